//! What a container is told about its devices: the environment in an Allocate answer.
//!
//! Pure. Who the container is and which GPUs its pod has has been decided before.

use std::collections::HashMap;

use proto::record::{MEM_CONTAINER, MEM_DEV, MEM_IDX, MEM_POD};
use proto::request::ContainerRequest;

use crate::inventory::Gpu;
use crate::plugin::Settings;
use crate::pods::{NodePod, Placement};
use crate::served::Served;

/// The environment for the call of one resource of one container.
///
/// Every container sees all devices of its pod. Only one of a container's answers carries the
/// variable that says so: of two values kubelet would keep one at random.
pub fn environment(
    settings: &Settings,
    pod: &NodePod,
    placement: &Placement,
    container: &ContainerRequest,
    resource: Served,
    gpus: &[&Gpu],
) -> HashMap<String, String> {
    let mut env = HashMap::new();
    if resource == Served::Memory || container.memory_units == 0 {
        let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        env.insert(settings.visible_devices_env.clone(), uuids.join(","));
    }
    if let (Served::Memory, Some(gpu)) = (resource, gpus.first()) {
        let recorded = |read: fn(&proto::record::GpushareRecord) -> u64| placement.gpushare.as_ref().map(read).filter(|units| *units > 0);
        let pod_units = recorded(|record| record.pod_units).unwrap_or_else(|| pod.memory_units());
        let device_units = recorded(|record| record.device_units).unwrap_or_else(|| settings.memory_unit.units_in(gpu.memory_bytes));
        env.insert(MEM_IDX.to_owned(), gpu.minor.to_string());
        env.insert(MEM_POD.to_owned(), pod_units.to_string());
        env.insert(MEM_CONTAINER.to_owned(), container.memory_units.to_string());
        env.insert(MEM_DEV.to_owned(), device_units.to_string());
    }
    env
}

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use insta::assert_json_snapshot;
    use proto::memory_unit::MemoryUnit;
    use proto::request::ContainerRequest;
    use proto::resource::ResourceNames;

    use super::*;
    use crate::builders::{gpu, init, pod, shares, units};

    fn environment_of(containers: &[ContainerRequest], resource: Served, minors: &[u32], variable: &str) -> serde_json::Value {
        let settings = Settings {
            names: ResourceNames::default(),
            memory_unit: MemoryUnit::GIB,
            visible_devices_env: variable.to_owned(),
            allocate_wait: Duration::ZERO,
        };
        let pod = pod("a", 1, containers);
        let gpus: Vec<_> = minors.iter().map(|minor| gpu(*minor)).collect();
        let env = environment(&settings, &pod, pod.placement.as_ref().unwrap(), &containers[0], resource, &gpus.iter().collect::<Vec<_>>());
        serde_json::to_value(env).unwrap()
    }

    /// Old records may lack the amounts; then they follow from the pod and the GPU.
    #[test]
    fn units_of_a_pod_whose_record_lacks_amounts() {
        let containers = [init(units(9)), units(2), units(3)];
        assert_json_snapshot!(environment_of(&containers, Served::Memory, &[1], "NVIDIA_VISIBLE_DEVICES"), @r#"
        {
          "ALIYUN_COM_GPU_MEM_CONTAINER": "9",
          "ALIYUN_COM_GPU_MEM_DEV": "16",
          "ALIYUN_COM_GPU_MEM_IDX": "1",
          "ALIYUN_COM_GPU_MEM_POD": "9",
          "NVIDIA_VISIBLE_DEVICES": "GPU-00000001-aaaa-bbbb-cccc-000000000001"
        }
        "#);
    }

    #[test]
    fn shares_of_two_devices() {
        assert_json_snapshot!(environment_of(&[shares(2)], Served::Shared, &[3, 1], "VISIBLE"), @r#"
        {
          "VISIBLE": "GPU-00000003-aaaa-bbbb-cccc-000000000003,GPU-00000001-aaaa-bbbb-cccc-000000000001"
        }
        "#);
    }

    #[test]
    fn shares_beside_units_say_nothing() {
        let both = ContainerRequest { shared: 1, ..units(2) };
        assert_json_snapshot!(environment_of(&[both], Served::Shared, &[0], "NVIDIA_VISIBLE_DEVICES"), @"{}");
    }
}

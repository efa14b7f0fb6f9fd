//! Device topology: every example of Koordinator's proposals on partitions, joint allocation and hints, and the refused
//! ones.

pub(super) mod hints;
pub(super) mod joint;
pub(super) mod machines;
pub(super) mod partitions;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::record::{DeviceAllocation, RDMA_DEVICES, RDMA_FUNCTIONS};
use proto::request::hints::{ALLOCATE_HINT as HINT, JOINT_ALLOCATE as JOINT, PARTITION_SPEC};

use super::World;
use kit::invariants::last_value;
use kit::pod_fields::device_record;

/// The filter's reason for a node that has no free partition of the size, or no devices that are close enough.
const APART: &str = "devices that belong together";
/// The filter's reason for a node whose devices of another type than GPU do not suffice.
const NO_DEVICE: &str = "devices of another type";

/// The devices of one type in a pod's record.
fn recorded(pod: &Pod, kind: &str) -> Result<Vec<DeviceAllocation>> {
    let mut record = device_record(pod).with_context(|| format!("the record of {}", pod.name_any()))?;
    Ok(record.remove(kind).unwrap_or_default())
}

/// Minors of the devices of one type that a pod's record names.
fn minors(pod: &Pod, kind: &str) -> Result<Vec<i32>> {
    Ok(recorded(pod, kind)?.iter().map(|device| device.minor).collect())
}

/// PCI addresses of the virtual functions that a pod's record names.
fn virtual_functions_of(pod: &Pod) -> Result<Vec<String>> {
    let devices = recorded(pod, "rdma")?;
    let extensions = devices.iter().filter_map(|device| device.extension.as_ref());
    let functions = extensions
        .filter_map(|extension| extension.get("vfs")?.as_array())
        .flatten();
    Ok(functions
        .filter_map(|vf| Some(vf.get("busID")?.as_str()?.to_owned()))
        .collect())
}

/// Checks that the container sees the adapters and virtual functions that its pod's record names, and no others.
async fn ensure_shown(world: &World, name: &str) -> Result<()> {
    world.ensure_shown(name, "rdma", RDMA_DEVICES).await?;
    let functions = virtual_functions_of(&world.pod(name)?)?.join(",");
    let log = world.log(name, "main").await?;
    let shown = last_value(&log, RDMA_FUNCTIONS).unwrap_or_default();
    ensure!(
        shown == functions,
        "{name} sees the functions {shown:?}, its record names {functions:?}"
    );
    Ok(())
}

/// Checks that a pod's record names the devices of these minors.
fn ensure_minors(pod: &Pod, kind: &str, expected: &[i32]) -> Result<()> {
    let found = minors(pod, kind)?;
    ensure!(
        found == expected,
        "{} has {found:?}, not {expected:?}",
        pod.name_any()
    );
    Ok(())
}

//! What a container will see: read off the answer to Allocate, which kubelet keeps as long as the container lives.

use std::collections::BTreeSet;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::fleet::Fleet;
use crate::identity::checkpoint::Allocated;
use crate::inventory::GpuUuid;
use crate::pods::PodUid;

/// What the containers of one pod see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Whatever the CDI spec says when the container is created.
    Spec,
    /// These GPUs, for as long as they live.
    Gpus(BTreeSet<GpuUuid>),
    /// Something that is no GPU of this node, or one container other GPUs than another.
    Unclear(String),
}

/// What one answer makes its container see; none if it says nothing of devices.
pub fn of_answer(answer: &ContainerAllocateResponse, variable: &str, fleet: &Fleet) -> Option<Sight> {
    if answer.cdi_devices.iter().any(|device| device.name.starts_with(crate::cdi::PREFIX)) {
        return Some(Sight::Spec);
    }
    let value = answer.envs.get(variable)?;
    let gpu = |name: &str| {
        let is_meant = |entry: &&crate::fleet::FleetGpu| entry.gpu.uuid.as_str() == name || entry.gpu.index.to_string() == name;
        fleet.gpus.iter().find(is_meant).map(|entry| entry.gpu.uuid.clone())
    };
    let gpus: Option<BTreeSet<GpuUuid>> = value.split(',').map(gpu).collect();
    Some(gpus.map_or_else(|| Sight::Unclear(format!("{variable}={value}, which is not a list of GPUs of this node")), Sight::Gpus))
}

/// What the containers of a pod see by kubelet's checkpoint; none if it names no answer that says anything.
pub fn of_pod(written: &[Allocated], uid: &PodUid, variable: &str, fleet: &Fleet) -> Option<Sight> {
    let own = written.iter().filter(|entry| entry.pod == *uid);
    let mut seen: Option<Sight> = None;
    for sight in own.filter_map(|entry| of_answer(&entry.answer, variable, fleet)) {
        seen = Some(match seen {
            // A container with a spec sees whatever the others do, once that is written.
            None | Some(Sight::Spec) => sight,
            Some(seen) if seen == sight || sight == Sight::Spec => seen,
            Some(_) => Sight::Unclear("its containers were given different devices".to_owned()),
        });
    }
    seen
}

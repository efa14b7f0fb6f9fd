//! The container that kubelet is about to start, as far as it is known: kubelet's call names device IDs alone.

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::request::ContainerRequest;

use crate::devices::extended_resource::ExtendedResource;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::NodePod;

/// A container that kubelet is about to start.
#[derive(Debug)]
pub(crate) struct StartingContainer<'a> {
    pub(crate) pod: NodePod,
    pub(crate) resource: ExtendedResource,
    pub(crate) ids: &'a [String],
    /// The entries of kubelet's checkpoint that may be this container's: init and app containers can have the same IDs.
    pub(crate) entries: Vec<&'a Allocated>,
    /// The answer of this process about these IDs.
    logged: Option<ContainerAllocateResponse>,
}

impl<'a> StartingContainer<'a> {
    /// Finds the container's entries in kubelet's checkpoint (`allocated`). `logged` is the answer of this process about the IDs.
    pub(crate) fn find(
        pod: NodePod,
        resource: ExtendedResource,
        ids: &'a [String],
        allocated: &'a [Allocated],
        logged: Option<ContainerAllocateResponse>,
    ) -> Self {
        let is_own =
            |entry: &&Allocated| entry.pod == pod.uid && entry.resource == resource && entry.ids == ids;
        Self {
            entries: allocated.iter().filter(is_own).collect(),
            pod,
            resource,
            ids,
            logged,
        }
    }

    /// The answer that kubelet applies to the container: that in its checkpoint, else that of this process.
    pub(crate) fn answer(&self) -> Option<&ContainerAllocateResponse> {
        // By their answers, containers of the pod with the same IDs see the same devices, or the verification refuses the pod.
        let kept = self.entries.first().map(|entry| &entry.answer);
        kept.or(self.logged.as_ref())
    }

    /// The containers of the pod that this one may be: those to which kubelet allocated the IDs, else those that request as many.
    pub(crate) fn containers(&self) -> Vec<&ContainerRequest> {
        let mut containers = Vec::new();
        for container in &self.pod.containers {
            let is_allocated = self.entries.iter().any(|entry| entry.container == container.name);
            let requests_as_many = self.resource.count(container) == self.ids.len() as u64;
            if is_allocated || (self.entries.is_empty() && requests_as_many) {
                containers.push(container);
            }
        }
        containers
    }

    pub(crate) fn may_be(&self, name: &str) -> bool {
        self.containers().iter().any(|container| container.name == name)
    }
}

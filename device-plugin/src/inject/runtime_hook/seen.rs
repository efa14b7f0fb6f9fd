//! The GPUs that containers see according to the container runtime. In the Device object the plugin publishes them instead of the
//! GPUs that kubelet allocated to these containers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proto::nri::api::{Container, ContainerState, SynchronizeRequest};
use proto::record::{GPU_DEVICES, VISIBLE_DEVICES};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{FleetDevice, NodeFleet};
use crate::devices::inventory::PhysicalId;
use crate::inject::content::named_devices;
use crate::inject::mode::VOID;
use crate::node::pods::{NodePods, PodUid};

/// Most containers whose GPUs are kept in memory. A node has a few hundred pods.
const MOST_CONTAINERS: usize = 16_384;

/// Values of the visible-devices variable that name no device.
const NAMELESS: [&str; 4] = ["", "all", "none", "void"];

type ContainerKey = (PodUid, String);

/// The GPUs of each container that sees some.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenGpus {
    by_container: BTreeMap<ContainerKey, BTreeSet<PhysicalId>>,
    is_synced: bool,
}

impl SeenGpus {
    /// True once a runtime has reported all running containers.
    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    pub(crate) fn has_pod(&self, uid: &PodUid) -> bool {
        // No name sorts before the empty one, so the first entry from there on is of the pod if any is.
        let first = (uid.clone(), String::new());
        let mut following = self.by_container.range(first..);
        following.next().is_some_and(|((found, _), _)| found == uid)
    }

    pub(crate) fn gpus_of(&self, uid: &PodUid, container: &str) -> Option<&BTreeSet<PhysicalId>> {
        self.by_container.get(&(uid.clone(), container.to_owned()))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&(PodUid, String), &BTreeSet<PhysicalId>)> {
        self.by_container.iter()
    }

    pub(super) fn n_containers(&self) -> usize {
        self.by_container.len()
    }

    /// Records the GPUs of a container that is being created; returns true if others, or none, were recorded for it.
    pub(crate) fn record(
        &mut self,
        uid: PodUid,
        container: &str,
        gpus: BTreeSet<PhysicalId>,
        pods: &NodePods,
    ) -> bool {
        if self.by_container.len() >= MOST_CONTAINERS {
            // Records of pods that are gone do no harm, so they stay until room is needed.
            self.by_container.retain(|(uid, _), _| pods.get(uid).is_some());
        }
        let key = (uid, container.to_owned());
        if self.by_container.get(&key) == Some(&gpus) {
            return false;
        }
        self.by_container.insert(key, gpus);
        true
    }
}

/// The runtime's report of all running containers, which comes in parts; a container may come before its sandbox.
#[derive(Debug, Default)]
pub(super) struct RunningContainers {
    sandboxes: BTreeMap<String, PodUid>,
    /// The sandbox, name and GPUs of each container that sees some.
    containers: Vec<(String, String, BTreeSet<PhysicalId>)>,
}

impl RunningContainers {
    /// Adds one part of the runtime's report: sandboxes, and containers with the GPUs that they see.
    pub(super) fn add(&mut self, part: SynchronizeRequest, fleet: &NodeFleet) -> Result<(), String> {
        for sandbox in part.pods {
            self.sandboxes
                .insert(sandbox.id, PodUid::from(sandbox.uid.as_str()));
        }
        for container in part.containers {
            // A container that has stopped holds its GPU no longer, and the runtime reports it until kubelet removes it.
            if container.state() == ContainerState::Stopped {
                continue;
            }
            if let Some(gpus) = gpus_of(&container, fleet) {
                self.containers
                    .push((container.pod_sandbox_id, container.name, gpus));
            }
        }
        if self.sandboxes.len().max(self.containers.len()) > MOST_CONTAINERS {
            Err(format!("more than {MOST_CONTAINERS} containers with GPUs"))
        } else {
            Ok(())
        }
    }

    /// The GPUs of the reported containers, once every part of the report has been added.
    pub(super) fn complete(self) -> SeenGpus {
        let mut by_container = BTreeMap::new();
        for (sandbox, name, gpus) in self.containers {
            // The runtime reports containers without a sandbox too, which are no pod's.
            if let Some(uid) = self.sandboxes.get(&sandbox) {
                by_container.insert((uid.clone(), name), gpus);
            }
        }
        SeenGpus {
            by_container,
            is_synced: true,
        }
    }
}

/// The GPUs that a container sees: by the vendor's variable, else by device nodes, else by a CDI spec of this plugin.
pub(super) fn gpus_of(container: &Container, fleet: &NodeFleet) -> Option<BTreeSet<PhysicalId>> {
    let value = value_of(container, VISIBLE_DEVICES);
    if let Some(names) = value
        && !NAMELESS.contains(&names)
    {
        return named_gpus(names, fleet);
    }
    let by_nodes = gpus_by_nodes(container, fleet);
    if !by_nodes.is_empty() {
        return Some(by_nodes);
    }
    // A CDI spec of this plugin sets the vendor's variable to `void`; without `void` this project's variable may be the image's.
    if value != Some(VOID) {
        return None;
    }
    named_gpus(value_of(container, GPU_DEVICES)?, fleet)
}

/// The GPUs of this node that the value of a variable names; none if the value also names something that is no GPU of this node.
pub(super) fn named_gpus(value: &str, fleet: &NodeFleet) -> Option<BTreeSet<PhysicalId>> {
    let named = named_devices(ExtendedResource::Shared, value, fleet)?;
    Some(named.into_iter().collect())
}

/// Returns true if a container has a device node of a GPU, or a variable that names devices.
pub(super) fn has_devices(container: &Container, fleet: &NodeFleet) -> bool {
    value_of(container, VISIBLE_DEVICES).is_some_and(|value| !NAMELESS.contains(&value))
        || !gpus_by_nodes(container, fleet).is_empty()
}

/// The GPUs of this node whose device nodes a container has.
pub(super) fn gpus_by_nodes(container: &Container, fleet: &NodeFleet) -> BTreeSet<PhysicalId> {
    let nodes = container.linux.as_ref().map_or(&[][..], |linux| &linux.devices);
    let mut gpus = BTreeSet::new();
    for FleetDevice { device, .. } in &fleet.gpus {
        let path = device.device_node.as_path();
        if nodes.iter().any(|node| Path::new(&node.path) == path) {
            gpus.insert(device.uuid.clone());
        }
    }
    gpus
}

/// The value of a variable: of several values the container's process sees the last one.
pub(super) fn value_of<'a>(container: &'a Container, variable: &str) -> Option<&'a str> {
    values_of(container, variable).last()
}

/// Every value that a container has for a variable.
pub(super) fn values_of<'a>(container: &'a Container, variable: &str) -> impl Iterator<Item = &'a str> {
    let pairs = container.env.iter();
    pairs.filter_map(move |pair| pair.strip_prefix(variable)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use proto::nri::api::PodSandbox;

    use super::*;
    use crate::tests::builders::{fleet, gpu, pod, pods, whole};

    fn uuid(minor: u32) -> String {
        gpu(minor).uuid.to_string()
    }

    fn seen(entries: &[(&str, &str, u32)]) -> SeenGpus {
        let entry = |(uid, container, minor): &(&str, &str, u32)| {
            (
                (PodUid::from(*uid), (*container).to_owned()),
                [gpu(*minor).uuid].into(),
            )
        };
        SeenGpus {
            by_container: entries.iter().map(entry).collect(),
            is_synced: true,
        }
    }

    fn running(id: &str, state: ContainerState, env: &[String]) -> Container {
        let (pod_sandbox_id, name) = (id.to_owned(), "w1".to_owned());
        Container {
            id: format!("{id}-c"),
            pod_sandbox_id,
            name,
            state: state.into(),
            env: env.to_vec(),
            linux: None,
        }
    }

    /// Parts in which containers come before their sandboxes; one has stopped, one sees nothing, one has no sandbox.
    #[test]
    fn running_containers_come_in_parts() {
        let sandbox = |id: &str| PodSandbox {
            id: id.to_owned(),
            uid: format!("uid-{id}"),
            ..PodSandbox::default()
        };
        let by_uuid = [format!("{VISIBLE_DEVICES}={}", uuid(1)), "A=b".to_owned()];
        let by_index = [format!("{VISIBLE_DEVICES}=all"), format!("{VISIBLE_DEVICES}=0,2")];
        let first = vec![
            running("a", ContainerState::Running, &by_uuid),
            running("b", ContainerState::Created, &by_index),
            running("c", ContainerState::Stopped, &by_uuid),
            running("d", ContainerState::Running, &[format!("{VISIBLE_DEVICES}=all")]),
            running("e", ContainerState::Running, &by_uuid),
        ];
        let mut containers = RunningContainers::default();
        containers
            .add(
                SynchronizeRequest {
                    pods: vec![sandbox("d")],
                    containers: first,
                    more: true,
                },
                &fleet(4),
            )
            .unwrap();
        let rest = vec![sandbox("a"), sandbox("b"), sandbox("c")];
        containers
            .add(
                SynchronizeRequest {
                    pods: rest,
                    containers: Vec::new(),
                    more: false,
                },
                &fleet(4),
            )
            .unwrap();
        let mut expected = seen(&[("uid-a", "w1", 1), ("uid-b", "w1", 0)]);
        expected
            .by_container
            .get_mut(&("uid-b".into(), "w1".to_owned()))
            .unwrap()
            .insert(gpu(2).uuid);
        assert_eq!(containers.complete(), expected);
    }

    #[test]
    fn too_many_containers_are_an_error() {
        let many = (0..=MOST_CONTAINERS)
            .map(|n| PodSandbox {
                id: n.to_string(),
                ..PodSandbox::default()
            })
            .collect();
        let part = SynchronizeRequest {
            pods: many,
            ..SynchronizeRequest::default()
        };
        assert_eq!(
            RunningContainers::default().add(part, &fleet(1)),
            Err(format!("more than {MOST_CONTAINERS} containers with GPUs"))
        );
    }

    /// When there is no more room, containers of pods that are gone are removed.
    #[test]
    fn containers_of_pods_that_are_gone_are_removed() {
        let mut seen = SeenGpus::default();
        let known = pods([pod("kept", 1, [whole(1)])]);
        assert!(seen.record("kept".into(), "w1", [gpu(0).uuid].into(), &known));
        assert!(!seen.record("kept".into(), "w1", [gpu(0).uuid].into(), &known));
        for n in 0..MOST_CONTAINERS {
            seen.record(
                format!("gone-{n}").as_str().into(),
                "c",
                [gpu(1).uuid].into(),
                &known,
            );
        }
        assert_eq!(
            seen.by_container
                .keys()
                .map(|(uid, _)| uid.as_str())
                .collect::<Vec<_>>(),
            ["gone-16383", "kept"]
        );
    }
}

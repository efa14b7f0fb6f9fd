//! Which GPUs containers really see, as the runtime tells: for the Device object, where kubelet tells something else or nobody
//! has a record.

use std::collections::{BTreeMap, BTreeSet};

use proto::nri::api::{Container, ContainerState, SynchronizeRequest};
use proto::record::GPU_DEVICES;
use proto::resource::VENDOR_GPUS;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::injection::content::VOID;
use crate::inventory::{Gpu, PhysicalId};
use crate::pods::{PodUid, Pods, Stage};
use crate::vendor::{Allocation, PodName, uid_of};
use crate::verify::visible::named_devices;

/// Most containers that are remembered. A node has a few hundred pods.
const MOST_CONTAINERS: usize = 16_384;

/// Values of the visible-devices variable that name no device.
const NAMELESS: [&str; 4] = ["", "all", "none", "void"];

/// The GPUs of each container that was seen with some, by its pod's UID and its name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    by_container: BTreeMap<(PodUid, String), BTreeSet<PhysicalId>>,
    is_synced: bool,
}

/// There are more containers than can be on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than {MOST_CONTAINERS} containers with GPUs")]
pub struct TooMany;

impl Seen {
    /// Whether a runtime has told of everything that runs.
    pub fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Returns true if some container of the pod sees a GPU.
    pub fn names(&self, uid: &PodUid) -> bool {
        let first = (uid.clone(), String::new());
        self.by_container
            .range(first..)
            .next()
            .is_some_and(|((found, _), _)| found == uid)
    }

    /// The number of containers with GPUs.
    pub fn len(&self) -> usize {
        self.by_container.len()
    }

    /// Whether no container is known to see a GPU.
    pub fn is_empty(&self) -> bool {
        self.by_container.is_empty()
    }

    /// Remembers a container that is being made; whether that is news. When there are too many, those whose pods are gone
    /// are forgotten.
    pub(super) fn note(
        &mut self,
        uid: PodUid,
        container: &str,
        gpus: BTreeSet<PhysicalId>,
        pods: &Pods,
    ) -> bool {
        if self.by_container.len() >= MOST_CONTAINERS {
            self.by_container.retain(|(uid, _), _| pods.get(uid).is_some());
        }
        let key = (uid, container.to_owned());
        if self.by_container.get(&key) == Some(&gpus) {
            return false;
        }
        self.by_container.insert(key, gpus);
        true
    }

    /// Corrects kubelet's allocations by what containers really see, and adds what containers see whose pods have no record,
    /// as kubelet does not report that. A claim holds its devices whatever a container sees of them.
    pub fn correct(&self, allocations: Vec<Allocation>, pods: &Pods, fleet: &Fleet) -> Vec<Allocation> {
        let mut told = BTreeSet::new();
        let mut corrected: Vec<Allocation> = Vec::with_capacity(allocations.len());
        for mut allocation in allocations {
            let uid = uid_of(pods, &allocation.pod).cloned();
            let key = uid.map(|uid| (uid, allocation.container.clone()));
            if let Some((key, gpus)) = key.and_then(|key| self.by_container.get_key_value(&key)) {
                told.insert(key);
                if allocation.claim.is_none() {
                    allocation.device_ids = ids(gpus);
                    allocation.is_by_record = false;
                }
            }
            corrected.push(allocation);
        }
        let is_unrecorded = |uid: &PodUid| {
            pods.get(uid)
                .is_some_and(|pod| pod.placement.is_err() && pod.stage != Stage::Terminal)
        };
        let others = self
            .by_container
            .iter()
            .filter(|(key, _)| !told.contains(key) && is_unrecorded(&key.0));
        corrected.extend(others.filter_map(|((uid, container), gpus)| {
            let resource = resource_of(pods, uid, container, fleet)?;
            Some(Allocation {
                pod: PodName::Uid(uid.clone()),
                container: container.clone(),
                resource,
                device_ids: ids(gpus),
                is_by_record: false,
                claim: None,
            })
        }));
        corrected
    }
}

fn ids(gpus: &BTreeSet<PhysicalId>) -> Vec<String> {
    gpus.iter().map(ToString::to_string).collect()
}

/// The name in which the container asks for whole GPUs; none if it does not. Shares without a record are counted by the
/// scheduler wherever they may be.
fn resource_of(pods: &Pods, uid: &PodUid, container: &str, fleet: &Fleet) -> Option<String> {
    let request = pods
        .get(uid)?
        .containers
        .iter()
        .find(|request| request.name == container)?;
    let is_vendors = |name: &&&str| {
        name.strip_prefix(fleet.vendor.as_str())
            .is_some_and(|rest| rest.starts_with('.'))
    };
    let name = VENDOR_GPUS.iter().find(is_vendors).or(VENDOR_GPUS.first())?;
    (request.whole > 0).then(|| (*name).to_owned())
}

/// What the runtime tells of everything that runs, as far as it has come: in parts, in which a container may come before its
/// sandbox.
#[derive(Debug, Default)]
pub(super) struct Telling {
    /// Whose each sandbox is, by its ID.
    sandboxes: BTreeMap<String, PodUid>,
    /// The sandbox, name and GPUs of each container that sees some.
    containers: Vec<(String, String, BTreeSet<PhysicalId>)>,
}

impl Telling {
    /// Takes in a part.
    ///
    /// # Errors
    /// There is too much of it.
    pub(super) fn take_in(
        &mut self,
        part: SynchronizeRequest,
        variable: &str,
        fleet: &Fleet,
    ) -> Result<(), TooMany> {
        self.sandboxes.extend(
            part.pods
                .into_iter()
                .map(|sandbox| (sandbox.id, PodUid::from(sandbox.uid.as_str()))),
        );
        let lasting = part
            .containers
            .into_iter()
            .filter(|container| container.state() != ContainerState::Stopped);
        self.containers.extend(lasting.filter_map(|container| {
            let gpus = of_container(&container, variable, fleet)?;
            Some((container.pod_sandbox_id, container.name, gpus))
        }));
        if self.sandboxes.len().max(self.containers.len()) > MOST_CONTAINERS {
            Err(TooMany)
        } else {
            Ok(())
        }
    }

    /// All of it.
    pub(super) fn complete(self) -> Seen {
        let Self {
            sandboxes,
            containers,
        } = self;
        let named = containers
            .into_iter()
            .filter_map(|(sandbox, name, gpus)| Some(((sandboxes.get(&sandbox)?.clone(), name), gpus)));
        Seen {
            by_container: named.collect(),
            is_synced: true,
        }
    }
}

/// The GPUs that a container sees: those that the vendor's variable names, else those whose device nodes it has, else those
/// that a CDI spec of this plugin names; none if these do not resolve to GPUs of this node.
pub(super) fn of_container(
    container: &Container,
    variable: &str,
    fleet: &Fleet,
) -> Option<BTreeSet<PhysicalId>> {
    match value_of(container, variable).filter(|value| !NAMELESS.contains(value)) {
        Some(value) => named_devices(ExtendedResource::Shared, value, fleet).map(BTreeSet::from_iter),
        None => Some(by_nodes(container, fleet))
            .filter(|gpus| !gpus.is_empty())
            .or_else(|| by_spec(container, variable, fleet)),
    }
}

/// The GPUs that a CDI spec of this plugin names, which also sets the vendor's variable to `void`.
fn by_spec(container: &Container, variable: &str, fleet: &Fleet) -> Option<BTreeSet<PhysicalId>> {
    let named = value_of(container, GPU_DEVICES).filter(|_| value_of(container, variable) == Some(VOID))?;
    named_devices(ExtendedResource::Shared, named, fleet).map(BTreeSet::from_iter)
}

/// Whether somebody has given devices to a container: a variable that names some, or the device node of a GPU.
pub(super) fn is_given(container: &Container, variable: &str, fleet: &Fleet) -> bool {
    value_of(container, variable).is_some_and(|value| !NAMELESS.contains(&value))
        || !by_nodes(container, fleet).is_empty()
}

/// The GPUs whose device nodes a container has.
pub(super) fn by_nodes(container: &Container, fleet: &Fleet) -> BTreeSet<PhysicalId> {
    let nodes: BTreeSet<&str> = container
        .linux
        .iter()
        .flat_map(|linux| &linux.devices)
        .map(|device| device.path.as_str())
        .collect();
    let has_node = |gpu: &&Gpu| gpu.device_node.to_str().is_some_and(|path| nodes.contains(path));
    fleet
        .gpus
        .iter()
        .map(|entry| &entry.gpu)
        .filter(has_node)
        .map(|gpu| gpu.uuid.clone())
        .collect()
}

/// The value of a variable: where it is set twice, the last one counts.
pub(super) fn value_of<'a>(container: &'a Container, variable: &str) -> Option<&'a str> {
    values_of(container, variable).last()
}

/// Every value that a container has for a variable.
pub(super) fn values_of<'a>(container: &'a Container, variable: &str) -> impl Iterator<Item = &'a str> {
    let pairs = container.env.iter().filter_map(|pair| pair.split_once('='));
    pairs
        .filter(move |(name, _)| *name == variable)
        .map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use proto::nri::api::PodSandbox;
    use rstest::rstest;

    use super::*;
    use crate::builders::{fleet, gpu, pod, pods, units, whole};
    use crate::pods::{NodePod, Unplaced};

    const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

    fn uuid(minor: u32) -> String {
        gpu(minor).uuid.to_string()
    }

    fn seen(entries: &[(&str, &str, u32)]) -> Seen {
        let entry = |(uid, container, minor): &(&str, &str, u32)| {
            (
                (PodUid::from(*uid), (*container).to_owned()),
                [gpu(*minor).uuid].into(),
            )
        };
        Seen {
            by_container: entries.iter().map(entry).collect(),
            is_synced: true,
        }
    }

    fn stranger(name: &str, request: proto::request::ContainerRequest) -> NodePod {
        NodePod {
            placement: Err(Unplaced::NoDevice("gpu")),
            stage: Stage::Running,
            ..pod(name, 1, [request])
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

    /// Parts in which containers come before their sandboxes; one has stopped, one sees nothing, one is nobody's.
    #[test]
    fn what_runs_is_told_in_parts() {
        let sandbox = |id: &str| PodSandbox {
            id: id.to_owned(),
            uid: format!("uid-{id}"),
            ..PodSandbox::default()
        };
        let by_uuid = [format!("{VARIABLE}={}", uuid(1)), "A=b".to_owned()];
        let by_index = [format!("{VARIABLE}=all"), format!("{VARIABLE}=0,2")];
        let first = vec![
            running("a", ContainerState::Running, &by_uuid),
            running("b", ContainerState::Created, &by_index),
            running("c", ContainerState::Stopped, &by_uuid),
            running("d", ContainerState::Running, &[format!("{VARIABLE}=all")]),
            running("e", ContainerState::Running, &by_uuid),
        ];
        let mut telling = Telling::default();
        telling
            .take_in(
                SynchronizeRequest {
                    pods: vec![sandbox("d")],
                    containers: first,
                    more: true,
                },
                VARIABLE,
                &fleet(4),
            )
            .unwrap();
        let rest = vec![sandbox("a"), sandbox("b"), sandbox("c")];
        telling
            .take_in(
                SynchronizeRequest {
                    pods: rest,
                    containers: Vec::new(),
                    more: false,
                },
                VARIABLE,
                &fleet(4),
            )
            .unwrap();
        let mut expected = seen(&[("uid-a", "w1", 1), ("uid-b", "w1", 0)]);
        expected
            .by_container
            .get_mut(&("uid-b".into(), "w1".to_owned()))
            .unwrap()
            .insert(gpu(2).uuid);
        assert_eq!(telling.complete(), expected);
    }

    #[test]
    fn there_may_be_too_many() {
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
            Telling::default().take_in(part, VARIABLE, &fleet(1)),
            Err(TooMany)
        );
    }

    /// kubelet has given GPU 0 to container `w1` of the pod `told`.
    #[rstest]
    #[case::nothing_is_known(&[], &["told w1 0"])]
    #[case::the_container_sees_the_same(&[("told", "w1", 0)], &["told w1 0"])]
    #[case::the_container_sees_another(&[("told", "w1", 2)], &["told w1 2"])]
    #[case::another_container(&[("told", "other", 2)], &["told w1 0"])]
    #[case::without_record_and_kubelet_does_not_tell(&[("untold", "w1", 3)], &["told w1 0", "untold w1 3"])]
    #[case::without_record_for_units(&[("units", "u2", 3)], &["told w1 0"])]
    #[case::with_record(&[("ours", "w1", 3)], &["told w1 0"])]
    #[case::ended(&[("ended", "w1", 3)], &["told w1 0"])]
    #[case::unknown(&[("unknown", "w1", 3)], &["told w1 0"])]
    fn corrects_what_kubelet_tells(#[case] entries: &[(&str, &str, u32)], #[case] expected: &[&str]) {
        let ended = NodePod {
            stage: Stage::Terminal,
            ..stranger("ended", whole(1))
        };
        let known = [
            stranger("told", whole(1)),
            stranger("untold", whole(1)),
            stranger("units", units(2)),
            pod("ours", 1, [whole(1)]),
            ended,
        ];
        let allocation = Allocation {
            pod: PodName::Named {
                namespace: "default".to_owned(),
                name: "told".to_owned(),
            },
            container: "w1".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            device_ids: vec![uuid(0)],
            is_by_record: false,
            claim: None,
        };
        let corrected = seen(entries).correct(vec![allocation], &pods(known), &fleet(4));
        let minor = |id: &String| {
            fleet(4)
                .gpus
                .iter()
                .find(|entry| entry.gpu.uuid.as_str() == id)
                .map(|entry| entry.gpu.minor.to_string())
        };
        let texts: Vec<String> = corrected
            .iter()
            .map(|allocation| {
                assert_eq!(allocation.resource, "nvidia.com/gpu");
                let pod = match &allocation.pod {
                    PodName::Named { name, .. } => name,
                    PodName::Uid(uid) => uid.as_str(),
                };
                let minors: Vec<String> = allocation.device_ids.iter().filter_map(minor).collect();
                format!("{pod} {} {}", allocation.container, minors.join(","))
            })
            .collect();
        assert_eq!(texts, expected);
    }

    /// When there is no more room, containers of pods that are gone make some.
    #[test]
    fn pods_that_are_gone_are_forgotten() {
        let mut seen = Seen::default();
        let known = pods([pod("kept", 1, [whole(1)])]);
        assert!(seen.note("kept".into(), "w1", [gpu(0).uuid].into(), &known));
        assert!(!seen.note("kept".into(), "w1", [gpu(0).uuid].into(), &known));
        for n in 0..MOST_CONTAINERS {
            seen.note(
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

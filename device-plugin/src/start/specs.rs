//! Writes the CDI spec of each container before it starts, writes specs again that were removed, and removes the specs of
//! containers that are not in kubelet's checkpoint any more.

use std::collections::BTreeSet;
use std::io;
use std::time::SystemTime;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::request::ContainerRequest;
use tracing::{info, warn};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::DeviceKey;
use crate::inject::cdi::readers::prompt;
use crate::inject::cdi::{Edits, SpecDir, SpecError, device_of};
use crate::inject::content::{AssignedDevices, cdi_edits, lacks_limit_hook, names_devices};
use crate::inject::enforcement::limits::Recipient;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{NodePod, NodePods, PodStage};
use crate::start::node_state::NodeState;
use crate::start::verify::container::StartingContainer;
use daemon::api_server::one_line;

/// File names of specs that were written for a start, and that the container runtime has to read first.
pub(super) type SpecFiles = Vec<String>;

/// Writes the specs of the CDI devices that kubelet may give this container. Returns the files that the runtime has to read.
pub(super) fn write_specs(
    node: &NodeState,
    starting: &StartingContainer<'_>,
) -> Result<SpecFiles, SpecError> {
    let StartingContainer { pod, resource, .. } = starting;
    let mut wanted = Vec::<(&ContainerRequest, &ContainerAllocateResponse)>::new();
    // An init container and an app container may have the same device IDs, but each has an answer that names its own CDI device.
    for entry in &starting.entries {
        wanted.extend(pod.container(&entry.container).zip(Some(&entry.answer)));
    }
    if wanted.is_empty() {
        // kubelet has not written its checkpoint, or it cannot be read.
        wanted.extend(likeliest_container(starting).zip(starting.answer()));
    }
    if wanted.is_empty() {
        let source = io::Error::other("none of its containers requests that number of devices");
        let path = node.settings.specs.path().to_owned();
        return Err(SpecError::Io { path, source });
    }
    let mut files = SpecFiles::new();
    for (container, answer) in wanted {
        files.extend(write_spec(node, pod, container, *resource, answer)?);
    }
    // A pod that begins to run although the runtime has not read its spec proves that the runtime ignores CDI devices. A pod that
    // runs already proves nothing, so its start is not noted.
    if pod.stage != PodStage::Running {
        for file in &files {
            node.readers.note_start(file);
        }
    }
    Ok(files)
}

/// Writes the spec that this answer for a container names. Returns the file name if the container runtime has to read it.
fn write_spec(
    node: &NodeState,
    pod: &NodePod,
    container: &ContainerRequest,
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
) -> Result<Option<String>, SpecError> {
    let Some(name) = device_of(answer) else {
        return Ok(None);
    };
    let Some(edits) = spec_edits(node, pod, container, resource) else {
        return Ok(None);
    };
    // The vendor's tools replace their specs while pods come, so the hook may be there at kubelet's next try.
    if lacks_limit_hook(&edits) {
        return Err(SpecError::NoLimitHook);
    }
    let file = SpecDir::file(name);
    let specs = &node.settings.specs;
    // Events of an earlier file of this name are forgotten before the write, so that a read right after the write counts.
    if !specs.has(name) {
        node.readers.forget(&file);
    }
    if specs.write(name, &edits, SystemTime::now())? {
        return Ok(Some(file));
    }
    match node.readers.was_read(&file) {
        Some(true) => Ok(None),
        // A start that kubelet cancelled may have ended before the runtime was prompted.
        Some(false) => Ok(Some(file)),
        // An earlier process wrote the file, and may have ended before it prompted the runtime.
        None => {
            let path = specs.path().to_owned();
            specs
                .prompt_read()
                .map_err(|source| SpecError::Io { path, source })?;
            node.readers.assume_read(&file);
            Ok(None)
        }
    }
}

/// The edits of a container for one resource; none if its pod has no allocation record, or none of the pod's devices is here.
fn spec_edits(
    node: &NodeState,
    pod: &NodePod,
    container: &ContainerRequest,
    resource: ExtendedResource,
) -> Option<Edits> {
    let placement = pod.record()?;
    let fleet = node.fleet.borrow();
    let names = placement.names(resource).iter();
    let keys: Vec<DeviceKey> = names.filter_map(|name| fleet.find(resource, name)).collect();
    if keys.is_empty() {
        return None;
    }
    let enforcements = node.enforcements.borrow();
    let recipient = Recipient {
        pod,
        container,
        placement: Some(placement),
        enforcements: &enforcements,
    };
    let assigned = AssignedDevices::find(&fleet, resource, &keys);
    Some(cdi_edits(&node.settings, &recipient, resource, &assigned))
}

/// The container that may be starting: the first whose answer names the devices ([`names_devices`]), else the first.
fn likeliest_container<'a>(starting: &'a StartingContainer<'_>) -> Option<&'a ContainerRequest> {
    let containers = starting.containers();
    let mut naming = containers.iter();
    let naming = naming.find(|container| names_devices(starting.resource, container));
    naming.or(containers.first()).copied()
}

/// Writes the missing specs of containers in kubelet's checkpoint, and removes the specs of other containers.
pub(super) fn restore_specs(node: &NodeState, pods: &NodePods, allocated: &[Allocated]) {
    let specs = &node.settings.specs;
    let (mut kept, mut is_new) = (BTreeSet::new(), false);
    for entry in allocated {
        // An answer by variable needs no spec.
        let Some(name) = device_of(&entry.answer) else {
            continue;
        };
        kept.insert(name.to_owned());
        // kubelet removes the entries of ended pods late, and such a pod needs no spec.
        let pod = pods.get_live(&entry.pod);
        // An existing spec stays: a running container saw its content, and the next start compares it. A spec without limits
        // would have to be replaced as soon as the enforcement levels are decided.
        let Some(pod) = pod.filter(|_| !specs.has(name) && node.are_limits_decided()) else {
            continue;
        };
        let Some(container) = pod.container(&entry.container) else {
            continue;
        };
        match write_spec(node, pod, container, entry.resource, &entry.answer) {
            Ok(file) => is_new |= file.is_some(),
            // A start has set this name's old content aside less than 5 s ago, and runtimes may still resolve that. `Reconciler`
            // calls this function again within a minute.
            Err(SpecError::Retired { .. }) => {}
            Err(error) => warn!(
                pod = pod.display_name(),
                error = one_line(&error),
                "a CDI spec is not in place"
            ),
        }
    }
    if is_new {
        prompt(specs);
    }
    match specs.clean(&kept, SystemTime::now()) {
        Ok(0) => {}
        Ok(n_removed) => info!(n_removed, "removed CDI specs of containers that are gone"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            warn!(dir = %specs.path().display(), %error, "cannot look for CDI specs of containers that are gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::node::pods::PodUid;

    use proto::kubelet::deviceplugin::CdiDevice;
    use rstest::rstest;

    use super::*;
    use crate::inject::content::cdi_answer;
    use crate::tests::builders::{allocated, fleet, init, node_state, pod, pods, shares, units};

    /// Two containers of one pod have two shares each, and one has memory units too, whose spec is the one that names devices.
    #[rstest]
    #[case::the_one_that_has_them("both", &["both"])]
    #[case::the_other("s2", &["s2"])]
    #[case::either("s2", &["both", "s2"])]
    fn a_spec_is_that_of_the_container_which_has_the_ids(
        #[case] expected: &str,
        #[case] containers: &[&str],
    ) {
        let both = ContainerRequest {
            name: "both".to_owned(),
            memory_units: 3,
            ..shares(2)
        };
        let mut pod = pod("a", 1, [both, shares(2)]);
        pod.containers
            .retain(|container| containers.contains(&container.name.as_str()));
        let ids = ["x".to_owned(), "y".to_owned()];
        let holder_of = |ids| {
            let starting = StartingContainer::find(pod.clone(), ExtendedResource::Shared, ids, &[], None);
            likeliest_container(&starting).map(|container| container.name.clone())
        };
        assert_eq!(holder_of(&ids[..]).as_deref(), Some(expected));
        assert_eq!(holder_of(&ids[..1]), None);
    }

    /// A node whose specs are in this directory.
    fn node(all: impl IntoIterator<Item = NodePod>, specs: &tempfile::TempDir) -> NodeState {
        let mut node = node_state(fleet(2), pods(all));
        node.settings.specs = SpecDir::new(specs.path().to_owned());
        node
    }

    fn entry(pod: &str, container: &str, ids: &[&str], answer: ContainerAllocateResponse) -> Allocated {
        allocated(pod, container, ExtendedResource::Memory, ids).with(answer)
    }

    fn answer(ids: &[&str], fresh: u64) -> ContainerAllocateResponse {
        cdi_answer(
            ExtendedResource::Memory,
            &ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>(),
            fresh,
        )
    }

    /// The container's memory units in the spec of an answer.
    fn units_in(node: &NodeState, answer: &ContainerAllocateResponse) -> Option<String> {
        node.settings
            .specs
            .env(device_of(answer)?)?
            .remove("ALIYUN_COM_GPU_MEM_CONTAINER")
    }

    /// Both were allocated before either starts, with the same IDs; kubelet does not say which one it starts.
    #[test]
    fn an_init_and_an_app_container_with_the_same_ids_have_different_specs() {
        let first = ContainerRequest {
            name: "first".to_owned(),
            ..init(units(2))
        };
        let dir = tempfile::tempdir().unwrap();
        let node = &node([pod("a", 1, [first, units(2)])], &dir);
        let (of_init, of_app) = (answer(&["x", "y"], 1), answer(&["x", "y"], 2));
        let allocated = [
            entry("a", "first", &["x", "y"], of_init.clone()),
            entry("a", "u2", &["x", "y"], of_app.clone()),
        ];
        let ids = ["x".to_owned(), "y".to_owned()];
        let pod = node.pods.borrow().get(&PodUid::from("a")).unwrap().clone();
        let starting = StartingContainer::find(pod, ExtendedResource::Memory, &ids, &allocated, None);
        assert_eq!(write_specs(node, &starting).unwrap().len(), 2);
        assert_eq!(
            [units_in(node, &of_init), units_in(node, &of_app)],
            [Some("2".to_owned()), Some("2".to_owned())]
        );
        assert_eq!(
            write_specs(node, &starting).unwrap(),
            SpecFiles::new(),
            "identical content is left alone"
        );
    }

    /// Between two starts of the container its record has changed.
    #[test]
    fn a_start_with_changed_content_is_refused_once() {
        let dir = tempfile::tempdir().unwrap();
        let node = &node([pod("a", 1, [units(2)])], &dir);
        let allocated = [entry("a", "u2", &["x", "y"], answer(&["x", "y"], 1))];
        let ids = ["x".to_owned(), "y".to_owned()];
        let before = node.pods.borrow().get(&PodUid::from("a")).unwrap().clone();
        let starting = |pod| StartingContainer::find(pod, ExtendedResource::Memory, &ids, &allocated, None);
        write_specs(node, &starting(before.clone())).unwrap();
        let after = before.on([1]);
        let blocked = write_specs(node, &starting(after)).unwrap_err();
        assert!(
            one_line(&blocked).contains("had other content before"),
            "{blocked}"
        );
        assert!(
            !node.settings.specs.has(device_of(&allocated[0].answer).unwrap()),
            "no runtime resolves the old one"
        );
    }

    /// Names by letters; the node has pods a and b, and one that has ended.
    #[rstest]
    #[case::one_each("a=x b=y", "x y")]
    #[case::an_ended_pod("ended=x a=y", "y")]
    #[case::one_is_not_known_yet("new=x b=y", "y")]
    #[case::two_containers_of_one_pod("a=x a=x", "x")]
    fn missing_specs_are_written_where_the_holder_is_certain(
        #[case] allocated: &str,
        #[case] expected: &str,
    ) {
        let ended = pod("ended", 0, [units(1)]).at(PodStage::Terminal);
        let dir = tempfile::tempdir().unwrap();
        let node = node([pod("a", 1, [units(1)]), pod("b", 2, [units(1)]), ended], &dir);
        let named = |text: &str| {
            let (pod, name) = text.split_once('=').unwrap();
            let cdi_devices = vec![CdiDevice {
                name: format!("gpushare.dev/gpu={name}"),
            }];
            entry(
                pod,
                "u1",
                &["i"],
                ContainerAllocateResponse {
                    cdi_devices,
                    ..ContainerAllocateResponse::default()
                },
            )
        };
        let allocated: Vec<_> = allocated.split_whitespace().map(named).collect();
        restore_specs(&node, &node.pods.borrow(), &allocated);
        let found: Vec<_> = ["x", "y"]
            .into_iter()
            .filter(|name| node.settings.specs.has(name))
            .collect();
        assert_eq!(found.join(" "), expected);
    }
}

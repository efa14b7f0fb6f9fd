//! The CDI specs of this node's containers: written before a container starts, again when the directory was emptied, and
//! removed when no answer that kubelet keeps names them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, SystemTime};

use daemon::api_server::one_line;
use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::request::ContainerRequest;
use tracing::{info, warn};

use crate::cdi::dir::Written;
use crate::cdi::{ContainerSpec, DRIVER_DEVICE, Edits, SpecDir, SpecError, name_of};
use crate::extended_resource::ExtendedResource;
use crate::fleet::DeviceKey;
use crate::identity::checkpoint::Allocated;
use crate::inject::{self, Given, Known};
use crate::metrics::Metrics;
use crate::plugin::{NodeState, Settings};
use crate::pods::{NodePod, PodUid, Pods, Stage};

use super::{Held, Start, containers_of};

/// Longest wait of a start for a runtime that reads specs: it parses all of them, on a machine that may be busy.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait of a start for a runtime that has not been seen reading specs, and may have CDI off.
const FIRST_READ_LIMIT: Duration = Duration::from_millis(200);

/// The file names of specs that were written for a start, and that the runtime has to read.
pub(super) type Files = Vec<String>;

/// Puts the specs in place that the container's answer may name. Of an init and an app container with the same device IDs it
/// is not known which one starts: both have answers, with names of their own.
pub(super) fn prepare(
    node: &NodeState,
    pod: &NodePod,
    written: &[Allocated],
    start: &Start<'_>,
) -> Result<Files, Held> {
    let is_own = |entry: &&Allocated| {
        entry.pod == pod.uid && entry.resource == start.resource && entry.ids == start.ids
    };
    let mut wanted: Vec<(&ContainerRequest, ContainerAllocateResponse)> = Vec::new();
    for entry in written.iter().filter(is_own) {
        wanted.extend(container(pod, &entry.container).map(|container| (container, entry.answer.clone())));
    }
    if wanted.is_empty() {
        // kubelet has not written its checkpoint, or it cannot be read.
        let response = node.ledger().response(start.resource, start.ids).cloned();
        let holder = holder(
            pod,
            start.resource,
            start.ids.len() as u64,
            &containers_of(pod, written, start),
        );
        wanted.extend(holder.zip(response));
    }
    if wanted.is_empty() {
        let source = io::Error::other("none of its containers asks for so many devices");
        let path = node.settings.injection.specs.path().to_owned();
        return Err(Held::Spec {
            pod: pod.display_name(),
            source: SpecError::Io { path, source },
        });
    }
    let mut files = Files::new();
    for (container, answer) in wanted {
        let prepared = write(node, pod, container, start.resource, &answer);
        files.extend(prepared.map_err(|source| Held::Spec {
            pod: pod.display_name(),
            source,
        })?);
    }
    if pod.stage != Stage::Running {
        for file in &files {
            node.readers.need(file);
        }
    }
    Ok(files)
}

/// Returns when the runtime resolves these specs, or does not seem to read any.
pub(super) async fn until_resolved(node: &NodeState, files: &[String]) {
    if files.is_empty() {
        return;
    }
    let limit = if node.readers.has_reader() {
        READ_LIMIT
    } else {
        FIRST_READ_LIMIT
    };
    if !node
        .readers
        .until_read(&node.settings.injection.specs, files, limit)
        .await
    {
        info!(
            files = files.join(","),
            "the container runtime was not seen reading a new CDI spec; the container starts all the same"
        );
    }
}

/// Puts the spec in place that this answer for a container names; the file if the runtime has to read it.
fn write(
    node: &NodeState,
    pod: &NodePod,
    container: &ContainerRequest,
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
) -> Result<Option<String>, SpecError> {
    let Some(name) = device_of(answer) else {
        return Ok(None);
    };
    let Some(edits) = edits(node, pod, container, resource, answer) else {
        return Ok(None);
    };
    let file = SpecDir::file(name);
    let specs = &node.settings.injection.specs;
    if !specs.has(name) {
        node.readers.expect(&file);
    }
    let written = specs.write(
        &ContainerSpec {
            name: name.to_owned(),
            edits,
        },
        SystemTime::now(),
    )?;
    if written == Written::New {
        return Ok(Some(file));
    }
    match node.readers.was_read(&file) {
        Some(true) => Ok(None),
        // A start that was cancelled may not have called the runtime.
        Some(false) => Ok(Some(file)),
        // An earlier process wrote it, and may have been killed before it called the runtime.
        None => {
            if let Err(source) = specs.call() {
                return Err(SpecError::Io {
                    path: specs.path().to_owned(),
                    source,
                });
            }
            node.readers.assume_read(&file);
            Ok(None)
        }
    }
}

/// The edits for the spec that this answer names; none if the pod has no record, or no device of it is on this node.
fn edits(
    node: &NodeState,
    pod: &NodePod,
    container: &ContainerRequest,
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
) -> Option<Edits> {
    let placement = pod.placement.as_ref().ok()?;
    let fleet = node.fleet.borrow();
    let keys: Vec<DeviceKey> = placement
        .names(resource)
        .iter()
        .filter_map(|name| fleet.find(resource, name))
        .collect();
    if keys.is_empty() {
        return None;
    }
    let known = Known {
        pod,
        container,
        placement: Some(placement),
    };
    let given = Given::of(&fleet, resource, &keys);
    if has_driver(answer) || !is_about_gpus(resource) {
        return Some(inject::cdi_edits(&node.settings, &known, resource, &given));
    }
    let Settings {
        injection,
        visible_devices_env,
        ..
    } = &node.settings;
    let running = fleet.driver_version.as_deref().filter(|_| fleet.needs_driver);
    let driver = injection.vendor_specs.driver(running, visible_devices_env).ok();
    Some(inject::inlined_edits(
        &node.settings,
        driver.as_ref().map(|driver| &driver.edits),
        &known,
        resource,
        &given,
    ))
}

fn container<'a>(pod: &'a NodePod, name: &str) -> Option<&'a ContainerRequest> {
    pod.containers.iter().find(|container| container.name == name)
}

/// The container that has so many IDs, best one whose spec names devices, as an init container hands its IDs on.
fn holder<'a>(
    pod: &'a NodePod,
    resource: ExtendedResource,
    n_ids: u64,
    containers: &[&str],
) -> Option<&'a ContainerRequest> {
    let asks = |container: &&ContainerRequest| {
        resource.count(container) == n_ids && containers.contains(&&*container.name)
    };
    pod.containers
        .iter()
        .filter(asks)
        .min_by_key(|container| !inject::speaks(resource, container))
}

/// The name of the CDI device of ours that an answer names for its container.
pub(super) fn device_of(answer: &ContainerAllocateResponse) -> Option<&str> {
    answer.cdi_devices.iter().find_map(|device| name_of(&device.name))
}

/// Whether the container sees what its CDI spec says.
pub(super) fn is_by_spec(entry: &Allocated) -> bool {
    device_of(&entry.answer).is_some()
}

/// Returns true if an answer names the device that brings the driver. Answers of earlier versions do not.
fn has_driver(answer: &ContainerAllocateResponse) -> bool {
    answer
        .cdi_devices
        .iter()
        .any(|device| device.name == DRIVER_DEVICE)
}

fn is_about_gpus(resource: ExtendedResource) -> bool {
    resource.device_type() == TYPE_GPU
}

/// Brings the specs in step with kubelet's checkpoint. One that is there is left alone: a running container saw what it says,
/// and it is compared before the next start.
pub(super) fn rebuild(node: &NodeState, pods: &Pods, written: &[Allocated]) {
    let specs = &node.settings.injection.specs;
    let by_spec = || {
        written
            .iter()
            .filter_map(|entry| Some((device_of(&entry.answer)?, entry)))
    };
    let mut pods_of_name = BTreeMap::<&str, BTreeSet<&PodUid>>::new();
    for (name, entry) in by_spec().filter(|(_, entry)| {
        pods.get(&entry.pod)
            .is_none_or(|pod| pod.stage != Stage::Terminal)
    }) {
        pods_of_name.entry(name).or_default().insert(&entry.pod);
    }
    let mut is_new = false;
    for (name, entry) in by_spec().filter(|(name, _)| !specs.has(name)) {
        // Versions before gave the same name to the same device IDs, which kubelet may have handed out twice.
        let is_sole = pods_of_name
            .get(name)
            .is_some_and(|pods| pods.len() == 1 && pods.contains(&entry.pod));
        let Some(pod) = pods.get(&entry.pod).filter(|_| is_sole) else {
            continue;
        };
        let Some(container) = container(pod, &entry.container) else {
            continue;
        };
        match write(node, pod, container, entry.resource, &entry.answer) {
            Ok(file) => is_new |= file.is_some(),
            Err(SpecError::Retired { .. }) => {}
            Err(error) => warn!(
                pod = pod.display_name(),
                error = one_line(&error),
                "a CDI spec is not in place"
            ),
        }
    }
    if is_new && let Err(error) = specs.call() {
        warn!(dir = %specs.path().display(), %error, "cannot have the container runtime read CDI specs");
    }
    let kept: BTreeSet<String> = by_spec().map(|(name, _)| name.to_owned()).collect();
    match specs.clean(&kept, SystemTime::now()) {
        Ok(0) => {}
        Ok(n_removed) => info!(n_removed, "removed CDI specs of containers that are gone"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => {
            warn!(dir = %specs.path().display(), %error, "cannot look for CDI specs of containers that are gone");
        }
    }
}

/// Shows which containers have answers of a version before the driver had a CDI device of its own. They keep working.
pub(super) fn note_admitted_before(
    pods: &Pods,
    written: &[Allocated],
    metrics: &Metrics,
    told: &mut Option<usize>,
) {
    let is_before =
        |entry: &&Allocated| is_by_spec(entry) && is_about_gpus(entry.resource) && !has_driver(&entry.answer);
    let names: BTreeSet<String> = written
        .iter()
        .filter(is_before)
        .filter_map(|entry| {
            Some(format!(
                "{}/{}",
                pods.get(&entry.pod)?.display_name(),
                entry.container
            ))
        })
        .collect();
    metrics.set_admitted_before(names.len());
    if told.replace(names.len()) != Some(names.len()) && !names.is_empty() {
        let containers: Vec<&str> = names.iter().map(String::as_str).take(20).collect();
        info!(
            n_containers = names.len(),
            containers = containers.join(", "),
            "containers that an earlier version admitted keep working"
        );
    }
}

#[cfg(test)]
mod tests {
    use proto::kubelet::deviceplugin::CdiDevice;
    use proto::memory_unit::MemoryUnit;
    use proto::resource::ResourceNames;
    use rstest::rstest;
    use tokio::sync::watch;

    use super::*;
    use crate::builders::{fleet, init, pod, pods, shares, units};
    use crate::identity::Ledger;
    use crate::inject::cdi_answer;
    use crate::plugin::Settings;
    use std::sync::Arc;

    /// Two containers of one pod have two shares each, and one has memory units too, whose spec is the one that names devices.
    #[rstest]
    #[case::the_one_that_has_them("both", &["both"])]
    #[case::the_other("s2", &["s2"])]
    #[case::whichever_needs_more("s2", &["both", "s2"])]
    fn a_spec_is_that_of_the_container_which_has_the_ids(
        #[case] expected: &str,
        #[case] containers: &[&str],
    ) {
        let both = ContainerRequest {
            name: "both".to_owned(),
            memory_units: 3,
            ..shares(2)
        };
        let pod = pod("a", 1, [both, shares(2)]);
        assert_eq!(
            holder(&pod, ExtendedResource::Shared, 2, containers)
                .unwrap()
                .name,
            expected
        );
        assert_eq!(holder(&pod, ExtendedResource::Shared, 1, containers), None);
    }

    struct Scene {
        node: NodeState,
        _keep: (watch::Sender<Arc<crate::fleet::Fleet>>, watch::Sender<Pods>),
        _dir: tempfile::TempDir,
    }

    fn scene(all: impl IntoIterator<Item = NodePod>) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let mut settings = Settings::plain(ResourceNames::default(), MemoryUnit::GIB, Duration::ZERO);
        settings.injection.specs = SpecDir::new(dir.path().to_owned());
        let (fleets, fleet) = watch::channel(Arc::new(fleet(2)));
        let (known, pods) = watch::channel(pods(all));
        let node = NodeState::new(settings, fleet, pods, Ledger::default());
        Scene {
            node,
            _keep: (fleets, known),
            _dir: dir,
        }
    }

    fn entry(pod: &str, container: &str, ids: &[&str], answer: ContainerAllocateResponse) -> Allocated {
        let ids = ids.iter().map(|id| (*id).to_owned()).collect();
        Allocated {
            pod: PodUid::from(pod),
            container: container.to_owned(),
            resource: ExtendedResource::Memory,
            ids,
            answer,
        }
    }

    fn answer(node: &NodeState, ids: &[&str], fresh: u64) -> ContainerAllocateResponse {
        cdi_answer(
            &node.settings.visible_devices_env,
            ExtendedResource::Memory,
            &ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>(),
            fresh,
        )
    }

    /// The container's memory units in the spec of an answer.
    fn units_in(node: &NodeState, answer: &ContainerAllocateResponse) -> Option<String> {
        node.settings
            .injection
            .specs
            .env(device_of(answer)?)?
            .remove("ALIYUN_COM_GPU_MEM_CONTAINER")
    }

    /// Both were allocated before either starts, with the same IDs; kubelet does not say which one it starts.
    #[test]
    fn an_init_and_an_app_container_with_the_same_ids_have_specs_of_their_own() {
        let first = ContainerRequest {
            name: "first".to_owned(),
            ..init(units(2))
        };
        let scene = scene([pod("a", 1, [first, units(2)])]);
        let node = &scene.node;
        let (of_init, of_app) = (answer(node, &["x", "y"], 1), answer(node, &["x", "y"], 2));
        let written = [
            entry("a", "first", &["x", "y"], of_init.clone()),
            entry("a", "u2", &["x", "y"], of_app.clone()),
        ];
        let ids = ["x".to_owned(), "y".to_owned()];
        let start = Start {
            resource: ExtendedResource::Memory,
            ids: &ids,
            uid: PodUid::from("a"),
        };
        let pod = node.pods.borrow().get(&start.uid).unwrap().clone();
        assert_eq!(prepare(node, &pod, &written, &start).unwrap().len(), 2);
        assert_eq!(
            [units_in(node, &of_init), units_in(node, &of_app)],
            [Some("2".to_owned()), Some("2".to_owned())]
        );
        assert_eq!(
            prepare(node, &pod, &written, &start).unwrap(),
            Files::new(),
            "identical content is left alone"
        );
    }

    /// Between two starts of the container its record has changed.
    #[test]
    fn a_start_with_other_content_is_refused_at_first() {
        let scene = scene([pod("a", 1, [units(2)])]);
        let node = &scene.node;
        let written = [entry("a", "u2", &["x", "y"], answer(node, &["x", "y"], 1))];
        let ids = ["x".to_owned(), "y".to_owned()];
        let start = Start {
            resource: ExtendedResource::Memory,
            ids: &ids,
            uid: PodUid::from("a"),
        };
        let before = node.pods.borrow().get(&start.uid).unwrap().clone();
        prepare(node, &before, &written, &start).unwrap();
        let after = before.clone().on([1]);
        let held = prepare(node, &after, &written, &start).unwrap_err();
        assert!(one_line(&held).contains("had other content before"), "{held}");
        assert!(
            !node
                .settings
                .injection
                .specs
                .has(device_of(&written[0].answer).unwrap()),
            "nobody resolves the old one"
        );
    }

    /// The answer names one device, and no driver: the version before wrote everything into one spec.
    #[test]
    fn an_answer_of_the_version_before_keeps_its_form() {
        let scene = scene([pod("a", 1, [units(2)])]);
        let node = &scene.node;
        let name = "gpushare.dev/gpu=be37fd026d9b3b0b27132c57fb42f25b".to_owned();
        let old = ContainerAllocateResponse {
            cdi_devices: vec![CdiDevice { name }],
            ..ContainerAllocateResponse::default()
        };
        let written = [entry("a", "u2", &["x"], old)];
        rebuild(node, &node.pods.borrow(), &written);
        let env = node
            .settings
            .injection
            .specs
            .env("be37fd026d9b3b0b27132c57fb42f25b")
            .unwrap();
        assert!(
            env["NVIDIA_VISIBLE_DEVICES"].starts_with("GPU-"),
            "without the driver's device the runtime has to act: {env:?}"
        );
        let (mut told, mut registry) = (None, prometheus_client::registry::Registry::default());
        note_admitted_before(
            &node.pods.borrow(),
            &written,
            &Metrics::register(&mut registry),
            &mut told,
        );
        assert_eq!(told, Some(1));
    }

    /// Names by letters; the node has pods a and b, and one that has ended. An old name may be in the checkpoint twice.
    #[rstest]
    #[case::one_each("a=x b=y", "x y")]
    #[case::an_ended_pod_had_the_name_before("ended=x a=x", "x")]
    #[case::two_have_it("a=x b=x", "")]
    #[case::one_is_not_known_yet("a=x new=x b=y", "y")]
    #[case::two_containers_of_one_pod("a=x a=x", "x")]
    fn missing_specs_are_written_where_the_holder_is_certain(#[case] written: &str, #[case] expected: &str) {
        let ended = NodePod {
            stage: Stage::Terminal,
            ..pod("ended", 0, [units(1)])
        };
        let scene = scene([pod("a", 1, [units(1)]), pod("b", 2, [units(1)]), ended]);
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
        let written: Vec<_> = written.split_whitespace().map(named).collect();
        rebuild(&scene.node, &scene.node.pods.borrow(), &written);
        let found: Vec<_> = ["x", "y"]
            .into_iter()
            .filter(|name| scene.node.settings.injection.specs.has(name))
            .collect();
        assert_eq!(found.join(" "), expected);
    }
}

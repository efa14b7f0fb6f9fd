//! Differences between running pods and their records, and the corrections.

use serde_json::json;

use super::*;
use crate::inject::cdi::{Edits, SpecDir};
use crate::inject::content::cdi_answer;
use crate::tests::builders::{allocated, fleet, gpu, node_state, pod, pods, says, units};

fn running(name: &str, minor: u32) -> NodePod {
    pod(name, u64::from(minor), [units(2)])
        .on([minor])
        .at(PodStage::Running)
}

fn entry(name: &str, answer: ContainerAllocateResponse) -> Allocated {
    allocated(name, "u2", ExtendedResource::Memory, &[&format!("id-of-{name}")]).with(answer)
}

fn by_variable(name: &str, minor: u32) -> Allocated {
    entry(name, says("NVIDIA_VISIBLE_DEVICES", gpu(minor).uuid.as_str()))
}

fn node(all: Vec<NodePod>, cdi_dir: &std::path::Path) -> NodeState {
    node_with(pods(all), cdi_dir)
}

fn node_with(pods: NodePods, cdi_dir: &std::path::Path) -> NodeState {
    let mut node = node_state(fleet(3), pods);
    node.settings.specs = SpecDir::new(cdi_dir.to_owned());
    node
}

fn verification(node: &NodeState, allocated: &[Allocated], name: &str) -> Option<Verification> {
    compare(node, allocated, &PodUid::from(name)).map(|compared| compared.verification)
}

/// The partner of a swap.
fn partner(node: &NodeState, allocated: &[Allocated], name: &str) -> Option<String> {
    match verification(node, allocated, name) {
        Some(Verification::Swap(partner)) => Some(partner.as_str().to_owned()),
        _ => None,
    }
}

#[test]
fn edited_records_of_running_pods_are_corrected() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(
        vec![running("a", 0), running("b", 1), running("c", 2)],
        dir.path(),
    );
    let right = [by_variable("a", 0), by_variable("b", 1)];
    assert_eq!(verification(&node, &right, "a"), Some(Verification::Passed));
    assert_eq!(
        verification(&node, &right, "c"),
        None,
        "the checkpoint does not name it"
    );
    let crossed = [by_variable("a", 1), by_variable("b", 0), by_variable("c", 2)];
    assert_eq!(partner(&node, &crossed, "a").as_deref(), Some("b"));
    let doubled = [by_variable("a", 1), by_variable("b", 1)];
    assert!(matches!(
        verification(&node, &doubled, "a"),
        Some(Verification::Refused(StartRefusal::Mismatch { .. }))
    ));
}

/// Writes the spec of an answer, which shows the GPU of this minor.
fn write_spec(dir: &std::path::Path, entry: &Allocated, minor: u32) {
    let env = [
        ("NVIDIA_VISIBLE_DEVICES", "void".to_owned()),
        ("GPUSHARE_GPU_DEVICES", gpu(minor).uuid.to_string()),
    ];
    let edits = Edits {
        env: env.map(|(name, value)| (name.to_owned(), value)).into(),
        ..Edits::default()
    };
    let name = device_of(&entry.answer).unwrap();
    SpecDir::new(dir.to_owned())
        .write(name, &edits, std::time::SystemTime::now())
        .unwrap();
}

/// A container that runs sees what its spec said, whatever its record says now.
#[test]
fn the_spec_of_a_running_container_decides_before_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(vec![running("a", 0), running("b", 1)], dir.path());
    let allocated = ["a", "b"].map(|name| {
        entry(
            name,
            cdi_answer(ExtendedResource::Memory, &[format!("id-of-{name}")], 1),
        )
    });
    let spec = |name: &str, minor: u32| {
        let entry = allocated.iter().find(|entry| entry.pod.as_str() == name).unwrap();
        let _ = std::fs::remove_file(dir.path().join(SpecDir::file(device_of(&entry.answer).unwrap())));
        write_spec(dir.path(), entry, minor);
    };
    assert_eq!(
        verification(&node, &allocated, "a"),
        Some(Verification::Passed),
        "there is no spec to say otherwise"
    );
    spec("a", 1);
    spec("b", 0);
    assert_eq!(
        verification(&node, &allocated, "a"),
        Some(Verification::Passed),
        "they may be of earlier holders of these IDs"
    );
    assert!(!compare(&node, &allocated, &PodUid::from("a")).unwrap().is_certain);
    for entry in &allocated {
        node.log().note_start(&entry.pod, entry.resource, &entry.ids);
    }
    assert!(compare(&node, &allocated, &PodUid::from("a")).unwrap().is_certain);
    assert_eq!(partner(&node, &allocated, "a").as_deref(), Some("b"));
    spec("b", 1);
    assert!(matches!(
        verification(&node, &allocated, "a"),
        Some(Verification::Refused(StartRefusal::Mismatch { .. }))
    ));
    // Its IDs are allocated again, to a container that has not started.
    node.log().add_answer(
        ExtendedResource::Memory,
        &["id-of-a".to_owned()],
        None,
        ContainerAllocateResponse::default(),
    );
    assert_eq!(verification(&node, &allocated, "a"), Some(Verification::Passed));
}

#[test]
fn a_corrected_record_keeps_amounts_and_correct_devices() {
    let record: DeviceAllocations = serde_json::from_value(json!({"gpu": [
        {"minor": 0, "id": gpu(0).uuid.to_string(), "resources": {"koordinator.sh/gpu-core": "10"}},
        {"minor": 1, "id": gpu(1).uuid.to_string(), "resources": {"koordinator.sh/gpu-core": "20"}},
    ]}))
    .unwrap();
    let placement = pod("a", 1, [units(2)]).on([0, 1]).placement.unwrap();
    let seen = [gpu(1).uuid, gpu(2).uuid].into();
    let corrected = on_gpus(&placement, record.clone(), &seen, &fleet(3)).unwrap();
    let shown: Vec<_> = corrected["gpu"]
        .iter()
        .map(|entry| {
            (
                entry.minor,
                entry.id.clone(),
                entry.resources["koordinator.sh/gpu-core"].unsigned(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            (2, gpu(2).uuid.to_string(), Some(10)),
            (1, gpu(1).uuid.to_string(), Some(20))
        ]
    );
    assert_eq!(
        on_gpus(&placement, record, &[gpu(1).uuid].into(), &fleet(3)),
        None,
        "it has another number of them"
    );
}

#[test]
fn assigned_annotations_of_pods_not_yet_admitted_are_removed() {
    let marked = |name: &str, stage| pod(name, 1, [units(2)]).at(stage).assigned(true);
    let pods = pods([
        marked("copied", PodStage::Bound),
        marked("given", PodStage::Bound),
        marked("runs", PodStage::Running),
        pod("new", 1, [units(2)]),
    ]);
    let stale = stale_marks(&pods, &AllocateLog::default(), &[by_variable("given", 0)]);
    assert_eq!(stale.iter().map(|pod| &*pod.name).collect::<Vec<_>>(), ["copied"]);
    let mut log = AllocateLog::default();
    log.note_start(&PodUid::from("copied"), ExtendedResource::Memory, &[]);
    assert!(stale_marks(&pods, &log, &[by_variable("given", 0)]).is_empty());
}

/// The minor and the units of the record that a pod gets again.
fn removed(node: &NodeState, allocated: &[Allocated], name: &str) -> Option<(u32, u64)> {
    let record = compare(node, allocated, &PodUid::from(name)).and_then(|compared| compared.removed)?;
    record.gpushare.map(|gpushare| (gpushare.idx, gpushare.pod_units))
}

fn without_record(name: &str, stage: PodStage) -> NodePod {
    let placement = Err(crate::node::pods::Unplaced::Missing {
        key: proto::record::MEM_IDX,
    });
    NodePod {
        stage,
        placement,
        ..pod(name, 1, [units(2)])
    }
}

fn ours(name: &str, minor: u32) -> Allocated {
    let mut entry = by_variable(name, minor);
    entry
        .answer
        .envs
        .insert("GPUSHARE_GPU_DEVICES".to_owned(), gpu(minor).uuid.to_string());
    entry
}

/// A pod that runs with an answer of this plugin had a record; one that waits, or that another plugin served, need not have had
/// one.
#[test]
fn removed_records_of_running_pods_are_restored() {
    let dir = tempfile::tempdir().unwrap();
    let all = [
        ("runs", PodStage::Running),
        ("waits", PodStage::Admitted),
        ("served-by-another", PodStage::Running),
    ];
    let node = node(
        all.map(|(name, stage)| without_record(name, stage)).to_vec(),
        dir.path(),
    );
    let allocated = [
        ours("runs", 1),
        ours("waits", 1),
        by_variable("served-by-another", 2),
    ];
    assert_eq!(removed(&node, &allocated, "runs"), Some((1, 2)));
    assert_eq!(removed(&node, &allocated, "waits"), None);
    assert_eq!(
        removed(&node, &allocated, "served-by-another"),
        None,
        "this process has not let it start"
    );
    let started = allocated.last().unwrap();
    node.log()
        .note_start(&started.pod, started.resource, &started.ids);
    assert_eq!(removed(&node, &allocated, "served-by-another"), Some((2, 2)));
}

/// By CDI a container sees what the spec of its answer says, also after another process of the plugin wrote it.
#[test]
fn a_removed_record_is_restored_from_the_spec() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(vec![without_record("a", PodStage::Running)], dir.path());
    let allocated = [entry(
        "a",
        cdi_answer(ExtendedResource::Memory, &["id-of-a".to_owned()], 1),
    )];
    assert_eq!(removed(&node, &allocated, "a"), None, "there is no spec");
    write_spec(dir.path(), &allocated[0], 2);
    assert_eq!(removed(&node, &allocated, "a"), Some((2, 2)));
}

/// The record that the annotations had is written again if the containers see its devices, assume time included.
#[test]
fn a_removed_record_is_restored_with_its_assume_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut all = pods([running("a", 0), running("b", 1)]);
    all.apply(without_record("a", PodStage::Running));
    all.apply(without_record("b", PodStage::Running));
    let node = node_with(all, dir.path());
    let found = |name: &str, minor: u32| {
        let compared = compare(&node, &[ours(name, minor)], &PodUid::from(name)).unwrap();
        compared
            .removed
            .map(|record| (record.assumed_at, record.gpushare.unwrap().idx))
    };
    assert_eq!(
        found("b", 1),
        Some((Some(1), 0)),
        "the builder's record of gpushare names GPU 0"
    );
    assert_ne!(found("a", 2), Some((Some(0), 0)), "it sees another GPU");
}

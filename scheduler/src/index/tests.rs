//! The lifecycle of assumptions and hints, as far as no route of the extender shows it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use placement::Policies;
use proptest::prelude::*;
use proptest::sample::select;
use proto::node::Node;
use proto::pod::Pod;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::{Assumed, Attempt, Index, Phase, Shared, assumption, hints, requests_devices};
use crate::accounting::PodFacts;
use crate::bind::{PodId, PodLookup};
use crate::metrics::{AllocationSnapshot, NamespaceSnapshot};
use crate::offline;
use crate::watch::ObjectStore;

/// A hundred nodes of the old plugin: n0, n1 and so on.
fn index() -> Index {
    let capacity = json!({"aliyun.com/gpu-count": "1", "aliyun.com/gpu-mem": "10000"});
    let node = |at: usize| json!({"metadata": {"name": format!("n{at}")}, "status": {"capacity": capacity}});
    offline::index((0..100).map(node), std::iter::empty(), std::iter::empty())
}

fn pod(name: &str) -> Value {
    let containers = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}}]);
    json!({"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": {"containers": containers}})
}

fn facts(name: &str) -> PodFacts {
    let pod: Pod = serde_json::from_value(pod(name)).unwrap();
    PodFacts::of(&pod, &ResourceNames::default()).unwrap()
}

fn assume(index: &mut Index, name: &str, now: Instant) -> u64 {
    let id = PodId {
        namespace: "d".to_owned(),
        name: name.to_owned(),
        uid: name.to_owned(),
    };
    match index.assume(&id, &facts(name), "n1", 1, now).unwrap() {
        Assumed::Write { assumed_at, .. } => assumed_at,
        Assumed::AlreadyBound => panic!("not bound yet"),
    }
}

/// The phase of the assumption of pod `p`, if this is its assume time.
fn phase(index: &Index, assumed_at: u64) -> Option<Phase> {
    index
        .assumption_state("p")
        .filter(|state| state.assumed_at == assumed_at)
        .map(|state| state.phase)
}

fn found_on(node: &str) -> PodLookup {
    PodLookup::Bound {
        node: node.to_owned(),
        annotations: BTreeMap::new(),
    }
}

#[test]
fn only_the_named_assumption_is_forgotten() {
    let (mut index, now) = (index(), Instant::now());
    let assumed_at = assume(&mut index, "p", now);
    index.forget("p", assumed_at + 1);
    assert_eq!(phase(&index, assumed_at), Some(Phase::Writing));
    index.forget("p", assumed_at);
    assert_eq!(
        (
            phase(&index, assumed_at),
            index.fleet().n_owners(),
            index.snapshot().n_pending
        ),
        (None, 0, 0)
    );
}

#[test]
fn a_watched_pod_stays_pending_when_its_assumption_is_forgotten() {
    let (mut index, now) = (index(), Instant::now());
    index.apply(serde_json::from_value::<Pod>(pod("p")).unwrap());
    let assumed_at = assume(&mut index, "p", now);
    index.forget("p", assumed_at);
    assert_eq!(index.snapshot().n_pending, 1);
}

#[test]
fn a_pod_read_as_unbound_settles_its_assumption_only_after_a_while() {
    let (mut index, now) = (index(), Instant::now());
    let assumed_at = assume(&mut index, "p", now);
    assumption::mark_unknown(&mut index, "p", assumed_at, now);
    let state = index.assumption_state("p").unwrap();
    assert!(!index.settle("p", state, &PodLookup::Unbound, now + Duration::from_secs(59)));
    assert_eq!(index.fleet().n_owners(), 1);
    assert!(index.settle("p", state, &PodLookup::Unbound, now + Duration::from_secs(60)));
    assert_eq!(index.fleet().n_owners(), 0);
}

#[test]
fn the_pod_read_from_the_api_server_settles_an_assumption() {
    for (found, held) in [(found_on("n1"), 1), (found_on("n2"), 0), (PodLookup::Gone, 0)] {
        let (mut index, now) = (index(), Instant::now());
        index.apply(serde_json::from_value::<Pod>(pod("p")).unwrap());
        let assumed_at = assume(&mut index, "p", now);
        assumption::mark_unknown(&mut index, "p", assumed_at, now);
        let state = index.assumption_state("p").unwrap();
        assert!(index.settle("p", state, &found, now), "{found:?}");
        assert_eq!(index.fleet().n_owners(), held, "{found:?}");
        assert_eq!(index.pod("p").is_none(), found == PodLookup::Gone, "{found:?}");
    }
}

/// The pod was read before the bind was repeated, so the result does not count.
#[test]
fn an_assumption_that_was_repeated_meanwhile_is_not_settled() {
    let (mut index, now) = (index(), Instant::now());
    let assumed_at = assume(&mut index, "p", now);
    assumption::mark_unknown(&mut index, "p", assumed_at, now);
    let state = index.assumption_state("p").unwrap();
    let later = now + Duration::from_secs(100);
    assert_eq!(assume(&mut index, "p", later), assumed_at);
    assert!(!index.settle("p", state, &PodLookup::Unbound, later));
    assumption::mark_unknown(&mut index, "p", assumed_at, later);
    assert!(!index.settle("p", state, &PodLookup::Gone, later));
    assert_eq!(
        (phase(&index, assumed_at), index.fleet().n_owners()),
        (Some(Phase::Unknown), 1)
    );
}

#[test]
fn the_number_of_hints_is_bounded() {
    let mut index = index();
    let now = Instant::now();
    for at in 0..5000 {
        let uid = at.to_string();
        let node = index.fleet().node_id(&format!("n{}", at % 100)).unwrap();
        let ask = index.demand(&uid, &facts("p")).unwrap().unwrap();
        hints::hint(&mut index, node, &ask, &Attempt::default(), now);
    }
    assert_eq!(index.fleet().n_hints(), 4096);
    assert!(!index.hints().is_hinted("0") && index.hints().is_hinted("4999"));
    assert_eq!(index.fleet().check(), Vec::new());
    index.tick(now + Duration::from_secs(30));
    assert_eq!(index.fleet().n_hints(), 0);
}

/// A pod that is filtered again and again, and never bound, must not keep room from others for ever.
#[test]
fn a_hint_is_not_renewed_forever() {
    let (mut index, now) = (index(), Instant::now());
    let ask = index.demand("p", &facts("p")).unwrap().unwrap();
    let node = index.fleet().node_id("n1").unwrap();
    let mut hinted = |seconds: u64| {
        let at = now + Duration::from_secs(seconds);
        hints::hint(&mut index, node, &ask, &Attempt::default(), at);
        index.hints().is_hinted("p")
    };
    assert_eq!([0, 10, 29].map(&mut hinted), [true; 3]);
    assert_eq!(
        [30, 40, 59].map(&mut hinted),
        [false; 3],
        "the room is for others for as long again"
    );
    assert_eq!([60, 61].map(&mut hinted), [true; 2]);
    index.tick(now + Duration::from_secs(90));
    assert_eq!(index.fleet().n_hints(), 0);
}

#[test]
fn a_node_without_an_inventory_refuses_amounts_of_memory() {
    let index = index();
    let pod = json!({"spec": {"containers": [{"name": "c", "resources": {"limits": {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1"}}}]}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let facts = PodFacts::of(&pod, &ResourceNames::default()).unwrap();
    let ask = index.demand("u", &facts).unwrap().unwrap();
    assert_eq!(
        index.filter().fit("n1", &ask),
        Err(placement::Reason::UnitUnknown)
    );
}

#[test]
fn the_readiness_error_names_the_missing_lists() {
    let index = Index::new(ResourceNames::default(), Policies::default(), Duration::ZERO);
    assert_eq!(
        index.ready().unwrap_err(),
        "not ready: waiting for the list of nodes, devices, pods"
    );
}

/// The node's plugin has swapped two records: one event moves both pods, and each device holds one of them at every moment.
#[test]
fn swapped_records_count_before_annotations() {
    let record = |minor: u32| json!([{"minor": minor, "id": format!("GPU-{minor}"), "resources": {"koordinator.sh/gpu-memory": "4Gi"}}]);
    let bound = |name: &str, minor: u32| {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = json!("n");
        pod["metadata"]["annotations"] =
            json!({"scheduling.koordinator.sh/device-allocated": json!({"gpu": record(minor)}).to_string()});
        pod
    };
    let gpu = |minor: u32| json!({"type": "gpu", "id": format!("GPU-{minor}"), "minor": minor, "health": true, "resources": {"koordinator.sh/gpu-memory": "4Gi"}});
    let device = |swapped: &str| json!({"metadata": {"name": "n", "annotations": {"gpushare/exchanged-records": swapped}}, "spec": {"devices": [gpu(0), gpu(1)]}});
    let node = json!({"metadata": {"name": "n", "annotations": {"aliyun.com/gpu-mem-unit": "4Gi"}}, "status": {"capacity": {"aliyun.com/gpu-mem": "2"}}});
    let mut index = offline::index(
        [node].into_iter(),
        [device("{}")].into_iter(),
        [bound("p", 0), bound("q", 1)].into_iter(),
    );
    let held = |index: &Index| {
        ["p", "q"]
            .map(|owner| format!("{:?}", index.fleet().held_by(owner).unwrap().holdings).contains("GPU-1"))
    };
    assert_eq!(held(&index), [false, true]);
    let swapped = json!({"p": {"gpu": record(1)}, "q": {"gpu": record(0)}}).to_string();
    let show = |index: &mut Index, swapped: &str| {
        index.apply(serde_json::from_value::<super::RawDevice>(device(swapped)).unwrap());
    };
    show(&mut index, &swapped);
    assert_eq!(held(&index), [true, false]);
    index.apply(serde_json::from_value::<Pod>(bound("p", 1)).unwrap());
    assert_eq!(
        held(&index),
        [true, false],
        "the annotation of one of them has followed"
    );
    show(&mut index, "nonsense");
    assert_eq!(index.fleet().check(), Vec::new());
    assert_eq!(held(&index), [true, false], "what cannot be read changes nothing");
    show(&mut index, "{}");
    assert_eq!(held(&index), [true, true], "only annotations count now");
}

/// The copy reads a few nodes at a time, so no node may be left out or counted twice at the borders.
#[test]
fn metrics_read_each_gpu_once() {
    let mut index = index();
    assume(&mut index, "p", Instant::now());
    let snapshot = AllocationSnapshot::read(&Shared::new(index));
    let mut names: Vec<_> = (0..100).map(|at| format!("n{at}")).collect();
    names.sort();
    let read: Vec<_> = snapshot.gpus.iter().map(|gpu| gpu.node.clone()).collect();
    assert_eq!(read, names);
    let held: Vec<_> = snapshot.gpus.iter().filter(|gpu| gpu.n_pods > 0).collect();
    let [gpu] = held[..] else {
        panic!("one GPU is held: {held:?}");
    };
    let sum = NamespaceSnapshot {
        n_parts: 1,
        bytes: gpu.used,
        core: 0,
    };
    assert_eq!(snapshot.namespaces, [("d".to_owned(), sum)].into());
}

/// Pending pods are no sample of the workload, as a user may create any number of them; pods of a `DaemonSet` have a node from
/// the start.
#[rstest]
#[case::bound(Some("n"), "ReplicaSet", 16)]
#[case::waiting(None, "ReplicaSet", 0)]
#[case::of_a_daemon_set(Some("n"), "DaemonSet", 0)]
#[case::image_of_a_static_pod(Some("n"), "Node", 0)]
fn the_workload_model_counts_pods_that_the_scheduler_bound(
    #[case] node: Option<&str>,
    #[case] owner: &str,
    #[case] n_kinds: usize,
) {
    let mut index = offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty());
    // The model is refreshed at the sixteenth change.
    for at in 1..=16 {
        let mut pod = pod(&at.to_string());
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "o", "controller": true}]);
        pod["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-mem"] = at.to_string().into();
        pod["spec"]["nodeName"] = node.into();
        index.apply(serde_json::from_value::<Pod>(pod).unwrap());
    }
    assert_eq!(index.fleet().expected_workload().len(), n_kinds);
}

/// A change of the state that a snapshot counts.
#[derive(Clone, Debug)]
enum Change {
    /// A node with this number of GPUs exists, or none.
    Node(&'static str, Option<u8>),
    /// A pod as a watch shows it, with these annotations on a node; unbound without them.
    Pod(&'static str, Option<Value>),
    Delete(&'static str),
    Assume(&'static str),
    /// Takes back the assumption that was made last.
    Forget,
}

fn change() -> impl Strategy<Value = Change> {
    let pod = || select(&["p", "q", "r"][..]);
    let node = select(&["n0", "n1"][..]);
    let old = |gpu: &str, units: &str| json!({"ALIYUN_COM_GPU_MEM_IDX": gpu, "ALIYUN_COM_GPU_MEM_POD": units, "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
    // A good record, one of a GPU that is gone, one of more than the pod requests, none.
    let records = vec![old("0", "1"), old("7", "1"), old("0", "50"), json!({})];
    prop_oneof![
        (node, prop::option::of(0..3_u8)).prop_map(|(node, n)| Change::Node(node, n)),
        (pod(), prop::option::of(select(records))).prop_map(|(pod, record)| Change::Pod(pod, record)),
        pod().prop_map(Change::Delete),
        pod().prop_map(Change::Assume),
        Just(Change::Forget),
    ]
}

/// The counts of a snapshot that are kept with every change, from all nodes and pods: nodes, of these with GPUs, pending pods,
/// assumed ones, pods that are counted conservatively, and pods whose records contradict.
fn counted(index: &Index) -> [u64; 6] {
    let count = |n: usize| u64::try_from(n).unwrap();
    let (nodes, pods) = (&index.cluster.nodes, &index.cluster.pods);
    [
        nodes.values().filter(|node| node.exists()).count(),
        nodes.values().filter(|node| node.shares_gpus()).count(),
        pods.values()
            .filter(|pod| pod.bound().is_none() && requests_devices(&index.cluster, &pod.facts))
            .count(),
        pods.values().filter(|pod| pod.assumption.is_some()).count(),
        pods.values().filter(|pod| pod.problem.is_some()).count(),
        pods.values().filter(|pod| pod.contradicts).count(),
    ]
    .map(count)
}

fn take_change(index: &mut Index, change: &Change, assumed: &mut Option<(&'static str, u64)>) {
    let now = Instant::now();
    match change {
        Change::Node(name, n_gpus) => {
            let gpus = n_gpus.unwrap_or(0);
            let capacity = json!({"aliyun.com/gpu-count": gpus.to_string(), "aliyun.com/gpu-mem": (u32::from(gpus) * 100).to_string()});
            let node = json!({"metadata": {"name": name}, "status": {"capacity": capacity}});
            let node: Node = serde_json::from_value(node).unwrap();
            if n_gpus.is_some() {
                index.apply(node);
            } else {
                index.delete(&node);
            }
        }
        Change::Pod(name, record) => {
            let mut shown = pod(name);
            if let Some(record) = record {
                shown["metadata"]["annotations"] = record.clone();
                shown["spec"]["nodeName"] = json!("n1");
            }
            let shown: Pod = serde_json::from_value(shown).unwrap();
            index.apply(shown);
        }
        Change::Delete(name) => index.delete(&serde_json::from_value::<Pod>(pod(name)).unwrap()),
        Change::Assume(name) => {
            let id = PodId {
                namespace: "d".to_owned(),
                name: (*name).to_owned(),
                uid: (*name).to_owned(),
            };
            let result = index.assume(&id, &facts(name), "n1", 1, now);
            if let Ok(Assumed::Write { assumed_at, .. }) = result {
                *assumed = Some((name, assumed_at));
            }
        }
        Change::Forget => {
            if let Some((name, assumed_at)) = assumed.take() {
                index.forget(name, assumed_at);
            }
        }
    }
}

proptest! {
    #[test]
    fn a_snapshot_counts_all_nodes_and_pods(changes in prop::collection::vec(change(), 1..40)) {
        let mut index = Index::new(ResourceNames::default(), Policies::default(), Duration::from_secs(60));
        let mut assumed = None;
        for change in changes {
            take_change(&mut index, &change, &mut assumed);
            let shown = index.snapshot();
            let counts = [shown.n_nodes, shown.n_gpu_nodes, shown.n_pending, shown.n_assumed, shown.n_conservative, shown.n_contradicting];
            prop_assert_eq!(counts, counted(&index), "{:?}", change);
        }
    }
}

#[test]
fn a_snapshot_counts_doubtful_records() {
    let mut index = index();
    let record = |gpu: &str, units: &str| json!({"ALIYUN_COM_GPU_MEM_IDX": gpu, "ALIYUN_COM_GPU_MEM_POD": units, "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
    for (name, record) in [
        ("p", record("7", "1")),
        ("q", record("0", "50")),
        ("r", record("0", "1")),
    ] {
        take_change(&mut index, &Change::Pod(name, Some(record)), &mut None);
    }
    let shown = index.snapshot();
    assert_eq!((shown.n_conservative, shown.n_contradicting), (2, 1));
}

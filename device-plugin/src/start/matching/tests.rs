//! Tables of matched pods, and random admissions in kubelet's order.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::request::{ContainerKind, ContainerRequest};
use rstest::rstest;

use super::*;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::Requests;
use crate::tests::builders::{allocated, gpu, init, pod, pods, shares, units};
use ExtendedResource::{Memory, Shared};

mod restarts;

/// The pods of a node and the log of its Allocate calls.
struct Scene {
    pods: NodePods,
    log: AllocateLog,
}

impl Scene {
    fn new(all: impl IntoIterator<Item = NodePod>) -> Self {
        Self {
            pods: pods(all),
            log: AllocateLog::default(),
        }
    }

    fn ask(
        &self,
        resource: ExtendedResource,
        count: u64,
        devices: &[DeviceKey],
        attempt: MatchAttempt,
    ) -> Option<Match> {
        match_call(
            &self.pods,
            &self.log,
            &Call {
                resource,
                count,
                devices,
            },
            attempt,
        )
    }

    /// Answered calls for memory units: `pod/container` of each.
    fn memory<const N: usize>(&mut self, counts: [u64; N]) -> [String; N] {
        counts.map(|count| self.call(Memory, count))
    }

    fn call(&mut self, resource: ExtendedResource, count: u64) -> String {
        self.call_on(resource, count, &[])
    }

    fn call_on(&mut self, resource: ExtendedResource, count: u64, devices: &[DeviceKey]) -> String {
        match self.ask(resource, count, devices, MatchAttempt::Last) {
            Some(found) => {
                let container = format!("{}/{}", found.pod.as_str(), found.container);
                self.log.record(found, &self.pods);
                container
            }
            None => "NoPod".to_owned(),
        }
    }

    /// One answered call about an ID of that name: `pod/container`, and the GPUs of the record that it was answered with.
    fn call_for(&mut self, resource: ExtendedResource, count: u64, id: &str) -> String {
        let found = self.ask(resource, count, &[], MatchAttempt::Last).unwrap();
        let answer = format!(
            "{}/{} on {}",
            found.pod.as_str(),
            found.container,
            found.placement.as_ref().unwrap()
        );
        self.answer(resource, id, Some(found.pod.clone()));
        self.log.record(found, &self.pods);
        answer
    }

    /// Notes an answer about this ID.
    fn answer(&mut self, resource: ExtendedResource, id: &str, pod: Option<PodUid>) {
        self.log.add_answer(
            resource,
            &[id.to_owned()],
            pod,
            ContainerAllocateResponse::default(),
        );
    }

    /// Reads a checkpoint with these entries.
    fn correct(&mut self, entries: impl Into<Vec<Allocated>>) {
        self.log
            .correct_by_checkpoint(&Arc::new(entries.into()), &self.pods);
    }

    /// The pods are those of the first list, and kubelet's checkpoint has these entries.
    fn existing(&mut self, checkpoint: &[Allocated]) {
        assert!(self.log.note_existing_pods(&self.pods));
        self.log.load(checkpoint, &self.pods);
    }

    fn delete(&mut self, name: &str) {
        self.pods.delete(&PodUid::from(name));
        self.log.forget_gone(&self.pods);
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut NodePod)) {
        let mut pod = self.pods.get(&PodUid::from(name)).unwrap().clone();
        change(&mut pod);
        self.pods.apply(pod);
    }
}

#[rstest]
#[case::the_earliest_assume_time_comes_first(
    [pod("a", 2, [units(2)]), pod("b", 1, [units(2)]), pod("c", 3, [units(3)])],
    [2, 2, 3, 2],
    ["b/0", "a/0", "c/0", "NoPod"]
)]
#[case::equal_assume_times_are_ordered_by_name([pod("b", 1, [units(2)]), pod("a", 1, [units(2)])], [2, 2], ["a/0", "b/0"])]
#[case::a_pod_in_admission_comes_before_an_earlier_assume_time(
    [pod("early", 1, [units(2)]), pod("late", 2, [units(4), units(2)])],
    [4, 2, 2],
    ["late/0", "late/1", "early/0"]
)]
#[case::a_later_pod_without_a_record_comes_after_the_earlier_one([pod("z", 1, [units(2)]), unplaced_pod("a", 2)], [2, 2], ["z/0", "a/0"])]
// kubelet turned it away itself and went on; the report of that is on its way.
#[case::a_rejected_pod_without_a_record_blocks_no_other_pod(
    [unplaced_pod("u", 2), pod("a", 1, [units(3)]), pod("b", 2, [units(2)])],
    [3, 2],
    ["a/0", "b/0"]
)]
#[case::a_pod_without_a_record_blocks_only_calls_that_it_could_make(
    [unplaced_pod("x", 2), pod("a", 1, [units(3)])],
    [4, 2, 3],
    ["NoPod", "x/0", "a/0"]
)]
// `b` explains both calls and has the GPU of `a`; `c` would be given another one.
#[case::a_match_on_the_same_gpu_comes_before_one_on_another(
    [pod("a", 1, [units(2), units(4)]), pod("b", 2, [units(2), units(3)]), pod("c", 3, [units(3)]).on([1])],
    [2, 3, 3],
    ["a/0", "b/1", "c/0"]
)]
// Two pods begin with the same call and have the same GPU; the second call distinguishes them.
#[case::a_wrong_first_match_is_corrected_by_the_second_call(
    [pod("a", 1, [units(2), units(4)]), pod("b", 2, [units(2), units(3)])],
    [2, 3, 2, 4],
    ["a/0", "b/1", "a/0", "a/1"]
)]
fn calls_match<const P: usize, const N: usize>(
    #[case] all: [NodePod; P],
    #[case] counts: [u64; N],
    #[case] expected: [&str; N],
) {
    assert_eq!(Scene::new(all).memory(counts), expected);
}

#[test]
fn containers_match_in_order_and_resources_of_one_in_any_order() {
    let both = ContainerRequest {
        shared: 1,
        ..units(2)
    };
    let mut scene = Scene::new([pod("a", 1, [init(units(5)), both, units(3)])]);
    assert_eq!(
        scene.call(Memory, 2),
        "NoPod",
        "the init container has not been admitted"
    );
    assert_eq!(
        [
            scene.call(Memory, 5),
            scene.call(Shared, 1),
            scene.call(Memory, 2),
            scene.call(Memory, 3)
        ],
        ["a/0", "a/1", "a/1", "a/2"]
    );
}

#[test]
fn the_gpus_of_the_ids_decide_before_the_assume_time() {
    let mut scene = Scene::new([pod("a", 1, [units(2)]).on([0]), pod("b", 2, [units(2)]).on([1])]);
    assert_eq!(scene.call_on(Memory, 2, &[(&gpu(1)).into()]), "b/0");
    assert_eq!(
        scene.call_on(Memory, 2, &[(&gpu(1)).into()]),
        "a/0",
        "time decides where the GPUs do not"
    );
}

/// kubelet's checkpoint shows that it admitted `b`, though `a` was assumed earlier: each is matched with the other's record, and
/// `c` with its own.
#[test]
fn equal_pods_admitted_in_another_order_are_planned_to_swap() {
    let mut scene = Scene::new([
        pod("a", 1, [units(2)]).on([0]),
        pod("b", 2, [units(2)]).on([1]),
        pod("c", 3, [units(2)]).on([2]),
    ]);
    assert_eq!(scene.call_for(Memory, 2, "x"), "a/0 on minor 0");
    scene.correct([allocated("b", "u2", Memory, &["x"])]);
    assert_eq!(scene.call_for(Memory, 2, "y"), "a/0 on minor 1");
    assert_eq!(scene.call_for(Memory, 2, "z"), "c/0 on minor 2");
    scene.delete("b");
    assert_eq!(scene.call(Memory, 2), "NoPod");
}

/// Admitted in reverse order, each record is used once.
#[test]
fn each_record_is_used_once() {
    let mut scene = Scene::new((0..4).map(|n| pod(&format!("p{n}"), 10 + u64::from(n), [units(2)]).on([n])));
    let mut known = Vec::new();
    let mut given = Vec::new();
    for n in (0..4).rev() {
        let ids = format!("id{n}");
        given.push(scene.call_for(Memory, 2, &ids));
        known.push(allocated(&format!("p{n}"), "u2", Memory, &[&ids]));
        scene.correct(known.clone());
    }
    let gpus: BTreeSet<_> = given.iter().map(|answer| answer.rsplit(' ').next()).collect();
    assert_eq!(gpus, ["0", "1", "2", "3"].map(Some).into());
}

/// The other pod of a planned swap is gone: the pod keeps its own record.
#[test]
fn a_planned_swap_with_a_deleted_pod_is_dropped() {
    let mut scene = Scene::new([pod("a", 1, [units(2)]).on([0]), pod("b", 2, [units(2)]).on([1])]);
    assert_eq!(scene.call_for(Memory, 2, "x"), "a/0 on minor 0");
    scene.correct([allocated("b", "u2", Memory, &["x"])]);
    scene.delete("b");
    assert_eq!(scene.call_for(Memory, 2, "y"), "a/0 on minor 0");
}

/// Pods that look alike to kubelet and request other amounts cannot swap.
#[test]
fn pods_with_different_amounts_do_not_swap() {
    let asking = |name: &str, assumed_at, bytes: u64| NodePod {
        requests: Requests::of_device(bytes),
        ..pod(name, assumed_at, [shares(1)])
    };
    let mut scene = Scene::new([asking("a", 1, 1).on([0]), asking("b", 2, 2).on([1])]);
    assert_eq!(scene.call_for(Shared, 1, "x"), "a/0 on minor 0");
    scene.correct([allocated("b", "s1", Shared, &["x"])]);
    assert_eq!(scene.call_for(Shared, 1, "y"), "a/0 on minor 0");
}

/// kubelet removes the entries of ended pods late.
#[test]
fn a_checkpoint_entry_of_an_ended_pod_proves_nothing() {
    let mut scene = Scene::new([pod("old", 1, [units(2)]).on([0])]);
    assert_eq!(scene.call_for(Memory, 2, "x"), "old/0 on minor 0");
    let stale = allocated("old", "u2", Memory, &["x"]);
    scene.correct([stale.clone()]);
    scene.pods.apply(pod("new", 2, [units(2)]).on([1]));
    assert_eq!(scene.call_for(Memory, 2, "x"), "new/0 on minor 1");
    scene.correct([stale]);
    assert_eq!(scene.call(Memory, 2), "NoPod");
}

/// The call came before the pod was known, and was answered by its IDs: it must not be matched with another one's call.
#[test]
fn a_call_answered_before_its_pod_was_known_is_recorded_later() {
    let mut scene = Scene::new([]);
    scene.answer(Memory, "x", None);
    scene.pods.apply(pod("a", 1, [units(2)]));
    scene.correct([allocated("a", "u2", Memory, &["x"])]);
    assert_eq!(scene.call(Memory, 2), "NoPod");
}

/// An unchanged checkpoint says more once its pod is known.
#[test]
fn an_unchanged_checkpoint_is_read_again_when_its_pod_is_known() {
    let mut scene = Scene::new([]);
    let known = Arc::new(vec![allocated("a", "u2", Memory, &["x"])]);
    scene.answer(Memory, "x", None);
    scene.log.correct_by_checkpoint(&known, &scene.pods);
    scene.pods.apply(pod("a", 1, [units(2)]));
    scene.log.correct_by_checkpoint(&known, &scene.pods);
    assert_eq!(scene.call(Memory, 2), "NoPod");
}

/// The answer may have gone to the pod that was deleted, so no pod counts as passed over.
#[test]
fn a_pod_deleted_without_a_checkpoint_entry_does_not_change_the_order() {
    let mut scene = Scene::new([
        pod("a", 1, [units(2)]),
        pod("b", 2, [units(2)]),
        pod("c", 3, [units(2)]),
        pod("d", 4, [units(2)]),
    ]);
    assert_eq!(scene.memory([2, 2]), ["a/0", "b/0"]);
    scene.delete("a");
    scene.change("c", |pod| pod.stage = PodStage::Running);
    scene.log.forget_gone(&scene.pods);
    assert_eq!(
        scene.call(Memory, 2),
        "d/0",
        "b may just not have been reported yet"
    );
}

/// Neither an entry of an earlier process nor a pod that was admitted before the first answer contradicts the answers.
#[rstest]
fn pods_admitted_before_an_answer_do_not_contradict_it(#[values(true, false)] is_of_earlier_process: bool) {
    let all = [
        pod("old", 1, [units(2)]),
        pod("a", 2, [units(2)]),
        pod("b", 3, [units(2)]),
    ];
    let mut scene = Scene::new(all);
    if is_of_earlier_process {
        scene.log.note_existing_pods(&pods([pod("old", 1, [units(2)])]));
    }
    scene.change("old", |pod| pod.stage = PodStage::Running);
    assert_eq!(scene.memory([2, 2]), ["a/0", "b/0"]);
}

type Change = fn(&mut NodePod);

#[rstest]
#[case::failed(|pod: &mut NodePod| pod.stage = PodStage::Terminal)]
#[case::running(|pod: &mut NodePod| pod.stage = PodStage::Running)]
#[case::admitted(|pod: &mut NodePod| pod.stage = PodStage::Admitted)]
#[case::assigned(|pod: &mut NodePod| {
    let placement = pod.placement.as_mut().unwrap();
    placement.gpushare.as_mut().unwrap().assigned = true;
})]
fn a_pod_that_cannot_have_made_the_call_is_not_matched(#[case] change: Change) {
    let mut scene = Scene::new([pod("a", 1, [units(2)])]);
    scene.change("a", change);
    assert_eq!(scene.call(Memory, 2), "NoPod");
}

/// kubelet admits a pod that it sees for the first time even if it is being deleted; then the next one gets its own.
#[test]
fn a_terminating_pod_that_kubelet_admits_keeps_its_place() {
    let mut scene = Scene::new([pod("a", 1, [units(2)]).on([0]), pod("b", 2, [units(2)]).on([1])]);
    scene.change("a", |pod| pod.deleting = true);
    assert_eq!(scene.memory([2, 2]), ["a/0", "b/0"]);
}

/// kubelet went on to a later pod, so it has passed over the one being deleted: no pod gets its devices.
#[test]
fn a_terminating_pod_that_kubelet_skips_delays_no_other_pod() {
    let mut scene = Scene::new([
        pod("a", 1, [units(2)]).on([0]),
        pod("b", 2, [units(3)]),
        pod("c", 3, [units(2)]).on([1]),
    ]);
    scene.change("a", |pod| pod.deleting = true);
    assert_eq!(scene.memory([3, 2]), ["b/0", "c/0"]);
    assert_eq!(
        scene.ask(Memory, 2, &[], MatchAttempt::Early),
        None,
        "another pod may come"
    );
    assert_eq!(scene.call(Memory, 2), "a/0");
}

/// Skipped with an equal pod next: that one gets the other's devices and is not refused, and the pods after it get their own.
#[test]
fn a_terminating_pod_that_kubelet_skips_makes_no_other_pod_fail() {
    let mut scene = Scene::new([pod("a", 1, [units(2)]).on([0]), pod("b", 2, [units(2)]).on([1])]);
    scene.change("a", |pod| pod.deleting = true);
    assert_eq!(scene.call(Memory, 2), "a/0");
    scene.change("b", |pod| pod.stage = PodStage::Running);
    scene.pods.delete(&PodUid::from("a"));
    scene.pods.apply(pod("c", 3, [units(2)]));
    assert_eq!(scene.memory([2, 2]), ["c/0", "NoPod"]);
}

#[test]
fn a_terminating_pod_on_other_gpus_than_the_ids_comes_last() {
    let mut scene = Scene::new([pod("a", 1, [units(2)]).on([0]), pod("b", 2, [units(2)]).on([1])]);
    scene.change("a", |pod| pod.deleting = true);
    assert_eq!(scene.call_on(Memory, 2, &[(&gpu(1)).into()]), "b/0");
}

fn unplaced_pod(name: &str, units_asked: u64) -> NodePod {
    pod(name, 0, [units(units_asked)]).unplaced()
}

/// It would use devices that are counted for the pod that came later.
#[test]
fn an_earlier_pod_without_a_record_does_not_get_the_devices_of_a_later_one() {
    let mut scene = Scene::new([unplaced_pod("z", 2), pod("a", 1, [units(2)])]);
    assert_eq!(
        scene.ask(Memory, 2, &[], MatchAttempt::Early),
        None,
        "its record may come"
    );
    assert_eq!(
        scene
            .ask(Memory, 2, &[], MatchAttempt::Last)
            .map(|found| found.placement),
        Some(None)
    );
    assert_eq!(scene.call(Memory, 2), "z/0");
    assert_eq!(scene.memory([2, 2]), ["a/0", "NoPod"]);
}

#[test]
fn a_call_matches_the_pod_of_its_preferred_ids() {
    let mut scene = Scene::new([pod("b", 2, [units(2)])]);
    let call = Call {
        resource: Memory,
        count: 2,
        devices: &[],
    };
    let found = scene.ask(Memory, 2, &[], MatchAttempt::Early).unwrap();
    scene.log.preferred = Some(found);
    scene.pods.apply(pod("a", 1, [units(2)]));
    assert_eq!(
        preferred(
            &scene.pods,
            &scene.log,
            &Call {
                count: 3,
                ..call.clone()
            }
        ),
        None
    );
    let found = preferred(&scene.pods, &scene.log, &call).unwrap();
    assert_eq!(found.pod.as_str(), "b");
    scene.change("b", |pod| pod.stage = PodStage::Terminal);
    assert_eq!(preferred(&scene.pods, &scene.log, &call), None);
    scene.change("b", |pod| pod.stage = PodStage::Bound);
    scene.log.record(found, &scene.pods);
    assert_eq!(preferred(&scene.pods, &scene.log, &call), None, "used up");
}

/// The container before got the GPU of `m`; the likeliest explanation goes on with that, so that the pod sees one GPU only.
#[test]
fn the_containers_of_a_pod_see_the_devices_of_one_record() {
    let mut scene = Scene::new([
        pod("m", 1, [units(2), units(4)]),
        pod("a", 4, [units(2), units(3)]).on([1]),
        pod("b", 3, [units(2), units(3)]).on([1]),
        pod("c", 5, [units(3)]).on([2]),
    ]);
    assert_eq!(scene.call_for(Memory, 2, "x"), "m/0 on minor 0");
    assert_eq!(scene.ask(Memory, 3, &[], MatchAttempt::Early), None);
    assert_eq!(scene.call_for(Memory, 3, "y"), "b/1 on minor 0");
    assert_eq!(
        scene.call_for(Memory, 2, "z"),
        "m/0 on minor 0",
        "it asks for more than b and keeps its own"
    );
}

/// Their start has not been reported when this process takes over.
#[test]
fn pods_of_the_checkpoint_are_not_answered_again() {
    let mut scene = Scene::new([pod("old", 1, [units(2)]), pod("half", 2, [units(3), units(4)])]);
    let before = [
        allocated("old", "u2", Memory, &["x"]),
        allocated("half", "u3", Memory, &["x"]),
        allocated("gone", "x", Memory, &["x"]),
    ];
    scene.existing(&before);
    scene.pods.apply(pod("new", 3, [units(2)]));
    assert_eq!(scene.memory([2, 2, 4]), ["new/0", "NoPod", "half/1"]);
}

/// Another pod would explain both calls, but kubelet says for whom the first one was.
#[test]
fn a_match_that_the_checkpoint_confirms_is_not_corrected() {
    let others = [
        pod("b", 2, [units(3)]).on([1]),
        pod("c", 3, [units(2), units(3)]).on([2]),
    ];
    let mut scene = Scene::new([pod("a", 1, [units(2), units(4)])].into_iter().chain(others));
    scene.existing(&[allocated("a", "u2", Memory, &["x"])]);
    assert_eq!(scene.memory([3, 4]), ["b/0", "a/1"]);
}

/// A predecessor refused it, and kubelet has gone on.
#[test]
fn a_pod_without_a_record_older_than_the_checkpoint_blocks_no_other_pod() {
    let mut scene = Scene::new([unplaced_pod("u", 2), pod("v", 1, [units(3)])]);
    scene.existing(&[allocated("v", "u3", Memory, &["x"])]);
    scene.pods.apply(pod("w", 2, [units(2)]));
    assert_eq!(scene.call(Memory, 2), "w/0");
}

/// As long as kubelet's checkpoint does not show that no process answered for them.
#[test]
fn pods_of_an_earlier_process_come_after_others() {
    let mut scene = Scene::new([pod("old", 1, [units(2)])]);
    scene.log.note_existing_pods(&scene.pods);
    scene.pods.apply(pod("new", 3, [units(2)]));
    assert_eq!(scene.memory([2, 2]), ["new/0", "old/0"]);
}

#[test]
fn before_the_first_pod_list_no_call_is_matched() {
    let scene = Scene {
        pods: NodePods::default(),
        log: AllocateLog::default(),
    };
    assert_eq!(scene.ask(Memory, 1, &[], MatchAttempt::Last), None);
}

/// kubelet fails a pod half-way, for a reason of its own, and goes on to the next.
#[test]
fn a_pod_whose_admission_stopped_halfway_is_matched_last() {
    let mut scene = Scene::new([pod("a", 1, [units(2), units(4)]), pod("b", 2, [units(3)])]);
    assert_eq!(scene.memory([2, 3]), ["a/0", "b/0"]);
    assert_eq!(scene.ask(Memory, 2, &[], MatchAttempt::Early), None);
    assert_eq!(scene.call(Memory, 2), "a/0");
}

/// The same on different GPUs: the calls were b's, which goes on with the GPU that it was given; `a` is as if nothing had been.
#[test]
fn a_wrong_first_match_on_another_gpu_is_kept() {
    let mut scene = Scene::new([
        pod("a", 1, [units(2), units(4)]),
        pod("b", 2, [units(2), units(3)]).on([1]),
    ]);
    assert_eq!(scene.call_for(Memory, 2, "x"), "a/0 on minor 0");
    assert_eq!(scene.ask(Memory, 3, &[], MatchAttempt::Early), None);
    assert_eq!(scene.call_for(Memory, 3, "y"), "b/1 on minor 0");
    assert_eq!(scene.memory([2, 4]), ["a/0", "a/1"]);
}

/// A predecessor of this process may have answered the pod's first call.
#[test]
fn a_pod_of_an_earlier_process_is_continued_only_after_waiting() {
    let mut scene = Scene::new([pod("a", 1, [units(2), units(4), units(6)])]);
    scene.log.note_existing_pods(&scene.pods.clone());
    assert_eq!(scene.ask(Memory, 4, &[], MatchAttempt::Early), None);
    assert_eq!(scene.memory([4, 6]), ["a/1", "a/2"]);
}

#[test]
fn a_new_pod_of_the_same_name_is_matched_again() {
    let mut scene = Scene::new([pod("a", 1, [units(2)])]);
    assert_eq!(scene.call(Memory, 2), "a/0");
    scene.pods.delete(&PodUid::from("a"));
    scene.pods.apply(NodePod {
        uid: PodUid::from("a2"),
        ..pod("a", 5, [units(2)])
    });
    assert_eq!(scene.call(Memory, 2), "a2/0");
}

#[test]
fn a_pod_is_complete_once_all_its_calls_are_answered() {
    let mut scene = Scene::new([pod("a", 1, [shares(1), units(2)])]);
    let is_complete = |scene: &Scene| scene.log.is_complete(scene.pods.get(&PodUid::from("a")).unwrap());
    assert!(!is_complete(&scene));
    scene.call(Shared, 1);
    assert!(!is_complete(&scene));
    scene.call(Memory, 2);
    assert!(is_complete(&scene));
}

/// The calls that kubelet makes for a pod, the resources of each container in an order of its own.
fn calls_of(pod: &NodePod, flips: &[bool]) -> Vec<(usize, ExtendedResource, u64)> {
    let calls = |(idx, container): (usize, &ContainerRequest)| {
        let mut order = ExtendedResource::ALL;
        if flips.get(idx).copied().unwrap_or(false) {
            order.reverse();
        }
        order.map(|resource| (idx, resource, resource.count(container)))
    };
    pod.containers
        .iter()
        .enumerate()
        .flat_map(calls)
        .filter(|(.., count)| *count > 0)
        .collect()
}

fn kinds() -> impl Strategy<Value = ContainerKind> {
    prop_oneof![
        Just(ContainerKind::Init),
        Just(ContainerKind::Sidecar),
        Just(ContainerKind::App)
    ]
}

/// Pods of one to three containers, with counts up to `counts`; each container asks for something.
fn any_pods(counts: u64) -> impl Strategy<Value = Vec<NodePod>> {
    let container =
        (kinds(), 0..=counts, 0..=counts).prop_map(|(kind, memory_units, shared)| ContainerRequest {
            name: "c".to_owned(),
            kind,
            memory_units: if shared == 0 {
                memory_units.max(1)
            } else {
                memory_units
            },
            ..shares(shared)
        });
    let containers = prop::collection::vec(container, 1..4);
    prop::collection::vec((containers, 0_u32..3), 1..7).prop_map(|all| {
        let pod = |(idx, (mut containers, minor)): (usize, (Vec<ContainerRequest>, u32))| {
            containers.sort_by_key(|container| container.kind == ContainerKind::App);
            pod(&format!("p{idx}"), 10 + idx as u64, containers).on([minor])
        };
        all.into_iter().enumerate().map(pod).collect()
    })
}

proptest! {
    /// No two calls of the node are alike: whatever the order of admission, each finds its container.
    #[test]
    fn calls_that_differ_match_their_pods_in_any_order(
        all in any_pods(2),
        order in Just((0..7).collect::<Vec<usize>>()).prop_shuffle(),
        flips in prop::collection::vec(any::<bool>(), 3),
    ) {
        let mut next = 0;
        let mut distinct = |count: &mut u64| if *count > 0 { next += 1; *count = next };
        let mut all = all;
        for container in all.iter_mut().flat_map(|pod| &mut pod.containers) {
            distinct(&mut container.memory_units);
            distinct(&mut container.shared);
        }
        let mut scene = Scene::new(all.clone());
        for pod in order.iter().filter_map(|idx| all.get(*idx)) {
            for (container, resource, count) in calls_of(pod, &flips) {
                prop_assert_eq!(scene.call(resource, count), format!("{}/{container}", pod.name));
            }
            prop_assert!(scene.log.is_complete(pod));
        }
    }

    /// Pods may ask for the same; admitted in the order in which they were assumed, each finds its own,
    /// also when GPUs of IDs point at it and when pods show up one after the other.
    #[test]
    fn equal_calls_match_pods_in_the_order_of_assume_times(all in any_pods(2), flips in prop::collection::vec(any::<bool>(), 3), seen_at_once in any::<bool>()) {
        let mut scene = Scene::new(if seen_at_once { all.clone() } else { Vec::new() });
        for pod in &all {
            scene.pods.apply(pod.clone());
            for (container, resource, count) in calls_of(pod, &flips) {
                prop_assert_eq!(scene.call(resource, count), format!("{}/{container}", pod.name));
            }
        }
    }

    /// In any order of calls no container is answered twice, and none that does not wait for the call.
    #[test]
    fn no_container_is_matched_twice_or_with_another_count(all in any_pods(2), calls in prop::collection::vec((any::<bool>(), 0_u64..4, 0_u32..3), 0..40)) {
        let mut scene = Scene::new(all.clone());
        for (is_memory, count, minor) in calls {
            let resource = if is_memory { Memory } else { Shared };
            if let Some(found) = scene.ask(resource, count, &[(&gpu(minor)).into()], MatchAttempt::Last) {
                let pod = all.iter().find(|pod| pod.uid == found.pod).unwrap();
                prop_assert_eq!(resource.count(&pod.containers[found.container]), count);
                let answered = scene.log.answered_calls(&found.pod).to_vec();
                prop_assert!(!answered.iter().any(|step| step.container == found.container && step.resource == resource));
                scene.log.record(found, &scene.pods);
            }
        }
    }
}

//! Tables of records and answers, and the decisions about them.

use proto::memory_unit::MemoryUnit;

use super::*;
use crate::devices::fleet::NodeFleet;
use crate::inject::content::cdi_answer;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{NodePods, PodStage};
use crate::start::envvar::partners::{Verification, verify_or_swap};
use crate::start::matching::AllocateLog;
use crate::start::verify::{StartEvidence, Visible, VisibleByType, visible_to_pod};
use crate::tests::builders::{adapter, allocated, fleet, gpu, pod, pods, rdma, says, units};

mod check;

/// Pods p0, p1 and so on of two units: minors of their records, and the GPU that each sees; all on a node of four GPUs.
fn scene(records: &[u32], sees: &[Option<u32>]) -> (NodePods, Vec<Allocated>) {
    let all = records
        .iter()
        .enumerate()
        .map(|(at, minor)| pod(&format!("p{at}"), at as u64, [units(2)]).on([*minor]));
    let entry = |(at, minor): (usize, &Option<u32>)| {
        let answer = says("NVIDIA_VISIBLE_DEVICES", gpu((*minor)?).uuid.as_str());
        Some(
            allocated(
                &format!("p{at}"),
                "u2",
                ExtendedResource::Memory,
                &[&at.to_string()],
            )
            .with(answer),
        )
    };
    (pods(all), sees.iter().enumerate().filter_map(entry).collect())
}

fn evidence<'a>(
    pods: &'a NodePods,
    fleet: &'a NodeFleet,
    log: &'a AllocateLog,
    allocated: &'a [Allocated],
) -> StartEvidence<'a> {
    StartEvidence::new(pods, fleet, log, allocated, MemoryUnit::GIB)
}

fn verify_with(pods: &NodePods, allocated: &[Allocated], log: &AllocateLog, at: usize) -> Verification {
    let fleet = fleet(4);
    let evidence = evidence(pods, &fleet, log, allocated);
    let pod = pods.get(&PodUid::from(format!("p{at}").as_str())).unwrap();
    verify_or_swap(&evidence, pod, &visible_to_pod(allocated, &pod.uid, &fleet))
}

fn verify(records: &[u32], sees: &[Option<u32>], at: usize) -> Verification {
    let (pods, allocated) = scene(records, sees);
    verify_with(&pods, &allocated, &AllocateLog::default(), at)
}

/// The partner of a swap.
fn partner(verification: &Verification) -> Option<&str> {
    match verification {
        Verification::Swap(partner) => Some(partner.as_str()),
        _ => None,
    }
}

fn is_mismatch(verification: &Verification) -> bool {
    matches!(verification, Verification::Refused(StartRefusal::Mismatch { .. }))
}

fn look_again(uid: &str) -> Verification {
    Verification::LookAgain(PodUid::from(uid))
}

#[test]
fn a_container_whose_devices_match_its_record_passes() {
    assert_eq!(verify(&[0, 1], &[Some(0), Some(1)], 0), Verification::Passed);
}

#[test]
fn a_swap_prefers_the_pod_that_has_the_recorded_device() {
    assert_eq!(
        partner(&verify(&[0, 1, 1], &[Some(1), None, Some(0)], 0)),
        Some("p2")
    );
    assert_eq!(
        partner(&verify(&[0, 1, 1], &[Some(1), None, Some(2)], 0)),
        Some("p2")
    );
    assert_eq!(partner(&verify(&[0, 1], &[Some(1), None], 0)), Some("p1"));
}

/// It runs, or may run at any moment, with the devices of its record.
#[test]
fn a_pod_with_the_devices_of_its_record_does_not_swap() {
    assert!(is_mismatch(&verify(&[0, 1], &[Some(1), Some(1)], 0)));
}

#[test]
fn pods_with_different_amounts_do_not_swap() {
    let (mut pods, allocated) = scene(&[0, 1], &[Some(1), Some(0)]);
    pods.apply(pod("p1", 1, [units(3)]).on([1]));
    let verification = verify_with(&pods, &allocated, &AllocateLog::default(), 0);
    let Verification::Refused(refusal) = verification else {
        panic!("{verification:?}")
    };
    assert!(refusal.is_final());
    assert_eq!(
        refusal.to_string(),
        "kubelet allocated GPU-00000001-aaaa-bbbb-cccc-000000000001, but the scheduler assigned minor 0; delete the pod to reschedule it"
    );
}

/// kubelet may have allocated for the other pod since the snapshot.
#[test]
fn the_check_is_repeated_while_kubelet_allocates_for_the_other_pod() {
    use crate::start::matching::{Call, MatchAttempt, match_call};
    let (pods, allocated) = scene(&[0, 1], &[Some(1), None]);
    let mut log = AllocateLog::default();
    log.correct_by_checkpoint(&Arc::new(allocated.clone()), &pods);
    for _ in 0..2 {
        let found = match_call(
            &pods,
            &log,
            &Call {
                resource: ExtendedResource::Memory,
                count: 2,
                devices: &[],
            },
            MatchAttempt::Last,
        )
        .unwrap();
        log.record(found, &pods);
    }
    assert_eq!(verify_with(&pods, &allocated, &log, 0), look_again("p1"));
}

#[test]
fn unhealthy_and_missing_gpus_are_named() {
    let Verification::Refused(refusal) = verify(&[7], &[Some(0)], 0) else {
        panic!("it is not on this node")
    };
    assert_eq!(
        refusal.to_string(),
        "its record names minor 7, which this node does not have; delete the pod to reschedule it"
    );
}

#[test]
fn containers_of_one_pod_that_see_different_devices_are_refused() {
    let (pods, mut allocated) = scene(&[0], &[Some(0)]);
    let (_, other) = scene(&[0], &[Some(1)]);
    allocated.extend(other);
    assert!(is_mismatch(&verify_with(
        &pods,
        &allocated,
        &AllocateLog::default(),
        0
    )));
}

/// Swaps of two resolve every permutation.
#[test]
fn swaps_of_two_resolve_every_permutation() {
    let permutations = [
        [0, 1, 2, 3],
        [1, 0, 3, 2],
        [1, 2, 3, 0],
        [3, 2, 1, 0],
        [2, 0, 1, 3],
        [3, 0, 1, 2],
    ];
    for sees in permutations {
        for order in permutations {
            let mut records = [0, 1, 2, 3];
            for at in order {
                let at = at as usize;
                loop {
                    match verify(&records, &sees.map(Some), at) {
                        Verification::Passed => break,
                        Verification::Swap(partner) => {
                            records.swap(at, partner.as_str()[1..].parse().unwrap());
                        }
                        other => panic!("{sees:?} {order:?}: {other:?}"),
                    }
                }
            }
            assert_eq!(records, sees);
        }
    }
}

fn verify_p0(
    pods: &NodePods,
    allocated: &[Allocated],
    log: &AllocateLog,
    is_checkpoint_known: bool,
) -> Verification {
    let fleet = fleet(4);
    let evidence = StartEvidence {
        is_checkpoint_known,
        ..evidence(pods, &fleet, log, allocated)
    };
    verify_or_swap(
        &evidence,
        pods.get(&PodUid::from("p0")).unwrap(),
        &[("gpu", Visible::Devices([gpu(1).uuid].into()))].into(),
    )
}

/// A checkpoint that cannot be read does not say that a running pod has no devices yet.
#[test]
fn a_pod_that_may_be_running_does_not_swap() {
    let (mut pods, _) = scene(&[0, 1], &[]);
    assert_eq!(
        partner(&verify_p0(&pods, &[], &AllocateLog::default(), true)),
        Some("p1"),
        "it has not been answered for"
    );
    assert_eq!(
        verify_p0(&pods, &[], &AllocateLog::default(), false),
        look_again("p1"),
        "or that is not known"
    );
    let mut started = AllocateLog::default();
    started.note_start(&PodUid::from("p1"), ExtendedResource::Memory, &[]);
    for is_checkpoint_known in [true, false] {
        assert!(is_mismatch(&verify_p0(&pods, &[], &started, is_checkpoint_known)));
    }
    pods.apply(pod("p1", 1, [units(2)]).on([1]).at(PodStage::Running));
    assert!(is_mismatch(&verify_p0(
        &pods,
        &[],
        &AllocateLog::default(),
        false
    )));
}

/// A container that was given its devices by CDI sees those of its record since it started.
#[test]
fn a_pod_that_started_with_cdi_does_not_swap() {
    let (mut pods, mut allocated) = scene(&[0, 1], &[None, Some(1)]);
    allocated[0].answer = cdi_answer(ExtendedResource::Memory, &["1".to_owned()], 1);
    assert_eq!(
        partner(&verify_p0(&pods, &allocated, &AllocateLog::default(), true)),
        Some("p1")
    );
    pods.apply(pod("p1", 1, [units(2)]).on([1]).at(PodStage::Running));
    assert!(is_mismatch(&verify_p0(
        &pods,
        &allocated,
        &AllocateLog::default(),
        true
    )));
}

/// An answer by CDI beside one by variable, as a change of the injection mode leaves it, contradicts nothing.
#[test]
fn answers_of_both_injection_modes_do_not_contradict() {
    let (_, mut allocated) = scene(&[0], &[Some(2)]);
    allocated.push(Allocated {
        answer: cdi_answer(ExtendedResource::Memory, &["1".to_owned()], 1),
        ..allocated[0].clone()
    });
    for _ in 0..2 {
        allocated.reverse();
        let seen = visible_to_pod(&allocated, &PodUid::from("p0"), &fleet(4));
        assert_eq!(
            seen,
            VisibleByType::from([("gpu", Visible::Devices([gpu(2).uuid].into()))])
        );
    }
}

/// Two pods that do not fit together, and a process that does not know which of them an earlier one let start.
#[test]
fn after_a_restart_neither_of_two_pods_that_do_not_fit_starts() {
    let pods = pods([pod("p0", 0, [units(10)]), pod("p1", 1, [units(10)])]);
    let entry = |name: &str| allocated(name, "u10", ExtendedResource::Memory, &[name]);
    let mut log = AllocateLog::default();
    assert!(log.note_existing_pods(&pods));
    log.load(&[entry("p0"), entry("p1")], &pods);
    let fleet = fleet(1);
    let verify = |is_young, name: &str| {
        let evidence = StartEvidence {
            is_young,
            ..evidence(&pods, &fleet, &log, &[])
        };
        evidence.verify(pods.get(&PodUid::from(name)).unwrap(), &VisibleByType::new())
    };
    assert!(matches!(verify(true, "p0"), Err(StartRefusal::NoCapacity(_))));
    assert!(matches!(verify(true, "p1"), Err(StartRefusal::NoCapacity(_))));
    assert_eq!(verify(false, "p0"), Ok(()));
    assert!(matches!(verify(false, "p1"), Err(StartRefusal::NoCapacity(_))));
}

/// One of its containers has started by its spec on the GPU of its record; another was answered by variable for another GPU.
#[test]
fn a_pod_that_started_with_cdi_keeps_its_record() {
    let (pods, mut allocated) = scene(&[0, 1], &[Some(1), None]);
    allocated.push(Allocated {
        answer: cdi_answer(ExtendedResource::Memory, &["1".to_owned()], 1),
        ..allocated[0].clone()
    });
    assert_eq!(
        partner(&verify_p0(&pods, &allocated, &AllocateLog::default(), true)),
        Some("p1"),
        "it has not started"
    );
    let mut started = AllocateLog::default();
    started.note_start(&PodUid::from("p0"), ExtendedResource::Memory, &[]);
    assert!(is_mismatch(&verify_p0(&pods, &allocated, &started, true)));
}

/// Two pods have virtual functions of one adapter, and kubelet has admitted them in another order.
#[test]
fn pods_swap_virtual_functions() {
    let with = |name: &str, function: &str| pod(name, 1, [rdma(1)]).on_function(1, &adapter(1), function);
    let answered = |pod: &str, function: &str| {
        let envs = [
            ("GPUSHARE_RDMA_DEVICES", "0000:01:00.0"),
            ("GPUSHARE_RDMA_FUNCTIONS", function),
        ];
        let mut entry = allocated(pod, "r1", ExtendedResource::Rdma, &[pod]);
        entry.answer.envs = envs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        entry
    };
    let inventory = crate::devices::inventory::NodeInventory {
        others: vec![adapter(1)],
        ..Default::default()
    };
    let fleet = NodeFleet::new(inventory, fleet(0).ids);
    let verify = |seen: [&str; 2]| {
        let pods = pods([with("p0", "0000:01:00.2"), with("p1", "0000:01:00.3")]);
        let allocated = [answered("p0", seen[0]), answered("p1", seen[1])];
        let mut log = AllocateLog::default();
        log.set_offered(vec![ExtendedResource::Rdma]);
        let evidence = evidence(&pods, &fleet, &log, &allocated);
        let pod = pods.get(&PodUid::from("p0")).unwrap();
        verify_or_swap(&evidence, pod, &visible_to_pod(&allocated, &pod.uid, &fleet))
    };
    assert_eq!(verify(["0000:01:00.2", "0000:01:00.3"]), Verification::Passed);
    assert_eq!(partner(&verify(["0000:01:00.3", "0000:01:00.2"])), Some("p1"));
    let Verification::Refused(refusal) = verify(["0000:01:00.4", "0000:01:00.3"]) else {
        panic!("it has another function")
    };
    assert!(
        refusal
            .to_string()
            .contains("but the scheduler assigned 0000:01:00.0,0000:01:00.2;"),
        "{refusal}"
    );
}

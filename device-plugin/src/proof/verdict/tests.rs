//! Verdicts over tables of records and answers.

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::*;
use crate::builders::{adapter, fleet, gpu, pod, pods, rdma, units};
use crate::extended_resource::ExtendedResource;

/// Pods p0, p1 and so on of two units: minors of their records, and what each sees; all on a node of four GPUs.
fn scene(records: &[u32], sees: &[Option<u32>]) -> (Pods, Vec<Allocated>) {
    let all = records
        .iter()
        .enumerate()
        .map(|(at, minor)| pod(&format!("p{at}"), at as u64, [units(2)]).on([*minor]));
    let entry = |(at, minor): (usize, &Option<u32>)| {
        let envs = [(
            "NVIDIA_VISIBLE_DEVICES".to_owned(),
            gpu((*minor)?).uuid.to_string(),
        )]
        .into();
        let answer = ContainerAllocateResponse {
            envs,
            ..ContainerAllocateResponse::default()
        };
        Some(Allocated {
            pod: PodUid::from(format!("p{at}").as_str()),
            container: "u2".to_owned(),
            resource: ExtendedResource::Memory,
            ids: vec![at.to_string()],
            answer,
        })
    };
    (pods(all), sees.iter().enumerate().filter_map(entry).collect())
}

fn judge_with(pods: &Pods, written: &[Allocated], ledger: &Ledger, at: usize) -> Verdict {
    let fleet = fleet(4);
    let variable = "NVIDIA_VISIBLE_DEVICES";
    let evidence = Evidence {
        pods,
        fleet: &fleet,
        ledger,
        written,
        is_written_known: true,
        is_young: false,
        variable,
        unit: MemoryUnit::GIB,
    };
    let pod = pods.get(&PodUid::from(format!("p{at}").as_str())).unwrap();
    evidence.judge(pod, &sight::of_pod(written, &pod.uid, variable, &fleet))
}

fn judge(records: &[u32], sees: &[Option<u32>], at: usize) -> Verdict {
    let (pods, written) = scene(records, sees);
    judge_with(&pods, &written, &Ledger::default(), at)
}

fn exchange(with: &str) -> Verdict {
    Verdict::Exchange(PodUid::from(with))
}

#[test]
fn what_agrees_is_confirmed() {
    assert_eq!(judge(&[0, 1], &[Some(0), Some(1)], 0), Verdict::Confirm);
}

#[test]
fn a_pod_that_sees_mine_comes_before_one_that_sees_nothing_yet() {
    assert_eq!(judge(&[0, 1, 1], &[Some(1), None, Some(0)], 0), exchange("p2"));
    assert_eq!(judge(&[0, 1, 1], &[Some(1), None, Some(2)], 0), exchange("p2"));
    assert_eq!(judge(&[0, 1], &[Some(1), None], 0), exchange("p1"));
}

/// It runs, or may run at any moment, with the devices of its record.
#[test]
fn a_pod_that_sees_its_own_gives_nothing_away() {
    assert!(matches!(
        judge(&[0, 1], &[Some(1), Some(1)], 0),
        Verdict::Refuse(Refusal::Mismatch { .. })
    ));
}

#[test]
fn pods_of_other_amounts_do_not_change_places() {
    let (mut pods, written) = scene(&[0, 1], &[Some(1), Some(0)]);
    pods.apply(pod("p1", 1, [units(3)]).on([1]));
    let verdict = judge_with(&pods, &written, &Ledger::default(), 0);
    let Verdict::Refuse(refusal) = verdict else {
        panic!("{verdict:?}")
    };
    assert!(refusal.is_final());
    assert_eq!(
        refusal.to_string(),
        "kubelet has given it GPU-00000001-aaaa-bbbb-cccc-000000000001, but minor 0 is counted for it, and no other pod of this node can \
         change places with it; delete it to have it placed anew"
    );
}

/// An answer is under way to the other pod, and the look may have come too early to show it.
#[test]
fn looks_again_while_the_other_is_being_answered() {
    use crate::identity::{Call, Patience, identify};
    let (pods, written) = scene(&[0, 1], &[Some(1), None]);
    let mut ledger = Ledger::default();
    ledger.learn(&written, &pods);
    for _ in 0..2 {
        let found = identify(
            &pods,
            &ledger,
            &Call {
                resource: ExtendedResource::Memory,
                count: 2,
                devices: &[],
            },
            Patience::Over,
        )
        .unwrap();
        ledger.record(found, &pods);
    }
    assert_eq!(
        judge_with(&pods, &written, &ledger, 0),
        Verdict::LookAgain(PodUid::from("p1"))
    );
}

#[test]
fn sick_and_absent_gpus_are_named() {
    let Verdict::Refuse(refusal) = judge(&[7], &[Some(0)], 0) else {
        panic!("it is not on this node")
    };
    assert_eq!(
        refusal.to_string(),
        "its record names minor 7, which this node does not have"
    );
}

#[test]
fn containers_of_one_pod_that_see_different_devices_are_past_help() {
    let (pods, mut written) = scene(&[0], &[Some(0)]);
    let (_, other) = scene(&[0], &[Some(1)]);
    written.extend(other);
    assert!(matches!(
        judge_with(&pods, &written, &Ledger::default(), 0),
        Verdict::Refuse(Refusal::Mismatch { .. })
    ));
}

/// Whatever the permutation, exchanges of two make every pod right.
#[test]
fn every_permutation_is_resolved() {
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
                    match judge(&records, &sees.map(Some), at) {
                        Verdict::Confirm => break,
                        Verdict::Exchange(other) => records.swap(at, other.as_str()[1..].parse().unwrap()),
                        verdict => panic!("{sees:?} {order:?}: {verdict:?}"),
                    }
                }
            }
            assert_eq!(records, sees);
        }
    }
}

fn verdict_of(pods: &Pods, written: &[Allocated], ledger: &Ledger, is_written_known: bool) -> Verdict {
    let fleet = fleet(4);
    let variable = "NVIDIA_VISIBLE_DEVICES";
    let evidence = Evidence {
        pods,
        fleet: &fleet,
        ledger,
        written,
        is_written_known,
        is_young: false,
        variable,
        unit: MemoryUnit::GIB,
    };
    evidence.judge(
        pods.get(&PodUid::from("p0")).unwrap(),
        &[("gpu", Sight::Devices([gpu(1).uuid].into()))].into(),
    )
}

/// What cannot be read does not say that a running pod sees nothing yet.
#[test]
fn nothing_is_taken_from_a_pod_that_may_run() {
    let (mut pods, _) = scene(&[0, 1], &[]);
    assert_eq!(
        verdict_of(&pods, &[], &Ledger::default(), true),
        exchange("p1"),
        "it has not been answered for"
    );
    assert_eq!(
        verdict_of(&pods, &[], &Ledger::default(), false),
        Verdict::LookAgain(PodUid::from("p1")),
        "or nobody knows"
    );
    let mut confirmed = Ledger::default();
    confirmed.confirm(&PodUid::from("p1"));
    for is_written_known in [true, false] {
        assert!(matches!(
            verdict_of(&pods, &[], &confirmed, is_written_known),
            Verdict::Refuse(Refusal::Mismatch { .. })
        ));
    }
    pods.apply(NodePod {
        stage: Stage::Running,
        ..pod("p1", 1, [units(2)]).on([1])
    });
    assert!(matches!(
        verdict_of(&pods, &[], &Ledger::default(), false),
        Verdict::Refuse(Refusal::Mismatch { .. })
    ));
}

/// A container that was given its devices by CDI sees those of its record since it started.
#[test]
fn a_started_pod_by_cdi_gives_nothing_away() {
    let (mut pods, mut written) = scene(&[0, 1], &[None, Some(1)]);
    written[0].answer = crate::inject::cdi_answer(
        "NVIDIA_VISIBLE_DEVICES",
        ExtendedResource::Memory,
        &["1".to_owned()],
        1,
    );
    assert_eq!(
        verdict_of(&pods, &written, &Ledger::default(), true),
        exchange("p1")
    );
    pods.apply(NodePod {
        stage: Stage::Running,
        ..pod("p1", 1, [units(2)]).on([1])
    });
    assert!(matches!(
        verdict_of(&pods, &written, &Ledger::default(), true),
        Verdict::Refuse(Refusal::Mismatch { .. })
    ));
}

/// An answer by CDI beside one by variable, as a change of the manner leaves it, contradicts nothing.
#[test]
fn answers_of_both_manners_agree() {
    let (_, mut written) = scene(&[0], &[Some(2)]);
    written.push(Allocated {
        answer: crate::inject::cdi_answer(
            "NVIDIA_VISIBLE_DEVICES",
            ExtendedResource::Memory,
            &["1".to_owned()],
            1,
        ),
        ..written[0].clone()
    });
    for _ in 0..2 {
        written.reverse();
        let seen = sight::of_pod(&written, &PodUid::from("p0"), "NVIDIA_VISIBLE_DEVICES", &fleet(4));
        assert_eq!(
            seen,
            Sights::from([("gpu", Sight::Devices([gpu(2).uuid].into()))])
        );
    }
}

/// Two pods that do not fit together, and a process that does not know which of them its predecessor let start.
#[test]
fn a_young_process_starts_neither_of_two_that_do_not_fit() {
    let pods = pods([pod("p0", 0, [units(10)]), pod("p1", 1, [units(10)])]);
    let entry = |name: &str| {
        let answer = ContainerAllocateResponse::default();
        Allocated {
            pod: PodUid::from(name),
            container: "u10".to_owned(),
            resource: ExtendedResource::Memory,
            ids: vec![name.to_owned()],
            answer,
        }
    };
    let mut ledger = Ledger::after(Some(vec![entry("p0"), entry("p1")]));
    ledger.inherit(&pods);
    let fleet = fleet(1);
    let judge = |is_young, name: &str| {
        let variable = "NVIDIA_VISIBLE_DEVICES";
        let evidence = Evidence {
            pods: &pods,
            fleet: &fleet,
            ledger: &ledger,
            written: &[],
            is_written_known: true,
            is_young,
            variable,
            unit: MemoryUnit::GIB,
        };
        evidence.judge(pods.get(&PodUid::from(name)).unwrap(), &Sights::new())
    };
    assert!(matches!(judge(true, "p0"), Verdict::Refuse(Refusal::NoRoom(_))));
    assert!(matches!(judge(true, "p1"), Verdict::Refuse(Refusal::NoRoom(_))));
    assert_eq!(judge(false, "p0"), Verdict::Confirm);
    assert!(matches!(judge(false, "p1"), Verdict::Refuse(Refusal::NoRoom(_))));
}

/// One of its containers has started by its spec on the GPU of its record; another was answered by variable for another GPU.
#[test]
fn a_pod_that_started_by_cdi_keeps_its_record() {
    let (pods, mut written) = scene(&[0, 1], &[Some(1), None]);
    written.push(Allocated {
        answer: crate::inject::cdi_answer(
            "NVIDIA_VISIBLE_DEVICES",
            ExtendedResource::Memory,
            &["1".to_owned()],
            1,
        ),
        ..written[0].clone()
    });
    assert_eq!(
        verdict_of(&pods, &written, &Ledger::default(), true),
        exchange("p1"),
        "it has not started"
    );
    let mut confirmed = Ledger::default();
    confirmed.confirm(&PodUid::from("p0"));
    assert!(matches!(
        verdict_of(&pods, &written, &confirmed, true),
        Verdict::Refuse(Refusal::Mismatch { .. })
    ));
}

/// Two pods have virtual functions of one adapter, and kubelet has admitted them in another order.
#[test]
fn pods_exchange_virtual_functions() {
    let with = |name: &str, function: &str| {
        let text = format!(
            r#"{{"rdma":[{{"minor":1,"id":"0000:01:00.0","resources":{{"koordinator.sh/rdma":"1"}},"extension":{{"vfs":[{{"minor":0,"busID":"{function}"}}]}}}}]}}"#
        );
        let record = proto::record::Record {
            allocations: serde_json::from_str(&text).unwrap(),
            assumed_at: Some(1),
            gpushare: None,
        };
        NodePod {
            placement: Placement::of_record(record, 1),
            ..pod(name, 1, [rdma(1)])
        }
    };
    let answered = |pod: &str, function: &str| {
        let envs = [
            ("GPUSHARE_RDMA_DEVICES", "0000:01:00.0"),
            ("GPUSHARE_RDMA_FUNCTIONS", function),
        ];
        let envs = envs
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        let answer = ContainerAllocateResponse {
            envs,
            ..ContainerAllocateResponse::default()
        };
        Allocated {
            pod: PodUid::from(pod),
            container: "r1".to_owned(),
            resource: ExtendedResource::Rdma,
            ids: vec![pod.to_owned()],
            answer,
        }
    };
    let inventory = crate::inventory::Inventory {
        others: vec![adapter(1)],
        ..Default::default()
    };
    let fleet = Fleet::new(inventory, fleet(0).ids);
    let judge = |seen: [&str; 2]| {
        let pods = pods([with("p0", "0000:01:00.2"), with("p1", "0000:01:00.3")]);
        let written = [answered("p0", seen[0]), answered("p1", seen[1])];
        let mut ledger = Ledger::default();
        ledger.serve(vec![ExtendedResource::Rdma]);
        let variable = "NVIDIA_VISIBLE_DEVICES";
        let (ledger, unit) = (&ledger, MemoryUnit::GIB);
        let evidence = Evidence {
            pods: &pods,
            fleet: &fleet,
            ledger,
            written: &written,
            is_written_known: true,
            is_young: false,
            variable,
            unit,
        };
        let pod = pods.get(&PodUid::from("p0")).unwrap();
        evidence.judge(pod, &sight::of_pod(&written, &pod.uid, variable, &fleet))
    };
    assert_eq!(judge(["0000:01:00.2", "0000:01:00.3"]), Verdict::Confirm);
    assert_eq!(judge(["0000:01:00.3", "0000:01:00.2"]), exchange("p1"));
    let Verdict::Refuse(refusal) = judge(["0000:01:00.4", "0000:01:00.3"]) else {
        panic!("it has another function")
    };
    assert!(
        refusal
            .to_string()
            .contains("but 0000:01:00.0,0000:01:00.2 is counted for it"),
        "{refusal}"
    );
}

//! Verdicts over tables of records and answers.

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use super::*;
use crate::builders::{fleet, gpu, pod, pods, units};
use crate::served::Served;

/// Pods p0, p1 and so on of two units: minors of their records, and what each sees; all on a node of four GPUs.
fn scene(records: &[u32], sees: &[Option<u32>]) -> (Pods, Vec<Allocated>) {
    let all = records.iter().enumerate().map(|(at, minor)| pod(&format!("p{at}"), at as u64, [units(2)]).on([*minor]));
    let entry = |(at, minor): (usize, &Option<u32>)| {
        let envs = [("NVIDIA_VISIBLE_DEVICES".to_owned(), gpu((*minor)?).uuid.to_string())].into();
        let answer = ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() };
        Some(Allocated {
            pod: PodUid::from(format!("p{at}").as_str()),
            container: "u2".to_owned(),
            resource: Served::Memory,
            ids: vec![at.to_string()],
            answer,
        })
    };
    (pods(all), sees.iter().enumerate().filter_map(entry).collect())
}

fn judge_with(pods: &Pods, written: &[Allocated], ledger: &Ledger, at: usize) -> Verdict {
    let fleet = fleet(4);
    let variable = "NVIDIA_VISIBLE_DEVICES";
    let evidence = Evidence { pods, fleet: &fleet, ledger, written, variable, unit: MemoryUnit::GIB };
    let pod = pods.get(&PodUid::from(format!("p{at}").as_str())).unwrap();
    evidence.judge(pod, sight::of_pod(written, &pod.uid, variable, &fleet).as_ref())
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
    assert!(matches!(judge(&[0, 1], &[Some(1), Some(1)], 0), Verdict::Refuse(Refusal::Mismatch { .. })));
}

#[test]
fn pods_of_other_amounts_do_not_change_places() {
    let (mut pods, written) = scene(&[0, 1], &[Some(1), Some(0)]);
    pods.apply(pod("p1", 1, [units(3)]).on([1]));
    let verdict = judge_with(&pods, &written, &Ledger::default(), 0);
    let Verdict::Refuse(refusal) = verdict else { panic!("{verdict:?}") };
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
        let found = identify(&pods, &ledger, &Call { resource: Served::Memory, count: 2, gpus: &[] }, Patience::Over).unwrap();
        ledger.record(found, &pods);
    }
    assert_eq!(judge_with(&pods, &written, &ledger, 0), Verdict::LookAgain(PodUid::from("p1")));
}

#[test]
fn sick_and_absent_gpus_are_named() {
    let Verdict::Refuse(refusal) = judge(&[7], &[Some(0)], 0) else { panic!("it is not on this node") };
    assert_eq!(refusal.to_string(), "its record names minor 7, which this node does not have");
}

#[test]
fn containers_of_one_pod_that_see_different_devices_are_past_help() {
    let (pods, mut written) = scene(&[0], &[Some(0)]);
    let (_, other) = scene(&[0], &[Some(1)]);
    written.extend(other);
    assert!(matches!(judge_with(&pods, &written, &Ledger::default(), 0), Verdict::Refuse(Refusal::Mismatch { .. })));
}

/// Whatever the permutation, exchanges of two make every pod right.
#[test]
fn every_permutation_is_resolved() {
    let permutations = [[0, 1, 2, 3], [1, 0, 3, 2], [1, 2, 3, 0], [3, 2, 1, 0], [2, 0, 1, 3], [3, 0, 1, 2]];
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

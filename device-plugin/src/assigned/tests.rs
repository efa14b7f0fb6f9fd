//! Which pods are due to be marked.

use rstest::rstest;

use super::*;
use crate::builders::{pod, pods, units};
use crate::identity::{Call, Patience, identify};
use crate::served::Served;

/// Whether the pod is due after so many of its two calls have been answered.
fn is_due(stage: Stage, n_answered: u64, is_assigned: bool) -> bool {
    let bound = pod("a", 1, [units(1), units(2)]);
    let (before, mut ledger) = (pods([bound.clone()]), Ledger::default());
    for count in 1..=n_answered {
        let call = Call { resource: Served::Memory, count, gpus: &[] };
        let found = identify(&before, &ledger, &call, Patience::Over).unwrap();
        ledger.record(found, &before);
    }
    let mut now = NodePod { stage, ..bound };
    now.placement.as_mut().unwrap().gpushare.as_mut().unwrap().assigned = is_assigned;
    !due(&pods([now]), &ledger).is_empty()
}

#[rstest]
#[case::nothing_answered(Stage::Bound, 0, false, false)]
#[case::half_way(Stage::Bound, 1, false, false)]
#[case::all_answered(Stage::Bound, 2, false, true)]
#[case::admitted_meanwhile(Stage::Admitted, 2, false, true)]
#[case::left_behind_by_a_predecessor(Stage::Running, 0, false, true)]
#[case::marked_already(Stage::Running, 2, true, false)]
#[case::failed(Stage::Terminal, 2, false, false)]
fn due_once_every_container_has_its_devices(#[case] stage: Stage, #[case] n_answered: u64, #[case] marked: bool, #[case] expected: bool) {
    assert_eq!(is_due(stage, n_answered, marked), expected);
}

/// Assigned is derived, not written, for pods of the other dialect.
#[test]
fn other_dialect_is_never_marked() {
    let mut running = NodePod { stage: Stage::Running, ..pod("a", 1, [units(1)]) };
    running.placement.as_mut().unwrap().gpushare = None;
    assert_eq!(due(&pods([running]), &Ledger::default()), []);
}

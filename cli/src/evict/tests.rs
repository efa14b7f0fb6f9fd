//! Tests of the next act; whole runs are in `runs`.

mod runs;
mod world;

use proto::read_api::LeftPod;
use rstest::rstest;

use super::*;

fn empty_node() -> PlannedGoal {
    PlannedGoal::EmptyNode {
        node: "n1".to_owned(),
    }
}

fn free() -> PlannedGoal {
    PlannedGoal::Free {
        bytes: 1,
        gpus: 1,
        on: None,
    }
}

fn plan(reached: bool, moves: &[&str], left: &[(&str, bool)]) -> PlanAnswer {
    let to_move = |uid: &&str| PlannedMove {
        uid: (*uid).to_owned(),
        ..PlannedMove::default()
    };
    let to_stay = |(uid, temporary): &(&str, bool)| LeftPod {
        uid: (*uid).to_owned(),
        temporary: *temporary,
        ..LeftPod::default()
    };
    PlanAnswer {
        reached,
        moves: moves.iter().map(to_move).collect(),
        left: left.iter().map(to_stay).collect(),
        ..PlanAnswer::default()
    }
}

/// The first three words.
fn words(reason: &str) -> String {
    reason.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

fn word(next: &Next<'_>) -> String {
    match next {
        Next::Evict(moves) => {
            let uids: Vec<&str> = moves.iter().map(|one| one.uid.as_str()).collect();
            format!("evict {}", uids.join(" "))
        }
        Next::Reached => "reached".to_owned(),
        Next::Wait(reason) => format!("wait: {}", words(reason)),
        Next::Stop(reason) => words(reason),
    }
}

/// Pods a, b and c were confirmed, of which b stays.
#[rstest]
#[case::confirmed(free(), plan(true, &["a", "x", "c"], &[]), "evict a")]
#[case::several(free(), plan(true, &["b", "c", "a", "x"], &[]), "evict c a")]
#[case::not_confirmed(free(), plan(true, &["x", "a"], &[]), "wait: by now pod")]
#[case::not_confirmed_either(empty_node(), plan(true, &["x"], &[]), "wait: by now pod")]
#[case::nearest_while_a_budget_has_no_room(free(), plan(false, &["a"], &[("b", true)]), "wait: the goal can")]
#[case::out_of_reach(free(), plan(false, &["a"], &[("c", false)]), "wait: the goal can")]
#[case::nothing_helps(free(), plan(false, &[], &[("c", false)]), "no further move")]
#[case::reached(free(), plan(true, &[], &[("c", true)]), "reached")]
#[case::empty(empty_node(), plan(true, &[], &[("c", false)]), "reached")]
#[case::not_yet_empty(empty_node(), plan(true, &[], &[("c", true)]), "wait: pod c stays:")]
#[case::a_further_gain(PlannedGoal::Join, plan(true, &["x"], &[]), "wait: by now pod")]
#[case::all_but_one_that_stays(empty_node(), plan(true, &["b"], &[]), "reached")]
fn the_next_act(#[case] goal: PlannedGoal, #[case] plan: PlanAnswer, #[case] expected: &str) {
    let progress = Progress {
        confirmed: ["a", "b", "c"].map(str::to_owned).into(),
        stay: ["b".to_owned()].into(),
        max_moves: 10,
        ..Progress::default()
    };
    assert_eq!(word(&progress.next(&goal, &plan)), expected);
}

/// Later moves that would help too were not confirmed, and a pod that waited may have the freed memory by now.
#[rstest]
#[case::join(PlannedGoal::Join, false, plan(true, &["x"], &[]), "reached")]
#[case::free(free(), false, plan(false, &["x"], &[]), "reached")]
#[case::short(free(), true, plan(false, &["x"], &[]), "wait: the goal can")]
#[case::short_and_out_of_reach(free(), true, plan(false, &[], &[]), "no further move")]
#[case::short_and_reached_by_others(free(), true, plan(true, &[], &[]), "reached")]
fn goals_that_free_memory_end_with_the_confirmed_moves(
    #[case] goal: PlannedGoal,
    #[case] falls_short: bool,
    #[case] plan: PlanAnswer,
    #[case] expected: &str,
) {
    let progress = Progress {
        confirmed: ["a".to_owned()].into(),
        evicted: ["a".to_owned()].into(),
        max_moves: 10,
        falls_short,
        ..Progress::default()
    };
    assert_eq!(word(&progress.next(&goal, &plan)), expected);
}

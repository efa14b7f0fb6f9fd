//! The verdict on random clusters: `explain` and `fits` say what kube-scheduler and the extender do.
//!
//! kube-scheduler is the testbed's model of it, which shares no code with the scheduler, or the real one (`real`, by hand). Three
//! questions of each cluster: does `explain` name the same nodes, the same refusing part and the same reason; does `fits` count
//! as many pods as can be placed one after the other; does a pod fit a node when the pods that `explain` names have ended?
//!
//! `VERDICT_CASES` is the number of clusters, `VERDICT_SEED` the seed of the first one; a failure prints the seed, and the
//! objects that are left after all have been taken out that make no difference. Not tried: gangs, nominated nodes, volumes,
//! ports, spreading, affinity to pods, resizes in place, devices of DRA drivers, variables by which a container selects its
//! devices, and pods with
//! `gpushare/all-devices` that ask for no resource.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test that cannot go on should end, and this one prints what it has compared"
)]

use std::collections::BTreeMap;

mod cluster;
mod comparison;
mod generator;
mod real;
mod shrinking;

use cluster::Case;
use comparison::{Tally, compare};

/// As many as two busy cores try in less than a minute.
const CASES: u64 = 300;

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
        Err(_) => default,
    }
}

#[tokio::test(start_paused = true)]
async fn explain_and_fits_say_what_kube_scheduler_and_the_extender_do() {
    let (first, n_cases) = (setting("VERDICT_SEED", 0), setting("VERDICT_CASES", CASES));
    let mut tally = Tally::default();
    // One case of each kind is shrunk and shown, with the number of all of its kind.
    let mut failures: BTreeMap<&str, (u64, String)> = BTreeMap::new();
    for seed in first..first + n_cases {
        let case = Case::random(seed, false);
        let Some(difference) = compare(&case, &mut tally).await else {
            continue;
        };
        if let Some((n, _)) = failures.get_mut(difference.question) {
            *n += 1;
        } else {
            let (smallest, difference) = shrinking::shrink(case, difference).await;
            let text = format!("seed {seed}: {}\n{smallest}", difference.text);
            failures.insert(difference.question, (1, text));
        }
    }
    println!("{tally}");
    assert!(failures.is_empty(), "{failures:#?}");
    // A generator that makes clusters in which nothing happens would prove nothing.
    assert!(n_cases < 200 || tally.is_varied(), "{tally}");
}

//! A bounded share of the chaos runs: the daemons under a schedule that a seed decides.

use testbed::chaos::{Mode, one_run};
use testbed::cluster::default_deploy;
use testbed::console::Console;

/// The comparison's other side: whatever kubelet's order does to the devices, no record oversubscribes one.
#[tokio::test(flavor = "multi_thread")]
async fn matching_by_timestamp_oversubscribes_nothing() {
    let run = one_run(&Console::new(true), Mode::Timestamp, 2, 12, default_deploy()).await.unwrap();
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(run.admissions >= 30 && run.starts >= run.admissions, "{run:#?}");
}

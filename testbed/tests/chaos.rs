//! A bounded share of the chaos runs: the daemons under schedules that a seed decides.

use kit::cluster::default_deploy;
use kit::console::Console;
use testbed::chaos::{Figures, PluginMode, run_schedule};

async fn run(mode: PluginMode, seed: u64, steps: usize) -> anyhow::Result<Figures> {
    let run = run_schedule(&Console::new(true), mode, seed, steps, default_deploy()).await?;
    assert_eq!(run.violations, Vec::<String>::new());
    assert!(
        run.admissions >= 3 * steps && run.starts >= run.admissions,
        "{run:#?}"
    );
    Ok(run)
}

#[tokio::test(flavor = "multi_thread")]
async fn with_cdi_no_container_sees_a_wrong_device_and_no_pod_is_killed() {
    let run = run(PluginMode::Cdi, 1, 16).await.unwrap();
    assert_eq!((run.wrong, run.killed), (0, 0), "{:#?}", run.quotes);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_variable_no_container_sees_a_wrong_device() {
    let run = run(PluginMode::Envvar, 2, 12).await.unwrap();
    assert_eq!(run.wrong, 0, "{:#?}", run.quotes);
    let n_healed: u64 = run.heals.values().sum();
    assert!(n_healed > 0, "the schedule puts the plugin to no test");
}

/// Real kinds of nodes, with a container in each pod whose image asks for all GPUs.
#[tokio::test(flavor = "multi_thread")]
async fn on_several_kinds_of_nodes_no_container_sees_more_than_its_record_or_has_a_stale_spec() {
    let run = run(PluginMode::NodeKinds, 1, 10).await.unwrap();
    assert_eq!(
        (run.wrong, run.sees_more, run.stale, run.killed),
        (0, 0, 0, 0),
        "{:#?}",
        run.quotes
    );
}

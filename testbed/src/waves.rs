//! `testbed waves`: waves of pods on a cluster whose parts are killed in turn, and the number of pods that each fault
//! costs.
//!
//! The pods have no controller, so a pod that kubelet refuses for good stays lost. Parts are killed by SIGKILL;
//! the scenario `plugin-replaced` has the rollout with SIGTERM.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::scenario::waves::{Plan, Wave, run as run_wave};
use crate::scenario::{ScenarioStage, World};
use kit::cluster::{LocalCluster, client_of, default_deploy};
use kit::console::{Console, table};
use kit::daemons::Binaries;
use kit::parts::{ClusterPart, Commands, Need};

/// The parts of the testbed's cluster that can be killed.
const KILLABLE_ON_TESTBED: [ClusterPart; 4] = [
    ClusterPart::Plugin,
    ClusterPart::Scheduler,
    ClusterPart::KubeScheduler,
    ClusterPart::Kubelet,
];

/// `testbed waves`.
#[derive(Clone, Debug, Args)]
pub struct WavesArgs {
    /// A real cluster on which gpushare is deployed with simulated GPUs; the testbed's own without it.
    #[arg(long, value_name = "FILE", requires = "break_with")]
    kubeconfig: Option<PathBuf>,
    /// Commands that kill and start the parts of that cluster (docs/real-cluster.md).
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    break_with: Option<PathBuf>,
    /// Scheduler of the pods, where gpushare is attached to a second one.
    #[arg(long, value_name = "NAME")]
    scheduler_name: Option<String>,
    /// Pods in all.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pods: usize,
    /// Pods of a wave; the GPUs need a memory unit for each.
    #[arg(long, value_name = "N", default_value_t = 25)]
    wave: usize,
    /// Parts that are killed, in turn, one in each wave; all that can be without it.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    kill: Vec<ClusterPart>,
    /// Print every wave as JSON.
    #[arg(long)]
    json: bool,
    /// The directory deploy/ of the repository.
    #[arg(long, env = "TESTBED_DEPLOY", value_name = "DIR", default_value_os_t = default_deploy())]
    deploy: PathBuf,
}

/// Runs the waves; true if no container saw a wrong device, no device was oversubscribed, and no pod was stuck.
pub async fn run(args: WavesArgs) -> Result<bool> {
    let console = Console::new(args.json);
    ensure!(args.wave > 0, "--wave is 0");
    let (mut world, parts) = if let (Some(kubeconfig), Some(file)) = (&args.kubeconfig, &args.break_with) {
        let commands = Commands::read(file, kubeconfig)?;
        let parts: Vec<ClusterPart> = commands.parts.keys().copied().collect();
        let namespace = format!("gpushare-waves-{}", std::process::id());
        let client = client_of(kubeconfig).await?;
        let world = World::new(client, &namespace, args.scheduler_name.clone(), None).await?;
        (world.broken_by(Some(commands)), parts)
    } else {
        Binaries::locate().await?;
        let cluster = LocalCluster::start(ScenarioStage::Faults.spec(args.deploy.clone())).await?;
        (
            World::new(cluster.client().clone(), "waves", None, Some(cluster)).await?,
            KILLABLE_ON_TESTBED.to_vec(),
        )
    };
    for part in &args.kill {
        ensure!(parts.contains(part), "there is no {}", Need::Kill(*part));
    }
    let kill = if args.kill.is_empty() {
        parts
    } else {
        args.kill.clone()
    };
    let waves = run_all(&console, &mut world, &args, &kill).await;
    // The world ends before an error is returned: a failed run leaves no namespace behind on a real cluster.
    let cluster = world.end().await;
    console.finish();
    let waves = waves?;
    console.result(&show(&waves));
    console.json(&waves);
    if let Some(cluster) = cluster? {
        cluster.stop().await?;
    }
    Ok(waves.iter().all(Wave::is_ok))
}

/// Runs wave after wave, and kills a part during most of them, each time at another moment.
async fn run_all(
    console: &Console,
    world: &mut World,
    args: &WavesArgs,
    kill: &[ClusterPart],
) -> Result<Vec<Wave>> {
    // The waves take turns: one without a kill, then one for each part.
    let mut faults = vec![None];
    faults.extend(kill.iter().copied().map(Some));
    let mut waves = Vec::new();
    for nth in 0..args.pods.div_ceil(args.wave) {
        let (round, turn) = (nth / faults.len(), nth % faults.len());
        let kill = faults.get(turn).copied().flatten();
        // In four rounds each part is killed with none, a quarter, half and three quarters of the pods bound.
        let n_bound = args.wave * (round % 4) / 4;
        let plan = Plan {
            prefix: format!("wave-{nth}"),
            n_pods: args.wave,
            kill,
            n_bound,
        };
        let what = kill.map_or("nothing".to_owned(), |part| part.to_string());
        console.step(&format!(
            "wave {nth}: {what} is killed with {n_bound} of {} pods bound",
            args.wave
        ));
        let wave = run_wave(world, &plan)
            .await
            .with_context(|| format!("wave {nth}, in which {what} was killed"))?;
        let Wave {
            n_ran,
            seconds,
            seconds_away,
            ..
        } = &wave;
        console.step(&format!(
            "wave {nth}: {n_ran} ran, {} lost, {seconds:.1} s, {what} away {seconds_away:.1} s",
            wave.n_lost()
        ));
        for problem in wave.wrong.iter().chain(&wave.over).chain(&wave.stuck) {
            console.say(&format!("wave {nth}: {problem}"));
        }
        waves.push(wave);
    }
    Ok(waves)
}

/// A table with one line for each part that was killed, and one for the waves without a kill.
fn show(waves: &[Wave]) -> String {
    let mut by_fault = BTreeMap::<Option<ClusterPart>, Vec<&Wave>>::new();
    for wave in waves {
        by_fault.entry(wave.killed).or_default().push(wave);
    }
    let mut lines = table([
        "KILLED", "WAVES", "PODS", "RAN", "LOST", "WRONG", "OVER", "STUCK", "AWAY", "LAST POD", "",
    ]);
    for (killed, waves) in by_fault {
        let [
            mut n_pods,
            mut n_ran,
            mut n_lost,
            mut n_wrong,
            mut n_over,
            mut n_stuck,
        ] = [0; 6];
        let (mut away, mut last_pod) = (0.0_f64, 0.0_f64);
        let mut lost = BTreeMap::<&str, usize>::new();
        for wave in &waves {
            n_pods += wave.n_pods;
            n_ran += wave.n_ran;
            n_lost += wave.n_lost();
            n_wrong += wave.wrong.len();
            n_over += wave.over.len();
            n_stuck += wave.stuck.len();
            // An administrator asks for the worst case, not for the mean.
            away = away.max(wave.seconds_away);
            last_pod = last_pod.max(wave.seconds);
            for (reason, n_pods) in &wave.lost {
                *lost.entry(reason).or_default() += n_pods;
            }
        }
        let mut reasons = Vec::new();
        for (reason, n_pods) in lost {
            reasons.push(format!("{n_pods} {reason}"));
        }
        lines.add_row([
            killed.map_or("nothing".to_owned(), |part| part.to_string()),
            waves.len().to_string(),
            n_pods.to_string(),
            n_ran.to_string(),
            n_lost.to_string(),
            n_wrong.to_string(),
            n_over.to_string(),
            n_stuck.to_string(),
            format!("{away:.1} s"),
            format!("{last_pod:.1} s"),
            reasons.join(", "),
        ]);
    }
    lines.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_one_line_per_kind_of_fault() {
        let lost = BTreeMap::from([("UnexpectedAdmissionError".to_owned(), 3)]);
        let plugin = Wave {
            killed: Some(ClusterPart::Plugin),
            n_pods: 25,
            n_ran: 22,
            lost,
            seconds_away: 3.2,
            ..Wave::default()
        };
        let calm = Wave {
            n_pods: 25,
            n_ran: 25,
            seconds: 9.5,
            ..Wave::default()
        };
        let waves = [
            calm.clone(),
            plugin.clone(),
            calm,
            Wave {
                seconds_away: 1.0,
                ..plugin
            },
        ];
        insta::assert_snapshot!(show(&waves));
    }
}

//! Many pods on one GPU: their start, their speed, and their life while the container runtime is killed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::GpuScenario;
use super::target::GIB;
use super::trial::{Finding, Trial, percentiles};
use crate::scenario::breaking;
use kit::observer::ClusterSnapshot;
use kit::parts::{ClusterPart, Need};
use kit::pod_fields::{container_statuses, is_running};
use kit::polling;

pub(super) const SCENARIOS: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-burst" => burst,
        "pods of 1 GiB in one burst, up to 40";
    "gpu-time-slicing" => time_slicing,
        "kernels per second of one, two and four pods side by side";
    "gpu-runtime-killed" needs [Need::Kill(ClusterPart::Containerd), Need::Kill(ClusterPart::Kubelet)] => runtime_killed,
        "containerd and kubelet killed";
};

/// The most pods of a burst.
const BURST: u64 = 40;

/// Pods that are created at once: from creation to Running, and the time of their contexts.
async fn burst(trial: &mut Trial) -> Result<Finding> {
    let share = trial.gpu.units(GIB) * trial.gpu.unit;
    let n_pods = BURST.min(trial.gpu.free / share);
    let names: Vec<String> = (0..n_pods).map(|idx| format!("burst-{idx}")).collect();
    let began = Instant::now();
    let commands = ["see", "memory", "allocate=134217728", "fill", "hold=3600"];
    let create = async |name: &String| {
        let created = began.elapsed().as_secs_f64();
        trial.start(name, &commands, GIB).await?;
        anyhow::Ok((trial.world.key(name), created))
    };
    let mut running = BTreeMap::<String, f64>::new();
    let mut all_run = |snapshot: &ClusterSnapshot| {
        for key in names.iter().map(|name| trial.world.key(name)) {
            if snapshot.pods.get(&key).is_some_and(is_running) {
                let seconds = began.elapsed().as_secs_f64();
                running.entry(key).or_insert(seconds);
            }
        }
        (running.len() == names.len()).then_some(())
    };
    let what = format!("{n_pods} pods to run");
    let watched = trial.world.until_within(BURST_LIMIT, &what, &mut all_run);
    let created = futures::future::try_join_all(names.iter().map(create));
    let (created, watched) = futures::join!(created, watched);
    let created: BTreeMap<String, f64> = created?.into_iter().collect();
    watched?;
    let starts = created
        .iter()
        .filter_map(|(key, created)| Some(running.get(key)? - created));
    let [p50, p90, max] = percentiles(starts.collect()).context("no pod ran")?;
    let mut contexts = Vec::new();
    for name in &names {
        let answers = trial.compared(name, "fill").await?;
        let memory = answers.last("memory");
        let milliseconds = memory.and_then(|answer| answer.context_milliseconds);
        contexts.extend(milliseconds.map(|milliseconds| milliseconds / 1e3));
    }
    let contexts = percentiles(contexts);
    let of_contexts = contexts.map_or(String::new(), |[p50, _, max]| {
        format!("; their CUDA contexts take {p50:.1} s (p50), {max:.1} s at most")
    });
    let text = format!(
        "all {n_pods} run; from creation to Running {p50:.2} s (p50), {p90:.2} s (p90), {max:.2} s at most{of_contexts}"
    );
    let figures = |[p50, p90, max]: [f64; 3]| json!({"p50": p50, "p90": p90, "max": max});
    Ok(Finding::new(text)
        .figure("pods", n_pods)
        .figure("secondsToRunning", figures([p50, p90, max]))
        .figure("contextSeconds", contexts.map(figures)))
}

/// The longest wait for the pods of a burst.
const BURST_LIMIT: Duration = Duration::from_secs(300);

async fn time_slicing(trial: &mut Trial) -> Result<Finding> {
    if trial.gpu.free < 4 * trial.gpu.units(GIB) * trial.gpu.unit {
        return Ok(Finding::not_run("four pods of 1 GiB do not fit on the GPU"));
    }
    let (mut rates, mut gpus) = (Vec::new(), BTreeSet::new());
    for n_pods in [1, 2, 4] {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let until = format!("until={}", now.as_secs() + trial.times.ready);
        let rate = format!("rate={}", trial.times.compute);
        let names: Vec<String> = (0..n_pods).map(|idx| format!("slice-{n_pods}-{idx}")).collect();
        for name in &names {
            trial
                .start(name, &["see", &until, &rate, "hold=3600"], GIB)
                .await?;
        }
        let mut of_pods = Vec::new();
        for name in &names {
            let answers = trial.compared(name, "rate").await?;
            let late = answers.last("until").and_then(|answer| answer.late_seconds);
            let late = late.context("a pod did not wait for the others")?;
            if late > trial.times.latest {
                return Ok(Finding::not_run(format!(
                    "{name} was ready {late:.1} s after the others began, so the rates cannot be compared"
                )));
            }
            of_pods.extend(answers.last("rate").and_then(|answer| answer.per_second));
            gpus.extend(trial.record(name)?);
        }
        rates.push(of_pods);
        trial.clear().await?;
    }
    let text = rates_text(&rates, gpus.len()).context("a pod has no rate")?;
    Ok(Finding::new(text).figure("kernelsPerSecond", &rates))
}

/// The rates of one, two and four pods, and the part that the last lose together.
fn rates_text(rates: &[Vec<f64>], n_gpus: usize) -> Option<String> {
    let [alone, two, four] = rates else { return None };
    let alone = alone.first().filter(|alone| **alone > 0.0)?;
    let (two, of_four) = (joined(two), joined(four));
    let text = format!("{alone:.0} alone; {two} for two pods, {of_four} for four");
    if n_gpus > 1 {
        return Some(format!("{text}, on {n_gpus} GPUs"));
    }
    let lost = 100.0 * (1.0 - four.iter().sum::<f64>() / alone);
    Some(format!("{text}: {lost:.0} % lost"))
}

fn joined(rates: &[f64]) -> String {
    let rates: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
    rates.join(", ")
}

/// The least rounds of a survivor after a fault of another pod, or of the runtime.
const ROUNDS: u64 = 20;

/// Starts a pod that fills and sums its memory as long as it lives.
pub(super) async fn start_survivor(trial: &Trial) -> Result<()> {
    let commands = ["see", "allocate=134217728", "work=0"];
    trial.start("survivor", &commands, GIB).await?;
    trial.compared("survivor", "work").await.map(drop)
}

/// The rounds of the survivor so far; an error if one of them was wrong.
async fn rounds(trial: &Trial) -> Result<u64> {
    let answers = trial.answers("survivor", "work").await?;
    let answer = answers.last("work").context("the survivor does not work")?;
    let counted = answer.rounds.zip(answer.wrong);
    let (rounds, wrong) = counted.context("the survivor counts no rounds")?;
    ensure!(wrong == 0, "{wrong} of the survivor's {rounds} sums were wrong");
    Ok(rounds)
}

/// The longest time for [`ROUNDS`].
const SURVIVE: Duration = Duration::from_secs(60);

/// Waits until the survivor has done more rounds; returns those before and after.
pub(super) async fn until_more_rounds(trial: &Trial) -> Result<[u64; 2]> {
    let before = rounds(trial).await?;
    let more = async || {
        let now = rounds(trial).await?;
        let enough = (now >= before + ROUNDS).then_some([before, now]);
        Ok(enough.ok_or_else(|| format!("the survivor has stopped after {now} rounds")))
    };
    polling::until_found(SURVIVE, more).await
}

/// The ID of the survivor's container, and the number of its restarts.
fn container(trial: &Trial) -> Result<(String, i32)> {
    let pod = trial.world.pod("survivor")?;
    let status = container_statuses(&pod).next();
    let status = status.context("the survivor has no status")?;
    let id = status.container_id.clone();
    Ok((id.context("the survivor has no container")?, status.restart_count))
}

async fn runtime_killed(trial: &mut Trial) -> Result<Finding> {
    start_survivor(trial).await?;
    // The program prints before kubelet writes the pod's status.
    trial.world.until_running(&["survivor"]).await?;
    let before = container(trial)?;
    let node = trial.gpu.node.clone();
    for part in [ClusterPart::Containerd, ClusterPart::Kubelet] {
        breaking::restart(&mut trial.world, part, &node).await?;
    }
    breaking::until_ready(&mut trial.world).await?;
    let [before_rounds, after] = until_more_rounds(trial).await?;
    ensure!(container(trial)? == before, "the container was started again");
    trial.ensure_works("after-kill").await?;
    let text = format!(
        "a container that uses CUDA goes on: rounds {before_rounds} to {after}, none wrong; a new pod works"
    );
    Ok(Finding::new(text).figure("roundsAfterwards", after - before_rounds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_compared_with_that_of_one_pod() {
        let rates = [vec![1483.0], vec![618.0, 618.4], vec![310.0, 309.6, 310.0, 310.2]];
        assert_eq!(
            rates_text(&rates, 1).unwrap(),
            "1483 alone; 618, 618 for two pods, 310, 310, 310, 310 for four: 16 % lost"
        );
        assert!(rates_text(&rates, 2).unwrap().ends_with("for four, on 2 GPUs"));
        assert_eq!(rates_text(&[vec![], vec![], vec![]], 1), None);
    }

    #[test]
    fn percentiles_are_of_the_sorted_seconds() {
        assert_eq!(
            percentiles((1..=40).rev().map(f64::from).collect()),
            Some([20.0, 36.0, 40.0])
        );
        assert_eq!(percentiles(vec![2.0]), Some([2.0; 3]));
        assert_eq!(percentiles(Vec::new()), None);
    }
}

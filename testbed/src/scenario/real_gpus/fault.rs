//! A program that makes an error on the GPU: its effect on others, and the reports of the driver, the kernel and the plugin.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::GpuScenario;
use super::computing::{start_survivor, until_more_rounds};
use super::containers::N_REPEATS;
use super::plugin::{self, application_xids};
use super::target::GIB;
use super::trial::{Finding, Trial};
use kit::cluster::GpuFault;
use kit::polling;

pub(super) const SCENARIOS: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-fault" => fault,
        "a kernel that faults";
};

/// The reason of the plugin's event about the fault of an application.
const EVENT: &str = "GPUApplicationFault";

/// The longest wait for that event: the plugin collects reports for 5 s, and waits up to 15 s for a measurement.
const EVENT_WITHIN: Duration = Duration::from_secs(30);

/// The XID of an access to memory that is not mapped, which the testbed reports in place of a driver.
const MMU_FAULT: u64 = 31;

/// A pod's kernel writes to an address that is not mapped; another pod goes on, a new one works, and the plugin reports the XID.
async fn fault(trial: &mut Trial) -> Result<Finding> {
    start_survivor(trial).await?;
    let kernel_log = KernelLog::start(trial).await;
    // The plugin finds the pod of a fault by the process that is gone, so it has to have listed that process.
    let metrics = plugin::metrics(trial).await.unwrap_or_default();
    let has_processes = metrics.has_processes();
    let hold = format!("hold={}", if has_processes { trial.times.listed } else { 0 });
    let began = Instant::now();
    let commands = ["see", "memory", "nvml", &hold, "fault", "hold=3600"];
    trial.start("fault", &commands, GIB).await?;
    if has_processes {
        trial.answers_of("fault", "nvml").await?;
        // The plugin measures soon after a container comes.
        trial.start("beside", &["see", "hold=3600"], GIB).await?;
    }
    let answers = trial.answers_of("fault", "fault").await?;
    trial.compare("fault", &answers)?;
    let (answer, error) = answers.failed().context("the kernel did not fault")?;
    ensure!(answer.command == "fault", "{} failed: {error}", answer.command);
    set_xid(trial, GpuFault::Xid(MMU_FAULT))?;
    let [before, after] = until_more_rounds(trial).await?;
    trial.ensure_works("after-fault").await?;
    let (object, event) = until_event(trial).await?;
    set_xid(trial, GpuFault::Healthy)?;
    // Without the list of processes the plugin does not know the pod.
    let of = if has_processes { "fault" } else { &trial.gpu.node };
    ensure!(
        object == of && event.contains("XID"),
        "the plugin's event about the fault is on {object}, and not on {of}: {event}"
    );
    let xids = match plugin::log(trial, began).await {
        Ok(log) => Ok(application_xids(&log, &trial.gpu.uuid)),
        Err(error) => Err(format!("{error:#}")),
    };
    let has_none = xids.as_ref().is_ok_and(BTreeSet::is_empty);
    ensure!(
        !has_none,
        "the plugin's log names no XID of {}, though its event does: {event}",
        trial.gpu.uuid
    );
    let is_healthy = trial.device()?.health;
    ensure!(is_healthy, "the fault of a program made the GPU unhealthy");
    let of_log = match &xids {
        Ok(xids) => format!("the plugin's log names XID {}", numbers(xids)),
        Err(reason) => format!("the plugin's log is not known: {reason}"),
    };
    let of_kernel = match kernel_log.new_line(trial).await {
        Ok(line) => format!("the kernel's log: {line}"),
        Err(reason) => format!("the kernel's log is not known: {reason}"),
    };
    let text = format!(
        "{error} in its own container; the GPU stays healthy, another pod goes on computing (rounds {before} to {after}, none wrong), \
         and a new pod works; {of_log}, and its event is on {object}: {event}; {of_kernel}"
    );
    Ok(Finding::new(text)
        .figure("roundsAfterwards", after - before)
        .figure("xids", xids.unwrap_or_default())
        .figure("eventOn", object)
        .figure("event", event)
        .figure("kernelLog", of_kernel))
}

/// Reports an error of the GPU in the testbed, whose programs have no driver that would.
fn set_xid(trial: &mut Trial, health: GpuFault) -> Result<()> {
    if trial.world.cluster.is_none() {
        return Ok(());
    }
    let (node, minor) = (trial.gpu.node.clone(), u32::try_from(trial.gpu.minor)?);
    trial.world.node(&node)?.set_health(minor, health)
}

/// Waits for the plugin's event about the fault: the object and the message.
async fn until_event(trial: &Trial) -> Result<(String, String)> {
    let missing = || format!("the plugin has written no event {EVENT}");
    let found = async || Ok(trial.event("fault", EVENT).await?.ok_or_else(missing));
    polling::until_found(EVENT_WITHIN, found).await
}

fn numbers(xids: &BTreeSet<u64>) -> String {
    let texts: Vec<String> = xids.iter().map(u64::to_string).collect();
    texts.join(", ")
}

/// The text of the driver's lines in the kernel's log about XIDs.
const XID_LINE: &str = "NVRM: Xid";

/// The longest wait for a line, which a pod looks for every three seconds.
const LINE_WITHIN: Duration = Duration::from_secs(8);

/// The longest wait for the first lines: a cluster may not start such a pod.
const READER_STARTS: Duration = Duration::from_secs(60);

/// The name of the pod that reads the kernel's log.
const READER: &str = "kernel-log";

/// The lines about XIDs in the log of the node's kernel before a fault, or the reason that they are not known.
struct KernelLog(Result<Vec<String>, String>);

impl KernelLog {
    /// Starts a pod that reads the log every few seconds. It is root and has the capability that this needs on most machines.
    async fn start(trial: &Trial) -> Self {
        if trial.world.cluster.is_some() {
            return Self(Err("the testbed's nodes have no kernel of their own".to_owned()));
        }
        let read = format!("{READER}={XID_LINE}");
        let commands = [read.as_str(), "hold=3"].repeat(N_REPEATS);
        let rights = json!({"runAsUser": 0, "capabilities": {"add": ["SYSLOG"]}});
        let pod = trial.pod(READER, &commands, &[]).with("securityContext", rights);
        Self(match trial.create(pod).await {
            Ok(()) => lines(trial).await,
            Err(error) => Err(format!("{error:#}")),
        })
    }

    /// The newest line since then.
    async fn new_line(self, trial: &Trial) -> Result<String, String> {
        let before = self.0?;
        let new = async || {
            let seen = lines(trial).await.map_err(anyhow::Error::msg)?;
            let new = seen.into_iter().rfind(|line| !before.contains(line));
            Ok(new.ok_or_else(|| format!("it has no new line with {XID_LINE:?}")))
        };
        let line = polling::until_found(LINE_WITHIN, new).await;
        let line = line.map_err(|error| format!("{error:#}"))?;
        // Level and time come before the text.
        let text = line.find(XID_LINE).and_then(|at| line.get(at..));
        Ok(text.unwrap_or_default().to_owned())
    }
}

/// The lines about XIDs, as the pod has read them last.
async fn lines(trial: &Trial) -> Result<Vec<String>, String> {
    let answers = trial.answers_within(READER_STARTS, READER, "main", READER).await;
    let answers = answers.map_err(|error| format!("{error:#}"))?;
    let answer = answers.last(READER).cloned().unwrap_or_default();
    match answer.error {
        Some(error) => Err(error.to_string()),
        None => Ok(answer.lines),
    }
}

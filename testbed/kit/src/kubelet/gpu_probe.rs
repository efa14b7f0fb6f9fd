//! Runs `gpu-probe` (`testbed/gpu-probe`), the only program that a container of the testbed can run, on nodes that have it.
//!
//! The program is a process of this machine. It has what the container runtime has brought into the container: its variables, its
//! device files in a directory of their own, and a stand-in for the driver's library if a mount brings that library.

use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Weak};

use anyhow::{Context, Result};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::sync::watch;

use super::machine::KubeletMachine;
use super::pod::ContainerType;
use super::probe_program::{PROGRAM, ProbeProgram, SPECS_MOUNT};
use super::runtime::{RunState, RuntimeContainer};

/// Starts the program for a container that has started. It ends by itself, or with the container.
pub(super) fn start(machine: &Arc<KubeletMachine>, container: RuntimeContainer, commands: &[String]) {
    let Some(probe) = machine.config.probe.clone() else {
        return;
    };
    let specs_dir = machine.config.cdi_dirs.last().cloned().unwrap_or_default();
    let mut commands = commands.to_vec();
    for command in &mut commands {
        // Volumes are not mounted in the testbed.
        if *command == format!("files={SPECS_MOUNT}") {
            *command = format!("files={}", specs_dir.display());
        }
    }
    // The machine ends with its node, which must not wait for a program.
    let (changes, weak) = (machine.subscribe(), Arc::downgrade(machine));
    let log = Arc::clone(&machine.config.log);
    tokio::spawn(async move {
        let set_gpu_bytes = |bytes| {
            if let Some(machine) = weak.upgrade() {
                machine.runtime.set_gpu_bytes(&container, bytes);
            }
        };
        let print = |line: String| {
            // The node's plugin gets the figure too, as it would from NVML.
            if let Some(bytes) = own_bytes(&line) {
                set_gpu_bytes(bytes);
            }
            log(&container.namespace, &container.pod, &container.name, line);
        };
        tokio::select! {
            () = until_over(changes, &weak, &container) => {}
            result = run(&probe, &container, commands, &print) => {
                set_gpu_bytes(0);
                if let Err(error) = result {
                    tracing::error!(error = format!("{error:#}"), pod = container.pod, "{PROGRAM} does not run");
                }
            }
        }
    });
}

/// The memory that the program uses, if a line of its output has it.
fn own_bytes(line: &str) -> Option<u64> {
    let answer: Value = serde_json::from_str(line).ok()?;
    answer.get("ownBytes")?.as_u64()
}

/// Returns true if this start of a container is over: it was removed, has started again, or no longer runs.
fn is_over(machine: &KubeletMachine, container: &RuntimeContainer) -> bool {
    let containers = machine.runtime.of_pod(&container.pod_uid);
    let Some(found) = containers.get(&container.name) else {
        return true;
    };
    let is_running = matches!(found.state, RunState::Running { .. });
    // The state of an init container says nothing: it is recorded as exited from its start on.
    found.starts != container.starts || (container.kind != ContainerType::Init && !is_running)
}

/// Waits until this start of a container is over, looking after each change of the node's containers.
async fn until_over(
    mut changes: watch::Receiver<()>,
    machine: &Weak<KubeletMachine>,
    container: &RuntimeContainer,
) {
    while machine
        .upgrade()
        .is_some_and(|machine| !is_over(&machine, container))
    {
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Runs the program to its end. The process is killed if the future is dropped.
async fn run(
    probe: &ProbeProgram,
    container: &RuntimeContainer,
    commands: Vec<String>,
    print: &(impl Fn(String) + Sync),
) -> Result<()> {
    let dir = TempDir::with_prefix("gpushare-probe-").context("cannot make a directory")?;
    for path in &container.device_nodes {
        if let Some(name) = path.strip_prefix("/dev/") {
            std::fs::write(dir.path().join(name), "").with_context(|| format!("cannot write {name}"))?;
        }
    }
    let mut command = Command::new(&probe.program);
    command.arg("--dev").arg(dir.path()).args(commands);
    command.env_clear().envs(&container.env);
    if container.mounts.iter().any(|path| is_driver_library(path)) {
        command.env("LD_LIBRARY_PATH", &probe.libraries);
    }
    let mut gpus = Vec::new();
    for uuid in &container.gpus {
        let digits: String = uuid.chars().skip("GPU-".len()).filter(|c| *c != '-').collect();
        gpus.push(format!("{digits}:{}", probe.gpu_bytes));
    }
    command.env("GPUS", gpus.join(" "));
    command.env("CONTEXT", probe.context_bytes.to_string());
    if container.mounts.iter().any(|path| path == PRELOAD) {
        command.env("LIMIT", container.env.get(HAMI_LIMIT).map_or("", String::as_str));
    }
    let mut process = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", probe.program.display()))?;
    let stdout = process
        .stdout
        .take()
        .context("the program has no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await.context("cannot read what it prints")? {
        print(format!("{line}\n"));
    }
    process.wait().await.map(drop).context("the program is lost")
}

/// The file by which HAMi-core's library is loaded into every program of a container.
const PRELOAD: &str = "/etc/ld.so.preload";
/// The variable in which that library finds the limit of the first GPU.
const HAMI_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT_0";

fn is_driver_library(path: &str) -> bool {
    let file = Path::new(path).file_name().and_then(|name| name.to_str());
    file.is_some_and(|name| name.starts_with("libcuda.so"))
}

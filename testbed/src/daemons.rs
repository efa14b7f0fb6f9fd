//! gpushare's real binaries as child processes: found or built, started, watched, killed.
//!
//! A daemon's output goes to a file. Dropping a daemon kills its process, so none outlives a panic or Ctrl-C.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

/// How many lines of a log an error quotes.
const TAIL_LINES: usize = 15;

/// Why a daemon is not there.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The own executable has no path.
    #[error("cannot tell where this program lies")]
    OwnPath(#[source] io::Error),
    /// A binary is not beside the own executable.
    #[error("{path} is not there; build it with `cargo build -p scheduler -p device-plugin`")]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// cargo failed to build it.
    #[error("cargo build of the daemons failed: {0}")]
    Build(String),
    /// The process cannot be started.
    #[error("cannot start {name}")]
    Start {
        /// Whose process.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The process cannot be sent a signal.
    #[error("cannot send {name} a signal")]
    Signal {
        /// Whose process.
        name: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The process ended and nobody had asked it to.
    #[error("{name} ended by itself ({status}); the end of its log {log}:\n{tail}")]
    Crashed {
        /// Whose process.
        name: String,
        /// How it ended.
        status: String,
        /// Its log.
        log: PathBuf,
        /// The last lines of it.
        tail: String,
    },
}

/// Where the daemons' binaries lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    /// `gpushare-scheduler`.
    pub scheduler: PathBuf,
    /// `gpushare-device-plugin`.
    pub device_plugin: PathBuf,
}

impl Binaries {
    /// Finds the daemons beside this program; under cargo they are built first, in the same profile.
    pub async fn locate() -> Result<Self, DaemonError> {
        let own = std::env::current_exe().map_err(DaemonError::OwnPath)?;
        let dir = profile_dir(&own);
        if let (Some(cargo), Some(manifest)) = (std::env::var_os("CARGO"), std::env::var_os("CARGO_MANIFEST_DIR")) {
            build(&cargo, Path::new(&manifest), &dir).await?;
        }
        let find = |name: &str| {
            let path = dir.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
            if path.is_file() { Ok(path) } else { Err(DaemonError::Missing { path }) }
        };
        Ok(Self { scheduler: find("gpushare-scheduler")?, device_plugin: find("gpushare-device-plugin")? })
    }
}

/// `target/<profile>` of a program or of a test below it.
fn profile_dir(executable: &Path) -> PathBuf {
    let dir = executable.parent().unwrap_or(Path::new("."));
    if dir.ends_with("deps") { dir.parent().unwrap_or(dir).to_owned() } else { dir.to_owned() }
}

async fn build(cargo: &OsString, manifest_dir: &Path, profile_dir: &Path) -> Result<(), DaemonError> {
    let profile = match profile_dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let target = profile_dir.parent().unwrap_or(profile_dir);
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--profile", profile, "-p", "scheduler", "-p", "device-plugin", "--bins"]);
    command.arg("--target-dir").arg(target).current_dir(manifest_dir).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| DaemonError::Build(error.to_string()))?;
    if output.status.success() { Ok(()) } else { Err(DaemonError::Build(String::from_utf8_lossy(&output.stderr).into_owned())) }
}

/// How a daemon is started.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// What to call it in messages.
    pub name: String,
    /// The binary.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Where its output is appended.
    pub log: PathBuf,
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    invocation: Invocation,
    pid: Option<u32>,
    orders: mpsc::Sender<Order>,
    ended: watch::Receiver<Option<ExitStatus>>,
    _keeper: AbortOnDropHandle<()>,
}

#[derive(Clone, Copy, Debug)]
enum Order {
    Kill,
}

impl Daemon {
    /// Starts the process.
    pub fn start(invocation: Invocation) -> Result<Self, DaemonError> {
        let fail = |source| DaemonError::Start { name: invocation.name.clone(), source };
        let output = File::options().create(true).append(true).open(&invocation.log).map_err(fail)?;
        let mut command = Command::new(&invocation.program);
        command.args(&invocation.args).stdin(Stdio::null()).kill_on_drop(true);
        command.stdout(output.try_clone().map_err(fail)?).stderr(output);
        let child = command.spawn().map_err(fail)?;
        let pid = child.id();
        let (orders, inbox) = mpsc::channel(1);
        let (report, ended) = watch::channel(None);
        let keeper = AbortOnDropHandle::new(tokio::spawn(keep(child, inbox, report)));
        Ok(Self { invocation, pid, orders, ended, _keeper: keeper })
    }

    /// Its process id.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Where its output goes.
    pub fn log(&self) -> &Path {
        &self.invocation.log
    }

    /// How it was started.
    pub fn invocation(&self) -> &Invocation {
        &self.invocation
    }

    /// Whether it has ended.
    pub fn is_down(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub async fn kill(&self) {
        // It may have ended already, which is what is wanted.
        let _ = self.orders.send(Order::Kill).await;
        let mut ended = self.ended.clone();
        let _ = ended.wait_for(Option::is_some).await;
    }

    /// Kills it and starts it anew with the same arguments.
    pub async fn restart(&mut self) -> Result<(), DaemonError> {
        self.restart_as(self.invocation.clone()).await
    }

    /// Kills it and starts it in another way.
    pub async fn restart_as(&mut self, invocation: Invocation) -> Result<(), DaemonError> {
        self.kill().await;
        *self = Self::start(invocation)?;
        Ok(())
    }

    /// Lets it stand still (SIGSTOP).
    pub async fn pause(&self) -> Result<(), DaemonError> {
        self.signal("STOP").await
    }

    /// Lets it go on (SIGCONT).
    pub async fn resume(&self) -> Result<(), DaemonError> {
        self.signal("CONT").await
    }

    /// Sending a signal needs unsafe code or a program; every system that runs kubelet has a shell.
    async fn signal(&self, name: &str) -> Result<(), DaemonError> {
        let Some(pid) = self.pid else { return Ok(()) };
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status().await;
        sent.map(drop).map_err(|source| DaemonError::Signal { name: self.invocation.name.clone(), source })
    }

    /// Asks it to end (SIGTERM) and kills it if it does not within `grace`; whether it ended by itself with success.
    pub async fn stop(self, grace: Duration) -> bool {
        // It is killed if it was not told.
        let _ = self.signal("TERM").await;
        let mut ended = self.ended.clone();
        let succeeded = |status: &Option<ExitStatus>| status.is_some_and(|status| status.success());
        let waited = tokio::time::timeout(grace, async { ended.wait_for(Option::is_some).await.is_ok_and(|status| succeeded(&status)) });
        let success = waited.await.unwrap_or(false);
        self.kill().await;
        success
    }

    /// Waits until it ends although nobody asked for it.
    pub async fn crash(&self) -> DaemonError {
        let mut ended = self.ended.clone();
        let status = match ended.wait_for(Option::is_some).await {
            Ok(status) => status.map(|status| status.to_string()).unwrap_or_default(),
            Err(_) => "its keeper is gone".to_owned(),
        };
        let Invocation { name, log, .. } = self.invocation.clone();
        DaemonError::Crashed { name, status, tail: tail(&log), log }
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        tail(&self.invocation.log)
    }
}

async fn keep(mut child: Child, mut orders: mpsc::Receiver<Order>, report: watch::Sender<Option<ExitStatus>>) {
    let ended = tokio::select! {
        ended = child.wait() => ended,
        _ = orders.recv() => {
            // It may have ended in this moment; waiting tells.
            let _ = child.start_kill();
            child.wait().await
        }
    };
    report.send_replace(ended.ok());
}

fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut lines: Vec<&str> = text.lines().rev().take(TAIL_LINES).collect();
    lines.reverse();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(dir: &Path, script: &str) -> Invocation {
        let args = vec!["-c".to_owned(), script.to_owned()];
        Invocation { name: "daemon".to_owned(), program: "/bin/sh".into(), args, log: dir.join("log") }
    }

    fn is_alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}/exe")).exists() && !std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ")
    }

    #[tokio::test]
    async fn a_crash_is_told_with_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(shell(dir.path(), "echo went wrong >&2; exit 3")).unwrap();
        let error = daemon.crash().await.to_string();
        assert!(error.contains("exit status: 3") && error.contains("went wrong"), "{error}");
    }

    #[tokio::test]
    async fn a_killed_daemon_is_gone_and_comes_back_as_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start(shell(dir.path(), "exec sleep 1000")).unwrap();
        let first = daemon.pid().unwrap();
        daemon.restart().await.unwrap();
        assert!(!is_alive(first));
        let second = daemon.pid().unwrap();
        assert!(is_alive(second));
        assert!(!daemon.stop(Duration::from_secs(5)).await, "a signal is no success");
        assert!(!is_alive(second));
    }

    #[tokio::test]
    async fn stop_lets_a_daemon_end_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(shell(dir.path(), "trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done")).unwrap();
        while !daemon.log_tail().contains("up") {
            tokio::task::yield_now().await;
        }
        assert!(daemon.stop(Duration::from_secs(5)).await);
    }

    #[test]
    fn the_profile_directory_of_programs_and_tests() {
        assert_eq!(profile_dir(Path::new("/t/release/testbed")), Path::new("/t/release"));
        assert_eq!(profile_dir(Path::new("/t/debug/deps/demo-1234")), Path::new("/t/debug"));
    }
}

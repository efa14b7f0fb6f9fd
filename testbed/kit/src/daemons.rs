//! gpushare's real binaries as child processes: locating or building them, and starting, watching and killing their processes.
//!
//! A daemon's output goes to a file. Dropping a daemon kills its process, so no process outlives a panic or
//! Ctrl-C. A daemon that ends by itself is recorded in [`Crashes`], and never restarted silently.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::{OnceCell, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

/// The pause between looks at the threads of a process that is to stop.
const STOP_POLL: Duration = Duration::from_millis(1);

/// The number of lines that an error quotes from the end of a log.
const TAIL_LINES: usize = 15;

/// A daemon's process that ended although the testbed did not end it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} ended by itself ({status}); the last lines of its log {}:\n{tail}", log.display())]
pub struct Crash {
    /// Name of the daemon.
    pub name: String,
    /// Exit status or signal.
    pub status: String,
    /// Its log.
    pub log: PathBuf,
    /// The last lines of that log.
    pub tail: String,
}

/// The crashes of a cluster's daemons; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Crashes(Arc<watch::Sender<Vec<Crash>>>);

impl Crashes {
    /// Waits for a crash of a daemon; one that has happened already counts until [`Crashes::clear`].
    pub async fn first(&self) -> Crash {
        let mut seen = self.0.subscribe();
        loop {
            if let Some(crash) = seen.borrow_and_update().first() {
                return crash.clone();
            }
            if seen.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Forgets all crashes so far.
    pub fn clear(&self) {
        self.0.send_replace(Vec::new());
    }

    fn add(&self, crash: Crash) {
        self.0.send_modify(|crashes| crashes.push(crash));
    }
}

/// A program of this workspace that the testbed runs as a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `gpushare-scheduler`.
    Scheduler,
    /// `gpushare-device-plugin`.
    DevicePlugin,
    /// `testbed`, which runs the model of kube-scheduler.
    Testbed,
    /// `kubectl-gpushare`.
    Cli,
}

impl Program {
    const ALL: [Self; 4] = [Self::Testbed, Self::Scheduler, Self::DevicePlugin, Self::Cli];

    fn package(self) -> &'static str {
        match self {
            Self::Scheduler => "scheduler",
            Self::DevicePlugin => "device-plugin",
            Self::Testbed => "testbed",
            Self::Cli => "cli",
        }
    }

    fn file_name(self) -> &'static str {
        match self {
            Self::Scheduler => "gpushare-scheduler",
            Self::DevicePlugin => "gpushare-device-plugin",
            Self::Testbed => "testbed",
            Self::Cli => "kubectl-gpushare",
        }
    }
}

/// The directory of the binaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Takes the directory of this program; under cargo the first call builds the binaries there, in the same profile.
    pub async fn locate() -> Result<Self> {
        static LOCATED: OnceCell<Binaries> = OnceCell::const_new();
        LOCATED.get_or_try_init(Self::build_and_find).await.cloned()
    }

    /// Builds the daemons if cargo has started this program, and returns the directory where they lie.
    async fn build_and_find() -> Result<Self> {
        let own = std::env::current_exe().context("cannot find out where this program lies")?;
        // A program that was started by hand has no cargo to build with, so it takes the binaries that lie beside it.
        let dir = profile_dir(&own);
        if let (Some(cargo), Some(manifest)) =
            (std::env::var_os("CARGO"), std::env::var_os("CARGO_MANIFEST_DIR"))
        {
            build(&cargo, Path::new(&manifest), &dir, is_test(&own)).await?;
        }
        Ok(Self { dir })
    }

    /// The path of a program that has been built.
    pub fn path(&self, program: Program) -> Result<PathBuf> {
        let path = self.dir.join(program.file_name());
        if path.is_file() {
            return Ok(path);
        }
        let (profile, package) = (cargo_profile(&self.dir), program.package());
        bail!(
            "{} is not there; build it with `cargo build --profile {profile} --package {package}`",
            path.display()
        )
    }
}

/// The cargo profile whose binaries lie in a directory.
fn cargo_profile(dir: &Path) -> &str {
    match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    }
}

/// `target/<profile>` of a program or of a test below it.
fn profile_dir(executable: &Path) -> PathBuf {
    let dir = executable.parent().unwrap_or(Path::new("."));
    if is_test(executable) {
        dir.parent().unwrap_or(dir).to_owned()
    } else {
        dir.to_owned()
    }
}

fn is_test(executable: &Path) -> bool {
    executable.parent().is_some_and(|dir| dir.ends_with("deps"))
}

/// Runs `cargo build` for all daemons, with the profile and target directory of this program.
async fn build(cargo: &OsString, manifest_dir: &Path, profile_dir: &Path, is_quiet: bool) -> Result<()> {
    let target = profile_dir.parent().unwrap_or(profile_dir);
    let mut command = Command::new(cargo);
    // With testbed selected too, cargo gives shared dependencies the features that this program was built with, and so
    // compiles none of them again (see testbed/kit/Cargo.toml).
    command.args([
        "build",
        "--locked",
        "--bins",
        "--profile",
        cargo_profile(profile_dir),
    ]);
    for program in Program::ALL {
        command.args(["--package", program.package()]);
    }
    command
        .arg("--target-dir")
        .arg(target)
        .current_dir(manifest_dir)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    // Tests would mix cargo's lines into their own output.
    if is_quiet {
        command.arg("--quiet");
    }
    // Build scripts depend on some, as ring's on CARGO_PKG_NAME, and cargo would run them again.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_of_this_package(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    let status = command.status().await.context("cannot run cargo build")?;
    ensure!(status.success(), "cargo build of the daemons failed: {status}");
    Ok(())
}

/// True for variables that cargo sets for the program that it runs.
fn is_of_this_package(variable: &str) -> bool {
    let variable = variable.strip_prefix("CARGO_").unwrap_or_default();
    let mut prefixes = ["PKG_", "MANIFEST_", "BIN_", "CRATE_", "PRIMARY_"].iter();
    prefixes.any(|prefix| variable.starts_with(prefix))
}

/// The command line of a daemon.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// Its name in messages.
    pub name: String,
    /// The binary.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// The kubeconfig by which it reaches the API server, if it needs one.
    pub kubeconfig: Option<PathBuf>,
    /// The file that its output is appended to.
    pub log: PathBuf,
}

impl Invocation {
    /// A start without arguments; the output goes to `<file>.log` in a directory.
    pub fn new(name: impl Into<String>, program: PathBuf, dir: &Path, file: &str) -> Self {
        Self {
            name: name.into(),
            program,
            args: Vec::new(),
            kubeconfig: None,
            log: dir.join(format!("{file}.log")),
        }
    }

    /// With more arguments.
    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// With a flag and its value.
    #[must_use]
    pub fn flag(self, flag: &str, value: &(impl ToString + ?Sized)) -> Self {
        self.args([flag.to_owned(), value.to_string()])
    }

    /// With the account of a kubeconfig.
    #[must_use]
    pub fn kubeconfig(mut self, path: impl Into<PathBuf>) -> Self {
        self.kubeconfig = Some(path.into());
        self
    }

    /// The value of a flag.
    pub fn value(&self, flag: &str) -> Option<&str> {
        let at = self.args.iter().position(|arg| arg == flag)?;
        self.args.get(at + 1).map(String::as_str)
    }

    /// Replaces the value of a flag; false if the command line does not have the flag.
    pub fn set(&mut self, flag: &str, value: &(impl ToString + ?Sized)) -> bool {
        let at = self.args.iter().position(|arg| arg == flag);
        // Flags and values are separate arguments, as `flag` writes them.
        let Some(old) = at.and_then(|at| self.args.get_mut(at + 1)) else {
            return false;
        };
        *old = value.to_string();
        true
    }
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    invocation: Invocation,
    crashes: Crashes,
    pid: Option<u32>,
    /// True once the testbed has begun to end the process, whose end is then no crash.
    is_ending: Arc<AtomicBool>,
    ended: watch::Receiver<Option<ExitStatus>>,
    /// Waits for the end of the process; if it is dropped, the process is killed.
    _keeper: AbortOnDropHandle<()>,
}

impl Daemon {
    /// Starts the daemon's process. An end that the testbed does not cause is added to `crashes`.
    pub fn start(invocation: Invocation, crashes: &Crashes) -> Result<Self> {
        let failure = || format!("cannot start {}", invocation.name);
        let mut log = File::options();
        let output = log
            .create(true)
            .append(true)
            .open(&invocation.log)
            .with_context(failure)?;
        let mut command = Command::new(&invocation.program);
        command
            .args(&invocation.args)
            .envs(invocation.kubeconfig.iter().map(|path| ("KUBECONFIG", path)))
            .stdin(Stdio::null())
            // One file for both, so that the lines are in the order in which they were written.
            .stdout(output.try_clone().with_context(failure)?)
            .stderr(output)
            .kill_on_drop(true);
        let child = command.spawn().with_context(failure)?;
        let pid = child.id();
        let (report, ended) = watch::channel(None);
        let is_ending = Arc::new(AtomicBool::new(false));
        let keeping = keep(
            child,
            report,
            Arc::clone(&is_ending),
            invocation.clone(),
            crashes.clone(),
        );
        Ok(Self {
            invocation,
            crashes: crashes.clone(),
            pid,
            is_ending,
            ended,
            _keeper: AbortOnDropHandle::new(tokio::spawn(keeping)),
        })
    }

    /// The daemon's process id.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// The file that has the daemon's output.
    pub fn log(&self) -> &Path {
        &self.invocation.log
    }

    /// The command line that the daemon was started with.
    pub fn invocation(&self) -> &Invocation {
        &self.invocation
    }

    /// True if the process has ended.
    pub fn is_down(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// Kills the process (SIGKILL) and waits for its end.
    pub async fn kill(&self) {
        self.is_ending.store(true, Ordering::Release);
        // A process of the testbed's own user can be killed, unless it has ended.
        let _ = self.signal(Signal::KILL);
        let _ = self.ended.clone().wait_for(Option::is_some).await;
    }

    /// Waits until the daemon ends by itself, which is no crash from now on; false if it still runs after `deadline`.
    pub async fn until_ended(&self, deadline: Duration) -> bool {
        self.is_ending.store(true, Ordering::Release);
        let mut ended = self.ended.clone();
        timeout(deadline, ended.wait_for(Option::is_some))
            .await
            .is_ok_and(|ended| ended.is_ok())
    }

    /// Kills the daemon and starts it again with the same arguments.
    pub async fn restart(&mut self) -> Result<()> {
        self.restart_as(self.invocation.clone()).await
    }

    /// Kills the daemon and starts it with another command line.
    pub async fn restart_as(&mut self, invocation: Invocation) -> Result<()> {
        self.kill().await;
        *self = Self::start(invocation, &self.crashes)?;
        Ok(())
    }

    /// Stops the process (SIGSTOP), and returns when all of its threads have stopped.
    pub async fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        // The kernel delivers the signal to one thread, and the others run on until that one gets a processor.
        while self.pid.is_some_and(|pid| !is_stopped(pid)) && !self.is_down() {
            tokio::time::sleep(STOP_POLL).await;
        }
        Ok(())
    }

    /// Resumes the process (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Sends a signal; a process that has ended gets none.
    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = self.pid.filter(|_| !self.is_down());
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
        let Some(pid) = pid.and_then(Pid::from_raw) else {
            return Ok(());
        };
        // A system call, since the testbed's image has no program for that.
        match kill_process(pid, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => {
                Err(error).with_context(|| format!("cannot send {} a signal", self.invocation.name))
            }
        }
    }

    /// Sends SIGTERM, and SIGKILL if the process has not ended within `grace`; true if it exited with success by itself.
    pub async fn stop(self, grace: Duration) -> bool {
        self.is_ending.store(true, Ordering::Release);
        // If the signal cannot be sent, the kill below ends it.
        let _ = self.signal(Signal::TERM);
        self.until_ended(grace).await;
        self.kill().await;
        self.ended.borrow().is_some_and(|status| status.success())
    }

    /// The last lines of the daemon's log.
    pub fn log_tail(&self) -> String {
        tail(&self.invocation.log)
    }
}

impl Drop for Daemon {
    /// Kills the process at once: the runtime drops the aborted keeper, and the child with it, a moment later.
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::Release);
        let _ = self.signal(Signal::KILL);
    }
}

/// Returns true if `/proc` shows that no thread of a process runs, or does not show the process.
fn is_stopped(pid: u32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    for task in tasks.flatten() {
        // A thread that has ended meanwhile does not run.
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else {
            continue;
        };
        // The state follows the name, which is in parentheses and may contain parentheses itself.
        let (_, fields) = stat.rsplit_once(") ").unwrap_or_default();
        if !fields.starts_with(['T', 't', 'Z', 'X']) {
            return false;
        }
    }
    true
}

/// Waits for the end of a process. An end that the testbed did not ask for is a crash.
async fn keep(
    mut child: Child,
    report: watch::Sender<Option<ExitStatus>>,
    is_ending: Arc<AtomicBool>,
    invocation: Invocation,
    crashes: Crashes,
) {
    let ended = child.wait().await;
    if !is_ending.load(Ordering::Acquire) {
        let status = ended
            .as_ref()
            .map_or_else(ToString::to_string, ToString::to_string);
        let Invocation { name, log, .. } = invocation;
        crashes.add(Crash {
            name,
            status,
            tail: tail(&log),
            log,
        });
    }
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
        Invocation::new("daemon", "/bin/sh".into(), dir, "daemon").args(["-c", script])
    }

    fn is_alive(pid: u32) -> bool {
        Path::new(&format!("/proc/{pid}/exe")).exists()
            && !std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .unwrap()
                .contains(") Z ")
    }

    #[tokio::test]
    async fn a_crash_is_recorded_with_the_last_lines_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let crashes = Crashes::default();
        let daemon = Daemon::start(shell(dir.path(), "echo went wrong >&2; exit 3"), &crashes).unwrap();
        let error = crashes.first().await.to_string();
        assert!(
            error.contains("exit status: 3") && error.contains("went wrong"),
            "{error}"
        );
        assert_eq!(
            crashes.first().await.to_string(),
            error,
            "a later wait sees it too"
        );
        daemon.kill().await;
    }

    #[tokio::test]
    async fn a_daemon_that_the_testbed_ends_has_not_crashed() {
        let dir = tempfile::tempdir().unwrap();
        let crashes = Crashes::default();
        let killed = Daemon::start(shell(dir.path(), "exec sleep 1000"), &crashes).unwrap();
        killed.kill().await;
        let stopped = Daemon::start(shell(dir.path(), "exec sleep 1000"), &crashes).unwrap();
        stopped.stop(Duration::from_secs(5)).await;
        assert_eq!(*crashes.0.borrow(), []);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_daemon_that_is_dropped_has_not_crashed() {
        let dir = tempfile::tempdir().unwrap();
        let crashes = Crashes::default();
        for _ in 0..50 {
            let daemon = Daemon::start(shell(dir.path(), "exec sleep 1000"), &crashes).unwrap();
            let mut ended = daemon.ended.clone();
            drop(daemon);
            // Its keeper ends with or without a status.
            let _ = ended.wait_for(Option::is_some).await;
        }
        assert_eq!(*crashes.0.borrow(), []);
    }

    /// A request that is sent after the pause must not be answered before the daemon goes on.
    #[tokio::test]
    async fn a_paused_daemon_does_nothing_until_it_is_resumed() {
        let dir = tempfile::tempdir().unwrap();
        let daemon =
            Daemon::start(shell(dir.path(), "while :; do echo .; done"), &Crashes::default()).unwrap();
        let length = || std::fs::metadata(dir.path().join("daemon.log")).unwrap().len();
        for _ in 0..20 {
            daemon.pause().await.unwrap();
            let before = length();
            tokio::time::sleep(STOP_POLL).await;
            assert_eq!(length(), before);
            daemon.resume().unwrap();
            while length() == before {
                tokio::time::sleep(STOP_POLL).await;
            }
        }
        daemon.kill().await;
    }

    #[tokio::test]
    async fn a_killed_daemon_is_gone_and_comes_back_as_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::start(shell(dir.path(), "exec sleep 1000"), &Crashes::default()).unwrap();
        let first = daemon.pid().unwrap();
        daemon.restart().await.unwrap();
        assert!(!is_alive(first));
        let second = daemon.pid().unwrap();
        assert!(is_alive(second));
        assert!(
            !daemon.stop(Duration::from_secs(5)).await,
            "a signal is no success"
        );
        assert!(!is_alive(second));
    }

    #[tokio::test]
    async fn stop_lets_a_daemon_end_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done";
        let daemon = Daemon::start(shell(dir.path(), script), &Crashes::default()).unwrap();
        while !daemon.log_tail().contains("up") {
            tokio::task::yield_now().await;
        }
        assert!(daemon.stop(Duration::from_secs(5)).await);
    }

    #[test]
    fn a_missing_binary_is_named_with_the_command_that_builds_it() {
        let binaries = Binaries {
            dir: "/t/release".into(),
        };
        assert_eq!(
            binaries.path(Program::Scheduler).unwrap_err().to_string(),
            "/t/release/gpushare-scheduler is not there; \
             build it with `cargo build --profile release --package scheduler`"
        );
    }

    #[test]
    fn binaries_lie_beside_a_program_and_above_a_test() {
        assert_eq!(
            profile_dir(Path::new("/t/release/testbed")),
            Path::new("/t/release")
        );
        assert_eq!(
            profile_dir(Path::new("/t/debug/deps/demo-1234")),
            Path::new("/t/debug")
        );
    }
}

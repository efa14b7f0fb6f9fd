//! Processes with a fault.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should end"
)]

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rstest::rstest;

/// The beginnings of variables that cargo sets for the package of a test.
const OF_PACKAGE: [&str; 5] = [
    "CARGO_PKG_",
    "CARGO_MANIFEST_",
    "CARGO_BIN_",
    "CARGO_CRATE_",
    "CARGO_PRIMARY_",
];

/// The time within which a process must end.
const DEADLINE: Duration = Duration::from_secs(10);

/// The example, built with the features of the workspace's tests, so that no dependency is compiled for it.
fn program() -> &'static PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "--workspace", "--all-features"]);
        cargo
            .args(["--example", "supervised"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        // Variables of this package, on which build scripts of dependencies depend, would have them compiled again.
        for (name, _) in std::env::vars().filter(|(name, _)| OF_PACKAGE.iter().any(|of| name.starts_with(of)))
        {
            cargo.env_remove(name);
        }
        let built = cargo.status().unwrap();
        assert!(built.success(), "{built}");
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(2).unwrap().join("examples/supervised")
    })
}

fn start(fault: &str) -> Child {
    Command::new(program())
        .args([fault, "--log-level=warn"])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the end; returns the exit status and the log.
fn end_of(mut child: Child) -> (String, String) {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("the process goes on: {}", log(&child.wait_with_output().unwrap()));
        }
        std::thread::yield_now();
    }
    let output = child.wait_with_output().unwrap();
    (output.status.to_string(), log(&output))
}

fn log(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Otherwise a leader whose watch has panicked would stay ready and decide by its last state.
#[rstest]
#[case::return_of_a_task("returns", "exit status: 1", &["task \"watch of pods\" has ended"])]
#[case::panic_in_a_task("panics", "signal: 6", &["panic task=\"watch of pods\"", "an impossible state", "supervised.rs"])]
#[case::panic_in_a_thread("panics-in-thread", "signal: 6", &["panic task=\"\" thread=\"device-watch\"", "an impossible state"])]
#[case::hang_of_the_runtime("hangs", "signal: 6", &["hangs=\"runtime\" limit=500ms"])]
#[case::lock_that_is_never_released("holds-lock", "signal: 6", &["hangs=\"state\" limit=500ms"])]
#[case::nothing("none", "exit status: 0", &[])]
fn a_fault_ends_the_process(#[case] fault: &str, #[case] status: &str, #[case] words: &[&str]) {
    let (ended, log) = end_of(start(fault));
    assert!(ended.starts_with(status), "{ended}: {log}");
    for word in words {
        assert!(log.contains(word), "{word}: {log}");
    }
    assert!(!words.is_empty() || log.is_empty(), "{log}");
}

/// A process that was stopped for longer than the watchdog's limit has not hung.
#[test]
fn a_paused_process_does_not_count_as_hanging() {
    let child = start("none");
    let signal = |name: &str| {
        assert!(
            Command::new("sh")
                .args(["-c", &format!("kill -{name} {}", child.id())])
                .status()
                .unwrap()
                .success()
        );
    };
    for _ in 0..3 {
        signal("STOP");
        let stopped = Instant::now();
        while stopped.elapsed() < Duration::from_millis(1500) {
            std::thread::yield_now();
        }
        signal("CONT");
    }
    let (ended, log) = end_of(child);
    assert!(
        ended.starts_with("exit status: 0") && log.is_empty(),
        "{ended}: {log}"
    );
}

//! The binary as a process: the settings that it refuses to serve with, and its end when it hangs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time within which the process must begin, and end.
const DEADLINE: Duration = Duration::from_secs(30);

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// The scheduler with an API server that is away.
    fn start(dir: &Path, flags: &[&str]) -> Self {
        let kubeconfig = dir.join("kubeconfig");
        let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                    clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}";
        std::fs::write(&kubeconfig, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-scheduler"));
        command.env("KUBECONFIG", kubeconfig).args(flags);
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    /// Waits for the end; returns the exit status.
    fn end(&mut self) -> String {
        let began = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.to_string();
            }
            assert!(began.elapsed() < DEADLINE, "the process goes on");
            std::thread::yield_now();
        }
    }

    /// Everything that it has logged, once it has ended.
    fn log(&mut self) -> String {
        let mut log = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// One request; the status line, if it is answered within a second.
fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
        .ok()?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).ok()?;
    reply.lines().next().map(str::to_owned)
}

#[test]
fn an_unauthenticated_address_beyond_loopback_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::start(dir.path(), &["--listen=0.0.0.0:0"]);
    assert_eq!(process.end(), "exit status: 1");
    let log = process.log();
    assert!(
        log.contains(
            "--listen=0.0.0.0:0: every client that reaches this address could bind pods. Set --tls-dir"
        ),
        "{log}"
    );
}

/// The pipe of its log is full and has no reader, so every thread that logs hangs: such a scheduler held up every pod.
#[test]
fn a_scheduler_that_hangs_ends_itself() {
    let dir = tempfile::tempdir().unwrap();
    let address = free_address();
    let listen = format!("--listen={address}");
    let mut process = Process::start(dir.path(), &[&listen, "--log-level=trace"]);
    let began = Instant::now();
    while process.0.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < DEADLINE, "the process goes on");
        // Refused and logged, until it hangs.
        drop(get(address, "/readyz"));
    }
    assert!(process.end().starts_with("signal: 6"), "{}", process.end());
}

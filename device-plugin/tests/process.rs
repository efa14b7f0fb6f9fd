//! The binary as a process: its wait for a driver.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    /// The plugin with these flags, in a directory without kubelet and with an API server that is away.
    fn start(dir: &Path, flags: &[&str]) -> Self {
        let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                    clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}";
        std::fs::write(dir.join("kubeconfig"), text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-device-plugin"));
        command.arg("--node-name=n1").args(flags);
        command.arg("--device-plugin-dir").arg(dir);
        command
            .arg("--cdi-spec-dirs")
            .arg(dir.join("cdi"))
            .env("KUBECONFIG", dir.join("kubeconfig"));
        Self(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }
}

/// A plugin that ends is restarted again and again, and each time finds the same.
#[test]
fn a_plugin_without_a_driver_waits_and_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let root = format!("--driver-root={}", dir.path().join("host").display());
    std::fs::create_dir(dir.path().join("sys")).unwrap();
    let host_root = format!("--host-root={}", dir.path().display());
    let mut process = Process::start(dir.path(), &[&root, &host_root, "--health-listen=127.0.0.1:0"]);
    let mut lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
    let mut log = String::new();
    let mut address = None;
    // Of a process that ends the log ends too.
    while !log.contains("no devices to share, looking again") {
        let line = lines.next().expect(&log).unwrap();
        let listening = line
            .split("address=")
            .nth(1)
            .filter(|_| line.contains("listening"));
        address = address.or(listening.map(|rest| rest.split_whitespace().next().unwrap().to_owned()));
        log.push_str(&line);
        log.push('\n');
    }
    assert!(log.contains("no libnvidia-ml.so.1 in"), "{log}");
    let mut probe = TcpStream::connect(address.expect(&log)).unwrap();
    probe
        .write_all(b"GET /readyz HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut answer = String::new();
    probe.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 503") && answer.contains("no devices to share: no libnvidia-ml.so.1"),
        "{answer}"
    );
    assert!(process.0.try_wait().unwrap().is_none());
}

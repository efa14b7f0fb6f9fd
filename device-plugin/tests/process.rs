//! The binary as a process: its end when it hangs.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::io::Read;
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
    /// The plugin with one simulated GPU in a directory without kubelet, and an API server that is away.
    fn start(dir: &Path) -> Self {
        let text = "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                    clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], users: [{name: u, user: {}}]}";
        std::fs::write(dir.join("kubeconfig"), text).unwrap();
        std::fs::write(
            dir.join("gpus.json"),
            r#"{"gpus": [{"uuid": "GPU-a", "minor": 0, "memory": "4Gi"}]}"#,
        )
        .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpushare-device-plugin"));
        command.args(["--node-name=n1", "--hang-timeout=1s"]);
        command
            .arg("--inventory")
            .arg(format!("file:{}", dir.join("gpus.json").display()));
        command
            .arg("--device-plugin-dir")
            .arg(dir)
            .arg("--cdi-dir")
            .arg(dir.join("cdi"));
        command
            .arg("--cdi-spec-dirs")
            .arg(dir.join("cdi"))
            .arg("--kubeconfig")
            .arg(dir.join("kubeconfig"));
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

/// Kubelet's checkpoint is a pipe without a writer, so the thread that answers kubelet waits for ever, as on a disk that does not
/// answer. Such a plugin held up every pod of its node until its probe had failed six times.
#[test]
fn a_plugin_that_hangs_ends_itself() {
    let dir = tempfile::tempdir().unwrap();
    let made = Command::new("mkfifo")
        .arg(dir.path().join("kubelet_internal_checkpoint"))
        .status()
        .unwrap();
    assert!(made.success(), "{made}");
    let mut process = Process::start(dir.path());
    let began = Instant::now();
    let status = loop {
        if let Some(status) = process.0.try_wait().unwrap() {
            break status.to_string();
        }
        assert!(began.elapsed() < DEADLINE, "the process goes on");
        std::thread::yield_now();
    };
    let mut log = String::new();
    process.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(
        status.starts_with("signal: 6") && log.contains("hangs=\"runtime\" limit=1s"),
        "{status}: {log}"
    );
}

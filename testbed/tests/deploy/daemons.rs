//! The daemons' binaries, asked about their flags. They are run, not linked: the testbed knows them as a user does.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use rstest::rstest;
use serde_json::Value;

/// A daemon, by the name of its binary, its container and its workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Daemon {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

pub(crate) const SCHEDULER: Daemon = Daemon { name: "gpushare-scheduler", package: "scheduler" };
pub(crate) const DEVICE_PLUGIN: Daemon = Daemon { name: "gpushare-device-plugin", package: "device-plugin" };

/// Built once for all tests.
static BINARIES: LazyLock<Vec<PathBuf>> = LazyLock::new(build);

impl Daemon {
    /// What `--help` prints.
    pub(crate) fn help(self) -> String {
        let output = self.command().arg("--help").output().unwrap();
        assert!(output.status.success(), "{} --help: {}", self.name, output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Whether it takes these arguments, names and values; it looks at them before it comes to `--help`.
    pub(crate) fn accepts(self, args: &[&str]) -> Result<(), String> {
        let output = self.command().args(args).arg("--help").output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{} {args:?}: {complaint}", self.name)) }
    }

    pub(crate) fn command(self) -> Command {
        let path = BINARIES.iter().find(|path| path.file_stem().is_some_and(|stem| stem == self.name));
        let mut command = Command::new(path.unwrap_or_else(|| panic!("cargo built no {}", self.name)));
        command.env_clear();
        command
    }
}

fn build() -> Vec<PathBuf> {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let packages = [SCHEDULER, DEVICE_PLUGIN].map(|daemon| format!("--package={}", daemon.package));
    let output = Command::new(cargo)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .args(["build", "--locked", "--bins", "--message-format=json"])
        .args(packages)
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo build: {}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter_map(|message| message["executable"].as_str().map(PathBuf::from)).collect()
}

#[rstest]
#[case::unknown_flag(SCHEDULER, "--no-such-flag=1", "--no-such-flag")]
#[case::wrong_value(SCHEDULER, "--listen=nowhere", "--listen")]
#[case::unit_that_is_none(DEVICE_PLUGIN, "--memory-unit=Gib", "--memory-unit")]
fn an_argument_that_is_wrong_is_noticed(#[case] daemon: Daemon, #[case] arg: &str, #[case] named: &str) {
    let complaint = daemon.accepts(&[arg]).unwrap_err();
    assert!(complaint.contains(named), "{complaint}");
}

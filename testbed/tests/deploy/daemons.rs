//! The daemons' binaries, asked about their flags. They are run, not linked: the testbed knows them as a user does.

use std::process::Command;
use std::sync::LazyLock;
use std::thread;

use kit::daemons::{Binaries, Program};
use rstest::rstest;
use serde_json::Value;
use tokio::runtime::Runtime;

use super::{find, named, pod};

/// A daemon, by the name of its binary, its container and its workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Daemon {
    pub(crate) name: &'static str,
    pub(crate) package: &'static str,
}

pub(crate) const SCHEDULER: Daemon = Daemon {
    name: "gpushare-scheduler",
    package: "scheduler",
};
pub(crate) const DEVICE_PLUGIN: Daemon = Daemon {
    name: "gpushare-device-plugin",
    package: "device-plugin",
};

static BINARIES: LazyLock<Binaries> = LazyLock::new(build);

impl Daemon {
    /// Its Deployment or `DaemonSet`.
    pub(crate) fn workload(self, objects: &[Value]) -> &Value {
        let kind = if self == SCHEDULER {
            "Deployment"
        } else {
            "DaemonSet"
        };
        find(objects, kind, self.name)
    }

    /// The spec of its pods.
    pub(crate) fn pod(self, objects: &[Value]) -> &Value {
        pod(self.workload(objects))
    }

    /// Its container.
    pub(crate) fn container(self, objects: &[Value]) -> &Value {
        named(&self.pod(objects)["containers"], self.name)
    }

    /// The output of `--help`.
    pub(crate) fn help(self) -> String {
        let output = self.command().arg("--help").output().unwrap();
        assert!(output.status.success(), "{} --help: {}", self.name, output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// True if it takes these arguments, names and values; it checks them before `--help`.
    pub(crate) fn accepts(self, args: &[&str]) -> Result<(), String> {
        let output = self.command().args(args).arg("--help").output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            Ok(())
        } else {
            Err(format!("{} {args:?}: {complaint}", self.name))
        }
    }

    pub(crate) fn command(self) -> Command {
        let program = if self == SCHEDULER {
            Program::Scheduler
        } else {
            Program::DevicePlugin
        };
        let mut command = Command::new(BINARIES.path(program).unwrap());
        command.env_clear();
        command
    }
}

/// Builds them as all other tests do, so that none of their dependencies is compiled a second time.
fn build() -> Binaries {
    // Some tests run in a runtime, in which another cannot be waited for.
    let building = thread::spawn(|| Runtime::new().unwrap().block_on(Binaries::locate()).unwrap());
    building.join().unwrap()
}

#[rstest]
#[case::unknown_flag(SCHEDULER, "--no-such-flag=1", "--no-such-flag")]
#[case::wrong_value(SCHEDULER, "--listen=nowhere", "--listen")]
#[case::unit_that_is_none(DEVICE_PLUGIN, "--memory-unit=Gib", "--memory-unit")]
fn a_wrong_argument_is_refused(#[case] daemon: Daemon, #[case] arg: &str, #[case] named: &str) {
    let complaint = daemon.accepts(&[arg]).unwrap_err();
    assert!(complaint.contains(named), "{complaint}");
}

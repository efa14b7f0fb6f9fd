//! The parts of a real cluster that scenarios may break, and the shell commands that break them.
//!
//! A file of the cluster's administrator has the commands, as only the administrator knows how to reach a node
//! and restart a part there. A file may leave out any part.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

use crate::command::value_name;
use crate::files;

const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// A part of a cluster that scenarios kill or stop; all other parts have to survive that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterPart {
    /// `gpushare-device-plugin` of a node.
    Plugin,
    /// `gpushare-scheduler`.
    Scheduler,
    /// The kube-scheduler that calls gpushare's scheduler.
    KubeScheduler,
    /// kubelet of a node.
    Kubelet,
    /// The container runtime of a node.
    Containerd,
    /// The API server.
    Apiserver,
}

impl std::fmt::Display for ClusterPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&value_name(self))
    }
}

/// A file of a node that scenarios remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum NodeFile {
    /// The sockets that the plugin serves.
    PluginSockets,
    /// The socket at which kubelet takes registrations of plugins.
    KubeletSocket,
    /// kubelet's checkpoint of devices.
    KubeletCheckpoint,
}

impl std::fmt::Display for NodeFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&value_name(self))
    }
}

/// The commands for one part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartCommands {
    /// Ends the part's process at once, as SIGKILL does; of a part with replicas, all processes.
    pub kill: String,
    /// Starts the part, and returns when it serves; `None` where something else starts it again.
    pub start: Option<String>,
    /// Stops the part's process, as SIGSTOP does.
    pub pause: Option<String>,
    /// Resumes the part's process.
    pub resume: Option<String>,
}

/// The commands of a cluster, as its file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commands {
    /// The parts that may be broken.
    #[serde(default)]
    pub parts: BTreeMap<ClusterPart, PartCommands>,
    /// The commands that remove files.
    #[serde(default)]
    pub remove: BTreeMap<NodeFile, String>,
    /// True if more important pods may take the place of any pods that hold GPUs.
    #[serde(default)]
    pub evict: bool,
    /// The kubeconfig of the cluster; not in the file.
    #[serde(skip)]
    kubeconfig: PathBuf,
}

/// A command that a scenario needs on a real cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Kills a part, and starts it again.
    Kill(ClusterPart),
    /// Stops a part for a while.
    Pause(ClusterPart),
    /// Removes a file.
    Remove(NodeFile),
    /// Creates pods of high priority, which evict other pods.
    Evict,
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kill(part) => write!(f, "parts.{part}.kill"),
            Self::Pause(part) => write!(f, "parts.{part}.pause and resume"),
            Self::Remove(file) => write!(f, "remove.{file}"),
            Self::Evict => f.write_str("evict: true"),
        }
    }
}

impl Commands {
    /// Reads the file of the cluster with this kubeconfig.
    pub fn read(path: &Path, kubeconfig: &Path) -> Result<Self> {
        Self::parse(&files::read(path)?, kubeconfig)
            .with_context(|| format!("{} does not say how to break a cluster", path.display()))
    }

    /// Parses the file of commands and checks that they are complete.
    fn parse(text: &str, kubeconfig: &Path) -> Result<Self> {
        let commands: Self = serde_yaml_ng::from_str(text)?;
        for (part, of_part) in &commands.parts {
            ensure!(!of_part.kill.trim().is_empty(), "parts.{part}.kill is empty");
            ensure!(
                of_part.pause.is_some() == of_part.resume.is_some(),
                "parts.{part} has one of pause and resume"
            );
        }
        Ok(Self {
            kubeconfig: kubeconfig.to_owned(),
            ..commands
        })
    }

    /// True if the file has the commands that a scenario needs.
    pub fn allow(&self, need: Need) -> bool {
        match need {
            Need::Kill(part) => self.parts.contains_key(&part),
            Need::Pause(part) => self
                .parts
                .get(&part)
                .is_some_and(|commands| commands.pause.is_some()),
            Need::Remove(file) => self.remove.contains_key(&file),
            Need::Evict => self.evict,
        }
    }

    fn commands_of(&self, part: ClusterPart) -> Result<&PartCommands> {
        let commands = self.parts.get(&part);
        commands.with_context(|| format!("the file has no commands for parts.{part}"))
    }

    /// Kills a part; `node` names the node for parts that run on every node.
    pub async fn kill(&self, part: ClusterPart, node: &str) -> Result<()> {
        let command = &self.commands_of(part)?.kill;
        self.run(&format!("parts.{part}.kill"), Some(command), node).await
    }

    /// Starts a part that was killed, unless something else does.
    pub async fn start(&self, part: ClusterPart, node: &str) -> Result<()> {
        match &self.commands_of(part)?.start {
            None => Ok(()),
            command => {
                self.run(&format!("parts.{part}.start"), command.as_ref(), node)
                    .await
            }
        }
    }

    /// Stops a part.
    pub async fn pause(&self, part: ClusterPart, node: &str) -> Result<()> {
        let command = self.commands_of(part)?.pause.as_ref();
        self.run(&format!("parts.{part}.pause"), command, node).await
    }

    /// Resumes a part that was stopped.
    pub async fn resume(&self, part: ClusterPart, node: &str) -> Result<()> {
        let command = self.commands_of(part)?.resume.as_ref();
        self.run(&format!("parts.{part}.resume"), command, node).await
    }

    /// Removes a file of a node.
    pub async fn remove(&self, file: NodeFile, node: &str) -> Result<()> {
        self.run(&format!("remove.{file}"), self.remove.get(&file), node)
            .await
    }

    /// Runs one command in a shell, with the node and the kubeconfig in its environment.
    async fn run(&self, name: &str, command: Option<&String>, node: &str) -> Result<()> {
        let command = command.with_context(|| format!("the file has no {name}"))?;
        let mut shell = Command::new("sh");
        let status = shell
            .args(["-c", command.as_str()])
            .env("NODE", node)
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null())
            // The testbed prints its results there, and a part that the command starts would keep it open.
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .status();
        let status = timeout(COMMAND_TIMEOUT, status)
            .await
            .with_context(|| format!("{name} takes longer than {COMMAND_TIMEOUT:?}"))?;
        match status.with_context(|| format!("cannot run {name}"))? {
            status if status.success() => Ok(()),
            status => bail!("{name} of node {node:?} failed ({status}): {command}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const FILE: &str = r#"
parts:
  plugin: {kill: "kill -9 1", pause: "kill -STOP 1", resume: "kill -CONT 1"}
  kube-scheduler: {kill: "kill -9 2", start: "true"}
remove:
  kubelet-socket: rm -f "$SOCKET"
evict: true
"#;

    #[rstest]
    #[case::killed(Need::Kill(ClusterPart::Plugin), true)]
    #[case::stopped(Need::Pause(ClusterPart::Plugin), true)]
    #[case::killed_only(Need::Pause(ClusterPart::KubeScheduler), false)]
    #[case::left_alone(Need::Kill(ClusterPart::Kubelet), false)]
    #[case::file(Need::Remove(NodeFile::KubeletSocket), true)]
    #[case::another_file(Need::Remove(NodeFile::PluginSockets), false)]
    #[case::eviction(Need::Evict, true)]
    fn a_fault_is_possible_if_the_file_has_its_command(#[case] need: Need, #[case] expected: bool) {
        assert_eq!(
            Commands::parse(FILE, Path::new("k")).unwrap().allow(need),
            expected
        );
    }

    #[rstest]
    #[case::unknown_part("parts: {disk: {kill: x}}", "unknown variant `disk`")]
    #[case::unknown_command("parts: {plugin: {kill: x, halt: y}}", "unknown field `halt`")]
    #[case::no_kill("parts: {plugin: {start: x}}", "missing field `kill`")]
    #[case::empty_kill("parts: {plugin: {kill: ' '}}", "parts.plugin.kill is empty")]
    #[case::pause_alone("parts: {plugin: {kill: x, pause: y}}", "has one of pause and resume")]
    #[case::unknown_file("remove: {disk: x}", "unknown variant `disk`")]
    fn malformed_files_of_commands_are_refused(#[case] file: &str, #[case] expected: &str) {
        let error = format!("{:#}", Commands::parse(file, Path::new("k")).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }

    #[tokio::test]
    async fn commands_get_the_node_and_the_cluster_in_variables() {
        let file = r#"
parts:
  kubelet: {kill: test "$NODE $KUBECONFIG" = "n1 k", start: "false"}
  plugin: {kill: "true"}
"#;
        let commands = Commands::parse(file, Path::new("k")).unwrap();
        commands.kill(ClusterPart::Kubelet, "n1").await.unwrap();
        commands.start(ClusterPart::Plugin, "n1").await.unwrap();
        let error = commands
            .start(ClusterPart::Kubelet, "n1")
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("parts.kubelet.start of node \"n1\" failed"),
            "{error}"
        );
        assert!(
            commands.kill(ClusterPart::Scheduler, "").await.is_err(),
            "it is not in the file"
        );
    }
}

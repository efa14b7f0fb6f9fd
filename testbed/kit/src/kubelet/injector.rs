//! The injection of CDI devices: by the testbed's model of a runtime's cache, or by containerd's own code in
//! the process `cdi-injector`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::cdi::{CdiCache, CdiHook, DeviceNode, MountPoint, RecordedEdits};
use super::config::KubeletConfig;

/// The runtime's side of CDI.
#[derive(Debug)]
pub(crate) enum Injector {
    /// The testbed's own model.
    Modelled(CdiCache),
    /// The process `cdi-injector` that listens at this socket.
    Containerd(PathBuf),
}

/// The answer of `cdi-injector`. It is written in Go, where an empty list becomes null.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct InjectorAnswer {
    env: Option<Vec<String>>,
    device_nodes: Option<Vec<String>>,
    mounts: Option<Vec<String>>,
    hooks: Option<Vec<Vec<String>>>,
    #[serde(default)]
    error: String,
}

impl From<InjectorAnswer> for RecordedEdits {
    fn from(answer: InjectorAnswer) -> Self {
        let nodes = answer.device_nodes.into_iter().flatten();
        let mounts = answer.mounts.into_iter().flatten();
        let hooks = answer.hooks.into_iter().flatten();
        Self {
            env: answer.env.unwrap_or_default(),
            device_nodes: nodes.map(|path| DeviceNode { path }).collect(),
            mounts: mounts
                .map(|container_path| MountPoint { container_path })
                .collect(),
            hooks: hooks.map(|args| CdiHook { args }).collect(),
        }
    }
}

impl Injector {
    pub(crate) fn start(config: &KubeletConfig) -> io::Result<Self> {
        match &config.cdi_injector {
            Some(socket) => Ok(Self::Containerd(socket.clone())),
            None => CdiCache::start(config.cdi_dirs.clone(), config.runtime.refresh, config.seed)
                .map(Self::Modelled),
        }
    }

    /// The edits of all `names`, and the `names` whose spec on disk has other edits by now, which only the model detects.
    pub(crate) async fn inject(&self, names: &[String]) -> Result<(RecordedEdits, Vec<String>)> {
        match self {
            Self::Modelled(cache) => cache.inject(names).context("CDI device injection failed"),
            Self::Containerd(_) if names.is_empty() => Ok((RecordedEdits::default(), Vec::new())),
            Self::Containerd(socket) => {
                let answer = ask_injector(socket, names).await;
                let answer = answer
                    .with_context(|| format!("the CDI injector at {} does not answer", socket.display()))?;
                ensure!(answer.error.is_empty(), answer.error);
                Ok((answer.into(), Vec::new()))
            }
        }
    }
}

/// Asks the external CDI implementation for the edits of these devices: a line of JSON each way.
async fn ask_injector(socket: &Path, names: &[String]) -> io::Result<InjectorAnswer> {
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    stream
        .write_all(format!("{}\n", json!({"devices": names})).as_bytes())
        .await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use tokio::net::UnixListener;

    use super::*;

    /// A socket that answers one question with this line.
    fn answering(line: &'static str) -> (tempfile::TempDir, Injector, tokio::task::JoinHandle<String>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("injector.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let asked = tokio::spawn(async move {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            let mut question = String::new();
            stream.read_line(&mut question).await.unwrap();
            stream.write_all(line.as_bytes()).await.unwrap();
            question
        });
        (dir, Injector::Containerd(socket), asked)
    }

    #[tokio::test]
    async fn the_edits_of_containerds_cdi_library_are_used() {
        let (_dir, injector, asked) = answering(
            "{\"env\":[\"A=1\"],\"deviceNodes\":[\"/dev/nvidia0\"],\"mounts\":null,\"hooks\":[[\"nvidia-cdi-hook\",\"update-ldcache\"]]}\n",
        );
        let (edits, _) = injector.inject(&["gpushare.dev/gpu=x".to_owned()]).await.unwrap();
        assert_eq!(asked.await.unwrap(), "{\"devices\":[\"gpushare.dev/gpu=x\"]}\n");
        assert_eq!((edits.env, edits.mounts), (vec!["A=1".to_owned()], Vec::new()));
        assert_eq!(
            edits.device_nodes,
            [DeviceNode {
                path: "/dev/nvidia0".to_owned()
            }]
        );
        assert_eq!(edits.hooks[0].args, ["nvidia-cdi-hook", "update-ldcache"]);
        assert_eq!(
            injector.inject(&[]).await.unwrap().0,
            RecordedEdits::default(),
            "a container without devices asks nothing"
        );
    }

    #[rstest]
    #[case::unresolvable("{\"error\":\"unresolvable CDI devices x\"}\n", "unresolvable CDI devices x")]
    #[case::it_ends_meanwhile("", "does not answer")]
    #[tokio::test]
    async fn an_error_of_the_injector_is_returned(#[case] line: &'static str, #[case] expected: &str) {
        let (_dir, injector, _asked) = answering(line);
        let error = format!("{:#}", injector.inject(&["x".to_owned()]).await.unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

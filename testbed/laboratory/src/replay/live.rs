//! An administrator's own cluster as the starting point: the objects of its API server, read once and never written.

mod seen;

use std::path::Path;

use anyhow::{Context, Result};
use http::StatusCode;
use kube::Client;
use serde_json::Value;

use kit::cluster::client_of;

pub use seen::world;

/// Objects in one page of a list.
const PAGE: u32 = 500;

/// The objects of a cluster that a replay reads, as the API server shows them.
#[derive(Clone, Debug, Default)]
pub struct LiveCluster {
    /// Nodes.
    pub nodes: Vec<Value>,
    /// Device objects; none, if the cluster has no such kind.
    pub devices: Vec<Value>,
    /// Pods of all namespaces.
    pub pods: Vec<Value>,
}

/// Reads a cluster. Needs leave to list nodes, Device objects and pods.
///
/// # Errors
/// A kind of object that cannot be listed, and the cause.
pub async fn read(kubeconfig: &Path) -> Result<LiveCluster> {
    let client = client_of(kubeconfig).await?;
    let nodes = list(&client, "/api/v1/nodes")
        .await?
        .context("the cluster has no kind Node")?;
    let devices = list(&client, "/apis/scheduling.koordinator.sh/v1alpha1/devices")
        .await?
        .unwrap_or_default();
    let pods = list(&client, "/api/v1/pods")
        .await?
        .context("the cluster has no kind Pod")?;
    Ok(LiveCluster { nodes, devices, pods })
}

/// All objects of a kind; `None` if there is no such kind.
async fn list(client: &Client, path: &str) -> Result<Option<Vec<Value>>> {
    let mut objects = Vec::new();
    let mut page = String::new();
    loop {
        let request = http::Request::get(format!("{path}?limit={PAGE}{page}")).body(Vec::new())?;
        let answer: Value = match client.request(request).await {
            Err(kube::Error::Api(status)) if status.code == StatusCode::NOT_FOUND.as_u16() => {
                return Ok(None);
            }
            answer => answer.with_context(|| format!("cannot list {path}"))?,
        };
        if let Some(Value::Array(items)) = answer.get("items") {
            objects.extend(items.iter().cloned());
        }
        match answer
            .pointer("/metadata/continue")
            .and_then(Value::as_str)
            .filter(|token| !token.is_empty())
        {
            Some(token) => page = format!("&continue={token}"),
            None => return Ok(Some(objects)),
        }
    }
}

#[cfg(test)]
mod tests;

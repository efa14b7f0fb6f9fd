//! An administrator's own cluster as the starting point: the objects of its API server, read once and never written.

use std::path::Path;

use anyhow::{Context, Result};
use http::{Request, StatusCode, header};
use kube::Client;
use serde_json::Value;

use super::seen::ClusterObjects;
use kit::cluster::client_of;

const PAGE: u32 = 500;
const JSON: &str = "application/json";

/// Reads a cluster by a kubeconfig whose user may list nodes, Device objects and pods.
pub async fn read(kubeconfig: &Path) -> Result<ClusterObjects> {
    let client = client_of(kubeconfig).await?;
    let all = async |path| list(&client, path, "", JSON).await;
    let nodes = all("/api/v1/nodes").await?;
    let devices = all("/apis/scheduling.koordinator.sh/v1alpha1/devices").await?;
    let pods = all("/api/v1/pods").await?;
    Ok(ClusterObjects {
        nodes: nodes.context("the cluster has no kind Node")?,
        devices: devices.unwrap_or_default(),
        pods: pods.context("the cluster has no kind Pod")?,
    })
}

/// The objects below a path that a label selector matches, in the form that `accept` names; `None` if there is no such kind.
pub async fn list(client: &Client, path: &str, selector: &str, accept: &str) -> Result<Option<Vec<Value>>> {
    let mut objects = Vec::new();
    let mut page = String::new();
    loop {
        let uri = format!("{path}?limit={PAGE}&labelSelector={selector}{page}");
        let request = Request::get(uri)
            .header(header::ACCEPT, accept)
            .body(Vec::new())?;
        let mut answer: Value = match client.request(request).await {
            Err(kube::Error::Api(status)) if status.code == StatusCode::NOT_FOUND.as_u16() => {
                return Ok(None);
            }
            answer => answer.with_context(|| format!("cannot list {path}"))?,
        };
        if let Some(Value::Array(items)) = answer.get_mut("items") {
            objects.append(items);
        }
        let next = answer.pointer("/metadata/continue").and_then(Value::as_str);
        match next.filter(|token| !token.is_empty()) {
            Some(token) => page = format!("&continue={token}"),
            None => return Ok(Some(objects)),
        }
    }
}

#[cfg(test)]
mod tests;

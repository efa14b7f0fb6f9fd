//! Objects of a real API server, by URL path: created, listed by name, patched and deleted, many at a time.

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use futures::stream::{StreamExt, TryStreamExt};
use http::{Request, StatusCode, header};
use kube::Client;
use serde_json::Value;

use crate::replay::live;
use kit::console::Console;

const CONCURRENCY: usize = 64;
/// `Accept` for a list of names only; a server without metadata-only lists may send whole objects.
const NAMES: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

#[derive(Clone)]
pub(super) struct Objects(Client);

impl Objects {
    pub(super) fn of(client: &Client) -> Self {
        Self(client.clone())
    }

    pub(super) async fn create(&self, path: &str, object: &Value) -> Result<()> {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(serde_json::to_vec(object)?)?;
        let sent = self.send(request, StatusCode::CONFLICT).await;
        sent.with_context(|| format!("cannot create an object of {path}"))
    }

    pub(super) async fn patch(&self, path: &str, change: &Value) -> Result<()> {
        let request = Request::patch(path).header(header::CONTENT_TYPE, "application/merge-patch+json");
        let request = request.body(serde_json::to_vec(change)?)?;
        let sent = self.0.request::<Value>(request).await;
        sent.map(drop).with_context(|| format!("cannot patch {path}"))
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        let request = Request::delete(format!("{path}?gracePeriodSeconds=0")).body(Vec::new())?;
        let sent = self.send(request, StatusCode::NOT_FOUND).await;
        sent.with_context(|| format!("cannot delete {path}"))
    }

    /// The names of the objects below a path that a label selector matches; none if the kind does not exist.
    pub(super) async fn names(&self, path: &str, selector: &str) -> Result<BTreeSet<String>> {
        let items = live::list(&self.0, path, selector, NAMES).await?;
        let mut names = BTreeSet::new();
        for item in items.unwrap_or_default() {
            let name = item.pointer("/metadata/name").and_then(Value::as_str);
            names.extend(name.map(str::to_owned));
        }
        Ok(names)
    }

    pub(super) async fn delete_all(
        &self,
        console: &Console,
        path: &str,
        names: BTreeSet<String>,
    ) -> Result<()> {
        let what = format!("deleting {}", path.rsplit('/').next().unwrap_or(path));
        let delete = |name| async move { self.delete(&format!("{path}/{name}")).await };
        each(console, &what, names, delete).await
    }

    /// Sends a request; an answer with the status that is harmless here is no error.
    async fn send(&self, request: Request<Vec<u8>>, harmless: StatusCode) -> Result<()> {
        match self.0.request::<Value>(request).await {
            Err(kube::Error::Api(status)) if status.code == harmless.as_u16() => Ok(()),
            answer => Ok(answer.map(drop)?),
        }
    }
}

/// Runs `work` for each item, many at a time, and shows what is done.
pub(super) async fn each<T, F>(
    console: &Console,
    what: &str,
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> F,
) -> Result<()>
where
    F: Future<Output = Result<()>>,
{
    let items: Vec<T> = items.into_iter().collect();
    if items.is_empty() {
        return Ok(());
    }
    console.step(&format!("{what}: {}", items.len()));
    let done = futures::stream::iter(items).map(work);
    done.buffer_unordered(CONCURRENCY).try_collect().await
}

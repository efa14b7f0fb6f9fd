//! Kubernetes objects from YAML files, applied as `kubectl apply --server-side` would.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde::Deserialize;

/// The objects of a YAML text, in order; empty documents are left out.
pub fn parse(text: &str) -> Result<Vec<DynamicObject>> {
    let documents = serde_yaml_ng::Deserializer::from_str(text).map(serde_json::Value::deserialize);
    let mut objects = Vec::new();
    for document in documents {
        let document = document?;
        if !document.is_null() {
            objects.push(serde_json::from_value(document).context("a document is no Kubernetes object")?);
        }
    }
    Ok(objects)
}

/// The objects of a file.
pub fn read(path: &Path) -> Result<Vec<DynamicObject>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    parse(&text).with_context(|| path.display().to_string())
}

/// The YAML files of a directory, by name.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    Ok(files)
}

/// Applies one object; a namespaced one without a namespace goes to `default`. Answers the object as it is stored.
pub async fn apply(client: &Client, object: &DynamicObject) -> Result<DynamicObject> {
    let types = object
        .types
        .clone()
        .context("an object has no apiVersion and kind")?;
    let kind = GroupVersionKind::try_from(&types).context("an apiVersion does not parse")?;
    let resource = ApiResource::from_gvk(&kind);
    let namespace = object
        .namespace()
        .or_else(|| (types.kind == "Pod").then(|| "default".to_owned()));
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let name = object.name_any();
    let applied = api
        .patch(
            &name,
            &PatchParams::apply("testbed").force(),
            &Patch::Apply(object),
        )
        .await;
    applied.with_context(|| format!("cannot apply {} {name}", types.kind))
}

/// Applies every object of a file.
pub async fn apply_file(client: &Client, path: &Path) -> Result<Vec<DynamicObject>> {
    let mut applied = Vec::new();
    for object in read(path)? {
        applied.push(
            apply(client, &object)
                .await
                .with_context(|| path.display().to_string())?,
        );
    }
    Ok(applied)
}

//! Kubernetes objects from YAML files, applied as `kubectl apply --server-side --force-conflicts` would.

use std::path::Path;

use anyhow::{Context, Result};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, ResourceExt};
use serde::Deserialize;

use crate::files;

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
    parse(&files::read(path)?).with_context(|| path.display().to_string())
}

/// Applies one object, a Pod without a namespace in `default`; returns the stored object.
pub async fn apply(client: &Client, object: &DynamicObject) -> Result<DynamicObject> {
    let types = object
        .types
        .clone()
        .context("an object has no apiVersion and kind")?;
    let kind = GroupVersionKind::try_from(&types).context("an apiVersion does not parse")?;
    let resource = ApiResource::from_gvk(&kind);
    let api: Api<DynamicObject> = match object.namespace() {
        Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
        None if types.kind == "Pod" => Api::namespaced_with(client.clone(), "default", &resource),
        None => Api::all_with(client.clone(), &resource),
    };
    let name = object.name_any();
    let params = PatchParams::apply("testbed").force();
    let applied = api.patch(&name, &params, &Patch::Apply(object)).await;
    applied.with_context(|| format!("cannot apply {} {name}", types.kind))
}

/// Applies every object of a file.
pub async fn apply_file(client: &Client, path: &Path) -> Result<Vec<DynamicObject>> {
    let mut applied = Vec::new();
    for object in read(path)? {
        let stored = apply(client, &object).await;
        applied.push(stored.with_context(|| path.display().to_string())?);
    }
    Ok(applied)
}

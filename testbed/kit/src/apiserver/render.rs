//! Objects as answers show them: whole, as metadata only, or as rows of a printed table.
//!
//! A whole object is served as the bytes that all answers share; every other view is built for the answer.

use bytes::Bytes;
use serde_json::{Value, json};

use super::resource::Resource;
use super::store::ObjectVersion;
use super::table;
use crate::pods::set;

/// The representation a client prefers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Object,
    Metadata,
    Table,
}

impl View {
    /// The view for an Accept header; none if JSON is not acceptable.
    pub(crate) fn negotiate(accept: &str) -> Option<Self> {
        if accept.trim().is_empty() {
            return Some(Self::Object);
        }
        accept.split(',').find_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default();
            if !matches!(media, "application/json" | "application/*" | "*/*") {
                return None;
            }
            match parts.find_map(|p| p.strip_prefix("as=")) {
                None => Some(Self::Object),
                Some("Table") => Some(Self::Table),
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => Some(Self::Metadata),
                Some(_) => None,
            }
        })
    }
}

/// One object as an answer or as the object of a watch event.
pub(crate) fn render_object(view: View, resource: &Resource, version: &ObjectVersion) -> Bytes {
    let value = match view {
        View::Object => return version.bytes.clone(),
        View::Metadata => metadata_only(&version.value),
        View::Table => {
            let rows = [table::row(resource, &version.value)];
            table::table(resource, &rows, &list_meta(version.rv, None))
        }
    };
    Bytes::from(value.to_string())
}

/// One object as an item of a list; an item of a table is a row.
pub(crate) fn render_list_item(view: View, resource: &Resource, version: &ObjectVersion) -> Bytes {
    match view {
        View::Table => Bytes::from(table::row(resource, &version.value).to_string()),
        _ => render_object(view, resource, version),
    }
}

/// The metadata of a list; `next` is the token of its next page.
pub(crate) fn list_meta(rv: u64, next: Option<&str>) -> Value {
    let mut meta = json!({"resourceVersion": rv.to_string()});
    if let Some(next) = next {
        set(&mut meta, "continue", Value::from(next));
    }
    meta
}

/// The JSON before the items of a list; `]}` follows them.
pub(crate) fn list_head(view: View, resource: &Resource, meta: &Value) -> String {
    let (kind, version) = match view {
        View::Object => (format!("{}List", resource.kind), resource.api_version()),
        View::Metadata => (
            "PartialObjectMetadataList".to_owned(),
            "meta.k8s.io/v1".to_owned(),
        ),
        View::Table => {
            let mut empty = table::table(resource, &[], meta).to_string();
            empty.truncate(empty.len() - "]}".len());
            return empty;
        }
    };
    format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{version}\",\"metadata\":{meta},\"items\":[")
}

/// The object of a BOOKMARK event.
pub(crate) fn bookmark(resource: &Resource, view: View, rv: u64, ends_initial_events: bool) -> Value {
    let mut meta = json!({"resourceVersion": rv.to_string(), "creationTimestamp": null});
    if ends_initial_events {
        // A client that streams its list (WatchList) waits for this annotation before it takes the list for complete.
        set(
            &mut meta,
            "annotations",
            json!({"k8s.io/initial-events-end": "true"}),
        );
    }
    match view {
        View::Object => {
            json!({"kind": resource.kind, "apiVersion": resource.api_version(), "metadata": meta})
        }
        View::Metadata => metadata_only(&json!({"metadata": meta})),
        View::Table => {
            let row = json!({"cells": [], "object": metadata_only(&json!({"metadata": meta}))});
            table::table(resource, &[row], &list_meta(rv, None))
        }
    }
}

/// A `PartialObjectMetadata` of an object.
pub(crate) fn metadata_only(value: &Value) -> Value {
    let meta = value.get("metadata").cloned().unwrap_or_default();
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": meta})
}

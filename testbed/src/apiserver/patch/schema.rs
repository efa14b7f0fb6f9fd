//! The merge rules of lists and maps: by key, as sets, or as a whole.
//!
//! For built-in kinds a short table by field name; for custom resources what their schema says. Unknown lists
//! are atomic and unknown maps merge, as in Kubernetes.

use std::sync::Arc;

use serde_json::Value;

use crate::apiserver::resource::Resource;

/// The merge rule of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListRule {
    /// Replaced as a whole.
    Atomic,
    /// A set of scalars.
    Set,
    /// Items are identified by these fields.
    Map(Vec<String>),
}

/// The merge rules of one kind. Paths are field names from the root, without list indexes.
#[derive(Debug, Clone)]
pub(crate) enum Schema {
    /// A built-in kind.
    Builtin,
    /// A custom resource with its `openAPIV3Schema`.
    Custom(Option<Arc<Value>>),
}

/// Parent field (or none for any), field, merge keys.
const KEYED: &[(Option<&str>, &str, &[&str])] = &[
    (None, "ownerReferences", &["uid"]),
    (None, "conditions", &["type"]),
    (None, "containers", &["name"]),
    (None, "initContainers", &["name"]),
    (None, "ephemeralContainers", &["name"]),
    (None, "env", &["name"]),
    (None, "volumes", &["name"]),
    (None, "volumeMounts", &["mountPath"]),
    (None, "volumeDevices", &["devicePath"]),
    (None, "volumeClaimTemplates", &["name"]),
    (None, "imagePullSecrets", &["name"]),
    (None, "secrets", &["name"]),
    (None, "hostAliases", &["ip"]),
    (None, "podIPs", &["ip"]),
    (None, "hostIPs", &["ip"]),
    (None, "schedulingGates", &["name"]),
    (None, "resourceClaims", &["name"]),
    (None, "webhooks", &["name"]),
    (None, "matchConditions", &["name"]),
    (
        None,
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
    (Some("containers"), "ports", &["containerPort", "protocol"]),
    (Some("initContainers"), "ports", &["containerPort", "protocol"]),
    (Some("spec"), "ports", &["port", "protocol"]),
    (Some("status"), "addresses", &["type"]),
    (Some("resources"), "claims", &["name"]),
];
const SETS: &[(Option<&str>, &str)] = &[
    (None, "finalizers"),
    (Some("spec"), "podCIDRs"),
    (Some("spec"), "loadBalancerSourceRanges"),
];
const ATOMIC_MAPS: &[&str] = &[
    "nodeSelector",
    "selector",
    "labelSelector",
    "secretKeyRef",
    "configMapKeyRef",
    "fieldRef",
];

impl Schema {
    pub(crate) fn of(resource: &Resource) -> Self {
        if resource.custom {
            Self::Custom(resource.schema.clone())
        } else {
            Self::Builtin
        }
    }

    /// The merge rule of the list at a path.
    pub(crate) fn list(&self, path: &[&str]) -> ListRule {
        match self {
            Self::Custom(schema) if path.first() != Some(&"metadata") => schema
                .as_deref()
                .and_then(|s| descend(s, path))
                .map_or(ListRule::Atomic, declared),
            _ => builtin(path),
        }
    }

    /// True if the map at a path is replaced as a whole.
    pub(crate) fn is_atomic_map(&self, path: &[&str]) -> bool {
        match self {
            Self::Custom(schema) => schema
                .as_deref()
                .and_then(|s| descend(s, path))
                .is_some_and(|s| s.get("x-kubernetes-map-type").and_then(Value::as_str) == Some("atomic")),
            Self::Builtin => {
                path.last().is_some_and(|field| ATOMIC_MAPS.contains(field))
                    && path.first() != Some(&"metadata")
            }
        }
    }
}

fn builtin(path: &[&str]) -> ListRule {
    let Some((field, parents)) = path.split_last() else {
        return ListRule::Atomic;
    };
    let under = |parent: Option<&str>| parent.is_none_or(|p| parents.last() == Some(&p));
    if let Some((_, _, keys)) = KEYED
        .iter()
        .find(|(parent, name, _)| name == field && under(*parent))
    {
        return ListRule::Map(keys.iter().map(|k| (*k).to_owned()).collect());
    }
    if SETS.iter().any(|(parent, name)| name == field && under(*parent)) {
        ListRule::Set
    } else {
        ListRule::Atomic
    }
}

fn descend<'a>(schema: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(schema, |at, field| {
        let at = at.get("items").unwrap_or(at);
        at.get("properties")
            .and_then(|p| p.get(*field))
            .or_else(|| at.get("additionalProperties"))
    })
}

fn declared(schema: &Value) -> ListRule {
    match schema.get("x-kubernetes-list-type").and_then(Value::as_str) {
        Some("set") => ListRule::Set,
        Some("map") => {
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            ListRule::Map(
                keys.into_iter()
                    .flatten()
                    .filter_map(Value::as_str)
                    .map(str::to_owned)
                    .collect(),
            )
        }
        _ => ListRule::Atomic,
    }
}

/// The identity of a list item under merge keys, as JSON text; `protocol` is TCP unless said otherwise.
pub(crate) fn item_key(item: &Value, keys: &[String]) -> Option<String> {
    let mut identity = serde_json::Map::new();
    for key in keys {
        let value = match item.get(key) {
            Some(value) => value.clone(),
            None if key == "protocol" => Value::from("TCP"),
            None => return None,
        };
        identity.insert(key.clone(), value);
    }
    Some(Value::Object(identity).to_string())
}

//! Discovery and `OpenAPI` documents: the kinds that the server serves.
//!
//! The `OpenAPI` documents have as much as kubectl needs: the kinds, and the parameters of a patch. Built-in
//! kinds have no field schemas there.

use serde_json::{Map, Value, json};

use super::resource::{Registry, Resource, group_version};
use crate::pods::set;

/// The answer to `/version`.
pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

/// The answer to a discovery or `OpenAPI` path (without its leading slash), if it is one.
pub(crate) fn answer_discovery(registry: &Registry, path: &str) -> Option<Value> {
    match path.split('/').collect::<Vec<_>>().as_slice() {
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["api", version] => resource_list(registry, "", version),
        ["apis"] => {
            let groups: Vec<Value> = groups(registry).iter().map(|g| group(registry, g)).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["apis", name] if groups(registry).contains(name) => {
            let mut found = group(registry, name);
            set(&mut found, "kind", "APIGroup".into());
            set(&mut found, "apiVersion", "v1".into());
            Some(found)
        }
        ["apis", group, version] => resource_list(registry, group, version),
        ["openapi", "v3"] => Some(openapi_index(registry)),
        ["openapi", "v3", "api", version] => openapi(registry, "", version),
        ["openapi", "v3", "apis", group, version] => openapi(registry, group, version),
        _ => None,
    }
}

/// The API groups that are served, each once; the core group has no name and is not among them.
fn groups(registry: &Registry) -> Vec<&str> {
    let groups = registry.all().iter().map(|resource| resource.group.as_str());
    each_once(groups.filter(|group| !group.is_empty()))
}

fn each_once<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut once = Vec::new();
    for name in names {
        if !once.contains(&name) {
            once.push(name);
        }
    }
    once
}

/// One entry of an `APIGroupList`: a group with its versions.
fn group(registry: &Registry, name: &str) -> Value {
    let members = registry.all().iter().filter(|resource| resource.group == name);
    let mut versions = Vec::new();
    for version in each_once(members.map(|resource| resource.version.as_str())) {
        versions.push(json!({"groupVersion": group_version(name, version), "version": version}));
    }
    json!({"name": name, "versions": versions, "preferredVersion": versions.first()})
}

fn resources_of<'a>(registry: &'a Registry, group: &str, version: &str) -> Vec<&'a Resource> {
    let resources = registry.all().iter().map(AsRef::as_ref);
    resources
        .filter(|found| found.group == group && found.version == version)
        .collect()
}

/// The `APIResourceList` of a group and version; `None` if the server has no resource in it.
fn resource_list(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let members = resources_of(registry, group, version);
    if members.is_empty() {
        return None;
    }
    let resources: Vec<Value> = members.iter().flat_map(|r| discovery_entries(r)).collect();
    Some(json!({
        "kind": "APIResourceList", "apiVersion": "v1",
        "groupVersion": group_version(group, version), "resources": resources,
    }))
}

/// The entries of an `APIResourceList` for one resource: the resource itself and its subresources.
fn discovery_entries(resource: &Resource) -> Vec<Value> {
    // `bindings` is the one resource here that nothing can read: a POST to it binds the pod that it names.
    let verbs = match resource.plural.as_str() {
        "bindings" => "create",
        _ => "create delete deletecollection get list patch update watch",
    };
    let verbs: Vec<&str> = verbs.split(' ').collect();
    let mut main = json!({
        "name": resource.plural, "singularName": resource.kind.to_lowercase(), "namespaced": resource.namespaced,
        "kind": resource.kind, "verbs": verbs,
    });
    if !resource.short_names.is_empty() {
        set(&mut main, "shortNames", json!(resource.short_names));
    }
    let mut entries = vec![main];
    if resource.status {
        let verbs = ["get", "patch", "update"];
        entries.push(subresource(resource, "status", &resource.kind, &verbs));
    }
    for action in resource.actions() {
        entries.push(match *action {
            "binding" => subresource(resource, "binding", "Binding", &["create"]),
            "exec" => subresource(resource, "exec", "PodExecOptions", &["create", "get"]),
            "log" => subresource(resource, "log", "Pod", &["get"]),
            "eviction" => {
                // kubectl drain looks here for the version of the eviction API.
                let mut eviction = subresource(resource, "eviction", "Eviction", &["create"]);
                set(&mut eviction, "group", "policy".into());
                set(&mut eviction, "version", "v1".into());
                eviction
            }
            "ephemeralcontainers" | "resize" => subresource(resource, action, "Pod", &["patch", "update"]),
            // `finalize` of a Namespace, and `portforward`, which no client looks up here.
            other => subresource(resource, other, &resource.kind, &["update"]),
        });
    }
    entries
}

/// The entry of an `APIResourceList` for a subresource.
fn subresource(resource: &Resource, name: &str, kind: &str, verbs: &[&str]) -> Value {
    json!({
        "name": format!("{}/{name}", resource.plural), "singularName": "", "namespaced": resource.namespaced,
        "kind": kind, "verbs": verbs,
    })
}

/// The answer to `/openapi/v3`: the URL of the `OpenAPI` document of each group and version.
fn openapi_index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for resource in registry.all() {
        let root = if resource.group.is_empty() { "api" } else { "apis" };
        let path = format!("{root}/{}", resource.api_version());
        let url = format!("/openapi/v3/{path}");
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json!({"paths": paths})
}

/// The `OpenAPI` document of a group and version, cut down to the parts that kubectl reads.
fn openapi(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let members = resources_of(registry, group, version);
    if members.is_empty() {
        return None;
    }
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for resource in members {
        let kind = json!({"group": group, "version": version, "kind": resource.kind});
        let root = if group.is_empty() { "/api" } else { "/apis" };
        let scope = if resource.namespaced {
            "/namespaces/{namespace}"
        } else {
            ""
        };
        let (api_version, plural) = (resource.api_version(), &resource.plural);
        let path = format!("{root}/{api_version}{scope}/{plural}/{{name}}");
        let parameter = |name: &str| json!({"name": name, "in": "query", "schema": {"type": "string"}});
        let operation = json!({
            "x-kubernetes-action": "patch", "x-kubernetes-group-version-kind": kind,
            "parameters": [parameter("dryRun"), parameter("fieldManager"), parameter("fieldValidation")],
            "responses": {"200": {"description": "OK"}},
        });
        // kubectl reads these parameters to learn that the server knows dry runs and field validation.
        paths.insert(path, json!({"patch": operation}));
        let mut schema = match &resource.schema {
            Value::Null => json!({"type": "object"}),
            schema => schema.clone(),
        };
        set(&mut schema, "x-kubernetes-group-version-kind", json!([kind]));
        let group = if group.is_empty() { "core" } else { group };
        schemas.insert(format!("{group}.{version}.{}", resource.kind), schema);
    }
    Some(json!({
        "openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": paths, "components": {"schemas": schemas},
    }))
}

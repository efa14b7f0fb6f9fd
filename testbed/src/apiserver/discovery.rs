//! Discovery and `OpenAPI`: the lists of kinds that the server serves.
//!
//! The `OpenAPI` documents are the least that kubectl needs: the kinds, and the parameters of a patch. They hold no field
//! schemas of built-in kinds.

use serde_json::{Map, Value, json};

use super::resource::{Registry, Resource, group_version};

/// The answer to `/version`.
pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

/// The answer to a discovery or `OpenAPI` path (without its leading slash), if it is one.
pub(crate) fn answer(registry: &Registry, path: &str) -> Option<Value> {
    match path.split('/').collect::<Vec<_>>().as_slice() {
        ["version"] => Some(version()),
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})),
        ["api", version] => resource_list(registry, "", version),
        ["apis"] => {
            let groups: Vec<Value> = groups(registry).iter().map(|g| group(registry, g)).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["apis", name] => groups(registry).contains(name).then(|| {
            let mut found = group(registry, name);
            if let Some(map) = found.as_object_mut() {
                map.insert("kind".to_owned(), Value::from("APIGroup"));
                map.insert("apiVersion".to_owned(), Value::from("v1"));
            }
            found
        }),
        ["apis", group, version] => resource_list(registry, group, version),
        ["openapi", "v3"] => Some(openapi_index(registry)),
        ["openapi", "v3", "api", version] => openapi(registry, "", version),
        ["openapi", "v3", "apis", group, version] => openapi(registry, group, version),
        _ => None,
    }
}

fn groups(registry: &Registry) -> Vec<&str> {
    let mut groups: Vec<&str> = Vec::new();
    for resource in registry.all() {
        if !resource.group.is_empty() && !groups.contains(&resource.group.as_str()) {
            groups.push(&resource.group);
        }
    }
    groups
}

fn versions<'a>(registry: &'a Registry, group: &str) -> Vec<&'a str> {
    let mut versions: Vec<&str> = Vec::new();
    for resource in registry.all().iter().filter(|r| r.group == group) {
        if !versions.contains(&resource.version.as_str()) {
            versions.push(&resource.version);
        }
    }
    versions
}

fn group(registry: &Registry, name: &str) -> Value {
    let versions: Vec<Value> = versions(registry, name)
        .into_iter()
        .map(|v| json!({"groupVersion": group_version(name, v), "version": v}))
        .collect();
    json!({"name": name, "versions": versions, "preferredVersion": versions.first()})
}

fn members<'a>(registry: &'a Registry, group: &str, version: &str) -> Vec<&'a Resource> {
    registry
        .all()
        .iter()
        .map(AsRef::as_ref)
        .filter(|r| r.group == group && r.version == version)
        .collect()
}

fn resource_list(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let members = members(registry, group, version);
    if members.is_empty() {
        return None;
    }
    let resources: Vec<Value> = members.iter().flat_map(|r| described(r)).collect();
    Some(json!({
        "kind": "APIResourceList", "apiVersion": "v1",
        "groupVersion": group_version(group, version), "resources": resources,
    }))
}

fn described(resource: &Resource) -> Vec<Value> {
    let all = [
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    ];
    let verbs: &[&str] = if resource.plural == "bindings" {
        &["create"]
    } else {
        &all
    };
    let mut main = json!({
        "name": resource.plural, "singularName": resource.singular, "namespaced": resource.namespaced,
        "kind": resource.kind, "verbs": verbs,
    });
    if let Some(map) = main.as_object_mut() {
        for (field, list) in [
            ("shortNames", &resource.short_names),
            ("categories", &resource.categories),
        ] {
            if !list.is_empty() {
                map.insert(field.to_owned(), json!(list));
            }
        }
    }
    let mut described = vec![main];
    if resource.status {
        described.push(subresource(
            resource,
            "status",
            &resource.kind,
            &["get", "patch", "update"],
        ));
    }
    for action in resource.actions() {
        described.push(match *action {
            "binding" => subresource(resource, "binding", "Binding", &["create"]),
            "log" => subresource(resource, "log", "Pod", &["get"]),
            "eviction" => {
                let mut eviction = subresource(resource, "eviction", "Eviction", &["create"]);
                if let Some(map) = eviction.as_object_mut() {
                    map.insert("group".to_owned(), Value::from("policy"));
                    map.insert("version".to_owned(), Value::from("v1"));
                }
                eviction
            }
            other => subresource(resource, other, &resource.kind, &["update"]),
        });
    }
    described
}

fn subresource(resource: &Resource, name: &str, kind: &str, verbs: &[&str]) -> Value {
    json!({
        "name": format!("{}/{name}", resource.plural), "singularName": "", "namespaced": resource.namespaced,
        "kind": kind, "verbs": verbs,
    })
}

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

fn openapi(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let members = members(registry, group, version);
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
        let path = format!(
            "{root}/{}{scope}/{}/{{name}}",
            resource.api_version(),
            resource.plural
        );
        let parameter = |name: &str| json!({"name": name, "in": "query", "schema": {"type": "string"}});
        let operation = json!({
            "x-kubernetes-action": "patch", "x-kubernetes-group-version-kind": kind,
            "parameters": [parameter("dryRun"), parameter("fieldManager"), parameter("fieldValidation")],
            "responses": {"200": {"description": "OK"}},
        });
        paths.insert(path, json!({"patch": operation}));
        let mut schema = resource
            .schema
            .as_deref()
            .cloned()
            .unwrap_or_else(|| json!({"type": "object"}));
        if let Some(map) = schema.as_object_mut() {
            map.insert("x-kubernetes-group-version-kind".to_owned(), json!([kind]));
        }
        schemas.insert(
            format!(
                "{}.{version}.{}",
                if group.is_empty() { "core" } else { group },
                resource.kind
            ),
            schema,
        );
    }
    Some(json!({
        "openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": paths, "components": {"schemas": schemas},
    }))
}

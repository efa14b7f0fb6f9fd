//! Deletion: preconditions, grace, finalizers, and namespaces, whose objects are deleted first.

use std::sync::Arc;

use chrono::{TimeDelta, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ApiState, RequestTarget, unmet_precondition};
use crate::apiserver::resource::{CRD_GROUP, CRD_PLURAL, NAMESPACES};
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::{Key, ObjectVersion};
use crate::apiserver::{object, pod};

/// The result of a deletion.
#[derive(Debug, Clone)]
pub(crate) struct Deleted {
    pub(crate) version: Arc<ObjectVersion>,
    /// True if the object is gone, not merely marked.
    pub(crate) removed: bool,
}

/// Reads the options of a deletion from a body, which may be absent.
pub(crate) fn read_options(body: &Value) -> Result<DeleteOptions, ApiError> {
    let options = Option::<DeleteOptions>::deserialize(body);
    let options = options.map_err(|error| ApiError::bad_request(format!("DeleteOptions: {error}")))?;
    Ok(options.unwrap_or_default())
}

pub(crate) fn is_dry_run(options: &DeleteOptions) -> bool {
    options.dry_run.iter().flatten().any(|stage| stage == "All")
}

/// Deletes an object, or marks it as being deleted.
pub(crate) fn delete(
    state: &mut ApiState,
    target: &RequestTarget,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let current = state.current(target)?;
    check_preconditions(target, &current.value, options)?;
    if is_dry_run(options) {
        return Ok(Deleted {
            version: current,
            removed: true,
        });
    }
    if target.resource.is("", "namespaces") {
        return delete_namespace(state, target, &current);
    }
    // CheckGracefulDelete: a pod without a node or with a final phase has nothing to end, so its grace is zero.
    let grace = if target.resource.is_pod() {
        pod::grace(&current.value, options.grace_period_seconds)
    } else {
        0
    };
    if grace == 0 && !object::has_finalizers(&current.value) {
        let version = remove_object(state, target, Value::clone(&current.value));
        return Ok(Deleted {
            version,
            removed: true,
        });
    }
    let mut marked = Value::clone(&current.value);
    mark_deleting(&mut marked, grace);
    let version = if marked == *current.value {
        current
    } else {
        state.store.put(&target.resource.storage, target.key(), marked)
    };
    Ok(Deleted {
        version,
        removed: false,
    })
}

/// The objects of a collection that selectors select.
pub(crate) fn select_objects(
    state: &ApiState,
    target: &RequestTarget,
    selectors: &Selectors,
) -> Vec<RequestTarget> {
    let mut matching = Vec::new();
    for (key, version) in state
        .store
        .scan(&target.resource.storage, &target.namespace, None)
    {
        if selectors.matches(&version.value) {
            matching.push(RequestTarget {
                namespace: key.namespace.clone(),
                name: key.name.clone(),
                ..target.clone()
            });
        }
    }
    matching
}

/// The keys of all objects of a resource in a namespace, or in all namespaces if it is empty.
fn object_keys(state: &ApiState, storage: &str, namespace: &str) -> Vec<Key> {
    let found = state.store.scan(storage, namespace, None);
    found.map(|(key, _)| key.clone()).collect()
}

/// Removes an object, with all objects of a kind if it is the definition of the kind.
pub(super) fn remove_object(state: &mut ApiState, target: &RequestTarget, last: Value) -> Arc<ObjectVersion> {
    if target.resource.is(CRD_GROUP, CRD_PLURAL) {
        state.registry.undefine(&last);
        let storage = format!(
            "{}/{}",
            object::text(&last, "/spec/group"),
            object::text(&last, "/spec/names/plural")
        );
        for key in object_keys(state, &storage, "") {
            state.store.remove(&storage, &key, None);
        }
    }
    let removed = state
        .store
        .remove(&target.resource.storage, &target.key(), Some(last.clone()));
    if !target.namespace.is_empty() {
        end_namespace_if_empty(state, &target.namespace);
    }
    // Not reached: the callers have found the object under the same lock.
    removed.unwrap_or_else(|| state.unstored(last))
}

/// Refuses a deletion whose preconditions name another UID or version than the stored object has.
fn check_preconditions(
    target: &RequestTarget,
    object: &Value,
    options: &DeleteOptions,
) -> Result<(), ApiError> {
    let found = object::text(object, "/metadata/uid");
    let version = object::text(object, "/metadata/resourceVersion");
    let Some(asked) = &options.preconditions else {
        return Ok(());
    };
    for (what, asked, found) in [
        ("UID", &asked.uid, found),
        ("ResourceVersion", &asked.resource_version, version),
    ] {
        if let Some(why) = unmet_precondition(what, asked.as_deref().unwrap_or_default(), found) {
            let plural = target.resource.qualified();
            return Err(ApiError::conflict(&plural, &target.name, &why));
        }
    }
    Ok(())
}

/// Marks an object as being deleted after `grace` seconds; a later deletion can only shorten the grace.
fn mark_deleting(object: &mut Value, grace: i64) {
    let earlier_end = object::parse_time(object::text(object, "/metadata/deletionTimestamp"));
    let earlier_grace = object::integer(object, "/metadata/deletionGracePeriodSeconds").unwrap_or(0);
    // BeforeDelete: a later deletion may shorten the grace, and counts from the first one.
    let started = match earlier_end {
        Some(_) if grace >= earlier_grace => return,
        Some(end) => end - TimeDelta::seconds(earlier_grace),
        None => Utc::now(),
    };
    let end = started + TimeDelta::seconds(grace);
    let generation = object::integer(object, "/metadata/generation");
    let meta = object::meta(object);
    meta.insert("deletionTimestamp".to_owned(), object::timestamp(end));
    meta.insert("deletionGracePeriodSeconds".to_owned(), Value::from(grace));
    if let Some(generation) = generation.filter(|_| earlier_end.is_none()) {
        meta.insert("generation".to_owned(), Value::from(generation + 1));
    }
}

/// Marks a namespace as terminating and deletes every object in it; the namespace goes with the last of them.
fn delete_namespace(
    state: &mut ApiState,
    target: &RequestTarget,
    current: &ObjectVersion,
) -> Result<Deleted, ApiError> {
    let mut marked = Value::clone(&current.value);
    mark_deleting(&mut marked, 0);
    object::make_object(&mut marked).insert("status".to_owned(), json!({"phase": "Terminating"}));
    let version = state.store.put(&target.resource.storage, target.key(), marked);
    let contents: Vec<_> = state.registry.namespaced().cloned().collect();
    for resource in contents {
        for key in object_keys(state, &resource.storage, &target.name) {
            let inner = RequestTarget {
                resource: Arc::clone(&resource),
                namespace: key.namespace,
                name: key.name,
                subresource: String::new(),
            };
            delete(state, &inner, &DeleteOptions::default())?;
        }
    }
    end_namespace_if_empty(state, &target.name);
    Ok(Deleted {
        version,
        removed: false,
    })
}

/// Removes a namespace that is being deleted once nothing is left in it.
fn end_namespace_if_empty(state: &mut ApiState, name: &str) {
    let key = Key::new("", name);
    let Some(namespace) = state.store.get(NAMESPACES, &key) else {
        return;
    };
    if !object::is_deleting(&namespace.value) || object::has_finalizers(&namespace.value) {
        return;
    }
    let mut resources = state.registry.namespaced();
    if resources.all(|r| object_keys(state, &r.storage, name).is_empty()) {
        state.store.remove(NAMESPACES, &key, None);
    }
}

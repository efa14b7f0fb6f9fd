//! Deletion: preconditions, grace, finalizers, and namespaces, whose objects are deleted first.

use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};

use super::{ApiState, RequestTarget, WrittenPart};
use crate::apiserver::resource::{CRD_GROUP, CRD_PLURAL, NAMESPACES};
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::{Key, ObjectVersion};
use crate::apiserver::{object, pod};

/// The fields of `DeleteOptions` that the model knows.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeleteOptions {
    /// The grace period in seconds.
    pub(crate) grace: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
    pub(crate) dry_run: bool,
    pub(crate) now: DateTime<Utc>,
}

/// The result of a deletion.
#[derive(Debug, Clone)]
pub(crate) struct Deleted {
    pub(crate) version: Arc<ObjectVersion>,
    /// True if the object is gone, not merely marked.
    pub(crate) removed: bool,
}

impl DeleteOptions {
    pub(crate) fn read(body: &Value, now: DateTime<Utc>) -> Self {
        let text = |pointer: &str| Some(object::text(body, pointer).to_owned()).filter(|t| !t.is_empty());
        Self {
            grace: body.get("gracePeriodSeconds").and_then(Value::as_i64),
            uid: text("/preconditions/uid"),
            resource_version: text("/preconditions/resourceVersion"),
            dry_run: object::array(body, "/dryRun").iter().any(|d| d == "All"),
            now,
        }
    }
}

/// Deletes an object, or marks it as being deleted.
pub(crate) fn delete(
    state: &mut ApiState,
    target: &RequestTarget,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let current = state.current(target)?;
    check_preconditions(target, &current.value, options)?;
    if options.dry_run {
        return Ok(Deleted {
            version: current,
            removed: true,
        });
    }
    if target.resource.is("", "namespaces") {
        return delete_namespace(state, target, &current, options);
    }
    // CheckGracefulDelete: a pod without a node or with a final phase has nothing to end, so its grace is zero.
    let grace = if target.resource.is_pod() {
        pod::grace(&current.value, options.grace)
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
    mark_deleting(&mut marked, grace, options.now);
    let version = if marked == *current.value {
        current
    } else {
        state.store.put(target.storage(), target.key(), marked)
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
    let namespace = Some(target.namespace.as_str()).filter(|n| !n.is_empty());
    let mut matching = Vec::new();
    for (key, version) in state.store.scan(&target.resource.storage, namespace, None) {
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

/// The keys of all objects of a resource in a namespace, or in all namespaces.
fn object_keys(state: &ApiState, storage: &str, namespace: Option<&str>) -> Vec<Key> {
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
        for key in object_keys(state, &storage, None) {
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
    for (what, asked, found) in [
        ("UID", &options.uid, found),
        ("ResourceVersion", &options.resource_version, version),
    ] {
        if let Some(asked) = asked
            && asked != found
        {
            let why = format!(
                "Precondition failed: {what} in precondition: {asked}, {what} in object meta: {found}"
            );
            return Err(ApiError::conflict(
                &target.resource.qualified(),
                &target.name,
                &why,
            ));
        }
    }
    Ok(())
}

/// Marks an object as being deleted after `grace` seconds; a later deletion can only shorten the grace.
fn mark_deleting(object: &mut Value, grace: i64, now: DateTime<Utc>) {
    let earlier_end = object::parse_time(object::text(object, "/metadata/deletionTimestamp"));
    let earlier_grace = object::integer(object, "/metadata/deletionGracePeriodSeconds").unwrap_or(0);
    // BeforeDelete: a later deletion may shorten the grace, and counts from the first one.
    let started = match earlier_end {
        Some(_) if grace >= earlier_grace => return,
        Some(end) => end - TimeDelta::seconds(earlier_grace),
        None => now,
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
    current: &Arc<ObjectVersion>,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let mut marked = Value::clone(&current.value);
    mark_deleting(&mut marked, 0, options.now);
    object::make_object(&mut marked).insert("status".to_owned(), json!({"phase": "Terminating"}));
    let version = state.store.put(target.storage(), target.key(), marked);
    let contents: Vec<_> = state.registry.namespaced().cloned().collect();
    let each = DeleteOptions {
        now: options.now,
        ..DeleteOptions::default()
    };
    for resource in contents {
        for key in object_keys(state, &resource.storage, Some(&target.name)) {
            let inner = RequestTarget {
                resource: Arc::clone(&resource),
                namespace: key.namespace,
                name: key.name,
                part: WrittenPart::Object,
            };
            delete(state, &inner, &each)?;
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
    if resources.all(|r| object_keys(state, &r.storage, Some(name)).is_empty()) {
        state.store.remove(NAMESPACES, &key, None);
    }
}

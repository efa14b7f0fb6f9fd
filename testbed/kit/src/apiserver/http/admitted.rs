//! Writes with admission: webhooks and policies are called between the draft of an object and its storage.
//!
//! A write that no webhook or policy applies to is one step under the lock. Any other is drafted, shown to webhooks
//! without the lock, and drafted again if another write has changed the object meanwhile.

use std::sync::Arc;

use serde_json::{Value, json};

use super::Server;
use super::request::ApiRequest;
use crate::apiserver::admission::{AdmissionChain, AdmissionOperation, ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::patch::PatchFormat;
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::verbs::delete::{DeleteOptions, Deleted};
use crate::apiserver::verbs::patch::PatchedObject;
use crate::apiserver::verbs::{
    ApiState, RequestTarget, WriteOptions, Written, binding, create, delete, patch, update,
};
use crate::pods::set;

/// The number of drafts of one write; the conflict of the last is returned, as by `GuaranteedUpdate`.
const ATTEMPTS: usize = 5;

/// The webhooks and policies that apply to a write.
fn admission_chain(server: &Server, write: &ReviewedWrite<'_>) -> AdmissionChain {
    AdmissionChain::for_request(&server.objects.state(), server.objects.services(), write)
}

/// Creates an object after admission, for a request that creates or patches it.
pub(super) async fn create(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    let reviewed_target = RequestTarget {
        name: object::text(&body, "/metadata/name").to_owned(),
        ..target.clone()
    };
    let write = reviewed_write(request, AdmissionOperation::Create, &reviewed_target, options);
    let chain = admission_chain(server, &write);
    if chain.applies_to_nothing() {
        return create::create(&mut server.objects.state_mut(), target, body, options);
    }
    let (mut named_target, mut draft) = create::draft_new(&server.objects.state(), target, body, options)?;
    let mut shown = draft.clone();
    hide_system_fields(&mut shown, reviewed_target.name.is_empty());
    let mutated = chain
        .mutate(&write, ReviewObjects::created(shown.clone()))
        .await?;
    // An object that webhooks have changed is drafted again: a default may be missing now.
    if mutated != shown {
        (named_target, draft) = create::draft_new(&server.objects.state(), target, mutated, options)?;
    }
    create::check_new(&named_target, &draft)?;
    let reviewed = ReviewObjects::created(draft.clone());
    chain.validate(&write, &reviewed).await?;
    create::store_new(&mut server.objects.state_mut(), &named_target, draft, options)
}

/// Replaces an object after admission.
pub(super) async fn update(
    server: &Server,
    request: &ApiRequest,
    body: Value,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    let target = request.route.target();
    let draft = |state: &ApiState| {
        Ok(PatchedObject::Changed {
            new: update::draft_update(state, &target, body.clone())?,
            applied: false,
        })
    };
    change_object(server, request, &target, options, draft).await
}

/// Patches an object after admission.
pub(super) async fn patch(
    server: &Server,
    request: &ApiRequest,
    format: PatchFormat,
    body: Value,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    let target = request.route.target();
    let draft = |state: &ApiState| patch::draft_patch(state, &target, format, body.clone(), options);
    change_object(server, request, &target, options, draft).await
}

/// Changes an object after admission. `draft` computes the new object from the stored state; it is called again after a
/// conflict with another write.
async fn change_object(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    options: &WriteOptions,
    draft: impl Fn(&ApiState) -> Result<PatchedObject, ApiError>,
) -> Result<Written, ApiError> {
    let write = reviewed_write(request, AdmissionOperation::Update, target, options);
    let chain = admission_chain(server, &write);
    let mut attempt = 1;
    loop {
        let drafted = if chain.applies_to_nothing() {
            // Draft and storage under one lock: no other write can come in between.
            let mut state = server.objects.state_mut();
            match draft(&state)? {
                created @ PatchedObject::New(..) => created,
                PatchedObject::Changed { new, applied } => {
                    return update::commit(&mut state, target, new, options, applied);
                }
            }
        } else {
            draft(&server.objects.state())?
        };
        let (new, applied) = match drafted {
            PatchedObject::New(body, options) => {
                return create(server, request, target, body, &options).await;
            }
            PatchedObject::Changed { new, applied } => (new, applied),
        };
        match try_change(server, target, &write, &chain, new, options, applied).await {
            // The client's resourceVersion, if it sent one, is part of the draft, so its own conflict repeats
            // in each attempt and is returned in the end.
            Err(error) if error.code == 409 && attempt < ATTEMPTS => attempt += 1,
            outcome => return outcome,
        }
    }
}

/// Runs admission on one draft of a changed object and stores the result; `applied` is that of [`update::commit`]. Another write
/// in between makes it fail with a conflict.
async fn try_change(
    server: &Server,
    target: &RequestTarget,
    write: &ReviewedWrite<'_>,
    chain: &AdmissionChain,
    new: Value,
    options: &WriteOptions,
    applied: bool,
) -> Result<Written, ApiError> {
    let current = server.objects.state().current(target)?;
    let old = Arc::clone(&current.value);
    let objects = ReviewObjects {
        old: Arc::clone(&old),
        new: new.clone(),
    };
    let mutated = chain.mutate(write, objects).await?;
    let new = if mutated == new {
        new
    } else {
        update::draft_update(&server.objects.state(), target, mutated)?
    };
    let settled = update::settle(&server.objects.state(), target, new, applied)?;
    let new = settled.after().clone();
    chain.validate(write, &ReviewObjects { old, new }).await?;
    update::store_settled(&mut server.objects.state_mut(), target, settled, options)
}

/// Deletes one object after admission; a request for a collection deletes many.
pub(super) async fn delete(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let write_options = WriteOptions {
        dry_run: options.dry_run,
        manager: String::new(),
        is_apply: false,
        now: options.now,
    };
    let write = reviewed_write(request, AdmissionOperation::Delete, target, &write_options);
    let chain = admission_chain(server, &write);
    if !chain.applies_to_nothing() {
        let current = server.objects.state().current(target)?;
        let objects = ReviewObjects {
            old: Arc::clone(&current.value),
            new: Value::Null,
        };
        chain.mutate(&write, objects.clone()).await?;
        chain.validate(&write, &objects).await?;
    }
    delete::delete(&mut server.objects.state_mut(), target, options)
}

/// Deletes the objects that selectors select; each deletion passes admission by itself.
pub(super) async fn delete_all(
    server: &Server,
    request: &ApiRequest,
    selectors: &Selectors,
    options: &DeleteOptions,
) -> Result<Vec<Arc<ObjectVersion>>, ApiError> {
    let found = delete::select_objects(&server.objects.state(), &request.route.target(), selectors);
    let mut deleted = Vec::new();
    for target in found {
        match delete(server, request, &target, options).await {
            Ok(one) => deleted.push(one.version),
            // Another request has deleted the object in between.
            Err(error) if error.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(deleted)
}

/// Binds a pod to a node after admission of the Binding. The URL `/namespaces/NS/bindings` does not name the pod, so `pod` does.
pub(super) async fn bind(
    server: &Server,
    request: &ApiRequest,
    pod: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> Result<(), ApiError> {
    // Webhooks see a POST to `/namespaces/NS/bindings` as a creation of the resource `bindings`, though it binds a pod too.
    let target = RequestTarget {
        name: pod.name.clone(),
        ..request.route.target()
    };
    let binding = admit_action(server, request, &target, body, options).await?;
    binding::bind(&mut server.objects.state_mut(), pod, &binding, options).map(drop)
}

/// Evicts a pod after admission of the Eviction.
pub(super) async fn evict(
    server: &Server,
    request: &ApiRequest,
    body: Value,
    options: &WriteOptions,
) -> Result<(), ApiError> {
    let target = request.route.target();
    let eviction = admit_action(server, request, &target, body, options).await?;
    binding::evict(&mut server.objects.state_mut(), &target, &eviction, options)
}

/// Runs admission for the object of a create-only subresource, such as a Binding; returns the object as webhooks leave it.
async fn admit_action(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let write = reviewed_write(request, AdmissionOperation::Create, target, options);
    let chain = admission_chain(server, &write);
    if chain.applies_to_nothing() {
        return Ok(body);
    }
    let body = chain.mutate(&write, ReviewObjects::created(body)).await?;
    let objects = ReviewObjects::created(body);
    chain.validate(&write, &objects).await?;
    Ok(objects.new)
}

/// Describes a write in the form in which webhooks and policies see it.
fn reviewed_write<'a>(
    request: &'a ApiRequest,
    operation: AdmissionOperation,
    target: &'a RequestTarget,
    options: &WriteOptions,
) -> ReviewedWrite<'a> {
    let kind = match (operation, request.route.verb) {
        (_, "patch") => "PatchOptions",
        (AdmissionOperation::Create, _) => "CreateOptions",
        (AdmissionOperation::Update, _) => "UpdateOptions",
        (AdmissionOperation::Delete, _) => "DeleteOptions",
    };
    let mut options_body = json!({"kind": kind, "apiVersion": "meta.k8s.io/v1"});
    if !options.manager.is_empty() {
        set(
            &mut options_body,
            "fieldManager",
            Value::from(options.manager.clone()),
        );
    }
    if options.dry_run {
        set(&mut options_body, "dryRun", json!(["All"]));
    }
    ReviewedWrite {
        operation,
        target,
        subresource: &request.route.subresource,
        user: &request.user,
        dry_run: options.dry_run,
        options: options_body,
    }
}

/// Removes the fields that a new object gets only after the mutating webhooks.
fn hide_system_fields(shown: &mut Value, is_unnamed: bool) {
    let meta = object::meta(shown);
    for field in ["uid", "creationTimestamp", "generation"] {
        meta.remove(field);
    }
    if is_unnamed {
        meta.remove("name");
    }
}

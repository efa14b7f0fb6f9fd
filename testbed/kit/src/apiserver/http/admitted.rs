//! Writes with admission: webhooks and policies are called between the draft of an object and its storage.
//!
//! Webhooks are called without the lock, so that a change is drafted again if another write has changed the object meanwhile.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use serde_json::Value;

use super::Server;
use super::request::ApiRequest;
use crate::apiserver::admission::{AdmissionChain, ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::patch::PatchFormat;
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::verbs::delete::Deleted;
use crate::apiserver::verbs::{RequestTarget, binding, check_body, create, delete, patch, update};

/// The number of drafts of one write; the conflict of the last is returned, as by `GuaranteedUpdate`.
const ATTEMPTS: usize = 5;

/// Creates an object after admission, for a request that creates or patches it.
pub(super) async fn create(
    server: &Server,
    request: &ApiRequest,
    body: Value,
) -> Result<Arc<ObjectVersion>, ApiError> {
    let (objects, target) = (&server.objects, &request.target);
    let reviewed_target = RequestTarget {
        name: object::text(&body, "/metadata/name").to_owned(),
        ..target.clone()
    };
    let write = reviewed_write(request, "CREATE", &reviewed_target);
    let chain = AdmissionChain::for_request(objects, &write);
    let (mut named_target, mut draft) = create::draft_new(&objects.state(), target, body)?;
    let mut shown = draft.clone();
    hide_system_fields(&mut shown, reviewed_target.name.is_empty());
    let mutated = chain
        .mutate(&write, ReviewObjects::created(shown.clone()))
        .await?;
    // An object that webhooks have changed is drafted again: a default may be missing now.
    if mutated != shown {
        (named_target, draft) = create::draft_new(&objects.state(), target, mutated)?;
    }
    create::check_new(&named_target, &draft)?;
    let reviewed = ReviewObjects::created(draft);
    chain.validate(&write, &reviewed).await?;
    let mut state = objects.state_mut();
    create::store_new(&mut state, &named_target, reviewed.new, request.dry_run())
}

/// Replaces an object after admission.
pub(super) async fn update(
    server: &Server,
    request: &ApiRequest,
    body: Value,
) -> Result<Arc<ObjectVersion>, ApiError> {
    let draft = |live: Option<&Value>| update::draft_update(&request.target, live, body.clone());
    let (version, _) = change_object(server, request, draft).await?;
    Ok(version)
}

/// Patches an object after admission; true if that creates it.
pub(super) async fn patch(
    server: &Server,
    request: &ApiRequest,
    format: PatchFormat,
    body: Value,
) -> Result<(Arc<ObjectVersion>, bool), ApiError> {
    let manager = request.query.get("fieldManager").unwrap_or_default();
    let draft =
        |live: Option<&Value>| patch::draft_patch(&request.target, live, format, body.clone(), manager);
    change_object(server, request, draft).await
}

/// Changes an object after admission. `draft` computes the new object from the stored one; it is called again after a conflict
/// with another write. A draft without a stored object is a creation.
async fn change_object(
    server: &Server,
    request: &ApiRequest,
    draft: impl Fn(Option<&Value>) -> Result<Value, ApiError>,
) -> Result<(Arc<ObjectVersion>, bool), ApiError> {
    let write = reviewed_write(request, "UPDATE", &request.target);
    let chain = AdmissionChain::for_request(&server.objects, &write);
    let mut attempt = 1;
    loop {
        let live = server.objects.state().find(&request.target);
        let new = draft(live.as_ref().map(|live| &*live.value))?;
        let Some(before) = live else {
            return Ok((create(server, request, new).await?, true));
        };
        match try_change(server, request, (&write, &chain), before, new).await {
            // The client's resourceVersion, if it sent one, is part of the draft, so its own conflict repeats
            // in each attempt and is returned in the end.
            Err(error) if error.code == 409 && attempt < ATTEMPTS => attempt += 1,
            outcome => return Ok((outcome?, false)),
        }
    }
}

/// Runs admission on one draft of a changed object and stores the result. Another write in between makes it fail with a conflict.
async fn try_change(
    server: &Server,
    request: &ApiRequest,
    (write, chain): (&ReviewedWrite<'_>, &AdmissionChain),
    before: Arc<ObjectVersion>,
    new: Value,
) -> Result<Arc<ObjectVersion>, ApiError> {
    let target = &request.target;
    let old = Arc::clone(&before.value);
    let objects = ReviewObjects {
        old: Arc::clone(&old),
        new,
    };
    let mut mutated = chain.mutate(write, objects).await?;
    check_body(target, &mut mutated)?;
    let new = update::settle(target, &old, mutated)?;
    let reviewed = ReviewObjects { old, new };
    chain.validate(write, &reviewed).await?;
    let mut state = server.objects.state_mut();
    update::store_settled(&mut state, target, before, reviewed.new, request.dry_run())
}

/// Deletes one object after admission; a request for a collection deletes many.
pub(super) async fn delete(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    options: &DeleteOptions,
) -> Result<Deleted, ApiError> {
    let write = reviewed_write(request, "DELETE", target);
    let chain = AdmissionChain::for_request(&server.objects, &write);
    let current = server.objects.state().current(target)?;
    let objects = ReviewObjects {
        old: Arc::clone(&current.value),
        new: Value::Null,
    };
    chain.mutate(&write, objects.clone()).await?;
    chain.validate(&write, &objects).await?;
    delete::delete(&mut server.objects.state_mut(), target, options)
}

/// Deletes the objects that selectors select; each deletion passes admission by itself.
pub(super) async fn delete_all(
    server: &Server,
    request: &ApiRequest,
    selectors: &Selectors,
    options: &DeleteOptions,
) -> Result<Vec<Arc<ObjectVersion>>, ApiError> {
    let found = delete::select_objects(&server.objects.state(), &request.target, selectors);
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

/// Binds a pod to a node after admission of the Binding. A POST to `/namespaces/NS/bindings` names the pod in the body, one to
/// `pods/NAME/binding` in the URL.
pub(super) async fn bind(server: &Server, request: &ApiRequest, body: Value) -> Result<(), ApiError> {
    let mut pod = request.target.clone();
    if pod.name.is_empty() {
        object::text(&body, "/metadata/name").clone_into(&mut pod.name);
        pod.resource = server.objects.resource("pods")?;
    }
    // Webhooks see a POST to `/namespaces/NS/bindings` as a creation of the resource `bindings`, though it binds a pod too.
    let target = RequestTarget {
        name: pod.name.clone(),
        ..request.target.clone()
    };
    let binding = admit_action(server, request, &target, body).await?;
    binding::bind(&mut server.objects.state_mut(), &pod, &binding, request.dry_run())?;
    Ok(())
}

/// Evicts a pod after admission of the Eviction.
pub(super) async fn evict(server: &Server, request: &ApiRequest, body: Value) -> Result<(), ApiError> {
    let target = &request.target;
    let eviction = admit_action(server, request, target, body).await?;
    binding::evict(
        &mut server.objects.state_mut(),
        target,
        &eviction,
        request.dry_run(),
    )
}

/// Runs admission for the object of a create-only subresource, such as a Binding; returns the object as webhooks leave it.
async fn admit_action(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    body: Value,
) -> Result<Value, ApiError> {
    let write = reviewed_write(request, "CREATE", target);
    let chain = AdmissionChain::for_request(&server.objects, &write);
    let body = chain.mutate(&write, ReviewObjects::created(body)).await?;
    let objects = ReviewObjects::created(body);
    chain.validate(&write, &objects).await?;
    Ok(objects.new)
}

/// Describes a write in the form in which webhooks and policies see it.
fn reviewed_write<'a>(
    request: &'a ApiRequest,
    operation: &'static str,
    target: &'a RequestTarget,
) -> ReviewedWrite<'a> {
    ReviewedWrite {
        operation,
        target,
        user: &request.user,
        manager: request.query.get("fieldManager").unwrap_or_default(),
        dry_run: request.dry_run(),
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

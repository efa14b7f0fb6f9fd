//! Writes on their way past the admission webhooks to the rules of the API.
//!
//! A write that no webhook applies to is one step under the lock. Any other is worked out, sent to the webhooks without the
//! lock, and begun again if the object has changed meanwhile.

use std::sync::Arc;

use serde_json::{Value, json};

use super::Server;
use super::request::ApiRequest;
use crate::apiserver::admission::{self, AdmissionChain, AdmissionOperation, ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::patch::PatchFormat;
use crate::apiserver::render;
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::verbs::delete::{DeleteOptions, Deleted};
use crate::apiserver::verbs::patch::PatchedObject;
use crate::apiserver::verbs::{
    ApiState, RequestTarget, WriteOptions, Written, binding, create, delete, patch, update,
};

/// Attempts of a write that other writes come in between of.
const ATTEMPTS: usize = 5;

/// The result of a write, and the warnings of webhooks.
#[derive(Debug)]
pub(super) struct AdmittedWrite<T> {
    pub(super) done: T,
    pub(super) warnings: Vec<String>,
}

impl<T> AdmittedWrite<T> {
    fn unasked(done: T) -> Self {
        Self {
            done,
            warnings: Vec::new(),
        }
    }

    fn through(gate: &AdmissionChain, done: T) -> Self {
        Self {
            done,
            warnings: gate.warnings(),
        }
    }
}

type AdmissionResult<T> = Result<AdmittedWrite<T>, ApiError>;

fn gate(server: &Server, asked: &ReviewedWrite<'_>) -> AdmissionChain {
    AdmissionChain::of(
        &server.objects.state(),
        server.objects.services(),
        server.objects.params(),
        asked,
    )
}

pub(super) async fn create(
    server: &Server,
    request: &ApiRequest,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<Written> {
    create_at(server, request, &request.route.target(), body, options).await
}

async fn create_at(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<Written> {
    let named = RequestTarget {
        name: object::text(&body, "/metadata/name").to_owned(),
        ..target.clone()
    };
    let asked = asked(request, AdmissionOperation::Create, &named, options);
    let gate = gate(server, &asked);
    if gate.is_open() {
        return create::create(&mut server.objects.state_mut(), target, body, options)
            .map(AdmittedWrite::unasked);
    }
    let resource = &target.resource;
    let (mut settled, mut draft) = create::draft_new(&server.objects.state(), target, body, options)?;
    let mut shown = render::shown(resource, &draft);
    hide_system_fields(&mut shown, named.name.is_empty());
    let mutated = gate
        .mutate(
            &asked,
            ReviewObjects {
                old: Arc::default(),
                new: shown.clone(),
            },
        )
        .await?;
    if mutated != shown {
        (settled, draft) = create::draft_new(&server.objects.state(), target, mutated, options)?;
    }
    create::check_new(&settled, &draft)?;
    gate.validate(
        &asked,
        &ReviewObjects {
            old: Arc::default(),
            new: render::shown(resource, &draft),
        },
    )
    .await?;
    let written = create::store_new(&mut server.objects.state_mut(), &settled, draft, options)?;
    Ok(AdmittedWrite::through(&gate, written))
}

pub(super) async fn update(
    server: &Server,
    request: &ApiRequest,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<Written> {
    let target = request.route.target();
    let draft = |state: &ApiState| {
        Ok(PatchedObject::Changed {
            new: update::draft_update(state, &target, body.clone())?,
            applied: false,
        })
    };
    change(server, request, &target, options, draft).await
}

pub(super) async fn patch(
    server: &Server,
    request: &ApiRequest,
    format: PatchFormat,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<Written> {
    let target = request.route.target();
    let draft = |state: &ApiState| patch::draft_patch(state, &target, format, body.clone(), options);
    change(server, request, &target, options, draft).await
}

async fn change(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    options: &WriteOptions,
    draft: impl Fn(&ApiState) -> Result<PatchedObject, ApiError>,
) -> AdmissionResult<Written> {
    let asked = asked(request, AdmissionOperation::Update, target, options);
    let gate = gate(server, &asked);
    let mut attempt = 1;
    loop {
        let drafted = if gate.is_open() {
            let mut state = server.objects.state_mut();
            match draft(&state)? {
                PatchedObject::New(body, options) => PatchedObject::New(body, options),
                PatchedObject::Changed { new, applied } => {
                    return update::commit(&mut state, target, new, options, applied)
                        .map(AdmittedWrite::unasked);
                }
            }
        } else {
            draft(&server.objects.state())?
        };
        let (new, applied) = match drafted {
            PatchedObject::New(body, options) => {
                return create_at(server, request, target, body, &options).await;
            }
            PatchedObject::Changed { new, applied } => (new, applied),
        };
        match change_once(server, target, &asked, &gate, new, options, applied).await {
            Err(error) if error.code == 409 && attempt < ATTEMPTS => attempt += 1,
            outcome => return outcome.map(|written| AdmittedWrite::through(&gate, written)),
        }
    }
}

async fn change_once(
    server: &Server,
    target: &RequestTarget,
    asked: &ReviewedWrite<'_>,
    gate: &AdmissionChain,
    new: Value,
    options: &WriteOptions,
    applied: bool,
) -> Result<Written, ApiError> {
    let resource = &target.resource;
    let old = Arc::new(render::shown(
        resource,
        &server.objects.state().current(target)?.value,
    ));
    let shown = render::shown(resource, &new);
    let mutated = gate
        .mutate(
            asked,
            ReviewObjects {
                old: Arc::clone(&old),
                new: shown.clone(),
            },
        )
        .await?;
    let new = if mutated == shown {
        new
    } else {
        update::draft_update(&server.objects.state(), target, mutated)?
    };
    let settled = update::settle(&server.objects.state(), target, new, options, applied)?;
    gate.validate(
        asked,
        &ReviewObjects {
            old,
            new: render::shown(resource, settled.after()),
        },
    )
    .await?;
    update::store_settled(&mut server.objects.state_mut(), target, settled, options)
}

pub(super) async fn delete(
    server: &Server,
    request: &ApiRequest,
    options: &DeleteOptions,
) -> AdmissionResult<Deleted> {
    delete_at(server, request, &request.route.target(), options).await
}

async fn delete_at(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    options: &DeleteOptions,
) -> AdmissionResult<Deleted> {
    let write_options = WriteOptions {
        dry_run: options.dry_run,
        manager: String::new(),
        force: false,
        now: options.now,
    };
    let asked = asked(request, AdmissionOperation::Delete, target, &write_options);
    let gate = gate(server, &asked);
    if !gate.is_open() {
        let old = admission::value_of(Some(&server.objects.state().current(target)?));
        let objects = ReviewObjects {
            old,
            new: Value::Null,
        };
        gate.mutate(&asked, objects.clone()).await?;
        gate.validate(&asked, &objects).await?;
    }
    let deleted = delete::delete(&mut server.objects.state_mut(), target, options)?;
    Ok(AdmittedWrite::through(&gate, deleted))
}

/// Deletes the objects that a selector finds, each past the webhooks on its own.
pub(super) async fn delete_all(
    server: &Server,
    request: &ApiRequest,
    selectors: &Selectors,
    options: &DeleteOptions,
) -> AdmissionResult<Vec<Arc<ObjectVersion>>> {
    let found = delete::select(&server.objects.state(), &request.route.target(), selectors);
    let mut passed = AdmittedWrite::unasked(Vec::new());
    for target in found {
        match delete_at(server, request, &target, options).await {
            Ok(one) => {
                passed.done.push(one.done.version);
                passed.warnings.extend(one.warnings);
            }
            // Another write came first.
            Err(error) if error.code == 404 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(passed)
}

pub(super) async fn bind(
    server: &Server,
    request: &ApiRequest,
    pod: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<()> {
    // `POST bindings` is a request for that resource, though it binds a pod all the same.
    let target = RequestTarget {
        name: pod.name.clone(),
        ..request.route.target()
    };
    let (gate, binding) = admit_action(server, request, &target, body, options).await?;
    binding::bind(&mut server.objects.state_mut(), pod, &binding, options)?;
    Ok(AdmittedWrite::through(&gate, ()))
}

pub(super) async fn evict(
    server: &Server,
    request: &ApiRequest,
    body: Value,
    options: &WriteOptions,
) -> AdmissionResult<()> {
    let target = request.route.target();
    let (gate, eviction) = admit_action(server, request, &target, body, options).await?;
    binding::evict(&mut server.objects.state_mut(), &target, &eviction, options)?;
    Ok(AdmittedWrite::through(&gate, ()))
}

/// Shows the object of a create-only subresource to the webhooks.
async fn admit_action(
    server: &Server,
    request: &ApiRequest,
    target: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> Result<(AdmissionChain, Value), ApiError> {
    let asked = asked(request, AdmissionOperation::Create, target, options);
    let gate = gate(server, &asked);
    if gate.is_open() {
        return Ok((gate, body));
    }
    let body = gate
        .mutate(
            &asked,
            ReviewObjects {
                old: Arc::default(),
                new: body,
            },
        )
        .await?;
    let objects = ReviewObjects {
        old: Arc::default(),
        new: body,
    };
    gate.validate(&asked, &objects).await?;
    Ok((gate, objects.new))
}

fn asked<'a>(
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
    let mut given = json!({"kind": kind, "apiVersion": "meta.k8s.io/v1"});
    if !options.manager.is_empty() {
        object::make_object(&mut given)
            .insert("fieldManager".to_owned(), Value::from(options.manager.clone()));
    }
    if options.dry_run {
        object::make_object(&mut given).insert("dryRun".to_owned(), json!(["All"]));
    }
    ReviewedWrite {
        operation,
        target,
        subresource: &request.route.subresource,
        user: &request.user,
        dry_run: options.dry_run,
        options: given,
    }
}

/// A new object gets these only after the mutating webhooks.
fn hide_system_fields(shown: &mut Value, is_unnamed: bool) {
    let meta = object::meta(shown);
    for field in ["uid", "creationTimestamp", "generation"] {
        meta.remove(field);
    }
    if is_unnamed {
        meta.remove("name");
    }
}

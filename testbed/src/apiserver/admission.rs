//! Admission webhooks and policies: the choice of those that a request has to pass, and their verdicts.
//!
//! As in a real server: mutating webhooks one after the other, in order of their configurations' names, then policies, then
//! the validating webhooks.

mod call;
mod hook;
mod policy;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use serde_json::Value;

use self::hook::{AdmissionPhase, WebhookConfig};
use self::policy::Expressions;
use super::access::User;
use super::object;
use super::resource::Resource;
use super::status::ApiError;
use super::store::{Key, ObjectVersion};
use super::verbs::{ApiState, RequestTarget};

pub(crate) use self::hook::check_configuration;
pub(crate) use self::policy::Params;

/// The addresses on this machine of ports of Services or of pods, by namespace, name and port.
#[derive(Debug, Default)]
pub(crate) struct LocalPorts(RwLock<HashMap<(String, String, u16), SocketAddr>>);

impl LocalPorts {
    pub(crate) fn set(&self, namespace: &str, name: &str, port: u16, address: SocketAddr) {
        let key = (namespace.to_owned(), name.to_owned(), port);
        self.0.write().insert(key, address);
    }

    pub(crate) fn get(&self, namespace: &str, name: &str, port: u16) -> Option<SocketAddr> {
        let key = (namespace.to_owned(), name.to_owned(), port);
        self.0.read().get(&key).copied()
    }
}

/// The operation of a request on an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdmissionOperation {
    Create,
    Update,
    Delete,
}

impl AdmissionOperation {
    fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

/// A write as webhooks see it, without the object.
#[derive(Debug)]
pub(crate) struct ReviewedWrite<'a> {
    pub(crate) operation: AdmissionOperation,
    pub(crate) target: &'a RequestTarget,
    /// Empty for the object itself.
    pub(crate) subresource: &'a str,
    pub(crate) user: &'a User,
    pub(crate) dry_run: bool,
    /// `CreateOptions` and the like.
    pub(crate) options: Value,
}

/// The object of a request before and after; null where there is none.
#[derive(Debug, Clone)]
pub(crate) struct ReviewObjects {
    pub(crate) old: Arc<Value>,
    pub(crate) new: Value,
}

/// The webhooks and policies that one request has to pass.
#[derive(Debug)]
pub(crate) struct AdmissionChain {
    mutating: Vec<WebhookConfig>,
    validating: Vec<WebhookConfig>,
    policies: Vec<policy::PolicyRule>,
    /// The namespace of the request as an object; null for cluster-scoped ones.
    namespace: Arc<Value>,
    services: Arc<LocalPorts>,
    /// Warnings and audit annotations of webhooks.
    warnings: Mutex<Vec<String>>,
}

impl AdmissionChain {
    /// The webhooks whose rules and namespace selector match, and the policies whose rules do.
    pub(crate) fn of(
        state: &ApiState,
        services: &Arc<LocalPorts>,
        params: &Params,
        request: &ReviewedWrite<'_>,
    ) -> Self {
        let resource = &request.target.resource;
        let own_kind = matches!(
            resource.plural.as_str(),
            "mutatingwebhookconfigurations" | "validatingwebhookconfigurations"
        );
        let hooks = |phase: AdmissionPhase| {
            let hooks = if own_kind {
                Vec::new()
            } else {
                hook::all(state, phase)
            };
            hooks.into_iter().filter(|hook| hook.matches(request)).collect()
        };
        let key = Key::new("", request.target.namespace.clone());
        let namespace = state
            .store
            .get(super::resource::NAMESPACES, &key)
            .map(|version| Arc::clone(&version.value));
        Self {
            mutating: hooks(AdmissionPhase::Mutating),
            validating: hooks(AdmissionPhase::Validating),
            policies: policy::rules(state, params, request),
            namespace: namespace.unwrap_or_default(),
            services: Arc::clone(services),
            warnings: Mutex::default(),
        }
    }

    /// True if no webhook and no policy applies.
    pub(crate) fn is_open(&self) -> bool {
        self.mutating.is_empty() && self.validating.is_empty() && self.policies.is_empty()
    }

    /// The warnings for the client.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }

    /// Asks the mutating webhooks; the new object as they leave it.
    pub(crate) async fn mutate(
        &self,
        request: &ReviewedWrite<'_>,
        mut objects: ReviewObjects,
    ) -> Result<Value, ApiError> {
        let mut seen = Vec::new();
        for hook in &self.mutating {
            self.mutate_by(hook, request, &mut objects).await?;
            seen.push(objects.new.clone());
        }
        for (hook, seen) in self.mutating.iter().zip(seen) {
            if hook.reinvoke && seen != objects.new {
                self.mutate_by(hook, request, &mut objects).await?;
            }
        }
        Ok(objects.new)
    }

    async fn mutate_by(
        &self,
        hook: &WebhookConfig,
        request: &ReviewedWrite<'_>,
        objects: &mut ReviewObjects,
    ) -> Result<(), ApiError> {
        let patch = self.ask(hook, request, objects).await?;
        let Some(patch) = patch.filter(|_| !objects.new.is_null()) else {
            return Ok(());
        };
        super::patch::json_patch(&mut objects.new, patch)
            .map_err(|error| ApiError::new(500, format!("Internal error occurred: {error}")))
    }

    /// Asks policies and the validating webhooks, which receive the object as it would be stored.
    pub(crate) async fn validate(
        &self,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<(), ApiError> {
        for policy in &self.policies {
            policy.validate(request, objects)?;
        }
        let answers = self
            .validating
            .iter()
            .map(|hook| self.ask(hook, request, objects));
        for answer in futures::future::join_all(answers).await {
            answer?;
        }
        Ok(())
    }

    /// The patch that a webhook answers with.
    async fn ask(
        &self,
        hook: &WebhookConfig,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<Option<Value>, ApiError> {
        if !hook.selects(request, objects, &self.namespace) {
            return Ok(None);
        }
        if !Self::is_meant(hook, request, objects)? {
            return Ok(None);
        }
        if request.dry_run && hook.has_side_effects {
            return Err(ApiError::bad_request(format!(
                "admission webhook \"{}\" does not support dry run",
                hook.name
            )));
        }
        let uid = super::name::uid();
        let review = call::request(&uid, request, objects);
        let called = call::post(&self.services, hook, &review)
            .await
            .and_then(|answer| call::read(&uid, hook, &answer));
        match called {
            Ok(verdict) => {
                let warnings = verdict.warnings.iter().cloned();
                self.warnings.lock().extend(warnings);
                verdict.decide(&hook.name)
            }
            Err(error) if hook.ignores_failure => {
                tracing::warn!(webhook = hook.name, %error, "failed calling webhook, failing open");
                Ok(None)
            }
            Err(error) => Err(ApiError::internal(&format!(
                "failed calling webhook \"{}\": {error}",
                hook.name
            ))),
        }
    }

    /// Returns true if a webhook's `matchConditions` are met; one that cannot be evaluated is a failure of the webhook.
    fn is_meant(
        hook: &WebhookConfig,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<bool, ApiError> {
        if hook.conditions.is_empty() {
            return Ok(true);
        }
        match Expressions::new(request, objects, None)
            .and_then(|expressions| expressions.are_met(&hook.conditions))
        {
            Ok(is_meant) => Ok(is_meant),
            Err(error) if hook.ignores_failure => {
                tracing::warn!(
                    webhook = hook.name,
                    error,
                    "the match conditions of a webhook cannot be evaluated, failing open"
                );
                Ok(false)
            }
            Err(error) => Err(ApiError::internal(&format!(
                "match conditions of webhook \"{}\": {error}",
                hook.name
            ))),
        }
    }
}

/// The kind of a request's object.
fn kind_of(resource: &Resource, subresource: &str, new: &Value) -> (String, String, String) {
    let own = || {
        (
            resource.group.clone(),
            resource.version.clone(),
            resource.kind.clone(),
        )
    };
    let (group, version) = object::text(new, "/apiVersion")
        .rsplit_once('/')
        .unwrap_or(("", object::text(new, "/apiVersion")));
    match subresource {
        "binding" => (String::new(), "v1".to_owned(), "Binding".to_owned()),
        "eviction" if version.is_empty() => ("policy".to_owned(), "v1".to_owned(), "Eviction".to_owned()),
        "eviction" => (group.to_owned(), version.to_owned(), "Eviction".to_owned()),
        _ => own(),
    }
}

/// The stored version of an object, or null.
pub(crate) fn value_of(version: Option<&Arc<ObjectVersion>>) -> Arc<Value> {
    version
        .map(|version| Arc::clone(&version.value))
        .unwrap_or_default()
}

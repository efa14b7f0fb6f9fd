//! Admission: the webhooks and policies that apply to a write, and their verdicts.
//!
//! The order is that of kube-apiserver: mutating webhooks one after the other, ordered by the names of their
//! configurations, then policies, then all validating webhooks at once.

mod call;
mod hook;
mod policy;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::RwLock;
use serde_json::Value;

use self::hook::{AdmissionPhase, WebhookConfig};
use self::policy::Expressions;
use super::access::User;
use super::status::ApiError;
use super::store::Key;
use super::verbs::{ApiState, RequestTarget};

pub(crate) use self::policy::ParamInformers;

/// Addresses on this machine that stand for ports of Services or of pods, by namespace, name and port.
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

/// The `operation` of an admission review.
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

/// A write as webhooks and policies see it, without the object.
#[derive(Debug)]
pub(crate) struct ReviewedWrite<'a> {
    pub(crate) operation: AdmissionOperation,
    pub(crate) target: &'a RequestTarget,
    /// Empty for the object itself.
    pub(crate) subresource: &'a str,
    pub(crate) user: &'a User,
    pub(crate) dry_run: bool,
    /// The request's `CreateOptions`, `UpdateOptions`, `PatchOptions` or `DeleteOptions`.
    pub(crate) options: Value,
}

/// The object before and after a write; null where there is none.
#[derive(Debug, Clone)]
pub(crate) struct ReviewObjects {
    pub(crate) old: Arc<Value>,
    pub(crate) new: Value,
}

impl ReviewObjects {
    pub(crate) fn created(new: Value) -> Self {
        Self {
            old: Arc::default(),
            new,
        }
    }
}

/// The webhooks and policies that one request has to pass.
#[derive(Debug)]
pub(crate) struct AdmissionChain {
    mutating: Vec<WebhookConfig>,
    validating: Vec<WebhookConfig>,
    policies: Vec<policy::PolicyRule>,
    /// The Namespace object of the request's namespace; null for cluster-scoped resources.
    namespace: Arc<Value>,
    services: Arc<LocalPorts>,
}

impl AdmissionChain {
    /// Collects the webhooks whose rules match the request, and the policies that apply to it.
    pub(crate) fn for_request(
        state: &ApiState,
        services: &Arc<LocalPorts>,
        request: &ReviewedWrite<'_>,
    ) -> Self {
        let resource = &request.target.resource;
        // Webhooks are never called for their own configurations: a broken one could otherwise not be corrected.
        let is_webhook_configuration = matches!(
            resource.plural.as_str(),
            "mutatingwebhookconfigurations" | "validatingwebhookconfigurations"
        );
        let matching_webhooks = |phase: AdmissionPhase| {
            let configured = if is_webhook_configuration {
                Vec::new()
            } else {
                hook::all_of_phase(state, phase)
            };
            configured
                .into_iter()
                .filter(|hook| hook.matches(request))
                .collect()
        };
        let key = Key::new("", request.target.namespace.clone());
        let namespace = state
            .store
            .get(super::resource::NAMESPACES, &key)
            .map(|version| Arc::clone(&version.value));
        Self {
            mutating: matching_webhooks(AdmissionPhase::Mutating),
            validating: matching_webhooks(AdmissionPhase::Validating),
            policies: policy::matching_rules(state, request),
            namespace: namespace.unwrap_or_default(),
            services: Arc::clone(services),
        }
    }

    /// Returns true if neither a webhook nor a policy applies.
    pub(crate) fn applies_to_nothing(&self) -> bool {
        self.mutating.is_empty() && self.validating.is_empty() && self.policies.is_empty()
    }

    /// Calls the mutating webhooks; returns the object with their patches.
    pub(crate) async fn mutate(
        &self,
        request: &ReviewedWrite<'_>,
        mut objects: ReviewObjects,
    ) -> Result<Value, ApiError> {
        let mut left_behind = Vec::new();
        for hook in &self.mutating {
            self.apply_webhook(hook, request, &mut objects).await?;
            left_behind.push(objects.new.clone());
        }
        for (hook, left_behind) in self.mutating.iter().zip(left_behind) {
            // reinvocationPolicy IfNeeded: a webhook is called once more if later ones have changed what it left behind.
            if hook.reinvoke && left_behind != objects.new {
                self.apply_webhook(hook, request, &mut objects).await?;
            }
        }
        Ok(objects.new)
    }

    /// Calls one mutating webhook and applies the JSON patch of its answer to the new object.
    async fn apply_webhook(
        &self,
        hook: &WebhookConfig,
        request: &ReviewedWrite<'_>,
        objects: &mut ReviewObjects,
    ) -> Result<(), ApiError> {
        let patch = self.call_webhook(hook, request, objects).await?;
        let Some(patch) = patch.filter(|_| !objects.new.is_null()) else {
            return Ok(());
        };
        super::patch::json_patch(&mut objects.new, patch)
            .map_err(|error| ApiError::new(500, format!("Internal error occurred: {error}")))
    }

    /// Evaluates policies and calls the validating webhooks, with the object as it would be stored.
    pub(crate) async fn validate(
        &self,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<(), ApiError> {
        for policy in &self.policies {
            policy.validate(request, objects)?;
        }
        // Validating webhooks cannot change the object, so kube-apiserver calls them concurrently.
        let answers = self
            .validating
            .iter()
            .map(|hook| self.call_webhook(hook, request, objects));
        for answer in futures::future::join_all(answers).await {
            answer?;
        }
        Ok(())
    }

    /// Calls one webhook; returns the patch of its answer.
    async fn call_webhook(
        &self,
        hook: &WebhookConfig,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<Option<Value>, ApiError> {
        if !hook.selects(request, objects, &self.namespace) {
            return Ok(None);
        }
        if !Self::conditions_met(hook, request, objects)? {
            return Ok(None);
        }
        let uid = super::name::uid();
        let review = call::review_of(&uid, request, objects);
        let called = call::post(&self.services, hook, &review)
            .await
            .and_then(|answer| call::read_verdict(&uid, hook, &answer));
        match called {
            Ok(verdict) => verdict.decide(&hook.name),
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

    /// Returns true if a webhook's `matchConditions` are all true. A condition that cannot be evaluated counts as a failed call.
    fn conditions_met(
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
            Ok(are_true) => Ok(are_true),
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

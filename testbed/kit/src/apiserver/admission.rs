//! Admission: the webhooks and policies that apply to a write, and their verdicts.
//!
//! The order is that of kube-apiserver: mutating webhooks one after the other, ordered by the names of their
//! configurations, then policies, then all validating webhooks at once. No webhook is called twice (`reinvocationPolicy`).

mod call;
mod hook;
mod policy;

use std::sync::Arc;

use serde_json::Value;

use self::hook::WebhookConfig;
use self::policy::Expressions;
pub(crate) use self::policy::ParamInformers;
use super::access::User;
use super::api_objects::ApiObjects;
use super::status::ApiError;
use super::store::Key;
use super::verbs::RequestTarget;

/// A write as webhooks and policies see it, without the object.
#[derive(Debug)]
pub(crate) struct ReviewedWrite<'a> {
    /// `CREATE`, `UPDATE` or `DELETE`.
    pub(crate) operation: &'static str,
    pub(crate) target: &'a RequestTarget,
    pub(crate) user: &'a User,
    /// `fieldManager` of the request; empty without one.
    pub(crate) manager: &'a str,
    pub(crate) dry_run: bool,
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
    objects: ApiObjects,
}

impl AdmissionChain {
    /// Collects the webhooks whose rules match the request, and the policies that apply to it.
    pub(crate) fn for_request(objects: &ApiObjects, request: &ReviewedWrite<'_>) -> Self {
        let state = objects.state();
        let key = Key::new("", request.target.namespace.clone());
        let namespace = state.store.get(super::resource::NAMESPACES, &key);
        Self {
            mutating: hook::matching(&state, "mutatingwebhookconfigurations", request),
            validating: hook::matching(&state, "validatingwebhookconfigurations", request),
            policies: policy::matching_rules(&state, request),
            namespace: namespace
                .map(|version| Arc::clone(&version.value))
                .unwrap_or_default(),
            objects: objects.clone(),
        }
    }

    /// Calls the mutating webhooks; returns the object with their patches.
    pub(crate) async fn mutate(
        &self,
        request: &ReviewedWrite<'_>,
        mut objects: ReviewObjects,
    ) -> Result<Value, ApiError> {
        for hook in &self.mutating {
            let patch = self.call_webhook(hook, request, &objects).await?;
            if let Some(patch) = patch.filter(|_| !objects.new.is_null()) {
                super::patch::json_patch(&mut objects.new, patch)
                    .map_err(|error| ApiError::new(500, format!("Internal error occurred: {error}")))?;
            }
        }
        Ok(objects.new)
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
        let (name, conditions) = (&hook.name, &hook.conditions);
        // A condition that cannot be evaluated counts as a failed call.
        let failure = match Expressions::new(request, objects, None).are_met(conditions) {
            Ok(false) => return Ok(None),
            Ok(true) => match call::call(&self.objects, hook, request, objects).await {
                Ok(verdict) => return verdict,
                Err(error) => format!("failed calling webhook \"{name}\": {error:#}"),
            },
            Err(error) => format!("match conditions of webhook \"{name}\": {error}"),
        };
        if hook.ignores_failure {
            tracing::warn!(failure, "failing open");
            return Ok(None);
        }
        Err(ApiError::internal(&failure))
    }
}

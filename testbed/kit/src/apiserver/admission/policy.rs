//! `ValidatingAdmissionPolicy` objects: those that apply to a request, and their verdicts.
//!
//! Expressions are evaluated as CEL with optional fields. Compared with kube-apiserver 1.36: only the action Deny is carried out,
//! parameters are found by name, expressions are neither type-checked nor limited in cost, and selectors, exceptions from rules
//! and the variables `authorizer` and `namespaceObject` are not known, so that an expression which uses them is an error. With
//! `failurePolicy: Ignore` a validation that cannot be evaluated ends the policy, though a later one may deny the request.
//!
//! Objects that policies name as parameters come from [`ParamInformers`], which repeats a fault of kube-apiserver
//! (kubernetes/kubernetes#130887, #133827): its informer of a kind ends with the last policy binding that needs it. For a
//! custom resource it makes another one later. The informer of a built-in kind is shared and never starts again: parameters
//! stay as it had seen them by then. The real server looks for changed bindings once a second, and this one at every write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cel::Context;
use cel::parser::Parser;
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, NamedRuleWithOperations, ParamKind, ParamRef, RuleWithOperations,
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingAdmissionPolicySpec, Validation,
};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::hook::rule_matches;
use super::{ReviewObjects, ReviewedWrite, call};
use crate::apiserver::object;
use crate::apiserver::resource::{ADMISSION, Resource};
use crate::apiserver::status::ApiError;
use crate::apiserver::store::Key;
use crate::apiserver::verbs::ApiState;

/// `apiVersion` and kind of the objects that are parameters of a policy (`paramKind`).
type VersionedKind = (String, String);

/// The objects of one parameter kind as its informer has seen them.
type SeenParams = BTreeMap<Key, Arc<Value>>;

/// The informers of the kinds that policies name in `paramKind`.
#[derive(Debug, Default)]
pub(crate) struct ParamInformers(Mutex<Informers>);

#[derive(Debug, Default)]
struct Informers {
    /// The kinds that bindings needed at the last write.
    running: BTreeSet<VersionedKind>,
    /// Ended informers of built-in kinds, with the objects that they had seen by then: these stay in use (kubernetes#130887).
    ended: BTreeMap<VersionedKind, SeenParams>,
}

impl ParamInformers {
    /// Starts informers of the parameter kinds that bindings need now, and ends those of other kinds.
    fn refresh(&self, state: &ApiState, needed: BTreeSet<VersionedKind>) {
        let mut informers = self.0.lock();
        let previously_running = std::mem::replace(&mut informers.running, needed);
        for kind in previously_running {
            let resource = resource_of(state, &kind).filter(|resource| !resource.custom);
            if let Some(resource) = resource.filter(|_| !informers.running.contains(&kind)) {
                let seen = state.store.scan(&resource.storage, "", None);
                let seen = seen.map(|(key, version)| (key.clone(), Arc::clone(&version.value)));
                informers.ended.entry(kind).or_insert_with(|| seen.collect());
            }
        }
    }

    /// A parameter object as the informer of its kind shows it.
    fn get(
        &self,
        state: &ApiState,
        resource: &Resource,
        kind: &VersionedKind,
        key: &Key,
    ) -> Option<Arc<Value>> {
        if let Some(seen) = self.0.lock().ended.get(kind) {
            return seen.get(key).cloned();
        }
        let current = state.store.get(&resource.storage, key)?;
        Some(Arc::clone(&current.value))
    }
}

/// The served resource with this API version and kind.
fn resource_of(state: &ApiState, (api_version, kind): &VersionedKind) -> Option<Arc<Resource>> {
    let mut resources = state.registry.all().iter();
    resources
        .find(|resource| resource.api_version() == *api_version && resource.kind == *kind)
        .cloned()
}

/// All stored admission objects of one plural name, such as the policies; objects that do not decode are left out.
fn list_objects<T: DeserializeOwned>(state: &ApiState, plural: &str) -> Vec<T> {
    let found = state.store.scan(&format!("{ADMISSION}/{plural}"), "", None);
    found
        .filter_map(|(_, version)| T::deserialize(&*version.value).ok())
        .collect()
}

/// A policy with one of its bindings, and the parameter object that the binding names.
#[derive(Debug)]
pub(super) struct PolicyRule {
    policy: ValidatingAdmissionPolicy,
    binding: String,
    /// The parameter object, null without one; or the reason why a required one is missing.
    params: Result<Arc<Value>, String>,
}

/// The policies that apply to a request, each with its binding and parameter.
pub(super) fn matching_rules(state: &ApiState, request: &ReviewedWrite<'_>) -> Vec<PolicyRule> {
    let policies: Vec<ValidatingAdmissionPolicy> = list_objects(state, "validatingadmissionpolicies");
    let bindings: Vec<ValidatingAdmissionPolicyBinding> =
        list_objects(state, "validatingadmissionpolicybindings");
    let (mut bound_policies, mut param_kinds) = (Vec::new(), BTreeSet::new());
    for binding in bindings {
        let bound = Some(&binding.spec.policy_name);
        let policy = policies
            .iter()
            .find(|policy| policy.metadata.name.as_ref() == bound);
        if let Some((policy, spec)) = policy.and_then(|policy| Some((policy, policy.spec.as_ref()?))) {
            param_kinds.extend(spec.param_kind.as_ref().and_then(kind_of));
            bound_policies.push((policy, spec, binding));
        }
    }
    state.params.refresh(state, param_kinds);
    // Policies do not apply to policies, so that a wrong one can still be corrected or deleted.
    let resource = &request.target.resource;
    if resource.group == ADMISSION && resource.plural.starts_with("validatingadmissionpolic") {
        return Vec::new();
    }
    let mut rules = Vec::new();
    for (policy, spec, binding) in bound_policies {
        let mut actions = binding.spec.validation_actions.iter();
        let denies = actions.any(|action| action == "Deny");
        let constraints = spec.match_constraints.iter();
        let mut match_rules = constraints.flat_map(|constraints| constraints.resource_rules.iter().flatten());
        // Only the action Deny is modelled: bindings with Warn or Audit alone have no effect.
        if !denies || !match_rules.any(|rule| rule_matches(&without_names(rule), request)) {
            continue;
        }
        let reference = binding.spec.param_ref.as_ref();
        if let Some(params) = parameter_of(state, spec.param_kind.as_ref(), reference) {
            rules.push(PolicyRule {
                policy: policy.clone(),
                binding: binding.metadata.name.unwrap_or_default(),
                params,
            });
        }
    }
    rules
}

/// API version and kind of the parameters that a policy names.
fn kind_of(kind: &ParamKind) -> Option<VersionedKind> {
    Some((kind.api_version.clone()?, kind.kind.clone()?))
}

/// The same rule without `resourceNames`, the one field by which rules of policies and of webhooks differ.
fn without_names(rule: &NamedRuleWithOperations) -> RuleWithOperations {
    let NamedRuleWithOperations {
        api_groups,
        api_versions,
        operations,
        resources,
        scope,
        ..
    } = rule.clone();
    RuleWithOperations {
        api_groups,
        api_versions,
        operations,
        resources,
        scope,
    }
}

/// The object that a binding names as the policy's parameter; `None` if there is none and the policy does not apply without it.
fn parameter_of(
    state: &ApiState,
    kind: Option<&ParamKind>,
    reference: Option<&ParamRef>,
) -> Option<Result<Arc<Value>, String>> {
    let (Some(kind), Some(reference)) = (kind.and_then(kind_of), reference) else {
        return Some(Ok(Arc::default()));
    };
    let Some(resource) = resource_of(state, &kind) else {
        let (api_version, kind) = &kind;
        return Some(Err(format!(
            "failed to configure policy: failed to find resource referenced by paramKind: '{api_version}, Kind={kind}'"
        )));
    };
    let namespace = reference.namespace.clone().unwrap_or_default();
    let name = reference.name.as_deref().unwrap_or_default();
    let found = state
        .params
        .get(state, &resource, &kind, &Key::new(namespace, name));
    match found {
        Some(found) => Some(Ok(found)),
        // Without `Deny` a binding whose parameter is missing does not apply at all.
        None if reference.parameter_not_found_action.as_deref() == Some("Deny") => {
            let why = "no params found for policy binding with `Deny` parameterNotFoundAction";
            Some(Err(format!("failed to configure binding: {why}")))
        }
        None => None,
    }
}

impl PolicyRule {
    /// Refuses a request for which an expression is false or cannot be evaluated.
    pub(super) fn validate(
        &self,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
    ) -> Result<(), ApiError> {
        let Some(spec) = &self.policy.spec else {
            return Ok(());
        };
        // A missing parameter is an error before any match condition is looked at, and so for every request that the rules name.
        let params = self.params.as_deref().map_err(Clone::clone);
        let failed = params.and_then(|params| failed_validation(spec, request, objects, params));
        match failed {
            Ok(None) => Ok(()),
            Ok(Some((reason, message))) => Err(self.denied(request, &reason, &message)),
            Err(error) if spec.failure_policy.as_deref() == Some("Ignore") => {
                let policy = self.name();
                tracing::warn!(policy, error, "a policy cannot be evaluated, failing open");
                Ok(())
            }
            Err(error) => Err(self.denied(request, "Invalid", &error)),
        }
    }

    fn name(&self) -> &str {
        self.policy.metadata.name.as_deref().unwrap_or_default()
    }

    /// The error of a request that this policy denies, with the HTTP status that belongs to the reason.
    fn denied(&self, request: &ReviewedWrite<'_>, reason: &str, message: &str) -> ApiError {
        let (resource, name) = (request.target.resource.qualified(), &request.target.name);
        let (policy, binding) = (self.name(), &self.binding);
        // The API allows these four reasons; each has its HTTP status, and Invalid is the default.
        let code = match reason {
            "Unauthorized" => 401,
            "Forbidden" => 403,
            "RequestEntityTooLarge" => 413,
            _ => 422,
        };
        let denied = format!(
            "ValidatingAdmissionPolicy '{policy}' with binding '{binding}' denied request: {message}"
        );
        ApiError::denied(
            code,
            reason,
            format!("{resource} \"{name}\" is forbidden: {denied}"),
        )
    }
}

/// The reason and message of the first validation that fails; none if the policy allows the request or does not apply.
fn failed_validation(
    spec: &ValidatingAdmissionPolicySpec,
    request: &ReviewedWrite<'_>,
    objects: &ReviewObjects,
    params: &Value,
) -> Result<Option<(String, String)>, String> {
    let mut expressions = Expressions::new(request, objects, Some(params));
    if !expressions.are_met(spec.match_conditions.as_deref().unwrap_or_default())? {
        return Ok(None);
    }
    for variable in spec.variables.iter().flatten() {
        expressions.add_variable(&variable.name, &variable.expression);
    }
    for validation in spec.validations.iter().flatten() {
        if !expressions.is_true(&validation.expression)? {
            let reason = validation.reason.clone().unwrap_or("Invalid".to_owned());
            return Ok(Some((reason, message(&expressions, validation))));
        }
    }
    Ok(None)
}

/// The message of a failed validation: the result of its `messageExpression`, else its `message`, else its expression.
fn message(expressions: &Expressions, validation: &Validation) -> String {
    let expression = validation.message_expression.as_ref();
    let evaluated = expression.and_then(|expression| expressions.evaluate(expression).ok());
    match (evaluated, &validation.message) {
        (Some(cel::Value::String(text)), _) if !text.trim().is_empty() => text.to_string(),
        (_, Some(message)) => message.clone(),
        (_, None) => format!("failed expression: {}", validation.expression.trim()),
    }
}

/// The environment of CEL expressions: the values that they can use by name.
pub(super) struct Expressions {
    names: Vec<(&'static str, Value)>,
    variables: Map<String, Value>,
}

impl Expressions {
    /// The environment for a request; `params` is the parameter object of a policy, and a webhook has none.
    pub(super) fn new(request: &ReviewedWrite<'_>, objects: &ReviewObjects, params: Option<&Value>) -> Self {
        let mut review = call::review_of("", request, objects);
        let mut shown_request = review.get_mut("request").map(Value::take).unwrap_or_default();
        let fields = object::make_object(&mut shown_request);
        for field in ["object", "oldObject"] {
            fields.remove(field);
        }
        object::child(&mut shown_request, "userInfo").insert("extra".to_owned(), json!(request.user.extra));
        let mut names = vec![
            ("object", objects.new.clone()),
            ("oldObject", Value::clone(&objects.old)),
            ("request", shown_request),
        ];
        names.extend(params.map(|params| ("params", params.clone())));
        Self {
            names,
            variables: Map::new(),
        }
    }

    /// Adds a variable of a policy. One that cannot be evaluated is left out, and an expression that uses it fails.
    fn add_variable(&mut self, name: &str, expression: &str) {
        if let Ok(value) = self.evaluate(expression)
            && let Ok(value) = value.json()
        {
            self.variables.insert(name.to_owned(), value);
        }
    }

    /// The value of an expression, or the reason for which it has none.
    fn evaluate(&self, expression: &str) -> Result<cel::Value, String> {
        let value = self.try_evaluate(expression);
        value.map_err(|error| format!("expression '{}' resulted in error: {error}", expression.trim()))
    }

    fn try_evaluate(&self, expression: &str) -> anyhow::Result<cel::Value> {
        // kube-apiserver enables optional fields (`object.?metadata`), and gpushare's policies use them.
        let parsed = Parser::new().enable_optional_syntax(true).parse(expression)?;
        let mut context = Context::default();
        for (name, value) in &self.names {
            context.add_variable(*name, value)?;
        }
        context.add_variable("variables", &self.variables)?;
        Ok(cel::Value::resolve(&parsed, &context)?)
    }

    /// Returns true if every condition is true. A false one decides even beside one that cannot be evaluated.
    pub(super) fn are_met(&self, conditions: &[MatchCondition]) -> Result<bool, String> {
        let mut outcome = Ok(true);
        for condition in conditions {
            match self.is_true(&condition.expression) {
                Ok(false) => return Ok(false),
                result => outcome = outcome.and(result),
            }
        }
        outcome
    }

    /// Evaluates a CEL expression that must give a bool.
    fn is_true(&self, expression: &str) -> Result<bool, String> {
        match self.evaluate(expression)? {
            cel::Value::Bool(is_true) => Ok(is_true),
            other => Err(format!("expression '{expression}' is no bool but {other:?}")),
        }
    }
}

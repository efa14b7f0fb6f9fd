//! One webhook of a configuration object, and the requests that it is called for.

use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, RuleWithOperations, WebhookClientConfig,
};
use serde::Deserialize;
use serde_json::Value;

use super::{ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::resource::{ADMISSION, Resource};
use crate::apiserver::selector::ParsedSelector;
use crate::apiserver::status::InvalidField;
use crate::apiserver::store::Slice;
use crate::apiserver::verbs::ApiState;

/// The two kinds of webhook configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdmissionPhase {
    Mutating,
    Validating,
}

/// A webhook with its defaults filled in.
#[derive(Debug, Clone)]
pub(crate) struct WebhookConfig {
    pub(crate) name: String,
    pub(crate) client: WebhookClientConfig,
    pub(crate) timeout: Duration,
    pub(crate) ignores_failure: bool,
    /// True if the webhook must not be called for a dry run.
    pub(crate) has_side_effects: bool,
    /// True if the webhook is called again after later webhooks changed the object (`reinvocationPolicy:
    /// IfNeeded`).
    pub(crate) reinvoke: bool,
    /// `matchConditions`: expressions that must all be true for the webhook to be called.
    pub(crate) conditions: Vec<MatchCondition>,
    rules: Vec<RuleWithOperations>,
    namespaces: ParsedSelector,
    objects: ParsedSelector,
}

impl WebhookConfig {
    /// Reads one entry of a configuration's `webhooks`; `None` if it does not decode.
    fn read(value: &Value) -> Option<Self> {
        // A validating webhook has the fields of a mutating one but for `reinvocationPolicy`.
        let hook = MutatingWebhook::deserialize(value).ok()?;
        let selector = |given: Option<_>| given.as_ref().map(ParsedSelector::from_field).unwrap_or_default();
        Some(Self {
            name: hook.name,
            client: hook.client_config,
            timeout: Duration::from_secs(
                hook.timeout_seconds
                    .and_then(|s| u64::try_from(s).ok())
                    .unwrap_or(10),
            ),
            ignores_failure: hook.failure_policy.as_deref() == Some("Ignore"),
            has_side_effects: !matches!(hook.side_effects.as_str(), "None" | "NoneOnDryRun"),
            reinvoke: hook.reinvocation_policy.as_deref() == Some("IfNeeded"),
            conditions: hook.match_conditions.unwrap_or_default(),
            rules: hook.rules.unwrap_or_default(),
            namespaces: selector(hook.namespace_selector),
            objects: selector(hook.object_selector),
        })
    }

    /// True if a rule names the request's operation and resource.
    pub(crate) fn matches(&self, request: &ReviewedWrite<'_>) -> bool {
        self.rules.iter().any(|rule| rule_matches(rule, request))
    }

    /// True if the selectors accept the namespace, and the object before or after the write.
    pub(crate) fn selects(
        &self,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
        namespace: &Value,
    ) -> bool {
        let resource = &request.target.resource;
        let labelled = |of: &Value| !of.is_null() && self.objects.matches(of);
        // The namespaceSelector of a webhook looks at a Namespace's own labels, and at those of its namespace
        // for any other object.
        let in_namespace = if resource.is("", "namespaces") {
            self.namespaces.matches(if objects.new.is_null() {
                &objects.old
            } else {
                &objects.new
            })
        } else {
            !resource.namespaced || self.namespaces.matches(namespace)
        };
        // Either version suffices: else a write could take an object out of reach of the webhook by removing
        // the label.
        in_namespace && (labelled(&objects.new) || labelled(&objects.old))
    }
}

/// Returns true if a rule of a webhook or policy matches the operation, resource and scope of a request.
pub(super) fn rule_matches(rule: &RuleWithOperations, request: &ReviewedWrite<'_>) -> bool {
    let resource = &request.target.resource;
    let has = |list: &Option<Vec<String>>, wanted: &str| {
        list.iter().flatten().any(|item| item == "*" || item == wanted)
    };
    let scoped = match rule.scope.as_deref() {
        Some("Namespaced") => resource.namespaced,
        Some("Cluster") => !resource.namespaced,
        _ => true,
    };
    scoped
        && has(&rule.operations, request.operation.as_str())
        && has(&rule.api_groups, &resource.group)
        && has(&rule.api_versions, &resource.version)
        && rule
            .resources
            .iter()
            .flatten()
            .any(|pattern| matches_resource(pattern, resource, request.subresource))
}

/// `pods`, `pods/binding`, `pods/*`, `*/binding`, `*/*`, or `*` for every resource without its subresources.
fn matches_resource(pattern: &str, resource: &Resource, subresource: &str) -> bool {
    let (wanted, sub) = pattern.split_once('/').unwrap_or((pattern, ""));
    (wanted == "*" || wanted == resource.plural) && (sub == "*" || sub == subresource)
}

/// All webhooks of a phase, ordered by the names of their configurations.
pub(crate) fn all_of_phase(state: &ApiState, phase: AdmissionPhase) -> Vec<WebhookConfig> {
    let plural = match phase {
        AdmissionPhase::Mutating => "mutatingwebhookconfigurations",
        AdmissionPhase::Validating => "validatingwebhookconfigurations",
    };
    let mut hooks = Vec::new();
    // A scan of the present never meets compacted revisions.
    let _ = state.store.scan(
        &format!("{ADMISSION}/{plural}"),
        Slice::default(),
        |_, version| {
            hooks.extend(
                object::array(&version.value, "/webhooks")
                    .iter()
                    .filter_map(WebhookConfig::read),
            );
            std::ops::ControlFlow::Continue(())
        },
    );
    hooks
}

/// Lists the errors of a webhook configuration that a client writes; empty for other kinds of objects.
pub(crate) fn check_configuration(resource: &Resource, body: &Value) -> Vec<InvalidField> {
    if !resource.is(ADMISSION, "mutatingwebhookconfigurations")
        && !resource.is(ADMISSION, "validatingwebhookconfigurations")
    {
        return Vec::new();
    }
    let hooks = object::array(body, "/webhooks").iter().enumerate();
    hooks
        .flat_map(|(idx, hook)| check_hook(&format!("webhooks[{idx}]"), hook))
        .collect()
}

/// Lists the errors of one webhook in a configuration that a client writes, as kube-apiserver's validation words them.
fn check_hook(path: &str, hook: &Value) -> Vec<InvalidField> {
    let mut errors = Vec::new();
    let name = object::text(hook, "/name");
    if name.split('.').filter(|part| !part.is_empty()).count() < 3 {
        errors.push(InvalidField::invalid(
            format!("{path}.name"),
            name,
            "should be a domain with at least three segments separated by dots",
        ));
    }
    let versions = object::array(hook, "/admissionReviewVersions");
    if !versions
        .iter()
        .any(|version| matches!(version.as_str(), Some("v1" | "v1beta1")))
    {
        let why = "must specify one of v1, v1beta1";
        errors.push(InvalidField::required(
            format!("{path}.admissionReviewVersions"),
            why,
        ));
    }
    let side_effects = object::text(hook, "/sideEffects");
    if !matches!(side_effects, "None" | "NoneOnDryRun") {
        errors.push(InvalidField::unsupported(
            format!("{path}.sideEffects"),
            side_effects,
            &["None", "NoneOnDryRun"],
        ));
    }
    let timeout = hook.get("timeoutSeconds").and_then(Value::as_i64).unwrap_or(10);
    if !(1..=30).contains(&timeout) {
        let why = "the timeout value must be between 1 and 30 seconds";
        errors.push(InvalidField::invalid(
            format!("{path}.timeoutSeconds"),
            &timeout.to_string(),
            why,
        ));
    }
    let policy = hook
        .get("failurePolicy")
        .map_or(Some("Fail"), Value::as_str)
        .unwrap_or_default();
    if !matches!(policy, "Fail" | "Ignore") {
        errors.push(InvalidField::unsupported(
            format!("{path}.failurePolicy"),
            policy,
            &["Fail", "Ignore"],
        ));
    }
    let (url, service) = (
        hook.pointer("/clientConfig/url").and_then(Value::as_str),
        hook.pointer("/clientConfig/service"),
    );
    match (url, service) {
        (Some(url), None) if !url.starts_with("https://") => {
            errors.push(InvalidField::invalid(
                format!("{path}.clientConfig.url"),
                url,
                "'https' is the only allowed URL scheme",
            ));
        }
        (Some(_), None) | (None, Some(_)) => {}
        _ => errors.push(InvalidField::required(
            format!("{path}.clientConfig"),
            "exactly one of url or service is required",
        )),
    }
    errors
}

//! One webhook of a configuration object, and the requests that it is called for.

use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, RuleWithOperations, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::Selector;
use serde::Deserialize;
use serde_json::Value;

use super::{ReviewObjects, ReviewedWrite};
use crate::apiserver::object;
use crate::apiserver::resource::{ADMISSION, Resource};
use crate::apiserver::selector::has_labels;
use crate::apiserver::verbs::ApiState;

/// A webhook with its defaults filled in.
#[derive(Debug, Clone)]
pub(crate) struct WebhookConfig {
    pub(crate) name: String,
    pub(crate) client: WebhookClientConfig,
    pub(crate) timeout: Duration,
    pub(crate) ignores_failure: bool,
    /// `matchConditions`: expressions that must all be true for the webhook to be called.
    pub(crate) conditions: Vec<MatchCondition>,
    rules: Vec<RuleWithOperations>,
    namespaces: Selector,
    objects: Selector,
}

impl WebhookConfig {
    /// Reads one entry of a configuration's `webhooks`; `None` if it does not decode, or has a selector with an unknown operator.
    fn read(value: &Value) -> Option<Self> {
        // A validating webhook has the fields of a mutating one but for `reinvocationPolicy`.
        let hook = MutatingWebhook::deserialize(value).ok()?;
        let selector = |given: Option<LabelSelector>| given.unwrap_or_default().try_into().ok();
        Some(Self {
            name: hook.name,
            client: hook.client_config,
            timeout: Duration::from_secs(u64::try_from(hook.timeout_seconds.unwrap_or(10)).unwrap_or(10)),
            ignores_failure: hook.failure_policy.as_deref() == Some("Ignore"),
            conditions: hook.match_conditions.unwrap_or_default(),
            rules: hook.rules.unwrap_or_default(),
            namespaces: selector(hook.namespace_selector)?,
            objects: selector(hook.object_selector)?,
        })
    }

    /// True if the selectors accept the namespace, and the object before or after the write.
    pub(crate) fn selects(
        &self,
        request: &ReviewedWrite<'_>,
        objects: &ReviewObjects,
        namespace: &Value,
    ) -> bool {
        let resource = &request.target.resource;
        let is_selected = |of: &Value| !of.is_null() && has_labels(&self.objects, of);
        // The namespaceSelector of a webhook looks at a Namespace's own labels, and at those of its namespace
        // for any other object.
        let in_namespace = if resource.is("", "namespaces") {
            let namespace_object = if objects.new.is_null() {
                &objects.old
            } else {
                &objects.new
            };
            has_labels(&self.namespaces, namespace_object)
        } else {
            !resource.namespaced || has_labels(&self.namespaces, namespace)
        };
        // The labels before or after the write suffice: a write that removes the label must not escape the webhook.
        in_namespace && (is_selected(&objects.new) || is_selected(&objects.old))
    }
}

/// Returns true if a rule of a webhook or policy matches the operation, resource and scope of a request.
pub(super) fn rule_matches(rule: &RuleWithOperations, request: &ReviewedWrite<'_>) -> bool {
    let resource = &request.target.resource;
    let lists = |list: &Option<Vec<String>>, wanted: &str| {
        list.iter().flatten().any(|item| item == "*" || item == wanted)
    };
    let is_in_scope = match rule.scope.as_deref() {
        Some("Namespaced") => resource.namespaced,
        Some("Cluster") => !resource.namespaced,
        _ => true,
    };
    is_in_scope
        && lists(&rule.operations, request.operation)
        && lists(&rule.api_groups, &resource.group)
        && lists(&rule.api_versions, &resource.version)
        && rule
            .resources
            .iter()
            .flatten()
            .any(|pattern| matches_resource(pattern, resource, &request.target.subresource))
}

/// Matches a rule's `pods`, `pods/binding`, `pods/*`, `*/binding`, `*/*`, or `*` for every resource without subresources.
fn matches_resource(pattern: &str, resource: &Resource, subresource: &str) -> bool {
    let (wanted, sub) = pattern.split_once('/').unwrap_or((pattern, ""));
    (wanted == "*" || wanted == resource.plural) && (sub == "*" || sub == subresource)
}

/// The webhooks in configurations of this plural name whose rules match a request, ordered by the names of their configurations.
pub(super) fn matching(state: &ApiState, plural: &str, request: &ReviewedWrite<'_>) -> Vec<WebhookConfig> {
    let resource = &request.target.resource;
    // Webhooks are never called for their own configurations: a broken one could otherwise not be corrected.
    if resource.group == ADMISSION && resource.plural.ends_with("webhookconfigurations") {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (_, version) in state.store.scan(&format!("{ADMISSION}/{plural}"), "", None) {
        let webhooks = object::array(&version.value, "/webhooks").iter();
        found.extend(webhooks.filter_map(WebhookConfig::read));
    }
    found.retain(|hook| hook.rules.iter().any(|rule| rule_matches(rule, request)));
    found
}

//! Decisions of the admission webhooks on one container.
//!
//! Reasons are this project's own words: they must name the resource and the value that Koordinator's words are about.

use std::time::Duration;

use clap::Parser;
use placement::Policies;
use proto::admission::AdmissionRequest;
use proto::resource::ResourceNames;
use scheduler::admission::{Refusal, Rules, Verdict};
use scheduler::config::{Args, Config};
use scheduler::index::{Index, Shared};
use serde_json::{Value, json};

use super::case::{Case, Outcome};
use super::requests::{amounts, says_all_and_shared};

/// Koordinator's words for resources, longest first.
const WORDS: &[(&str, &str)] = &[
    ("GPU memory ratio", "koordinator.sh/gpu-memory-ratio"),
    ("gpuMemoryRatio", "koordinator.sh/gpu-memory-ratio"),
    ("GPU memory", "koordinator.sh/gpu-memory"),
    ("gpuCore", "koordinator.sh/gpu-core"),
    ("GPU share", "koordinator.sh/gpu.shared"),
    ("of shared", "koordinator.sh/gpu.shared"),
];

/// Mutation: the container as it leaves the webhook.
pub(crate) fn mutate(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    if case.input["disabled"] == json!(true) {
        return without_webhooks(case);
    }
    let before = pod(&case.input["container_resources"]);
    let operation = case.input["operation"].as_str().unwrap_or("CREATE");
    let after = match mutated(&before, operation) {
        Ok(after) => after,
        Err(refusal) if case.is_ok() => return Outcome::Failed(refusal),
        Err(_) => return Outcome::Passed,
    };
    let resources = |pod: &Value| {
        ["requests", "limits"].map(|list| amounts(&pod["spec"]["containers"][0]["resources"][list]))
    };
    let expected = ["requests", "limits"].map(|list| amounts(&case.expected["container_resources"][list]));
    let is_changed = resources(&before) != resources(&after);
    Outcome::equal(&resources(&after), &expected).and(|| {
        case.expected["mutated"]
            .as_bool()
            .map_or(Outcome::Passed, |mutated| Outcome::equal(&is_changed, &mutated))
    })
}

/// Webhooks that are not enabled are not served, so pods are not changed.
fn without_webhooks(case: &Case<'_>) -> Outcome {
    let config = Config::try_from(Args::try_parse_from(["gpushare-scheduler"]).unwrap()).unwrap();
    let is_as_it_was = case.expected["container_resources"].is_null()
        || case.expected["container_resources"] == case.input["container_resources"];
    Outcome::equal(
        &(config.admission.webhooks.is_none(), is_as_it_was, case.is_ok()),
        &(true, true, true),
    )
}

/// Validation of what mutation leaves, as the API server asks for both.
pub(crate) fn validate(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    if case.input["feature_gate_enabled"] == json!(false) {
        return without_webhooks(case);
    }
    let resources = &case.input["container_resources"];
    if !case.is_ok() && says_all_and_shared(&resources["requests"]) {
        return Outcome::skipped(
            "the proposal keeps koordinator.sh/gpu as core and ratio together, which gpu.shared goes with",
        );
    }
    let before = pod(resources);
    let operation = case.input["operation"].as_str().unwrap_or("CREATE");
    let judged = mutated(&before, operation).and_then(|after| validated(&after, &before, operation));
    match (judged, case.is_ok()) {
        (Ok(()), true) => Outcome::Passed,
        (Ok(()), false) => Outcome::Failed("accepted".to_owned()),
        (Err(reason), true) => Outcome::Failed(reason),
        (Err(reason), false) => names_the_same(case.expected["reason"].as_str().unwrap_or_default(), &reason),
    }
}

/// True if a reason names every resource and value that Koordinator's names.
fn names_the_same(theirs: &str, ours: &str) -> Outcome {
    let value = theirs
        .split_once("Invalid value: \"")
        .and_then(|(_, rest)| rest.split_once('"'))
        .map(|(value, _)| value);
    let mut rest = theirs.to_owned();
    let mut named: Vec<&str> = value.into_iter().collect();
    for (word, resource) in WORDS {
        if rest.contains(word) {
            named.push(resource);
            rest = rest.replace(word, "");
        }
    }
    let missing: Vec<&str> = named.into_iter().filter(|name| !ours.contains(name)).collect();
    if missing.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("the reason does not name {missing:?}: {ours}"))
    }
}

fn pod(resources: &Value) -> Value {
    let mut resources = resources.clone();
    // The API server fills in requests from limits before it calls webhooks.
    if resources["requests"].is_null() {
        resources["requests"] = resources["limits"].clone();
    }
    json!({"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [{"name": "c", "resources": resources}]}})
}

fn request(operation: &str, pod: &Value, old: &Value) -> AdmissionRequest {
    let old = if operation == "CREATE" { &Value::Null } else { old };
    let request = json!({
        "uid": "u", "operation": operation, "resource": {"group": "", "version": "v1", "resource": "pods"},
        "name": "p", "namespace": "default", "object": pod, "oldObject": old});
    serde_json::from_value(request).unwrap()
}

/// The pod as the mutating webhook leaves it.
pub(crate) fn mutated(pod: &Value, operation: &str) -> Result<Value, String> {
    match Rules::default().mutate(&request(operation, pod, pod)).unwrap() {
        Verdict::Refused(refusal) => Err(words(refusal)),
        Verdict::Allowed { patch, .. } => {
            let patch: json_patch::Patch =
                serde_json::from_value(serde_json::to_value(patch).unwrap()).unwrap();
            let mut after = pod.clone();
            json_patch::patch(&mut after, &patch).unwrap();
            Ok(after)
        }
    }
}

fn validated(pod: &Value, old: &Value, operation: &str) -> Result<(), String> {
    // The cases are decided without a cluster: no watch has shown anything yet.
    let index = Shared::new(Index::new(
        ResourceNames::default(),
        Policies::default(),
        Duration::ZERO,
    ));
    match Rules::default()
        .validate(&request(operation, pod, old), &index)
        .unwrap()
    {
        Verdict::Refused(refusal) => Err(words(refusal)),
        Verdict::Allowed { .. } => Ok(()),
    }
}

fn words(refusal: Refusal) -> String {
    match refusal {
        Refusal::Invalid(message) | Refusal::Forbidden(message) => message,
    }
}

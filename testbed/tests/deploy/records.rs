//! The right to write the annotations that record a pod's devices.
//!
//! The tests in `testbed/kit/tests/apiserver/policies.rs` evaluate the expressions on requests.

use kit::cluster::{PLUGIN_USER, SCHEDULER_USER};
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use serde_json::Value;

use super::render::{render, render_with};
use super::{find, named, texts};

const NAME: &str = "gpushare-records";

/// The words between single quotes in a variable of the policy.
fn quoted(objects: &[Value], variable: &str) -> Vec<String> {
    let policy = find(objects, "ValidatingAdmissionPolicy", NAME);
    let expression = named(&policy["spec"]["variables"], variable)["expression"]
        .as_str()
        .unwrap();
    expression
        .split('\'')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_policy_guards_every_annotation_of_a_record() {
    let objects = render("base");
    let keys = [
        DEVICE_ALLOCATED,
        BIND_TIMESTAMP,
        GPU_MINORS,
        MEM_IDX,
        MEM_POD,
        MEM_DEV,
        MEM_ASSIGNED,
        MEM_ASSUME_TIME,
    ];
    assert_eq!(quoted(&objects, "changed"), keys);
    let spec = &find(&objects, "ValidatingAdmissionPolicy", NAME)["spec"];
    assert_eq!(spec["failurePolicy"], "Fail");
    let rule = &spec["matchConstraints"]["resourceRules"][0];
    assert_eq!(texts(&rule["operations"]), ["CREATE", "UPDATE"]);
    for resource in ["pods", "pods/status", "pods/binding", "bindings"] {
        assert!(texts(&rule["resources"]).contains(&resource), "{resource}");
    }
}

#[test]
fn a_component_adds_accounts_that_may_write_records() {
    let ours = quoted(&render("base"), "writers");
    assert_eq!(ours, [SCHEDULER_USER, PLUGIN_USER]);
    let all = quoted(&render_with("base", &["components/record-writers"]), "writers");
    assert!(all.starts_with(&ours) && all.len() > ours.len(), "{all:?}");
    assert!(
        all.iter()
            .all(|account| account.starts_with("system:serviceaccount:")),
        "{all:?}"
    );
}

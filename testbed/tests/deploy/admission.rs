//! Every object that a node's plugin may write by RBAC is confined to the node by a policy.
//!
//! `testbed/kit/tests/apiserver/policies.rs` evaluates the expressions.

use kit::rbac::DEVICE_PLUGIN;

use crate::render::render;
use crate::{all, items, texts};

#[test]
fn every_right_to_write_is_confined_by_a_policy() {
    let objects = render("base");
    let mut policies = all(&objects, "ValidatingAdmissionPolicy");
    policies
        .retain(|policy| policy["metadata"]["labels"]["app.kubernetes.io/name"] == "gpushare-device-plugin");
    assert!(
        policies
            .iter()
            .all(|policy| policy["spec"]["failurePolicy"] == "Fail")
    );
    let writes = DEVICE_PLUGIN
        .iter()
        .filter(|access| ["create", "update", "patch", "delete"].contains(&access.verb));
    for access in writes {
        let plural = match access.subresource {
            "" => access.resource.to_owned(),
            _ => format!("{}/*", access.resource),
        };
        let mut rules = policies
            .iter()
            .flat_map(|policy| items(&policy["spec"]["matchConstraints"]["resourceRules"]));
        let is_confined = rules.any(|rule| {
            texts(&rule["apiGroups"]).contains(&access.group)
                && texts(&rule["resources"]).contains(&plural.as_str())
                && texts(&rule["operations"]) == ["*"]
        });
        assert!(is_confined, "no policy confines: {access}");
    }
}

/// The API server leaves out of a request what is empty, and an expression that reads it all the same is an error: a refusal.
#[test]
fn expressions_check_that_optional_fields_exist() {
    let objects = render("base");
    for policy in all(&objects, "ValidatingAdmissionPolicy") {
        let name = policy["metadata"]["name"].as_str().unwrap();
        let text = policy["spec"].to_string();
        for field in [
            "subResource",
            "requestSubResource",
            "requestResource",
            "options",
            "dryRun",
        ] {
            assert!(
                !text.contains(&format!("request.{field}")),
                "{name}: request.{field}"
            );
        }
    }
}

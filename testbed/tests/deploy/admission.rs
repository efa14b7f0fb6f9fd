//! Every object that a node's plugin may write by RBAC is confined to the node by a policy.
//!
//! `testbed/kit/tests/apiserver/policies.rs` evaluates the expressions.

use kit::rbac::DEVICE_PLUGIN;

use super::render::render;
use super::{all, find, items, texts};

#[test]
fn every_right_to_write_is_confined_by_a_policy() {
    let objects = render("base");
    let mut policies = all(&objects, "ValidatingAdmissionPolicy");
    policies
        .retain(|policy| policy["metadata"]["labels"]["app.kubernetes.io/name"] == "gpushare-device-plugin");
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

/// A request that a policy cannot judge is refused, except by a policy with a parameter: see
/// `no_policy_refuses_others_while_its_parameter_is_missing`.
#[test]
fn policies_fail_closed_are_bound_and_name_their_rule() {
    let objects = render("base");
    for policy in all(&objects, "ValidatingAdmissionPolicy") {
        let name = policy["metadata"]["name"].as_str().unwrap();
        let spec = &policy["spec"];
        let has_parameter = !spec["paramKind"].is_null();
        let expected = if has_parameter { "Ignore" } else { "Fail" };
        assert_eq!(spec["failurePolicy"], expected, "{name}");
        let mut validations = items(&spec["validations"]).iter();
        assert!(validations.all(|rule| rule["message"].is_string()), "{name}");
        let binding = &find(&objects, "ValidatingAdmissionPolicyBinding", name)["spec"];
        assert_eq!(binding["policyName"], name);
        assert_eq!(texts(&binding["validationActions"]), ["Deny"], "{name}");
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

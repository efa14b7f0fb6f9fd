//! Every object that a node's plugin may write by RBAC is confined to the node by a policy.
//!
//! Only an API server can evaluate the expressions.

use kit::rbac::DEVICE_PLUGIN;
use proto::device::NODE_LABELS;
use proto::node::CONDITION_SHARING_READY;
use serde_json::Value;

use crate::render::render;
use crate::{all, find, texts};

fn of_plugin(objects: &[Value]) -> Vec<&Value> {
    let policies = all(objects, "ValidatingAdmissionPolicy").into_iter();
    policies
        .filter(|policy| policy["metadata"]["labels"]["app.kubernetes.io/name"] == "gpushare-device-plugin")
        .collect()
}

#[test]
fn every_right_to_write_is_confined_by_a_policy() {
    let objects = render("base");
    let policies = of_plugin(&objects);
    let writes = DEVICE_PLUGIN
        .iter()
        .filter(|access| ["create", "update", "patch", "delete"].contains(&access.verb));
    for access in writes {
        let plural = match access.subresource {
            "" => access.resource.to_owned(),
            _ => format!("{}/*", access.resource),
        };
        let confined = policies.iter().any(|policy| {
            let rules = policy["spec"]["matchConstraints"]["resourceRules"]
                .as_array()
                .unwrap();
            rules.iter().any(|rule| {
                texts(&rule["apiGroups"]).contains(&access.group)
                    && texts(&rule["resources"]).contains(&plural.as_str())
                    && texts(&rule["operations"]) == ["*"]
            })
        });
        assert!(confined, "no policy confines: {access}");
    }
}

#[test]
fn policies_check_the_plugins_account_and_the_node_of_its_token() {
    let objects = render("base");
    let policies = of_plugin(&objects);
    assert_eq!(policies.len(), 4);
    for policy in policies {
        let name = policy["metadata"]["name"].as_str().unwrap();
        let spec = &policy["spec"];
        assert_eq!(spec["failurePolicy"], "Fail", "{name}");
        let condition = &spec["matchConditions"][0]["expression"];
        assert_eq!(
            condition,
            "request.userInfo.username == 'system:serviceaccount:gpushare-system:gpushare-device-plugin'",
            "{name}"
        );
        assert_eq!(spec["variables"][0]["name"], "node", "{name}");
        let node = spec["variables"][0]["expression"].as_str().unwrap();
        assert!(
            node.contains("'authentication.kubernetes.io/node-name'"),
            "{name}: {node}"
        );
        let validations = spec["validations"].as_array().unwrap();
        let expressions: Vec<&str> = validations
            .iter()
            .map(|v| v["expression"].as_str().unwrap())
            .collect();
        assert!(
            expressions
                .iter()
                .any(|e| e.contains("variables.node != ''") && e.contains("== variables.node")),
            "{name}: {expressions:?}"
        );
        assert!(validations.iter().all(|v| v["message"].is_string()), "{name}");
        let binding = find(&objects, "ValidatingAdmissionPolicyBinding", name);
        assert_eq!(binding["spec"]["policyName"], name);
        assert_eq!(binding["spec"]["validationActions"], Value::from(vec!["Deny"]));
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

/// A node's status has fields that differ from version to version, so the policy says which may change and not which may not.
#[test]
fn the_plugin_may_change_only_amounts_and_its_condition_in_a_node_status() {
    let objects = render("base");
    let policy = find(
        &objects,
        "ValidatingAdmissionPolicy",
        "gpushare-device-plugin-nodes",
    );
    let validations = policy["spec"]["validations"].as_array().unwrap();
    let says_so = |expression: &str| {
        expression.contains("[[object.?status.orValue({}), oldObject.?status.orValue({})]")
            && expression.contains("[oldObject.?status.orValue({}), object.?status.orValue({})]]")
            && expression.contains("field in ['capacity', 'allocatable', 'conditions']")
    };
    assert!(
        validations
            .iter()
            .any(|validation| says_so(validation["expression"].as_str().unwrap())),
        "{validations:?}"
    );
    let others = |object: &str| {
        format!(
            "{object}.?status.?conditions.orValue([]).filter(condition, condition.type != '{CONDITION_SHARING_READY}')"
        )
    };
    let keeps_others = format!("{} == {}", others("object"), others("oldObject"));
    assert!(
        validations
            .iter()
            .any(|validation| validation["expression"] == keeps_others.as_str()),
        "{validations:?}"
    );
}

/// The labels that the plugin writes on its node are those of its Device object; any other may place pods or powers elsewhere.
#[test]
fn the_plugin_may_change_only_gpu_labels_of_a_node() {
    let objects = render("base");
    let policy = find(
        &objects,
        "ValidatingAdmissionPolicy",
        "gpushare-device-plugin-nodes",
    );
    let named = NODE_LABELS.map(|label| format!("'{label}'")).join(", ");
    let both_ways = "[[object.metadata.?labels.orValue({}), oldObject.metadata.?labels.orValue({})], \
        [oldObject.metadata.?labels.orValue({}), object.metadata.?labels.orValue({})]].all(labels, ";
    let expected = format!(
        "{both_ways}labels[0].all(label, label in [{named}] || (label in labels[1] && labels[0][label] == labels[1][label])))"
    );
    let expressions: Vec<&str> = policy["spec"]["validations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|validation| validation["expression"].as_str().unwrap())
        .collect();
    assert!(
        expressions.contains(&expected.as_str()),
        "{expected}\n{expressions:#?}"
    );
}

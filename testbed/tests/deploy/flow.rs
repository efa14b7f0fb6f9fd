//! The scheduler's requests have the priority of kube-scheduler's, and do not queue behind every other service account.

use rstest::rstest;
use serde_json::json;
use testbed::rbac::{
    SCHEDULER, SCHEDULER_CERTIFICATES, SCHEDULER_LEADER, SCHEDULER_ROOM, SCHEDULER_WEBHOOKS,
};

use crate::daemons;
use crate::render::render;
use crate::{find, texts};

/// The precedence of Kubernetes' own schema for all service accounts.
const ALL_SERVICE_ACCOUNTS: i64 = 9000;

#[rstest]
fn the_flow_schema_comes_before_that_of_service_accounts(
    #[values("base", "attach/second-scheduler")] folder: &str,
) {
    let objects = render(folder);
    let schema = &find(&objects, "FlowSchema", daemons::SCHEDULER.name)["spec"];
    assert!((1..ALL_SERVICE_ACCOUNTS).contains(&schema["matchingPrecedence"].as_i64().unwrap()));
    // Not mandatory, but in every cluster: what kube-scheduler itself is given.
    assert_eq!(
        schema["priorityLevelConfiguration"],
        json!({"name": "workload-high"})
    );
    let deployment = find(&objects, "Deployment", daemons::SCHEDULER.name);
    let account = &deployment["spec"]["template"]["spec"]["serviceAccountName"];
    let account = json!({"name": account, "namespace": deployment["metadata"]["namespace"]});
    assert_eq!(
        schema["rules"][0]["subjects"],
        json!([{"kind": "ServiceAccount", "serviceAccount": account}])
    );
}

/// A request that no rule matches goes to the schema of all service accounts.
#[test]
fn the_flow_schema_matches_all_requests_of_the_scheduler() {
    let objects = render("base");
    let rules = &find(&objects, "FlowSchema", daemons::SCHEDULER.name)["spec"]["rules"][0]["resourceRules"];
    for access in [
        SCHEDULER,
        SCHEDULER_LEADER,
        SCHEDULER_ROOM,
        SCHEDULER_CERTIFICATES,
        SCHEDULER_WEBHOOKS,
    ]
    .concat()
    {
        let is_in = |list, word| texts(list).iter().any(|one| *one == "*" || *one == word);
        let is_meant = rules.as_array().unwrap().iter().any(|rule| {
            let is_everywhere = rule["clusterScope"] == true && texts(&rule["namespaces"]) == ["*"];
            is_everywhere
                && is_in(&rule["apiGroups"], access.group)
                && is_in(&rule["resources"], access.resource)
                && is_in(&rule["verbs"], access.verb)
        });
        assert!(is_meant, "{access}");
    }
}

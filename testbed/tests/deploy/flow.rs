//! The scheduler's requests do not queue behind every other service account, nor can they hold up kube-scheduler's.

use kit::rbac::{SCHEDULER, SCHEDULER_CERTIFICATES, SCHEDULER_LEADER, SCHEDULER_ROOM, SCHEDULER_WEBHOOKS};
use rstest::rstest;
use serde_json::json;

use super::daemons;
use super::render::render;
use super::{find, items, texts};

/// The precedence of Kubernetes' own schema for all service accounts.
const ALL_SERVICE_ACCOUNTS: i64 = 9000;
/// The shares of Kubernetes' own level `workload-high`, which serves kube-scheduler and kube-controller-manager.
const SHARES_OF_KUBE_SCHEDULER: i64 = 40;

#[rstest]
fn the_flow_schema_comes_before_that_of_service_accounts(
    #[values("base", "attach/second-scheduler")] folder: &str,
) {
    let objects = render(folder);
    let schema = &find(&objects, "FlowSchema", daemons::SCHEDULER.name)["spec"];
    assert!((1..ALL_SERVICE_ACCOUNTS).contains(&schema["matchingPrecedence"].as_i64().unwrap()));
    let level = find(&objects, "PriorityLevelConfiguration", daemons::SCHEDULER.name);
    assert_eq!(
        schema["priorityLevelConfiguration"]["name"],
        level["metadata"]["name"]
    );
    let limits = &level["spec"]["limited"];
    assert!(
        limits["nominalConcurrencyShares"].as_i64().unwrap() < SHARES_OF_KUBE_SCHEDULER,
        "{limits}"
    );
    assert!(
        limits["borrowingLimitPercent"].is_number(),
        "without a limit it borrows all that is idle: {limits}"
    );
    let account = &daemons::SCHEDULER.pod(&objects)["serviceAccountName"];
    let account = json!({"name": account, "namespace": "gpushare-system"});
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
        let is_meant = items(rules).iter().any(|rule| {
            let is_everywhere = rule["clusterScope"] == true && texts(&rule["namespaces"]) == ["*"];
            is_everywhere
                && is_in(&rule["apiGroups"], access.group)
                && is_in(&rule["resources"], access.resource)
                && is_in(&rule["verbs"], access.verb)
        });
        assert!(is_meant, "{access}");
    }
}

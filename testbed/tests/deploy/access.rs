//! The rights of the service accounts, against the tables of the daemons' requests.

use std::collections::BTreeSet;

use kit::rbac::{
    DEVICE_PLUGIN, Permission, Rbac, RbacTarget, SCHEDULER, SCHEDULER_CERTIFICATES, SCHEDULER_LEADER,
    SCHEDULER_ROOM,
};
use rstest::rstest;

use crate::render::{documents, render};
use crate::{all, find, read, texts};

const SCHEDULER_ACCOUNT: &str = "system:serviceaccount:gpushare-system:gpushare-scheduler";
const PLUGIN_ACCOUNT: &str = "system:serviceaccount:gpushare-system:gpushare-device-plugin";

/// No right is missing and none is too many.
#[rstest]
#[case::scheduler("base", SCHEDULER_ACCOUNT, SCHEDULER, &[("gpushare-scheduler", SCHEDULER_LEADER), ("gpushare-room", SCHEDULER_ROOM), ("gpushare-scheduler-certificates", SCHEDULER_CERTIFICATES)])]
#[case::device_plugin("base", PLUGIN_ACCOUNT, DEVICE_PLUGIN, &[])]
#[case::device_plugin_simulated("overlays/simulated", PLUGIN_ACCOUNT, DEVICE_PLUGIN, &[])]
fn may_do_what_it_does_and_nothing_else(
    #[case] folder: &str,
    #[case] account: &str,
    #[case] used: &[Permission<'static>],
    #[case] at_home: &[(&str, &[Permission<'static>])],
) {
    let rbac = Rbac::of(&render(folder)).unwrap();
    let everywhere: BTreeSet<Permission<'_>> = used.iter().copied().collect();
    let named: BTreeSet<Permission<'_>> = at_home
        .iter()
        .flat_map(|(_, accesses)| accesses.iter().copied())
        .collect();
    assert_eq!(rbac.granted(account), everywhere.union(&named).copied().collect());
    for access in everywhere {
        assert!(
            rbac.allows(
                account,
                access,
                RbacTarget {
                    namespace: "any",
                    name: "any"
                }
            ),
            "{access}"
        );
    }
    for (name, access) in at_home
        .iter()
        .flat_map(|(name, accesses)| accesses.iter().map(move |access| (*name, *access)))
    {
        assert!(
            !rbac.allows(
                account,
                access,
                RbacTarget {
                    namespace: "any",
                    name
                }
            ),
            "{access} elsewhere"
        );
        assert!(
            rbac.allows(
                account,
                access,
                RbacTarget {
                    namespace: "gpushare-system",
                    name
                }
            ),
            "{access}"
        );
    }
}

#[rstest]
#[case::workload("Deployment", "gpushare-scheduler", SCHEDULER_ACCOUNT)]
#[case::daemon_set("DaemonSet", "gpushare-device-plugin", PLUGIN_ACCOUNT)]
fn each_daemon_runs_under_its_account(#[case] kind: &str, #[case] name: &str, #[case] account: &str) {
    let objects = render("base");
    let workload = find(&objects, kind, name);
    let namespace = workload["metadata"]["namespace"].as_str().unwrap();
    let service_account = workload["spec"]["template"]["spec"]["serviceAccountName"]
        .as_str()
        .unwrap();
    assert_eq!(
        format!("system:serviceaccount:{namespace}:{service_account}"),
        account
    );
    assert_eq!(
        find(&objects, "ServiceAccount", service_account)["metadata"]["namespace"],
        namespace
    );
}

/// The second kube-scheduler adds to the pod's account its Lease and the roles that every cluster has; the extenders have no
/// Lease of their own there.
#[test]
fn the_second_scheduler_adds_its_lease_and_the_roles_of_kube_scheduler() {
    let objects = render("attach/second-scheduler");
    let rbac = Rbac::of(&objects).unwrap();
    let used: BTreeSet<Permission<'_>> = SCHEDULER
        .iter()
        .chain(SCHEDULER_LEADER)
        .chain(SCHEDULER_ROOM)
        .chain(SCHEDULER_CERTIFICATES)
        .copied()
        .collect();
    assert_eq!(rbac.granted(SCHEDULER_ACCOUNT), used);
    let update = Permission {
        group: "coordination.k8s.io",
        resource: "leases",
        subresource: "",
        verb: "update",
    };
    let lease = |namespace, name| rbac.allows(SCHEDULER_ACCOUNT, update, RbacTarget { namespace, name });
    assert!(lease("gpushare-system", "gpushare-kube-scheduler"));
    for (namespace, name) in [
        ("gpushare-system", "gpushare-scheduler"),
        ("kube-system", "gpushare-kube-scheduler"),
    ] {
        assert!(!lease(namespace, name), "{namespace}/{name}");
    }

    let roles = [
        "gpushare-second-kube-scheduler",
        "gpushare-second-volume-scheduler",
    ];
    let roles = roles.map(|name| {
        find(&objects, "ClusterRoleBinding", name)["roleRef"]["name"]
            .as_str()
            .unwrap()
            .to_owned()
    });
    assert_eq!(roles, ["system:kube-scheduler", "system:volume-scheduler"]);
    let reader = find(&objects, "RoleBinding", "gpushare-second-authentication-reader");
    assert_eq!(
        reader["roleRef"]["name"],
        "extension-apiserver-authentication-reader"
    );
    assert_eq!(reader["metadata"]["namespace"], "kube-system");
}

/// kustomize adds a hash to the name of a generated `ConfigMap` wherever it meets that name, roles' `resourceNames` included.
#[test]
fn no_role_names_an_object_with_a_generated_name() {
    let component = documents(&read("components/second-scheduler/kustomization.yaml")).remove(0);
    let generated: Vec<&str> = component["configMapGenerator"]
        .as_array()
        .unwrap()
        .iter()
        .map(|generator| generator["name"].as_str().unwrap())
        .collect();
    let objects = render("attach/second-scheduler");
    let rules = ["Role", "ClusterRole"]
        .into_iter()
        .flat_map(|kind| all(&objects, kind))
        .flat_map(|role| role["rules"].as_array().unwrap());
    let named: Vec<&str> = rules.flat_map(|rule| texts(&rule["resourceNames"])).collect();
    assert!(named.contains(&"gpushare-kube-scheduler"), "{named:?}");
    assert!(
        generated.iter().all(|name| !named.contains(name)),
        "{generated:?} {named:?}"
    );
}

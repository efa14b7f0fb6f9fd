//! The rights of the service accounts, against the tables of the daemons' requests.

use std::collections::BTreeSet;

use kit::rbac::{
    DEVICE_PLUGIN, Permission, Rbac, RbacTarget, SCHEDULER, SCHEDULER_CERTIFICATES, SCHEDULER_LEADER,
    SCHEDULER_ROOM,
};
use rstest::rstest;

use serde_json::Value;

use super::render::{documents, render, render_with};
use super::{all, daemons, find, items, read, texts};

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
    let allows = |access, namespace, name| rbac.allows(account, access, RbacTarget { namespace, name });
    for access in everywhere {
        assert!(allows(access, "any", "any"), "{access}");
    }
    for (name, accesses) in at_home {
        for access in *accesses {
            assert!(!allows(*access, "any", name), "{access} elsewhere");
            assert!(allows(*access, "gpushare-system", name), "{access}");
        }
    }
}

/// Kubernetes keeps the events of nodes, which are in no namespace, in `default`.
#[test]
fn the_scheduler_writes_events_of_nodes() {
    let rbac = Rbac::of(&render("base")).unwrap();
    for (namespace, expected) in [("default", true), ("tenant", false)] {
        for verb in ["create", "patch"] {
            let event = Permission {
                group: "",
                resource: "events",
                subresource: "",
                verb,
            };
            let target = RbacTarget {
                namespace,
                name: "any",
            };
            assert_eq!(
                rbac.allows(SCHEDULER_ACCOUNT, event, target),
                expected,
                "{verb} in {namespace}"
            );
        }
    }
}

/// The component adds the rights to evict, to nominate and to write events everywhere, and the flag that makes use of them.
#[rstest]
#[case::alone(&["components/make-room"])]
#[case::beside_a_second_kube_scheduler(&["components/second-scheduler", "components/make-room"])]
fn making_room_is_a_component_of_its_own(#[case] components: &[&str]) {
    let objects = render_with("base", components);
    let without: Vec<&str> = components
        .iter()
        .copied()
        .filter(|name| !name.ends_with("make-room"))
        .collect();
    let granted = |objects: &[Value]| -> BTreeSet<String> {
        let rbac = Rbac::of(objects).unwrap();
        rbac.granted(SCHEDULER_ACCOUNT)
            .iter()
            .map(ToString::to_string)
            .collect()
    };
    let base = render_with("base", &without);
    let (before, after) = (granted(&base), granted(&objects));
    let added: Vec<&String> = after.difference(&before).collect();
    assert_eq!(added, ["create pods/eviction", "patch pods/status"]);
    let args = daemons::SCHEDULER.pod(&objects)["containers"][0]["args"].to_string();
    assert!(args.contains("--make-room=evict"), "{args}");
    let args = daemons::SCHEDULER.pod(&base)["containers"][0]["args"].to_string();
    assert!(!args.contains("--make-room"), "{args}");
}

#[rstest]
#[case::scheduler(daemons::SCHEDULER, SCHEDULER_ACCOUNT)]
#[case::device_plugin(daemons::DEVICE_PLUGIN, PLUGIN_ACCOUNT)]
fn each_daemon_runs_under_its_account(#[case] daemon: daemons::Daemon, #[case] account: &str) {
    let objects = render("base");
    let used = daemon.pod(&objects)["serviceAccountName"].as_str().unwrap();
    let namespace = &find(&objects, "ServiceAccount", used)["metadata"]["namespace"];
    assert_eq!(*namespace, daemon.workload(&objects)["metadata"]["namespace"]);
    assert_eq!(
        format!("system:serviceaccount:{}:{used}", namespace.as_str().unwrap()),
        account
    );
}

/// The second kube-scheduler adds to the pod's account its Lease and the roles that every cluster has; the extenders have no
/// Lease of their own there.
#[test]
fn the_second_scheduler_adds_its_lease_and_the_roles_of_kube_scheduler() {
    let objects = render("attach/second-scheduler");
    let rbac = Rbac::of(&objects).unwrap();
    let used = [
        SCHEDULER,
        SCHEDULER_LEADER,
        SCHEDULER_ROOM,
        SCHEDULER_CERTIFICATES,
    ]
    .concat();
    assert_eq!(rbac.granted(SCHEDULER_ACCOUNT), used.into_iter().collect());
    let update = Permission {
        group: "coordination.k8s.io",
        resource: "leases",
        subresource: "",
        verb: "update",
    };
    let lease = |namespace, name| rbac.allows(SCHEDULER_ACCOUNT, update, RbacTarget { namespace, name });
    assert!(lease("gpushare-system", "gpushare-kube-scheduler"));
    assert!(!lease("gpushare-system", "gpushare-scheduler"));
    assert!(!lease("kube-system", "gpushare-kube-scheduler"));

    let role_of = |kind, name| find(&objects, kind, name)["roleRef"]["name"].as_str().unwrap();
    for (binding, role) in [
        ("gpushare-second-kube-scheduler", "system:kube-scheduler"),
        ("gpushare-second-volume-scheduler", "system:volume-scheduler"),
    ] {
        assert_eq!(role_of("ClusterRoleBinding", binding), role);
    }
    let reader = "gpushare-second-authentication-reader";
    assert_eq!(
        role_of("RoleBinding", reader),
        "extension-apiserver-authentication-reader"
    );
    assert_eq!(
        find(&objects, "RoleBinding", reader)["metadata"]["namespace"],
        "kube-system"
    );
}

/// kustomize adds a hash to the name of a generated `ConfigMap` wherever it meets that name, roles' `resourceNames` included.
#[test]
fn no_role_names_an_object_with_a_generated_name() {
    let component = documents(&read("components/second-scheduler/kustomization.yaml")).remove(0);
    let generated = items(&component["configMapGenerator"]);
    let objects = render("attach/second-scheduler");
    let roles = [all(&objects, "Role"), all(&objects, "ClusterRole")].concat();
    let granted = roles.into_iter().flat_map(|role| items(&role["rules"]));
    let named: Vec<&str> = granted.flat_map(|rule| texts(&rule["resourceNames"])).collect();
    assert!(named.contains(&"gpushare-kube-scheduler"), "{named:?}");
    assert!(
        generated
            .iter()
            .all(|generator| !named.contains(&generator["name"].as_str().unwrap())),
        "{generated:?} {named:?}"
    );
}

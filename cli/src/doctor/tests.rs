//! Planted faults: each is found by the check that is meant for it, and a sound cluster has none.

use proto::read_api::{Diagnosis, Replica as ReplicaState};
use rstest::rstest;
use serde_json::{Value, json};

use super::checks::findings;
use super::facts::Objects;
use super::*;

fn condition(kind: &str, status: &str) -> Value {
    json!({"conditions": [{"type": kind, "status": status}]})
}

fn workload(name: &str, image: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "gpushare-system"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [{"name": "c", "image": image, "args": []}]}}},
        "status": {"readyReplicas": 2, "desiredNumberScheduled": 1},
    })
}

fn binding(account: &str) -> Value {
    json!({"metadata": {"name": account}, "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "gpushare-system"}]})
}

fn webhook(ca: &str) -> Value {
    json!({"metadata": {"name": "gpushare"}, "webhooks": [{
        "name": "pods.gpushare.io", "failurePolicy": "Ignore",
        "clientConfig": {"caBundle": ca, "service": {"namespace": "gpushare-system", "name": "gpushare-webhook"}},
    }]})
}

fn replica(pod: &str, leading: bool) -> AskedReplica {
    AskedReplica {
        pod: pod.to_owned(),
        diagnosis: Ok(Diagnosis {
            replica: ReplicaState {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                leading,
                ..ReplicaState::default()
            },
            ..Diagnosis::default()
        }),
    }
}

/// An installation with one node and two replicas.
fn sound() -> InstallationFacts {
    let policies = [&checks::POLICIES[..], &[checks::WEBHOOK_POLICY]].concat();
    let node = json!({
        "metadata": {"name": "n1", "labels": {"gpushare": "true"}, "annotations": {"aliyun.com/gpu-mem-unit": "GiB"}},
        "status": {"capacity": {"aliyun.com/gpu-mem": "16"}},
    });
    let plugin = json!({
        "metadata": {"name": "plugin-1", "namespace": "gpushare-system", "labels": {"app.kubernetes.io/name": "gpushare-device-plugin"}},
        "spec": {"nodeName": "n1"}, "status": condition("Ready", "True"),
    });
    let device = json!({
        "metadata": {"name": "n1", "labels": {
            "node.koordinator.sh/gpu-vendor": "nvidia", "node.koordinator.sh/gpu-driver-version": "570.1"}},
        "spec": {"devices": [{"type": "gpu", "conditions": [{"type": "Injectable", "status": "True"}]}]},
    });
    let definition =
        |name: &str| json!({"metadata": {"name": name}, "status": condition("Established", "True")});
    let objects = [
        ("nodes", vec![node]),
        ("pods", vec![plugin]),
        ("devices", vec![device]),
        (
            "daemonsets",
            vec![workload(
                "gpushare-device-plugin",
                "ghcr.io/gpushare/gpushare-device-plugin:v1",
            )],
        ),
        (
            "deployments",
            vec![workload(
                "gpushare-scheduler",
                "ghcr.io/gpushare/gpushare-scheduler:v1",
            )],
        ),
        (
            "services",
            vec![json!({"metadata": {"name": "gpushare-webhook"}})],
        ),
        (
            "leases",
            vec![json!({"metadata": {"name": "gpushare-scheduler"}})],
        ),
        (
            "clusterrolebindings",
            vec![binding("gpushare-scheduler"), binding("gpushare-device-plugin")],
        ),
        (
            "customresourcedefinitions",
            vec![
                definition("devices.scheduling.koordinator.sh"),
                definition("schedulerleaders.gpushare.io"),
            ],
        ),
        (
            "validatingadmissionpolicies",
            policies
                .iter()
                .map(|name| json!({"metadata": {"name": name}}))
                .collect(),
        ),
        (
            "validatingadmissionpolicybindings",
            policies
                .iter()
                .map(|name| json!({"spec": {"policyName": name}}))
                .collect(),
        ),
        ("mutatingwebhookconfigurations", vec![webhook("Zm9v")]),
        ("validatingwebhookconfigurations", vec![webhook("Zm9v")]),
    ];
    InstallationFacts {
        namespace: "gpushare-system".to_owned(),
        version: json!({"major": "1", "minor": "34+", "gitVersion": "v1.34.1"}),
        objects: objects
            .into_iter()
            .map(|(kind, objects)| (kind, Ok(objects)))
            .collect(),
        replicas: Ok(vec![replica("s-1", true), replica("s-2", false)]),
        state: Ok(Vec::new()),
    }
}

/// The findings that are faults.
fn faults(facts: &InstallationFacts) -> Vec<Finding> {
    let mut faults = findings(facts);
    faults.retain(|finding| finding.severity != Severity::Ok);
    faults
}

#[test]
fn a_sound_cluster_has_no_finding() {
    assert_eq!(faults(&sound()), []);
}

/// The policy of the webhooks is part of their component.
#[test]
fn an_installation_without_webhooks_needs_no_policy_for_them() {
    let mut facts = sound();
    for kind in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
        *list(&mut facts, kind) = Ok(Vec::new());
    }
    list(&mut facts, "validatingadmissionpolicies")
        .as_mut()
        .unwrap()
        .pop();
    assert_eq!(faults(&facts), []);
}

/// The objects of a kind, to plant a fault.
fn list<'a>(facts: &'a mut InstallationFacts, kind: &str) -> &'a mut Objects {
    facts.objects.get_mut(kind).unwrap()
}

fn first(objects: &mut Objects) -> &mut Value {
    objects.as_mut().unwrap().first_mut().unwrap()
}

fn set(objects: &mut Objects, pointer: &str, value: Value) {
    *first(objects).pointer_mut(pointer).unwrap() = value;
}

fn answers(facts: &mut InstallationFacts) -> Vec<&mut Diagnosis> {
    let replicas = facts.replicas.as_mut().unwrap();
    replicas
        .iter_mut()
        .map(|replica| replica.diagnosis.as_mut().unwrap())
        .collect()
}

/// Adds a pod with an allocation record that has failed for this reason.
fn fail_pod(facts: &mut InstallationFacts, reason: &str) {
    list(facts, "pods").as_mut().unwrap().push(json!({
        "metadata": {"name": "p", "annotations": {"scheduling.koordinator.sh/device-allocated": "{}"}},
        "spec": {"nodeName": "n1"}, "status": {"phase": "Failed", "reason": reason},
    }));
}

fn report(check: &str, object: &str) -> Finding {
    Finding {
        check: check.to_owned(),
        severity: Severity::Error,
        object: object.to_owned(),
        ..Finding::default()
    }
}

#[rstest]
#[case::old_api_server("api-version", |facts: &mut InstallationFacts| facts.version = json!({"major": "1", "minor": "29"}))]
#[case::no_definition("definitions", |facts: &mut InstallationFacts| drop(list(facts, "customresourcedefinitions").as_mut().unwrap().remove(0)))]
#[case::definition_not_established("definitions", |facts: &mut InstallationFacts| set(list(facts, "customresourcedefinitions"), "/status/conditions/0/status", json!("False")))]
#[case::no_scheduler("scheduler-pods", |facts: &mut InstallationFacts| *list(facts, "deployments") = Ok(Vec::new()))]
#[case::scheduler_not_ready("scheduler-pods", |facts: &mut InstallationFacts| set(list(facts, "deployments"), "/status/readyReplicas", json!(0)))]
#[case::one_replica_not_ready("scheduler-pods", |facts: &mut InstallationFacts| set(list(facts, "deployments"), "/status/readyReplicas", json!(1)))]
#[case::read_api_refused("read-api", |facts: &mut InstallationFacts| facts.replicas.as_mut().unwrap()[1].diagnosis = Err("refused".to_owned()))]
#[case::no_leader("leader", |facts: &mut InstallationFacts| answers(facts)[0].replica.leading = false)]
#[case::two_leaders("leader", |facts: &mut InstallationFacts| answers(facts)[1].replica.leading = true)]
#[case::no_lease("leader", |facts: &mut InstallationFacts| *list(facts, "leases") = Ok(Vec::new()))]
#[case::replicas_differ("versions", |facts: &mut InstallationFacts| answers(facts)[1].replica.version = "0.0.1".to_owned())]
#[case::images_differ("versions", |facts: &mut InstallationFacts| set(list(facts, "daemonsets"), "/spec/template/spec/containers/0/image", json!("gpushare-device-plugin:v0")))]
#[case::no_rights("rights", |facts: &mut InstallationFacts| drop(list(facts, "clusterrolebindings").as_mut().unwrap().remove(1)))]
#[case::no_policy("policies", |facts: &mut InstallationFacts| drop(list(facts, "validatingadmissionpolicies").as_mut().unwrap().remove(4)))]
#[case::policy_without_binding("policies", |facts: &mut InstallationFacts| drop(list(facts, "validatingadmissionpolicybindings").as_mut().unwrap().remove(0)))]
#[case::no_policy_of_the_webhooks("policies", |facts: &mut InstallationFacts| drop(list(facts, "validatingadmissionpolicies").as_mut().unwrap().pop()))]
#[case::no_ca("webhooks", |facts: &mut InstallationFacts| set(list(facts, "mutatingwebhookconfigurations"), "/webhooks/0/clientConfig/caBundle", json!("")))]
#[case::webhook_to_nowhere("webhooks", |facts: &mut InstallationFacts| *list(facts, "services") = Ok(Vec::new()))]
#[case::no_limits("enforcement", |facts: &mut InstallationFacts| {
    set(list(facts, "daemonsets"), "/spec/template/spec/containers/0/args", json!(["--driver-limits"]));
    let limited = json!({"type": "Limited", "status": "False", "message": "driver 550 has no limits"});
    set(list(facts, "devices"), "/spec/devices/0/conditions/0", limited);
})]
#[case::level_that_no_gpu_has("enforcement", |facts: &mut InstallationFacts| list(facts, "pods").as_mut().unwrap().push(json!({
    "metadata": {"name": "p", "namespace": "n", "annotations": {"gpushare/enforcement": "driver"}}, "spec": {},
})))]
#[case::one_configuration("webhooks", |facts: &mut InstallationFacts| *list(facts, "validatingwebhookconfigurations") = Ok(Vec::new()))]
#[case::one_configuration_beside_those_of_others("webhooks", |facts: &mut InstallationFacts| {
    set(list(facts, "validatingwebhookconfigurations"), "/webhooks/0/clientConfig/service/namespace", json!("cert-manager"));
})]
#[case::no_plugin_pod("plugins", |facts: &mut InstallationFacts| *list(facts, "pods") = Ok(Vec::new()))]
#[case::plugin_not_ready("plugins", |facts: &mut InstallationFacts| set(list(facts, "pods"), "/status/conditions/0/status", json!("False")))]
#[case::no_labelled_node("plugins", |facts: &mut InstallationFacts| set(list(facts, "nodes"), "/metadata/labels/gpushare", json!("false")))]
#[case::no_device_object("device-objects", |facts: &mut InstallationFacts| *list(facts, "devices") = Ok(Vec::new()))]
#[case::empty_device_object("device-objects", |facts: &mut InstallationFacts| set(list(facts, "devices"), "/spec/devices", json!([])))]
#[case::device_without_node("device-objects", |facts: &mut InstallationFacts| list(facts, "devices").as_mut().unwrap().push(json!({"metadata": {"name": "gone"}})))]
#[case::no_cdi("injection", |facts: &mut InstallationFacts| set(list(facts, "devices"), "/spec/devices/0/conditions/0/status", json!("False")))]
#[case::isolation_unknown("injection", |facts: &mut InstallationFacts| {
    let unknown = json!({"type": "Isolated", "status": "Unknown", "message": "it is privileged"});
    set(list(facts, "devices"), "/spec/devices/0/conditions/0", unknown);
})]
#[case::no_driver("drivers", |facts: &mut InstallationFacts| set(list(facts, "devices"), "/metadata/labels/node.koordinator.sh~1gpu-driver-version", json!("")))]
#[case::no_unit("memory-units", |facts: &mut InstallationFacts| set(list(facts, "nodes"), "/metadata/annotations", json!({})))]
#[case::old_plugin("other-plugins", |facts: &mut InstallationFacts| {
    let mut other = workload("gpushare-device-plugin-ds", "registry/acs/k8s-gpushare-plugin:v2");
    other["metadata"]["namespace"] = json!("kube-system");
    list(facts, "daemonsets").as_mut().unwrap().push(other);
})]
#[case::refused_by_kubelet("failed-pods", |facts: &mut InstallationFacts| fail_pod(facts, "UnexpectedAdmissionError"))]
#[case::without_room_on_a_numa_node("failed-pods", |facts: &mut InstallationFacts| fail_pod(facts, "TopologyAffinityError"))]
#[case::without_cpu("failed-pods", |facts: &mut InstallationFacts| fail_pod(facts, "OutOfcpu"))]
#[case::sick_gpu("gpu-health", |facts: &mut InstallationFacts| facts.state = Ok(vec![proto::read_api::Node {
    gpus: vec![proto::read_api::Gpu::default()], ..Default::default()
}]))]
#[case::extender_not_asked("extender-asked", |facts: &mut InstallationFacts| answers(facts)[0].findings.push(report("extender-asked", "")))]
#[case::plugin_away("plugin-serves", |facts: &mut InstallationFacts| answers(facts)[0].findings.push(report("plugin-serves", "node n1")))]
fn planted_faults(#[case] check: &str, #[case] plant: fn(&mut InstallationFacts)) {
    let mut facts = sound();
    plant(&mut facts);
    let bad: Vec<Finding> = findings(&facts)
        .into_iter()
        .filter(|finding| finding.severity >= Severity::Warning)
        .collect();
    assert!(bad.iter().any(|finding| finding.check == check), "{bad:?}");
    // The remedies are whole commands. A command has the names of its objects, but where the user chooses one of several.
    for remedy in bad
        .iter()
        .map(|finding| &finding.remedy)
        .filter(|remedy| !remedy.is_empty())
    {
        let commands: Vec<&str> = remedy.split('`').skip(1).step_by(2).collect();
        let is_named = |command: &&str| {
            !["NAME", "NAMESPACE", "{", "}"]
                .iter()
                .any(|part| command.contains(part))
        };
        assert!(!commands.is_empty() && commands.iter().all(is_named), "{remedy}");
    }
    // A remedy stands beside each; the findings of replicas bring their own.
    let has_remedy = |finding: &Finding| {
        !finding.remedy.is_empty() || check == "extender-asked" || check == "plugin-serves"
    };
    assert!(bad.iter().all(has_remedy), "{bad:?}");
}

/// A node with the variant of the plugin that serves whole GPUs was reported as one without a plugin.
#[test]
fn the_plugin_of_whole_gpus_is_a_device_plugin() {
    let mut facts = sound();
    let name = "/metadata/labels/app.kubernetes.io~1name";
    set(
        list(&mut facts, "pods"),
        name,
        json!("gpushare-device-plugin-whole-gpus"),
    );
    assert_eq!(faults(&facts), []);
}

/// The digests of two images always differ.
#[rstest]
#[case::digests(
    "registry:5000/gpushare-scheduler@sha256:aa",
    "registry:5000/gpushare-device-plugin@sha256:bb"
)]
#[case::tags_and_digests("gpushare-scheduler:v1@sha256:aa", "gpushare-device-plugin:v1@sha256:bb")]
#[case::no_tags("registry:5000/gpushare-scheduler", "registry:5000/gpushare-device-plugin")]
fn images_of_one_release(#[case] scheduler: &str, #[case] plugin: &str) {
    let mut facts = sound();
    let image = "/spec/template/spec/containers/0/image";
    set(list(&mut facts, "deployments"), image, json!(scheduler));
    set(list(&mut facts, "daemonsets"), image, json!(plugin));
    assert_eq!(faults(&facts), []);
}

#[test]
fn versions_that_cannot_be_read_are_unknown() {
    let mut facts = sound();
    facts.version = Value::Null;
    facts.replicas = Err("forbidden".to_owned());
    set(
        list(&mut facts, "daemonsets"),
        "/spec/template/spec/containers/0/image",
        json!("gpushare-device-plugin@sha256:bb"),
    );
    let all = findings(&facts);
    let unknown = |check: &str| {
        all.iter()
            .any(|f| f.check == check && f.severity == Severity::Unknown)
    };
    assert!(unknown("api-version") && unknown("versions"), "{all:?}");
}

#[test]
fn a_right_that_lacks_makes_one_check_unknown() {
    let mut facts = sound();
    *list(&mut facts, "clusterrolebindings") = Err("forbidden".to_owned());
    let all = findings(&facts);
    let unknown: Vec<&str> = all
        .iter()
        .filter(|f| f.severity == Severity::Unknown)
        .map(|f| f.check.as_str())
        .collect();
    assert_eq!(unknown, ["rights"]);
    assert!(all.iter().all(|finding| finding.severity < Severity::Warning));
}

//! One scheduler decides: the election's flags, the label that the Service selects, rights, and what a rollout does.

use kit::rbac::SCHEDULER_LEADER;
use rstest::rstest;
use scheduler::leader::BIND_TIMEOUT;
use serde_json::{Value, json};

use crate::daemons::SCHEDULER;
use crate::render::render;
use crate::{all, find, texts};

/// The label of the leader's pod; the scheduler says so too.
pub(crate) const LEADER_LABEL: &str = "gpushare/leader";
const SINCE: &str = "gpushare/leader-since";

fn pod(objects: &[Value]) -> Value {
    find(objects, "Deployment", SCHEDULER.name)["spec"]["template"].clone()
}

fn container(objects: &[Value]) -> Value {
    pod(objects)["spec"]["containers"][0].clone()
}

fn flag<'a>(container: &'a Value, help: &'a str, name: &str) -> &'a str {
    let said = texts(&container["args"])
        .into_iter()
        .find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
    said.unwrap_or_else(|| {
        let text = help.split(&format!("      {name} ")).nth(1).unwrap();
        text.split("[default: ")
            .nth(1)
            .unwrap()
            .split(']')
            .next()
            .unwrap()
    })
}

#[test]
fn two_replicas_elect_a_leader_and_a_rollout_keeps_both() {
    let objects = render("base");
    let spec = &find(&objects, "Deployment", SCHEDULER.name)["spec"];
    assert_eq!(spec["replicas"], 2);
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    assert_eq!(spec["strategy"], rolling);
    let container = container(&objects);
    assert!(texts(&container["args"]).contains(&"--leader-elect"));
    let field = |name: &str| {
        let entry = container["env"]
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["name"] == name)
            .unwrap();
        entry["valueFrom"]["fieldRef"]["fieldPath"].clone()
    };
    assert_eq!(field("POD_NAME"), "metadata.name");
    let tolerations = pod(&objects)["spec"]["tolerations"].clone();
    for taint in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let toleration = tolerations
            .as_array()
            .unwrap()
            .iter()
            .find(|toleration| toleration["key"] == taint)
            .unwrap();
        assert_eq!(
            toleration["tolerationSeconds"], 30,
            "{taint}: a replica on a node that is gone is replaced soon"
        );
    }
    let labels = &pod(&objects)["metadata"]["labels"];
    assert_eq!(
        labels[LEADER_LABEL],
        Value::Null,
        "no replica leads from its start"
    );
    let budget = find(&objects, "PodDisruptionBudget", SCHEDULER.name);
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let spread = &pod(&objects)["spec"]["topologySpreadConstraints"][0];
    for selector in [&budget["spec"]["selector"], &spread["labelSelector"]] {
        assert!(
            selector["matchLabels"]
                .as_object()
                .unwrap()
                .iter()
                .all(|(key, value)| labels[key] == *value),
            "{selector}"
        );
    }
}

/// Every replica is ready and serves probes; only the label marks the leader.
#[test]
fn the_service_selects_the_leader() {
    let objects = render("base");
    let mut expected =
        find(&objects, "Deployment", SCHEDULER.name)["spec"]["selector"]["matchLabels"].clone();
    expected[LEADER_LABEL] = json!("true");
    assert_eq!(
        find(&objects, "Service", SCHEDULER.name)["spec"]["selector"],
        expected
    );
    assert!(
        SCHEDULER
            .help()
            .contains(&format!("label {LEADER_LABEL} while it leads"))
    );
}

#[test]
fn rights_cover_the_used_lease_and_the_own_pod_only() {
    let objects = render("base");
    let role = find(&objects, "Role", "gpushare-scheduler-leader");
    let named: Vec<&str> = role["rules"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|rule| texts(&rule["resourceNames"]))
        .collect();
    assert_eq!(
        named,
        [SCHEDULER.name, SCHEDULER.name],
        "the Lease, and the object of the same name that repeats it"
    );
    assert!(
        SCHEDULER_LEADER
            .iter()
            .any(|access| (access.resource, access.verb) == ("pods", "patch"))
    );
    let policy = find(&objects, "ValidatingAdmissionPolicy", "gpushare-scheduler-pods");
    let spec = &policy["spec"];
    assert_eq!(
        (
            &spec["failurePolicy"],
            &spec["matchConstraints"]["resourceRules"][0]["resources"]
        ),
        (&json!("Fail"), &json!(["pods"]))
    );
    let account = "request.userInfo.username == 'system:serviceaccount:gpushare-system:gpushare-scheduler'";
    assert_eq!(spec["matchConditions"][0]["expression"], account);
    assert!(
        spec["variables"][0]["expression"]
            .as_str()
            .unwrap()
            .contains("'authentication.kubernetes.io/pod-name'")
    );
    let expressions: Vec<&str> = spec["validations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["expression"].as_str().unwrap())
        .collect();
    for needed in [
        "variables.pod != '' && request.name == variables.pod",
        "object.spec == oldObject.spec",
        &format!("label == '{LEADER_LABEL}' ||"),
        &format!("mark == '{SINCE}' ||"),
    ] {
        assert!(
            expressions.iter().any(|expression| expression.contains(needed)),
            "{needed}: {expressions:#?}"
        );
    }
    let binding = find(
        &objects,
        "ValidatingAdmissionPolicyBinding",
        "gpushare-scheduler-pods",
    );
    assert_eq!(
        (
            &binding["spec"]["policyName"],
            &binding["spec"]["validationActions"]
        ),
        (&policy["metadata"]["name"], &json!(["Deny"]))
    );
}

/// A write that an earlier leader has sent may come in at any time: the API server refuses it once another is named. The kind is
/// our own: of a built-in one kube-apiserver's watch does not survive the policy.
#[test]
fn only_the_named_scheduler_binds() {
    let objects = render("base");
    let spec = &find(
        &objects,
        "ValidatingAdmissionPolicy",
        "gpushare-scheduler-bindings",
    )["spec"];
    let definition = find(
        &objects,
        "CustomResourceDefinition",
        "schedulerleaders.gpushare.io",
    );
    let (group, version) = (
        &definition["spec"]["group"],
        &definition["spec"]["versions"][0]["name"],
    );
    let api_version = format!("{}/{}", group.as_str().unwrap(), version.as_str().unwrap());
    let kind = json!({"apiVersion": api_version, "kind": definition["spec"]["names"]["kind"]});
    assert_eq!(
        (&spec["failurePolicy"], &spec["paramKind"]),
        (&json!("Ignore"), &kind)
    );
    assert!(
        texts(&container(&objects)["args"]).contains(&"--fence-bindings"),
        "no object would be named"
    );
    let resources = texts(&spec["matchConstraints"]["resourceRules"][0]["resources"]);
    // The API server answers a review and stores nothing.
    let stores = |access: &&kit::rbac::Permission<'_>| {
        access.verb == "create" && !access.resource.ends_with("reviews")
    };
    for access in kit::rbac::SCHEDULER.iter().filter(stores) {
        assert!(
            resources.contains(&format!("{}/{}", access.resource, access.subresource).as_str()),
            "not asked about: {access}"
        );
    }
    let account = "request.userInfo.username == 'system:serviceaccount:gpushare-system:gpushare-scheduler'";
    assert_eq!(
        spec["matchConditions"],
        json!([{"name": "is-scheduler", "expression": account}])
    );
    let expression = spec["validations"][0]["expression"].as_str().unwrap();
    assert!(
        expression.contains("holderIdentity.orValue('').startsWith(variables.pod + '_')"),
        "{expression}"
    );
    let binding = &find(
        &objects,
        "ValidatingAdmissionPolicyBinding",
        "gpushare-scheduler-bindings",
    )["spec"];
    let lease = json!({
        "namespace": "gpushare-system",
        "name": SCHEDULER.name,
        "parameterNotFoundAction": "Allow",
    });
    assert_eq!(
        (&binding["paramRef"], &binding["validationActions"]),
        (&lease, &json!(["Deny"]))
    );
}

/// kube-apiserver looks for a policy's parameter before it evaluates the conditions that limit the policy to our accounts: a policy
/// that fails without its parameter refuses the requests of the whole cluster.
#[test]
fn no_policy_refuses_others_while_its_parameter_is_missing() {
    for folder in ["base", "attach/second-scheduler"] {
        let objects = render(folder);
        for binding in all(&objects, "ValidatingAdmissionPolicyBinding") {
            let reference = &binding["spec"]["paramRef"];
            if reference.is_null() {
                continue;
            }
            assert_eq!(reference["parameterNotFoundAction"], "Allow");
            let name = binding["spec"]["policyName"].as_str().unwrap();
            let policy = find(&objects, "ValidatingAdmissionPolicy", name);
            assert_eq!(policy["spec"]["failurePolicy"], "Ignore", "{name}");
        }
    }
}

/// A policy whose parameter is of a built-in kind refuses everything once it was deleted and made again.
#[test]
fn no_policy_has_a_parameter_of_a_built_in_kind() {
    for folder in ["base", "attach/second-scheduler"] {
        let objects = render(folder);
        let definitions = all(&objects, "CustomResourceDefinition");
        let is_ours = |kind: &Value| {
            definitions
                .iter()
                .any(|definition| definition["spec"]["names"]["kind"] == *kind)
        };
        for policy in all(&objects, "ValidatingAdmissionPolicy") {
            let kind = &policy["spec"]["paramKind"]["kind"];
            assert!(
                kind.is_null() || is_ours(kind),
                "{}: {kind}",
                policy["metadata"]["name"]
            );
        }
    }
}

/// A leader ends its binds, gives the Lease up, takes its label off and answers what is in work before kubelet kills it.
#[test]
fn the_termination_grace_covers_the_release_of_the_lease() {
    let objects = render("base");
    let grace = pod(&objects)["spec"]["terminationGracePeriodSeconds"]
        .as_u64()
        .unwrap();
    let (container, help) = (container(&objects), SCHEDULER.help());
    // A request of the elector takes half of the renew deadline at most, which is two thirds of the Lease.
    let lease: u64 = flag(&container, &help, "--lease-duration")
        .trim_end_matches('s')
        .parse()
        .unwrap();
    let requests = lease / 3;
    let (goodbyes, drain) = (2 * 5, 10);
    assert!(
        grace > BIND_TIMEOUT.as_secs() + requests + goodbyes + drain,
        "{grace}"
    );
}

/// Two extenders that decide at one time would give the same device away twice (E11): each decides by the Lease of the
/// kube-scheduler in its own pod, and by nothing else.
#[rstest]
#[case::simulated("overlays/simulated")]
#[case::attached("attach/second-scheduler")]
fn beside_a_kube_scheduler_its_lease_elects_the_extender(#[case] folder: &str) {
    let objects = render(folder);
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    assert_eq!(deployment["spec"]["replicas"], 2);
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    assert_eq!(deployment["spec"]["strategy"], rolling);
    assert_eq!(
        pod(&objects)["spec"]["topologySpreadConstraints"][0]["topologyKey"],
        "kubernetes.io/hostname"
    );
    assert_eq!(
        pod(&objects)["spec"]["hostNetwork"],
        Value::Null,
        "the host name would not be the pod's name"
    );
    let container = container(&objects);
    let args = texts(&container["args"]);
    SCHEDULER
        .accepts(&[&args[..], &["--pod-name=p"]].concat())
        .unwrap();
    assert!(
        args.contains(&"--fence-bindings") && !args.contains(&"--leader-elect"),
        "{args:?}"
    );
    let map = pod(&objects)["spec"]["volumes"][0]["configMap"]["name"]
        .as_str()
        .unwrap()
        .to_owned();
    let files = find(&objects, "ConfigMap", &map)["data"]
        .as_object()
        .unwrap()
        .clone();
    let configuration: Value =
        serde_yaml_ng::from_str(files.values().next().unwrap().as_str().unwrap()).unwrap();
    let election = &configuration["leaderElection"];
    assert_eq!(election["leaderElect"], true);
    assert_eq!(election["resourceNamespace"], deployment["metadata"]["namespace"]);
    assert_eq!(
        flag(&container, "", "--kube-scheduler-lease"),
        election["resourceName"].as_str().unwrap()
    );
    // kube-scheduler's own times, which the configuration leaves as they are, are at least those of the extender.
    assert!(
        election
            .as_object()
            .unwrap()
            .keys()
            .all(|key| !key.ends_with("Duration") && !key.ends_with("Deadline"))
    );
    assert_eq!(flag(&container, &SCHEDULER.help(), "--lease-duration"), "15s");
    let variables = container["env"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["name"].as_str().unwrap());
    assert_eq!(variables.collect::<Vec<_>>(), ["POD_NAME"]);
    find(
        &objects,
        "ValidatingAdmissionPolicyBinding",
        "gpushare-scheduler-bindings",
    );
}

/// kubelet ends a container that stands still, and does not wait for its grace period then.
#[test]
fn a_hung_extender_beside_a_kube_scheduler_is_restarted_within_twenty_seconds() {
    let objects = render("attach/second-scheduler");
    for container in pod(&objects)["spec"]["containers"].as_array().unwrap() {
        let probe = &container["livenessProbe"];
        let number = |field: &str| probe[field].as_u64().unwrap();
        let seconds =
            number("periodSeconds") * number("failureThreshold") + number("terminationGracePeriodSeconds");
        assert!(seconds <= 20, "{}: {seconds} s", container["name"]);
    }
}

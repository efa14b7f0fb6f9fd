//! One scheduler decides: the election's flags, the label that the Service selects, rights, and what a rollout does.

use rstest::rstest;
use scheduler::leader::BIND_TIMEOUT;
use serde_json::{Value, json};

use super::daemons::SCHEDULER;
use super::render::render;
use super::{all, find, flag, items, named, texts};

/// The label of the leader's pod; the scheduler says so too.
pub(crate) const LEADER_LABEL: &str = "gpushare/leader";

/// The default of a flag, by the scheduler's help.
fn default_of(flag: &str) -> String {
    let help = SCHEDULER.help();
    let (_, text) = help.split_once(&format!("      {flag} ")).unwrap();
    let (_, text) = text.split_once("[default: ").unwrap();
    text.split(']').next().unwrap().to_owned()
}

#[rstest]
fn a_rollout_keeps_two_replicas(
    #[values("base", "overlays/simulated", "attach/second-scheduler")] folder: &str,
) {
    let objects = render(folder);
    let spec = &SCHEDULER.workload(&objects)["spec"];
    assert_eq!(spec["replicas"], 2);
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    assert_eq!(spec["strategy"], rolling);
    let spread = &SCHEDULER.pod(&objects)["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "kubernetes.io/hostname");
    let variables: Vec<&str> = items(&SCHEDULER.container(&objects)["env"])
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert_eq!(variables, ["POD_NAME"]);
}

#[test]
fn two_replicas_elect_a_leader() {
    let objects = render("base");
    let container = SCHEDULER.container(&objects);
    assert!(texts(&container["args"]).contains(&"--leader-elect"));
    let variable = named(&container["env"], "POD_NAME");
    assert_eq!(variable["valueFrom"]["fieldRef"]["fieldPath"], "metadata.name");
    for taint in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let mut tolerations = items(&SCHEDULER.pod(&objects)["tolerations"]).iter();
        let toleration = tolerations.find(|toleration| toleration["key"] == taint).unwrap();
        assert_eq!(
            toleration["tolerationSeconds"], 30,
            "{taint}: a replica on a node that is gone is replaced soon"
        );
    }
    let labels = &SCHEDULER.workload(&objects)["spec"]["template"]["metadata"]["labels"];
    assert_eq!(
        labels[LEADER_LABEL],
        Value::Null,
        "no replica leads from its start"
    );
    let budget = find(&objects, "PodDisruptionBudget", SCHEDULER.name);
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let spread = &SCHEDULER.pod(&objects)["topologySpreadConstraints"][0];
    for selector in [&budget["spec"]["selector"], &spread["labelSelector"]] {
        let selected = selector["matchLabels"].as_object().unwrap();
        assert!(
            selected.iter().all(|(key, value)| labels[key] == *value),
            "{selector}"
        );
    }
}

/// Every replica is ready and serves probes; only the label marks the leader.
#[test]
fn the_service_selects_the_leader() {
    let objects = render("base");
    let mut expected = SCHEDULER.workload(&objects)["spec"]["selector"]["matchLabels"].clone();
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

/// The Lease, and the object of the same name that repeats it.
#[test]
fn rights_cover_the_used_lease_only() {
    let objects = render("base");
    let rules = items(&find(&objects, "Role", "gpushare-scheduler-leader")["rules"]).iter();
    let named: Vec<&str> = rules.flat_map(|rule| texts(&rule["resourceNames"])).collect();
    assert_eq!(named, [SCHEDULER.name, SCHEDULER.name]);
}

/// A write that an earlier leader has sent may come in at any time: the API server refuses it once another is named.
#[test]
fn only_the_named_scheduler_binds() {
    let objects = render("base");
    let args = texts(&SCHEDULER.container(&objects)["args"]);
    assert!(args.contains(&"--fence-bindings"), "no object would be named");
    let policy = find(
        &objects,
        "ValidatingAdmissionPolicy",
        "gpushare-scheduler-bindings",
    );
    let resources = texts(&policy["spec"]["matchConstraints"]["resourceRules"][0]["resources"]);
    // The API server answers a review and stores nothing.
    let stores = |access: &&kit::rbac::Permission<'_>| {
        access.verb == "create" && !access.resource.ends_with("reviews")
    };
    for access in kit::rbac::SCHEDULER.iter().filter(stores) {
        let written = format!("{}/{}", access.resource, access.subresource);
        assert!(resources.contains(&written.as_str()), "not asked about: {access}");
    }
}

/// kube-apiserver looks for a policy's parameter before it evaluates the conditions that limit the policy to our accounts: a
/// policy that fails without its parameter refuses the requests of the whole cluster. One whose parameter is of a built-in kind
/// refuses everything once it was deleted and made again.
#[rstest]
fn no_policy_refuses_others_while_its_parameter_is_missing(
    #[values("base", "attach/second-scheduler")] folder: &str,
) {
    let objects = render(folder);
    let definitions = all(&objects, "CustomResourceDefinition");
    for binding in all(&objects, "ValidatingAdmissionPolicyBinding") {
        let (reference, name) = (&binding["spec"]["paramRef"], &binding["spec"]["policyName"]);
        let spec = &find(&objects, "ValidatingAdmissionPolicy", name.as_str().unwrap())["spec"];
        let kind = &spec["paramKind"]["kind"];
        assert_eq!(kind.is_null(), reference.is_null(), "{name}");
        if !kind.is_null() {
            assert_eq!(reference["parameterNotFoundAction"], "Allow", "{name}");
            assert_eq!(spec["failurePolicy"], "Ignore", "{name}");
            let is_ours = |definition: &&Value| definition["spec"]["names"]["kind"] == *kind;
            assert!(definitions.iter().any(is_ours), "{name}: {kind}");
        }
    }
}

/// A leader ends its binds, gives the Lease up, takes its label off and answers what is in work before kubelet kills it.
#[test]
fn the_termination_grace_covers_the_release_of_the_lease() {
    let objects = render("base");
    let grace = SCHEDULER.pod(&objects)["terminationGracePeriodSeconds"]
        .as_u64()
        .unwrap();
    // A request of the elector takes half of the renew deadline at most, which is two thirds of the Lease.
    let lease = flag(SCHEDULER.container(&objects), "--lease-duration").map(str::to_owned);
    let lease = lease.unwrap_or_else(|| default_of("--lease-duration"));
    let requests = lease.trim_end_matches('s').parse::<u64>().unwrap() / 3;
    let (goodbyes, drain) = (2 * 5, 10);
    assert!(
        grace > BIND_TIMEOUT.as_secs() + requests + goodbyes + drain,
        "{grace}"
    );
}

/// Two extenders that decide at one time would give the same device away twice (E11): each decides by the Lease of the
/// kube-scheduler in its own pod, and by nothing else.
#[rstest]
fn beside_a_kube_scheduler_its_lease_elects_the_extender(
    #[values("overlays/simulated", "attach/second-scheduler")] folder: &str,
) {
    let objects = render(folder);
    let container = SCHEDULER.container(&objects);
    let args = texts(&container["args"]);
    SCHEDULER
        .accepts(&[&args[..], &["--pod-name=p"]].concat())
        .unwrap();
    assert!(
        args.contains(&"--fence-bindings") && !args.contains(&"--leader-elect"),
        "{args:?}"
    );
    let map = &SCHEDULER.pod(&objects)["volumes"][0]["configMap"]["name"];
    let files = &find(&objects, "ConfigMap", map.as_str().unwrap())["data"];
    let file = files.as_object().unwrap().values().next().unwrap();
    let configuration: Value = serde_yaml_ng::from_str(file.as_str().unwrap()).unwrap();
    let election = configuration["leaderElection"].as_object().unwrap();
    assert_eq!(election["leaderElect"], true);
    let namespace = &SCHEDULER.workload(&objects)["metadata"]["namespace"];
    assert_eq!(election["resourceNamespace"], *namespace);
    assert_eq!(
        flag(container, "--kube-scheduler-lease"),
        election["resourceName"].as_str()
    );
    // kube-scheduler's own times, which the configuration leaves as they are, are at least those of the extender.
    let is_time = |key: &String| key.ends_with("Duration") || key.ends_with("Deadline");
    assert!(!election.keys().any(is_time), "{election:?}");
    assert_eq!(flag(container, "--lease-duration"), None);
    assert_eq!(default_of("--lease-duration"), "15s");
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
    for container in items(&SCHEDULER.pod(&objects)["containers"]) {
        let probe = &container["livenessProbe"];
        let number = |field: &str| probe[field].as_u64().unwrap();
        let seconds =
            number("periodSeconds") * number("failureThreshold") + number("terminationGracePeriodSeconds");
        assert!(seconds <= 20, "{}: {seconds} s", container["name"]);
    }
}

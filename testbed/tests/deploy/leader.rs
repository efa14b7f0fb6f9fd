//! One scheduler decides: the election's flags, the label that the Service selects, rights, and what a rollout does.

use rstest::rstest;
use serde_json::{Value, json};
use testbed::rbac::SCHEDULER_LEADER;

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
    let said = texts(&container["args"]).into_iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
    said.unwrap_or_else(|| {
        let text = help.split(&format!("      {name} ")).nth(1).unwrap();
        text.split("[default: ").nth(1).unwrap().split(']').next().unwrap()
    })
}

#[test]
fn two_replicas_elect_one_and_a_rollout_leaves_two() {
    let objects = render("base");
    let spec = &find(&objects, "Deployment", SCHEDULER.name)["spec"];
    assert_eq!(spec["replicas"], 2);
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
    assert_eq!(spec["strategy"], rolling);
    let container = container(&objects);
    assert!(texts(&container["args"]).contains(&"--leader-elect"));
    let field = |name: &str| {
        let entry = container["env"].as_array().unwrap().iter().find(|entry| entry["name"] == name).unwrap();
        entry["valueFrom"]["fieldRef"]["fieldPath"].clone()
    };
    assert_eq!(["POD_NAME", "POD_NAMESPACE"].map(field), ["metadata.name", "metadata.namespace"]);
    let labels = &pod(&objects)["metadata"]["labels"];
    assert_eq!(labels[LEADER_LABEL], Value::Null, "nobody leads from birth");
    let budget = find(&objects, "PodDisruptionBudget", SCHEDULER.name);
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    let spread = &pod(&objects)["spec"]["topologySpreadConstraints"][0];
    for selector in [&budget["spec"]["selector"], &spread["labelSelector"]] {
        assert!(selector["matchLabels"].as_object().unwrap().iter().all(|(key, value)| labels[key] == *value), "{selector}");
    }
}

/// Every replica is ready and serves probes; who decides is told by the label alone.
#[test]
fn the_service_selects_the_leader() {
    let objects = render("base");
    let mut expected = find(&objects, "Deployment", SCHEDULER.name)["spec"]["selector"]["matchLabels"].clone();
    expected[LEADER_LABEL] = json!("true");
    assert_eq!(find(&objects, "Service", SCHEDULER.name)["spec"]["selector"], expected);
    assert!(SCHEDULER.help().contains(&format!("label {LEADER_LABEL} while it leads")));
}

#[test]
fn rights_are_for_the_lease_that_is_used_and_the_own_pod() {
    let objects = render("base");
    let role = find(&objects, "Role", "gpushare-scheduler-leader");
    let named: Vec<&str> = role["rules"].as_array().unwrap().iter().flat_map(|rule| texts(&rule["resourceNames"])).collect();
    let (container, help) = (container(&objects), SCHEDULER.help());
    let lease = flag(&container, &help, "--lease-name");
    assert_eq!(named, [lease, lease], "the Lease, and the object of the same name that repeats it");
    assert!(SCHEDULER_LEADER.iter().any(|access| (access.resource, access.verb) == ("pods", "patch")));
    let policy = find(&objects, "ValidatingAdmissionPolicy", "gpushare-scheduler-pods");
    let spec = &policy["spec"];
    assert_eq!((&spec["failurePolicy"], &spec["matchConstraints"]["resourceRules"][0]["resources"]), (&json!("Fail"), &json!(["pods"])));
    let account = "request.userInfo.username == 'system:serviceaccount:gpushare-system:gpushare-scheduler'";
    assert_eq!(spec["matchConditions"][0]["expression"], account);
    assert!(spec["variables"][0]["expression"].as_str().unwrap().contains("'authentication.kubernetes.io/pod-name'"));
    let expressions: Vec<&str> = spec["validations"].as_array().unwrap().iter().map(|one| one["expression"].as_str().unwrap()).collect();
    for needed in [
        "variables.pod != '' && request.name == variables.pod",
        "object.spec == oldObject.spec",
        &format!("label == '{LEADER_LABEL}' ||"),
        &format!("mark == '{SINCE}' ||"),
    ] {
        assert!(expressions.iter().any(|expression| expression.contains(needed)), "{needed}: {expressions:#?}");
    }
    let binding = find(&objects, "ValidatingAdmissionPolicyBinding", "gpushare-scheduler-pods");
    assert_eq!((&binding["spec"]["policyName"], &binding["spec"]["validationActions"]), (&policy["metadata"]["name"], &json!(["Deny"])));
}

/// A write that an earlier leader has sent may come in at any time: the API server refuses it once another is named. The kind is
/// our own: of a built-in one kube-apiserver's watch does not survive the policy.
#[test]
fn only_who_is_named_binds() {
    let objects = render("base");
    let spec = &find(&objects, "ValidatingAdmissionPolicy", "gpushare-scheduler-bindings")["spec"];
    let definition = find(&objects, "CustomResourceDefinition", "schedulerleaders.gpushare.io");
    let (group, version) = (&definition["spec"]["group"], &definition["spec"]["versions"][0]["name"]);
    let api_version = format!("{}/{}", group.as_str().unwrap(), version.as_str().unwrap());
    let kind = json!({"apiVersion": api_version, "kind": definition["spec"]["names"]["kind"]});
    assert_eq!((&spec["failurePolicy"], &spec["paramKind"]), (&json!("Fail"), &kind));
    assert!(texts(&container(&objects)["args"]).contains(&"--fence-bindings"), "nobody would be named");
    let resources = texts(&spec["matchConstraints"]["resourceRules"][0]["resources"]);
    // The API server answers a review and stores nothing.
    let stores = |access: &&testbed::rbac::Access<'_>| access.verb == "create" && !access.resource.ends_with("reviews");
    for access in testbed::rbac::SCHEDULER.iter().filter(stores) {
        assert!(resources.contains(&format!("{}/{}", access.resource, access.subresource).as_str()), "not asked about: {access}");
    }
    let account = "request.userInfo.username == 'system:serviceaccount:gpushare-system:gpushare-scheduler'";
    assert_eq!(spec["matchConditions"], json!([{"name": "is-scheduler", "expression": account}]));
    let expression = spec["validations"][0]["expression"].as_str().unwrap();
    assert!(expression.contains("holderIdentity.orValue('').startsWith(variables.pod + '_')"), "{expression}");
    let binding = &find(&objects, "ValidatingAdmissionPolicyBinding", "gpushare-scheduler-bindings")["spec"];
    let lease = json!({
        "namespace": "gpushare-system",
        "name": flag(&container(&objects), &SCHEDULER.help(), "--lease-name"),
        "parameterNotFoundAction": "Deny",
    });
    assert_eq!((&binding["paramRef"], &binding["validationActions"]), (&lease, &json!(["Deny"])));
}

/// A policy whose parameter is of a built-in kind refuses everything once it was deleted and made again.
#[test]
fn no_policy_has_a_parameter_of_a_built_in_kind() {
    for folder in ["base", "attach/second-scheduler"] {
        let objects = render(folder);
        let definitions = all(&objects, "CustomResourceDefinition");
        let is_ours = |kind: &Value| definitions.iter().any(|definition| definition["spec"]["names"]["kind"] == *kind);
        for policy in all(&objects, "ValidatingAdmissionPolicy") {
            let kind = &policy["spec"]["paramKind"]["kind"];
            assert!(kind.is_null() || is_ours(kind), "{}: {kind}", policy["metadata"]["name"]);
        }
    }
}

/// A leader ends its binds, gives the Lease up, takes its label off and answers what is in work before kubelet kills it.
#[test]
fn there_is_time_to_say_goodbye() {
    let objects = render("base");
    let grace = pod(&objects)["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap();
    let (container, help) = (container(&objects), SCHEDULER.help());
    let bind: u64 = flag(&container, &help, "--bind-timeout").trim_end_matches('s').parse().unwrap();
    let requests: u64 = flag(&container, &help, "--renew-deadline").trim_end_matches('s').parse::<u64>().unwrap() / 2;
    let (goodbyes, drain) = (2 * 5, 10);
    assert!(grace > bind + requests + goodbyes + drain, "{grace}");
}

/// The extender beside a kube-scheduler is asked by that one alone; two such pods would book the same device twice (E11).
#[rstest]
#[case::simulated("overlays/simulated")]
#[case::attached("attach/second-scheduler")]
fn beside_a_kube_scheduler_there_is_one_and_no_election(#[case] folder: &str) {
    let objects = render(folder);
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    assert_eq!((&deployment["spec"]["replicas"], &deployment["spec"]["strategy"]), (&json!(1), &json!({"type": "Recreate"})));
    let container = container(&objects);
    assert!(!texts(&container["args"]).iter().any(|arg| arg.contains("leader")), "{container:#}");
    let names = |kind| all(&objects, kind).into_iter().map(|object| object["metadata"]["name"].as_str().unwrap()).collect::<Vec<_>>();
    assert!(!names("Role").contains(&"gpushare-scheduler-leader"));
    for kind in ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"] {
        assert!(!names(kind).contains(&"gpushare-scheduler-bindings"), "nobody could bind");
        assert!(names(kind).contains(&"gpushare-records"));
    }
}

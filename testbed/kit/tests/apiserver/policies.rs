//! `ValidatingAdmissionPolicy` objects as kube-apiserver 1.36.2 applies them, with those of `deploy/`: the answers here were
//! compared with its own, except those about the labels of GPUs, conditions and other fields of a node, about a token that names
//! no node, and about the pod of a replica.

use std::collections::BTreeMap;

use http::Method;
use kit::apiserver::{ApiServer, User};
use kit::cluster::{PLUGIN_USER, SCHEDULER_USER, default_deploy};
use kit::manifests;
use proto::device::NODE_LABELS;
use proto::node::CONDITION_SHARING_READY;
use proto::resource::{GPU, GPU_CORE, GPU_COUNT, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use rstest::rstest;
use serde_json::{Value, json};

use crate::raw::{Answer, send};

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/gpushare-system/leases";
const ADMIN: &str = "admin";
const PODS: &str = "/api/v1/namespaces/default/pods";
const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";
const LEADERS: &str = "/apis/gpushare.io/v1alpha1/namespaces/gpushare-system/schedulerleaders";
/// The token of the plugin on the node n1.
const PLUGIN_OF_N1: &str = "plugin-n1";
/// A token of the plugin that names no node.
const PLUGIN_OF_NO_NODE: &str = "plugin";
const EVENTS: &str = "/api/v1/namespaces/default/events";
const EVENT: &str = "/api/v1/namespaces/default/events/e";
const ON_N1: &str = "/api/v1/namespaces/default/pods/on-n1";
const NODE: &str = "/api/v1/nodes/n1";
const STATUS: &str = "/api/v1/nodes/n1/status";
const DEVICE: &str = "/apis/scheduling.koordinator.sh/v1alpha1/devices/n1";
const SECRETS: &str = "/api/v1/namespaces/gpushare-system/secrets";
const MUTATING: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpushare-scheduler";
const DEVICES: &str = "/apis/scheduling.koordinator.sh/v1alpha1/devices";
const RECORD: &str = "scheduling.koordinator.sh/device-allocated";

async fn server() -> ApiServer {
    let server = ApiServer::start().await.unwrap();
    let add = |token: &str, name: &str, claim: Option<(&str, &str)>| {
        let claim = claim.map(|(kind, name)| {
            (
                format!("authentication.kubernetes.io/{kind}-name"),
                vec![name.to_owned()],
            )
        });
        let extra = claim.into_iter().collect();
        server.add_token(
            token,
            User {
                name: name.to_owned(),
                extra,
                ..User::default()
            },
        );
    };
    add("s-0", SCHEDULER_USER, Some(("pod", "s-0")));
    add("s-1", SCHEDULER_USER, Some(("pod", "s-1")));
    add(PLUGIN_OF_N1, PLUGIN_USER, Some(("node", "n1")));
    add(PLUGIN_OF_NO_NODE, PLUGIN_USER, None);
    for name in [
        ADMIN,
        "alice",
        "system:node:n1",
        "system:serviceaccount:koordinator-system:koord-scheduler",
    ] {
        add(name, name, None);
    }
    let namespace = json!({"metadata": {"name": "gpushare-system"}});
    server.objects().create("namespaces", namespace).unwrap();
    server
}

pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "busybox"}]},
    })
}

async fn ask(server: &ApiServer, token: &str, method: Method, path: &str, body: &Value) -> Answer {
    let authorization = format!("Bearer {token}");
    let content = if method == Method::PATCH {
        "application/merge-patch+json"
    } else {
        "application/json"
    };
    let headers = [
        ("authorization", authorization.as_str()),
        ("content-type", content),
    ];
    send(server, method, path, &headers, body.to_string())
        .await
        .unwrap()
}

async fn code_of(server: &ApiServer, token: &str, method: Method, path: &str, body: &Value) -> u16 {
    ask(server, token, method, path, body).await.code
}

/// The code of the answer to a new object.
async fn post(server: &ApiServer, token: &str, path: &str, body: &Value) -> u16 {
    code_of(server, token, Method::POST, path, body).await
}

/// Applies a file of `deploy/base`, or another one by its path from there.
async fn apply(server: &ApiServer, file: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    server.kubeconfig(&path, ADMIN).unwrap();
    let client = kit::cluster::client_of(&path).await.unwrap();
    manifests::apply_file(&client, &default_deploy().join("base").join(file))
        .await
        .unwrap();
}

fn binding(metadata: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "n1"}})
}

/// Binds a new pod as a replica of the scheduler; returns the code and the text of the answer.
async fn bind(server: &ApiServer, token: &str, name: &str) -> (u16, String) {
    assert_eq!(post(server, ADMIN, PODS, &pod(name)).await, 201);
    let path = format!("{PODS}/{name}/binding");
    let answer = ask(
        server,
        token,
        Method::POST,
        &path,
        &binding(&json!({"name": name})),
    )
    .await;
    (answer.code, answer.text)
}

/// Each of the two replicas binds a new pod; returns the codes of the answers.
async fn bind_as_each(server: &ApiServer, [first, second]: [&str; 2]) -> (u16, u16) {
    (
        bind(server, "s-0", first).await.0,
        bind(server, "s-1", second).await.0,
    )
}

fn leader(holder: &str) -> Value {
    json!({
        "apiVersion": "gpushare.io/v1alpha1", "kind": "SchedulerLeader", "metadata": {"name": "gpushare-scheduler"},
        "spec": {"holderIdentity": holder},
    })
}

/// Deletes the policies and their bindings, as the removal of the deployment does.
async fn uninstall(server: &ApiServer) {
    for plural in ["validatingadmissionpolicybindings", "validatingadmissionpolicies"] {
        let path = format!("{ADMISSION}/{plural}");
        assert_eq!(
            code_of(server, ADMIN, Method::DELETE, &path, &Value::Null).await,
            200
        );
    }
}

async fn create_policies(server: &ApiServer, text: &str) {
    for object in manifests::parse(text).unwrap() {
        let kind = &object.types.as_ref().unwrap().kind;
        let plural = format!("{}s", kind.to_lowercase()).replace("policys", "policies");
        let object = serde_json::to_value(&object).unwrap();
        let answer = ask(
            server,
            ADMIN,
            Method::POST,
            &format!("{ADMISSION}/{plural}"),
            &object,
        )
        .await;
        assert_eq!(answer.code, 201, "{}", answer.text);
    }
}

/// Deletes the kind of the policy's parameter.
fn delete_kind(server: &ApiServer) {
    let name = "schedulerleaders.gpushare.io";
    server
        .objects()
        .delete("customresourcedefinitions", "", name, None)
        .unwrap();
}

#[tokio::test]
async fn a_parameter_of_a_custom_kind_is_read_again() {
    let server = server().await;
    for file in ["scheduler-leader-crd.yaml", "scheduler-admission.yaml"] {
        apply(&server, file).await;
    }
    assert_eq!(bind(&server, ADMIN, "of-another-scheduler").await.0, 201);
    assert_eq!(bind(&server, "s-0", "before-any-leader").await.0, 201);
    let other = ask(&server, "s-1", Method::POST, LEADERS, &leader("s-0_a")).await;
    assert_eq!(other.code, 403, "a replica names another: {}", other.text);
    assert_eq!(post(&server, "s-0", LEADERS, &leader("s-0_a")).await, 201);
    assert_eq!(bind_as_each(&server, ["a", "b"]).await, (201, 403));
    uninstall(&server).await;
    apply(&server, "scheduler-admission.yaml").await;
    let path = format!("{LEADERS}/gpushare-scheduler");
    let next = json!({"spec": {"holderIdentity": "s-1_b"}});
    assert_eq!(code_of(&server, "s-1", Method::PATCH, &path, &next).await, 200);
    assert_eq!(bind_as_each(&server, ["c", "d"]).await, (403, 201));
    delete_kind(&server);
    assert_eq!(bind(&server, ADMIN, "after-the-kind").await.0, 201);
}

fn lease(holder: &str) -> Value {
    json!({"metadata": {"name": "gpushare-scheduler"}, "spec": {"holderIdentity": holder}})
}

/// The policy as it is shipped, but that a Lease is its parameter.
async fn apply_with_lease(server: &ApiServer) {
    let text = std::fs::read_to_string(default_deploy().join("base/scheduler-admission.yaml")).unwrap();
    let text = text
        .replace("gpushare.io/v1alpha1", "coordination.k8s.io/v1")
        .replace("kind: SchedulerLeader", "kind: Lease");
    create_policies(server, &text).await;
}

/// kubernetes/kubernetes#133827: the informer of a built-in kind ends with the last policy binding and shows its old objects from
/// then on.
#[tokio::test]
async fn a_parameter_of_a_built_in_kind_is_stale_after_its_last_binding_was_deleted() {
    let server = server().await;
    apply_with_lease(&server).await;
    assert_eq!(post(&server, ADMIN, LEASES, &lease("s-0_a")).await, 201);
    assert_eq!(bind_as_each(&server, ["a", "b"]).await, (201, 403));
    uninstall(&server).await;
    apply_with_lease(&server).await;
    let path = format!("{LEASES}/gpushare-scheduler");
    assert_eq!(
        code_of(&server, ADMIN, Method::PUT, &path, &lease("s-1_b")).await,
        200
    );
    assert_eq!(
        bind_as_each(&server, ["c", "d"]).await,
        (201, 403),
        "the Lease names s-1"
    );
}

/// As in `pkg/admission/plugin/webhook/matchconditions` of k8s.io/apiserver: `failurePolicy` counts only if no condition is false.
#[rstest]
#[case::all_true(&["true", "true"], 422)]
#[case::one_cannot_be_evaluated(&["true", "object.spec.none == 1"], 422)]
#[case::one_is_false_before_it(&["false", "object.spec.none == 1"], 201)]
#[case::one_is_false_after_it(&["object.spec.none == 1", "false"], 201)]
#[tokio::test]
async fn a_false_match_condition_leaves_a_request_out(#[case] conditions: &[&str], #[case] code: u16) {
    let server = server().await;
    let conditions: Vec<Value> = conditions
        .iter()
        .enumerate()
        .map(|(at, expression)| json!({"name": format!("c{at}"), "expression": expression}))
        .collect();
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["*"]});
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "p"},
        "spec": {
            "failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]},
            "matchConditions": conditions, "validations": [{"expression": "false"}],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "p"}, "spec": {"policyName": "p", "validationActions": ["Deny"]},
    });
    create_policies(&server, &format!("{policy}\n---\n{binding}")).await;
    let map = json!({"metadata": {"name": "m"}, "data": {}});
    assert_eq!(
        post(&server, ADMIN, "/api/v1/namespaces/default/configmaps", &map).await,
        code
    );
}

/// Recorded on kube-apiserver 1.36.2: without its parameter a policy with Fail and Deny refuses requests that its match
/// conditions leave out.
#[tokio::test]
async fn a_missing_parameter_concerns_every_request_that_the_rules_name() {
    let server = server().await;
    apply(&server, "scheduler-leader-crd.yaml").await;
    let text = std::fs::read_to_string(default_deploy().join("base/scheduler-admission.yaml")).unwrap();
    let strict = text
        .replace("Policy: Ignore", "Policy: Fail")
        .replace("Action: Allow", "Action: Deny");
    create_policies(&server, &strict).await;
    let (code, text) = bind(&server, ADMIN, "of-another-scheduler").await;
    assert_eq!(code, 422, "{text}");
    assert!(
        text.contains("no params found for policy binding with `Deny` parameterNotFoundAction"),
        "{text}"
    );
    delete_kind(&server);
    let (code, text) = bind(&server, ADMIN, "after-the-kind").await;
    assert_eq!(code, 422, "{text}");
    assert!(
        text.contains("failed to find resource referenced by paramKind"),
        "{text}"
    );
}

fn recorded(name: &str) -> Value {
    let mut pod = pod(name);
    pod["metadata"]["annotations"] = json!({RECORD: "{}", "other": "x"});
    pod
}

fn annotations(value: impl Into<Value>) -> Value {
    json!({"metadata": {"annotations": value.into()}})
}

#[rstest]
#[case::another_annotation("alice", "", annotations(json!({"other": "y"})), true)]
#[case::labels("alice", "", json!({"metadata": {"labels": {"a": "b"}}}), true)]
#[case::status("system:node:n1", "/status", json!({"status": {"phase": "Running"}}), true)]
#[case::the_record("alice", "", annotations(json!({RECORD: "{\"gpu\":[]}"})), false)]
#[case::another_key("alice", "", annotations(json!({"ALIYUN_COM_GPU_MEM_IDX": "0"})), false)]
#[case::removed("alice", "", annotations(json!({RECORD: null})), false)]
#[case::all_removed("alice", "", annotations(Value::Null), false)]
#[case::by_status("alice", "/status", annotations(json!({"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"})), false)]
#[case::by_kubelet("system:node:n1", "/status", annotations(json!({RECORD: "[]"})), false)]
#[case::other_schedulers("system:serviceaccount:koordinator-system:koord-scheduler", "", annotations(json!({RECORD: "[]"})), false)]
#[case::the_scheduler("s-0", "", annotations(json!({RECORD: "[]"})), true)]
#[tokio::test]
async fn policies_decide_changes_of_records_as_kube_apiserver_did(
    #[case] token: &str,
    #[case] subresource: &str,
    #[case] patch: Value,
    #[case] passes: bool,
) {
    let server = server().await;
    assert_eq!(
        post(&server, "alice", PODS, &recorded("p")).await,
        201,
        "before there is a policy"
    );
    apply(&server, "record-admission.yaml").await;
    let path = format!("{PODS}/p{subresource}");
    let answer = ask(&server, token, Method::PATCH, &path, &patch).await;
    assert_eq!(answer.code, if passes { 200 } else { 403 }, "{}", answer.text);
    assert_eq!(answer.text.contains("says which devices a pod holds"), !passes);
}

#[tokio::test]
async fn policies_decide_new_pods_and_bindings_as_kube_apiserver_did() {
    let server = server().await;
    apply(&server, "record-admission.yaml").await;
    let answer = ask(&server, "alice", Method::POST, PODS, &recorded("p")).await;
    assert_eq!(answer.code, 403);
    assert!(
        answer.text.contains(&format!("annotation {RECORD} says"))
            && answer.text.contains("alice is none of them"),
        "{}",
        answer.text
    );
    for (token, expected) in [("alice", 403), ("s-0", 201)] {
        assert_eq!(
            post(&server, "alice", PODS, &pod(token)).await,
            201,
            "without annotations"
        );
        let path = format!("{PODS}/{token}/binding");
        let bound = binding(&json!({"name": token, "annotations": {RECORD: "{}"}}));
        assert_eq!(post(&server, token, &path, &bound).await, expected);
    }
}

/// An event about the pod p as the plugin of n1 writes it.
fn event(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default"}, "type": "Warning", "reason": "GPUMismatch", "message": "m", "count": 1,
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "p", "uid": "u"},
        "source": {"component": "gpushare-device-plugin", "host": "n1"},
    })
}

/// An event with another value of one field.
fn event_with(pointer: &str, value: impl Into<Value>) -> Value {
    let mut event = event("f");
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    event.pointer_mut(parent).unwrap()[field] = value.into();
    event
}

/// A server with the policies, two nodes, a pod on each, and an event and a Device object of the first.
async fn server_with_nodes() -> ApiServer {
    let server = server().await;
    for file in ["crd.yaml", "device-plugin-admission.yaml"] {
        apply(&server, file).await;
    }
    for node in ["n1", "n2"] {
        server
            .objects()
            .create(
                "nodes",
                json!({"metadata": {"name": node, "annotations": {"gpushare/closed-gpus": "1"}}}),
            )
            .unwrap();
        let mut pod = pod(&format!("on-{node}"));
        pod["spec"]["nodeName"] = json!(node);
        assert_eq!(post(&server, ADMIN, PODS, &pod).await, 201);
    }
    for (path, body) in [(EVENTS, event("e")), (DEVICES, device("n1"))] {
        assert_eq!(post(&server, PLUGIN_OF_N1, path, &body).await, 201);
    }
    server
}

fn device(name: &str) -> Value {
    json!({"apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device", "metadata": {"name": name}})
}

fn label() -> Value {
    json!({"metadata": {"labels": {"a": "b"}}})
}

/// A change of the event e, with the source that the policy asks for.
fn to_event(field: &str, value: impl Into<Value>) -> Value {
    json!({"source": {"component": "gpushare-device-plugin", "host": "n1"}, field: value.into()})
}

fn capacity(resources: &[&str]) -> Value {
    let amounts = resources
        .iter()
        .map(|resource| ((*resource).to_owned(), json!("100")));
    json!({"status": {"capacity": Value::Object(amounts.collect())}})
}

fn condition(kind: &str) -> Value {
    json!({"status": {"conditions": [{"type": kind, "status": "True"}]}})
}

/// Attempts with the token of one node's plugin, apart from RBAC: the policies alone decide.
#[rstest]
#[case::event(Method::POST, EVENTS, event("f"), 201)]
#[case::event_of_another_component(Method::POST, EVENTS, event_with("/source/component", "kubelet"), 403)]
#[case::event_of_another_node(Method::POST, EVENTS, event_with("/source/host", "n2"), 403)]
#[case::event_reported_by_another(Method::POST, EVENTS, event_with("/reportingComponent", "kubelet"), 403)]
#[case::event_about_another_node(Method::POST, EVENTS, event_with("/involvedObject", json!({"kind": "Node", "name": "n2"})), 422)]
#[case::event_about_a_secret(Method::POST, EVENTS, event_with("/involvedObject/kind", "Secret"), 422)]
#[case::count_of_an_event(Method::PATCH, EVENT, to_event("count", 2), 200)]
#[case::text_of_an_event(Method::PATCH, EVENT, to_event("message", "x"), 403)]
#[case::pod_of_an_event(Method::PATCH, EVENT, to_event("involvedObject", json!({"name": "q"})), 403)]
#[case::end_of_an_event(Method::DELETE, EVENT, Value::Null, 422)]
#[case::annotation(Method::PATCH, ON_N1, annotations(json!({"a": "b"})), 200)]
#[case::label_of_a_pod(Method::PATCH, ON_N1, label(), 403)]
#[case::finalizer(Method::PATCH, ON_N1, json!({"metadata": {"finalizers": ["a/b"]}}), 403)]
#[case::status(Method::PATCH, "/api/v1/namespaces/default/pods/on-n1/status", json!({"status": {"phase": "Failed"}}), 422)]
#[case::pod_of_another_node(Method::PATCH, "/api/v1/namespaces/default/pods/on-n2", annotations(json!({"a": "b"})), 403)]
#[case::end_of_a_pod(Method::DELETE, ON_N1, Value::Null, 422)]
#[case::new_pod(Method::POST, PODS, pod("new"), 422)]
#[case::annotation_of_its_node(Method::PATCH, NODE, annotations(json!({"a": "b"})), 200)]
#[case::closed_gpus(Method::PATCH, NODE, annotations(json!({"gpushare/closed-gpus": "0"})), 403)]
#[case::opened_gpus(Method::PATCH, NODE, annotations(json!({"gpushare/closed-gpus": null})), 403)]
#[case::closed_gpus_by_the_status(Method::PATCH, STATUS, annotations(json!({"gpushare/closed-gpus": "0"})), 403)]
#[case::opened_gpus_by_the_status(Method::PATCH, STATUS, annotations(json!({"gpushare/closed-gpus": null})), 403)]
#[case::label_of_its_node(Method::PATCH, NODE, label(), 403)]
#[case::spec_of_its_node(Method::PATCH, NODE, json!({"spec": {"unschedulable": true}}), 403)]
#[case::another_node(Method::PATCH, "/api/v1/nodes/n2", annotations(json!({"a": "b"})), 403)]
#[case::labels_of_its_gpus(Method::PATCH, NODE, json!({"metadata": {"labels": NODE_LABELS.map(|key| (key, "x")).into_iter().collect::<BTreeMap<_, _>>()}}), 200)]
#[case::amounts(Method::PATCH, STATUS, capacity(&[GPU, GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, GPU_MEM]), 200)]
#[case::cpus(Method::PATCH, STATUS, capacity(&["cpu"]), 403)]
#[case::condition(Method::PATCH, STATUS, condition(CONDITION_SHARING_READY), 200)]
#[case::condition_of_kubelet(Method::PATCH, STATUS, condition("Ready"), 403)]
#[case::another_field_of_the_status(Method::PATCH, STATUS, json!({"status": {"phase": "Running"}}), 403)]
#[case::devices_of_its_node(Method::PATCH, DEVICE, label(), 200)]
#[case::devices_of_another_node(Method::POST, DEVICES, device("n2"), 403)]
#[case::end_of_devices(Method::DELETE, DEVICE, Value::Null, 422)]
#[tokio::test]
async fn policies_confine_the_token_of_a_plugin_to_its_node(
    #[case] method: Method,
    #[case] path: &str,
    #[case] body: Value,
    #[case] code: u16,
) {
    let server = server_with_nodes().await;
    let answer = ask(&server, PLUGIN_OF_NO_NODE, method.clone(), path, &body).await;
    assert!(
        [403, 422].contains(&answer.code),
        "without the claim: {}",
        answer.text
    );
    let answer = ask(&server, PLUGIN_OF_N1, method, path, &body).await;
    assert_eq!(answer.code, code, "{}", answer.text);
}

/// Attempts with the token of a replica of the scheduler at pods, apart from RBAC.
#[rstest]
#[case::leader("s-0", json!({"metadata": {"labels": {"gpushare/leader": "true"}, "annotations": {"gpushare/leader-since": "x"}}}), 200)]
#[case::another_replica("s-1", json!({"metadata": {"labels": {"gpushare/leader": "true"}}}), 403)]
#[case::another_label("s-0", json!({"metadata": {"labels": {"a": "b"}}}), 403)]
#[case::another_annotation("s-0", json!({"metadata": {"annotations": {"a": "b"}}}), 403)]
#[case::finalizer("s-0", json!({"metadata": {"finalizers": ["a/b"]}}), 403)]
#[case::spec("s-0", json!({"spec": {"activeDeadlineSeconds": 5}}), 403)]
#[tokio::test]
async fn policies_confine_the_token_of_a_replica_to_its_pod(
    #[case] name: &str,
    #[case] change: Value,
    #[case] code: u16,
) {
    let server = server().await;
    apply(&server, "scheduler-admission.yaml").await;
    let pods = PODS.replace("default", "gpushare-system");
    assert_eq!(post(&server, ADMIN, &pods, &pod(name)).await, 201);
    let answer = ask(&server, "s-0", Method::PATCH, &format!("{pods}/{name}"), &change).await;
    assert_eq!(answer.code, code, "{}", answer.text);
}

fn secret(name: &str, kind: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "gpushare-system"}, "type": kind})
}

/// A change of one field of the configuration's webhook.
fn to_webhook(path: &str, value: impl Into<Value>) -> Value {
    json!([{"op": "add", "path": format!("/webhooks/0{path}"), "value": value.into()}])
}

/// Attempts with the token of a replica of the scheduler at its Secret and its webhook configurations, apart from RBAC.
#[rstest]
#[case::own_secret(
    Method::POST,
    SECRETS,
    secret("gpushare-scheduler-certificates", "Opaque"),
    201
)]
#[case::another_secret(
    Method::POST,
    SECRETS,
    secret("sh.helm.release.v1.gpushare.v2", "helm.sh/release.v1"),
    403
)]
#[case::token(
    Method::POST,
    SECRETS,
    secret("gpushare-scheduler-certificates", "kubernetes.io/service-account-token"),
    403
)]
#[case::authority(Method::PATCH, MUTATING, to_webhook("/clientConfig/caBundle", "eA=="), 200)]
#[case::address(
    Method::PATCH,
    MUTATING,
    to_webhook("/clientConfig/service/name", "other"),
    403
)]
#[case::rules(Method::PATCH, MUTATING, to_webhook("/rules/0/resources", json!(["*"])), 403)]
#[case::policy(Method::PATCH, MUTATING, to_webhook("/failurePolicy", "Fail"), 403)]
#[case::condition(Method::PATCH, MUTATING, json!([{"op": "remove", "path": "/webhooks/0/matchConditions"}]), 403)]
#[case::no_webhook(Method::PATCH, MUTATING, json!([{"op": "remove", "path": "/webhooks/0"}]), 403)]
#[case::owner(Method::PATCH, MUTATING, json!([{"op": "add", "path": "/metadata/ownerReferences", "value":
    [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u"}]}]), 403)]
#[case::end(Method::DELETE, MUTATING, Value::Null, 403)]
#[tokio::test]
async fn policies_confine_the_token_of_a_replica_to_its_certificates(
    #[case] method: Method,
    #[case] path: &str,
    #[case] body: Value,
    #[case] code: u16,
) {
    let server = server().await;
    for file in [
        "scheduler-admission.yaml",
        "../components/webhooks/admission.yaml",
        "../components/webhook-configurations/webhook-configurations.yaml",
    ] {
        apply(&server, file).await;
    }
    let content = if method == Method::PATCH {
        "application/json-patch+json"
    } else {
        "application/json"
    };
    let headers = [("authorization", "Bearer s-0"), ("content-type", content)];
    let answer = send(&server, method, path, &headers, body.to_string())
        .await
        .unwrap();
    assert_eq!(answer.code, code, "{}", answer.text);
}

/// A server with the policies of the component make-room, and the replica `s-0` as the leader.
async fn server_led_by_s_0() -> ApiServer {
    let server = server().await;
    for file in [
        "scheduler-leader-crd.yaml",
        "../components/make-room/admission.yaml",
    ] {
        apply(&server, file).await;
    }
    let spec = json!({"holderIdentity": "s-0_1", "acquireTime": "2026-01-01T00:00:00Z"});
    let metadata = json!({"name": "gpushare-scheduler", "namespace": "gpushare-system"});
    let leader = json!({"apiVersion": "gpushare.io/v1alpha1", "kind": "SchedulerLeader", "metadata": metadata, "spec": spec});
    assert_eq!(post(&server, "s-0", LEADERS, &leader).await, 201);
    server
}

/// The rules for a pod's status hold for every other name of a field manager too, as the client chooses it.
#[rstest]
#[case::a_nomination(json!({"status": {"nominatedNodeName": "n1"}}), 200)]
#[case::condition_of_kube_scheduler(json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}}), 200)]
#[case::condition_of_kubelet(json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}), 403)]
#[case::phase(json!({"status": {"phase": "Failed"}}), 403)]
#[case::label(json!({"metadata": {"labels": {"a": "b"}}}), 403)]
#[case::annotation(json!({"metadata": {"annotations": {"a": "b"}}}), 403)]
#[tokio::test]
async fn policies_confine_the_status_of_pods_for_each_field_manager(
    #[case] change: Value,
    #[case] expected: u16,
    #[values("kube-scheduler", "another")] manager: &str,
) {
    let server = server_led_by_s_0().await;
    assert_eq!(post(&server, ADMIN, PODS, &pod("p")).await, 201);
    let path = format!("{PODS}/p/status?fieldManager={manager}");
    assert_eq!(
        code_of(&server, "s-0", Method::PATCH, &path, &change).await,
        expected
    );
}

/// The component make-room lets the leader evict and nominate, and do nothing else with the same rights.
#[rstest]
#[case::an_eviction("s-0", Method::POST, "default", "eviction", json!({"deleteOptions": {"preconditions": {"uid": "UID"}}}), 201)]
#[case::without_a_uid("s-0", Method::POST, "default", "eviction", json!({}), 403)]
#[case::of_the_cluster("s-0", Method::POST, "kube-system", "eviction", json!({"deleteOptions": {"preconditions": {"uid": "UID"}}}), 403)]
#[case::not_the_leader("s-1", Method::POST, "default", "eviction", json!({"deleteOptions": {"preconditions": {"uid": "UID"}}}), 403)]
#[case::another_user(ADMIN, Method::POST, "kube-system", "eviction", json!({}), 201)]
#[case::a_nomination("s-0", Method::PATCH, "default", "status", json!({"status": {"nominatedNodeName": "n1"}}), 200)]
#[case::nomination_by_another("s-1", Method::PATCH, "default", "status", json!({"status": {"nominatedNodeName": "n1"}}), 403)]
#[case::a_phase("s-0", Method::PATCH, "default", "status", json!({"status": {"nominatedNodeName": "n1", "phase": "Failed"}}), 403)]
#[case::a_condition("s-0", Method::PATCH, "default", "status", json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}), 403)]
#[case::a_condition_of_kube_scheduler("s-0", Method::PATCH, "default", "status", json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}}), 403)]
#[case::an_annotation("s-0", Method::PATCH, "default", "status", json!({"metadata": {"annotations": {"a": "b"}}}), 403)]
#[case::a_label("s-0", Method::PATCH, "default", "status", json!({"metadata": {"labels": {"a": "b"}}, "status": {"nominatedNodeName": "n1"}}), 403)]
#[tokio::test]
async fn policies_confine_the_making_of_room(
    #[case] token: &str,
    #[case] method: Method,
    #[case] namespace: &str,
    #[case] subresource: &str,
    #[case] mut body: Value,
    #[case] expected: u16,
) {
    let server = server_led_by_s_0().await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    assert_eq!(post(&server, ADMIN, &pods, &pod("p")).await, 201);
    let found = ask(&server, ADMIN, Method::GET, &format!("{pods}/p"), &Value::Null).await;
    let found: Value = serde_json::from_str(&found.text).unwrap();
    let uid = found["metadata"]["uid"].clone();
    if let Some(slot) = body.pointer_mut("/deleteOptions/preconditions/uid") {
        *slot = uid;
    }
    if subresource == "eviction" {
        body["apiVersion"] = "policy/v1".into();
        body["kind"] = "Eviction".into();
        body["metadata"] = json!({"name": "p", "namespace": namespace});
    }
    let path = format!("{pods}/p/{subresource}?fieldManager=gpushare-make-room");
    assert_eq!(code_of(&server, token, method, &path, &body).await, expected);
}

//! `ValidatingAdmissionPolicy` objects as kube-apiserver 1.36.2 applies them, with those of `deploy/`: the answers here were compared
//! with its own.

use http::Method;
use kube::Client;
use rstest::rstest;
use serde_json::{Value, json};
use testbed::apiserver::{ApiServer, User};
use testbed::cluster::{SCHEDULER_USER, default_deploy};
use testbed::manifests;

use crate::raw::{Answer, send};
use crate::setup::{pod, start};

const ADMIN: &str = "admin";
const PODS: &str = "/api/v1/namespaces/default/pods";
const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/gpushare-system/leases";
const LEADERS: &str = "/apis/gpushare.io/v1alpha1/namespaces/gpushare-system/schedulerleaders";
const RECORD: &str = "scheduling.koordinator.sh/device-allocated";

async fn server() -> ApiServer {
    let server = start().await;
    let replica = |pod: &str| User {
        name: SCHEDULER_USER.to_owned(),
        extra: [(
            "authentication.kubernetes.io/pod-name".to_owned(),
            vec![pod.to_owned()],
        )]
        .into(),
        ..User::default()
    };
    server.add_token("s-0", replica("s-0"));
    server.add_token("s-1", replica("s-1"));
    for name in [
        ADMIN,
        "alice",
        "system:node:n1",
        "system:serviceaccount:koordinator-system:koord-scheduler",
    ] {
        server.add_token(
            name,
            User {
                name: name.to_owned(),
                ..User::default()
            },
        );
    }
    server
        .objects()
        .create("namespaces", json!({"metadata": {"name": "gpushare-system"}}))
        .unwrap();
    server
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

async fn apply(server: &ApiServer, file: &str) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    server.kubeconfig(&path, ADMIN).unwrap();
    let client: Client = testbed::cluster::client_of(&path).await.unwrap();
    manifests::apply_file(&client, &default_deploy().join("base").join(file))
        .await
        .unwrap();
}

/// Binds a new pod as a replica of the scheduler; returns the code and the text of the answer.
async fn bind(server: &ApiServer, token: &str, name: &str) -> (u16, String) {
    assert_eq!(code_of(server, ADMIN, Method::POST, PODS, &pod(name)).await, 201);
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "n1"}});
    let answer = ask(
        server,
        token,
        Method::POST,
        &format!("{PODS}/{name}/binding"),
        &binding,
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

fn lease(holder: &str) -> Value {
    json!({"metadata": {"name": "gpushare-scheduler"}, "spec": {"holderIdentity": holder}})
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
        assert_eq!(
            code_of(
                server,
                ADMIN,
                Method::DELETE,
                &format!("{ADMISSION}/{plural}"),
                &Value::Null
            )
            .await,
            200
        );
    }
}

/// The policy as it is shipped, but that a Lease is its parameter.
async fn apply_with_lease(server: &ApiServer) {
    let text = std::fs::read_to_string(default_deploy().join("base/scheduler-admission.yaml")).unwrap();
    let text = text
        .replace("gpushare.io/v1alpha1", "coordination.k8s.io/v1")
        .replace("kind: SchedulerLeader", "kind: Lease");
    create_policies(server, &text).await;
}

async fn create_policies(server: &ApiServer, text: &str) {
    for object in manifests::parse(text).unwrap() {
        let plural =
            format!("{}s", object.types.as_ref().unwrap().kind.to_lowercase()).replace("policys", "policies");
        let answer = ask(
            server,
            ADMIN,
            Method::POST,
            &format!("{ADMISSION}/{plural}"),
            &serde_json::to_value(&object).unwrap(),
        )
        .await;
        assert_eq!(answer.code, 201, "{}", answer.text);
    }
}

/// kubernetes/kubernetes#133827: the informer of a built-in kind ends with the last policy binding and shows its old objects from
/// then on.
#[tokio::test]
async fn a_parameter_of_a_built_in_kind_is_stale_after_its_last_binding_was_deleted() {
    let server = server().await;
    apply_with_lease(&server).await;
    assert_eq!(
        code_of(&server, ADMIN, Method::POST, LEASES, &lease("s-0_a")).await,
        201
    );
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
    assert_eq!(
        code_of(&server, "s-0", Method::POST, LEADERS, &leader("s-0_a")).await,
        201
    );
    assert_eq!(bind_as_each(&server, ["a", "b"]).await, (201, 403));
    uninstall(&server).await;
    apply(&server, "scheduler-admission.yaml").await;
    let path = format!("{LEADERS}/gpushare-scheduler");
    assert_eq!(
        code_of(
            &server,
            "s-1",
            Method::PATCH,
            &path,
            &json!({"spec": {"holderIdentity": "s-1_b"}})
        )
        .await,
        200
    );
    assert_eq!(bind_as_each(&server, ["c", "d"]).await, (403, 201));
    server
        .objects()
        .delete(
            "customresourcedefinitions",
            "",
            "schedulerleaders.gpushare.io",
            None,
        )
        .unwrap();
    assert_eq!(bind(&server, ADMIN, "after-the-kind").await.0, 201);
}

/// Recorded on kube-apiserver 1.36.2: without its parameter a policy with Fail and Deny refuses requests that its match conditions
/// leave out.
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
    server
        .objects()
        .delete(
            "customresourcedefinitions",
            "",
            "schedulerleaders.gpushare.io",
            None,
        )
        .unwrap();
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
        code_of(&server, "alice", Method::POST, PODS, &recorded("p")).await,
        201,
        "before there is a policy"
    );
    apply(&server, "record-admission.yaml").await;
    let answer = ask(
        &server,
        token,
        Method::PATCH,
        &format!("{PODS}/p{subresource}"),
        &patch,
    )
    .await;
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
            code_of(&server, "alice", Method::POST, PODS, &pod(token)).await,
            201,
            "a pod without annotations"
        );
        let metadata = json!({"name": token, "annotations": {RECORD: "{}"}});
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "n1"}});
        assert_eq!(
            code_of(
                &server,
                token,
                Method::POST,
                &format!("{PODS}/{token}/binding"),
                &binding
            )
            .await,
            expected
        );
    }
}

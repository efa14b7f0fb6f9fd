//! Reviews as the API server sends them, and what comes back over HTTP.

use std::time::Duration;

use futures::{StreamExt, stream};
use placement::Policies;
use proptest::prelude::*;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;

fn webhooks() -> (Router, Registry) {
    let mut registry = Registry::default();
    let index = Shared::new(Index::new(
        ResourceNames::default(),
        Policies::default(),
        Duration::from_secs(30),
    ));
    let webhooks = Webhooks::new(Rules::default(), index, false, &mut registry);
    (router(Arc::new(webhooks), "/base"), registry)
}

async fn send(routes: &Router, path: &str, body: impl Into<Body>) -> (StatusCode, String) {
    let reply = routes
        .clone()
        .oneshot(Request::post(path).body(body.into()).unwrap())
        .await
        .unwrap();
    let status = reply.status();
    let body = reply.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// The review of a new pod, as kube-apiserver 1.33 sends it.
fn review(uid: &str, pod: &Value) -> Value {
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": uid, "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "default", "operation": "CREATE",
            "userInfo": {"username": "kubernetes-admin", "groups": ["system:masters", "system:authenticated"]},
            "object": pod, "oldObject": null, "dryRun": false,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"}}})
}

fn pod(amounts: &Value) -> Value {
    json!({"metadata": {"generateName": "p-"}, "spec": {"containers": [{"name": "c", "resources": {"limits": amounts, "requests": amounts}}]}})
}

#[tokio::test]
async fn answers_have_the_form_of_an_admission_review() {
    let (routes, registry) = webhooks();
    let (status, text) = send(
        &routes,
        "/base/webhook/mutate",
        review("u1", &pod(&json!({"koordinator.sh/gpu-memory": "1Gi"}))).to_string(),
    )
    .await;
    assert_eq!(status, StatusCode::OK);
    insta::assert_snapshot!(text, @r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"u1","allowed":true,"patch":"W3sib3AiOiJhZGQiLCJwYXRoIjoiL3NwZWMvY29udGFpbmVycy8wL3Jlc291cmNlcy9saW1pdHMva29vcmRpbmF0b3Iuc2h+MWdwdS5zaGFyZWQiLCJ2YWx1ZSI6IjEifSx7Im9wIjoiYWRkIiwicGF0aCI6Ii9zcGVjL2NvbnRhaW5lcnMvMC9yZXNvdXJjZXMvcmVxdWVzdHMva29vcmRpbmF0b3Iuc2h+MWdwdS5zaGFyZWQiLCJ2YWx1ZSI6IjEifV0=","patchType":"JSONPatch"}}"#);
    let (_, text) = send(
        &routes,
        "/base/webhook/mutate",
        review("u2", &pod(&json!({"cpu": "1"}))).to_string(),
    )
    .await;
    insta::assert_snapshot!(text, @r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"u2","allowed":true}}"#);
    let (status, text) = send(
        &routes,
        "/base/webhook/validate",
        review("u3", &pod(&json!({"koordinator.sh/gpu-memory": "1Gi"}))).to_string(),
    )
    .await;
    assert_eq!(status, StatusCode::OK);
    insta::assert_snapshot!(text, @r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"u3","allowed":false,"status":{"message":"container \"c\" asks for koordinator.sh/gpu-memory (1Gi) but not for koordinator.sh/gpu.shared, without which kubelet gives it no device: add koordinator.sh/gpu.shared: 1, or the number of GPUs","reason":"Invalid","code":422}}}"#);
    let mut metrics = String::new();
    prometheus_client::encoding::text::encode(&mut metrics, &registry).unwrap();
    for (webhook, verdict) in [
        ("mutate", "patched"),
        ("mutate", "allowed"),
        ("validate", "refused"),
    ] {
        let line = format!("admission_reviews_total{{webhook=\"{webhook}\",verdict=\"{verdict}\"}} 1");
        assert!(metrics.contains(&line), "{metrics}");
    }
}

#[tokio::test]
async fn a_body_that_is_no_review_is_refused_with_400() {
    let (routes, _) = webhooks();
    let mut old = review("u", &pod(&json!({})));
    old["apiVersion"] = "admission.k8s.io/v1beta1".into();
    let mut wrong = review("u", &json!({"spec": {"containers": "none"}}));
    wrong["request"]["operation"] = "CREATE".into();
    for (body, expected) in [
        (
            "nonsense".to_owned(),
            "not an AdmissionReview of admission.k8s.io/v1: expected ident",
        ),
        (
            old.to_string(),
            "not an AdmissionReview of admission.k8s.io/v1: it is a AdmissionReview of admission.k8s.io/v1beta1",
        ),
        (
            wrong.to_string(),
            "the object of request u is not of the kind that the request names: invalid type: string \"none\"",
        ),
    ] {
        let (status, text) = send(&routes, "/base/webhook/validate", body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
        assert!(text.starts_with(expected), "{text}");
    }
    let (status, _) = send(&routes, "/base/webhook/mutate", vec![b' '; MAX_REVIEW + 1]).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let (status, _) = send(&routes, "/base/bind", "{}").await;
    assert_eq!(status, StatusCode::NOT_FOUND, "no verb is served here");
}

/// A body that begins and never ends.
fn stalled(beginning: &[u8]) -> Body {
    let beginning = stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::copy_from_slice(beginning))]);
    Body::from_stream(beginning.chain(stream::pending()))
}

/// A permit was taken before the body was read: 64 clients that sent slowly made every review late, and the API server went on
/// without it.
#[rstest]
#[case::nothing_sent(Vec::new())]
#[case::half_a_review(br#"{"kind": "AdmissionReview""#.to_vec())]
#[case::a_large_one(vec![b' '; 2 * SMALL_BODY])]
#[tokio::test(start_paused = true)]
async fn slow_clients_do_not_delay_reviews(#[case] beginning: Vec<u8>) {
    let (routes, _) = webhooks();
    let slow: Vec<_> = (0..4 * MAX_DECIDING)
        .map(|_| {
            tokio::spawn({
                let (routes, body) = (routes.clone(), stalled(&beginning));
                async move { send(&routes, "/base/webhook/validate", body).await.0 }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let began = tokio::time::Instant::now();
    let (status, _) = send(
        &routes,
        "/base/webhook/validate",
        review("u", &pod(&json!({"cpu": "1"}))).to_string(),
    )
    .await;
    assert_eq!((status, began.elapsed()), (StatusCode::OK, Duration::ZERO));
    for slow in slow {
        assert_eq!(slow.await.unwrap(), StatusCode::REQUEST_TIMEOUT);
    }
    assert!(
        began.elapsed() <= READ_TIMEOUT,
        "they all end in time: {:?}",
        began.elapsed()
    );
    let large = review("u", &pod(&json!({"cpu": "1"}))).to_string() + &" ".repeat(3 * SMALL_BODY);
    assert_eq!(
        send(&routes, "/base/webhook/validate", large).await.0,
        StatusCode::OK,
        "a large review is answered after that"
    );
}

/// The API server sends pods that ask for nothing too, if they say which GPUs they see.
#[tokio::test]
async fn a_pod_that_would_see_every_gpu_is_refused_over_http() {
    let (routes, _) = webhooks();
    let mut pod = pod(&json!({"cpu": "1"}));
    pod["spec"]["containers"][0]["env"] = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let (status, text) = send(&routes, "/base/webhook/validate", review("u", &pod).to_string()).await;
    assert_eq!(status, StatusCode::OK);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (
            &answer["response"]["allowed"],
            &answer["response"]["status"]["code"]
        ),
        (&json!(false), &json!(403))
    );
    let message = answer["response"]["status"]["message"].as_str().unwrap();
    for part in [
        "container \"c\"",
        "NVIDIA_VISIBLE_DEVICES",
        "\"all\"",
        "\"void\"",
        "namespace \"default\"",
        "--unrestricted-namespaces",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let (_, text) = send(&routes, "/base/webhook/mutate", review("u", &pod).to_string()).await;
    assert!(text.contains("\"allowed\":true"), "{text}");
}

/// JSON in which the parts of a review turn up in places where they belong and where they do not.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[a-zA-Z/.{}\"]{0,8}".prop_map(Value::from)
    ];
    leaf.prop_recursive(5, 32, 5, |inner| {
        let key = prop_oneof![
            prop::sample::select(vec![
                "uid",
                "operation",
                "object",
                "oldObject",
                "resource",
                "subResource",
                "userInfo",
                "spec",
                "containers",
                "metadata",
                "name"
            ])
            .prop_map(str::to_owned),
            "[a-z]{0,3}"
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Pods with all fields that the webhooks complete, check and refuse, for a test that damages them.
fn pods() -> Vec<Value> {
    let hints = json!({
        "scheduling.koordinator.sh/device-allocate-hint": "{\"gpu\": {\"selector\": {\"matchLabels\": {\"a\": \"b\"}}}}",
        "scheduling.koordinator.sh/device-joint-allocate": "{\"deviceTypes\": [\"gpu\", \"rdma\"]}",
        "cdi.k8s.io/gpu": "nvidia.com/gpu=0",
    });
    let limits = json!({"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-core": "50"});
    let variable = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let old = json!({"kubernetes.io/gpu-core": "10", "kubernetes.io/gpu-memory-ratio": "10"});
    vec![
        json!({"metadata": {"name": "a", "annotations": hints}, "spec": {"containers": [{"name": "c", "resources": {"limits": limits, "requests": limits}}]}}),
        json!({"metadata": {"generateName": "b-"}, "spec": {
            "initContainers": [{"name": "i", "restartPolicy": "Always", "env": variable, "securityContext": {"privileged": true}}],
            "containers": [{"name": "c", "resources": {"limits": old}}],
        }}),
    ]
}

proptest! {
    #[test]
    fn any_body_is_answered_with_its_uid_or_refused(request in json_value(), object in prop_oneof![json_value(), fuzz::damaged_json(pods())], whole in any::<bool>(), known in any::<bool>()) {
        let mut body = review("the-uid", &object);
        if whole {
            body["request"] = request;
        } else if !known && let Value::Object(fields) = request {
            body["request"].as_object_mut().unwrap().extend(fields);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (routes, _) = webhooks();
        // Repeated parts may make a body of many MiB.
        let is_too_large = body.to_string().len() > MAX_REVIEW;
        let refusal = if is_too_large { StatusCode::PAYLOAD_TOO_LARGE } else { StatusCode::BAD_REQUEST };
        for path in ["/base/webhook/mutate", "/base/webhook/validate"] {
            let (status, text) = runtime.block_on(send(&routes, path, body.to_string()));
            if status == StatusCode::OK {
                let answer: Value = serde_json::from_str(&text).unwrap();
                prop_assert_eq!(&answer["response"]["uid"], &body["request"]["uid"]);
                prop_assert!(answer["response"]["allowed"].is_boolean());
            } else {
                prop_assert_eq!(status, refusal);
            }
        }
    }
}

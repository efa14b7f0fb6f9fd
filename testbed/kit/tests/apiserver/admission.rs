//! Admission webhooks, called over TLS as the API server of a real cluster calls them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Method, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use kit::apiserver::ApiServer;
use rstest::rstest;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use crate::raw::{Answer, get, post, send};
use crate::setup::{pod, start};

type Decide = Arc<dyn Fn(&Value) -> Value + Send + Sync>;

/// A webhook server for one name, with what it has been asked.
struct Webhook {
    address: SocketAddr,
    ca: String,
    asked: Arc<Mutex<Vec<Value>>>,
    _serving: AbortOnDropHandle<()>,
}

impl Webhook {
    /// Serves for the Service `hook` in `system`, and for 127.0.0.1; `decide` makes the `response` of a `request`.
    async fn start(decide: impl Fn(&Value) -> Value + Send + Sync + 'static) -> Self {
        let names = vec!["hook.system.svc".to_owned(), "127.0.0.1".to_owned()];
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config =
            rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_no_client_auth()
                .with_single_cert(vec![made.cert.der().clone()], key)
                .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::<Mutex<Vec<Value>>>::default();
        let serving = serve(
            listener,
            TlsAcceptor::from(Arc::new(config)),
            Arc::clone(&asked),
            Arc::new(decide),
        );
        Self {
            address,
            ca: made.cert.pem(),
            asked,
            _serving: AbortOnDropHandle::new(tokio::spawn(serving)),
        }
    }

    fn asked(&self) -> Vec<Value> {
        self.asked.lock().unwrap().clone()
    }

    /// A configuration that names this server through its Service.
    async fn register(&self, server: &ApiServer, kind: &str, change: impl FnOnce(&mut Value)) {
        server
            .objects()
            .route_service("system", "hook", 443, self.address);
        let client = json!({"caBundle": ByteString(self.ca.clone().into_bytes()), "service": {"namespace": "system", "name": "hook", "path": "/review"}});
        register(server, kind, client, change).await;
    }
}

async fn serve(listener: TcpListener, tls: TlsAcceptor, asked: Arc<Mutex<Vec<Value>>>, decide: Decide) {
    while let Ok((stream, _)) = listener.accept().await {
        let Ok(stream) = tls.accept(stream).await else {
            continue;
        };
        let (asked, decide) = (Arc::clone(&asked), Arc::clone(&decide));
        let service = service_fn(move |request| answer(request, Arc::clone(&asked), Arc::clone(&decide)));
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    request: http::Request<Incoming>,
    asked: Arc<Mutex<Vec<Value>>>,
    decide: Decide,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let review: Value = serde_json::from_slice(&body).unwrap();
    let mut response = decide(&review["request"]);
    if response["uid"].is_null() {
        response["uid"] = review["request"]["uid"].clone();
    }
    asked.lock().unwrap().push(review["request"].clone());
    let answer =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
    Ok(Response::new(Full::from(answer.to_string())))
}

async fn register(server: &ApiServer, kind: &str, client: Value, change: impl FnOnce(&mut Value)) {
    let mut hook = json!({
        "name": "pods.test.example", "admissionReviewVersions": ["v1"], "sideEffects": "None", "clientConfig": client,
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["pods", "pods/binding"]}],
    });
    change(&mut hook);
    let name = format!("{}-{}", hook["name"].as_str().unwrap(), kind.to_lowercase());
    let object = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "webhooks": [hook]});
    let plural = format!("{}s", kind.to_lowercase());
    let answer = post(
        server,
        &format!("/apis/admissionregistration.k8s.io/v1/{plural}"),
        &object,
    )
    .await;
    assert_eq!(answer.code, 201, "{}", answer.text);
}

fn allow() -> Value {
    json!({"allowed": true})
}

fn patched(patch: &Value) -> Value {
    json!({"allowed": true, "patchType": "JSONPatch", "patch": ByteString(patch.to_string().into_bytes())})
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const MUTATING: &str = "MutatingWebhookConfiguration";
const VALIDATING: &str = "ValidatingWebhookConfiguration";

async fn create(server: &ApiServer, name: &str) -> Answer {
    post(server, PODS, &pod(name)).await
}

#[tokio::test]
async fn a_mutating_webhook_gets_the_object_before_it_is_stored_and_its_patch_is_stored() {
    let webhook = Webhook::start(|_| {
        patched(&json!([{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}]))
    })
    .await;
    let server = start().await;
    webhook.register(&server, MUTATING, |_| {}).await;
    let answer = create(&server, "a").await;
    assert_eq!(
        (answer.code, answer.json()["metadata"]["labels"]["seen"].as_str()),
        (201, Some("yes")),
        "{}",
        answer.text
    );
    assert_eq!(
        get(&server, &format!("{PODS}/a"), "").await.json()["metadata"]["labels"]["seen"],
        "yes"
    );
    let asked = &webhook.asked()[0];
    assert_eq!(
        json!([
            asked["operation"],
            asked["name"],
            asked["namespace"],
            asked["kind"],
            asked["resource"],
            asked["dryRun"],
            asked["userInfo"]
        ]),
        json!([
            "CREATE", "a", "default", {"group": "", "version": "v1", "kind": "Pod"},
            {"group": "", "version": "v1", "resource": "pods"}, false,
            {"username": "system:anonymous", "groups": ["system:unauthenticated"]},
        ])
    );
    assert_eq!(
        asked["object"]["spec"]["schedulerName"], "default-scheduler",
        "defaults come first"
    );
    assert!(asked["object"]["metadata"]["uid"].is_null() && asked["oldObject"].is_null());
}

#[tokio::test]
async fn an_object_is_validated_again_after_it_was_patched() {
    let webhook =
        Webhook::start(|_| patched(&json!([{"op": "replace", "path": "/spec/containers", "value": []}])))
            .await;
    let server = start().await;
    webhook.register(&server, MUTATING, |_| {}).await;
    let answer = create(&server, "a").await;
    assert_eq!(answer.code, 422, "{}", answer.text);
    assert!(
        answer.text.contains("spec.containers: Required value"),
        "{}",
        answer.text
    );
}

#[rstest]
#[case::with_a_message(json!({"message": "too much", "code": 403, "reason": "Forbidden"}), 403, "Forbidden", ": too much")]
#[case::with_a_reason(json!({"reason": "Busy"}), 400, "", ": Busy")]
#[case::without_explanation(Value::Null, 400, "", " without explanation")]
#[case::never_below_400(json!({"code": 200, "message": "no"}), 400, "", ": no")]
#[tokio::test]
async fn the_client_gets_the_message_of_a_refusal(
    #[case] status: Value,
    #[case] code: u16,
    #[case] reason: &str,
    #[case] end: &str,
) {
    let webhook = Webhook::start(move |_| json!({"allowed": false, "status": status})).await;
    let server = start().await;
    webhook.register(&server, VALIDATING, |_| {}).await;
    let answer = create(&server, "a").await;
    let expected = format!("admission webhook \"pods.test.example\" denied the request{end}");
    let json = answer.json();
    assert_eq!(
        (answer.code, json["reason"].as_str(), json["message"].as_str()),
        (code, Some(reason), Some(expected.as_str()))
    );
    assert_eq!(get(&server, &format!("{PODS}/a"), "").await.code, 404);
}

#[tokio::test]
async fn webhooks_are_called_for_bindings_updates_and_deletions() {
    let webhook = Webhook::start(|_| allow()).await;
    let server = start().await;
    webhook.register(&server, VALIDATING, |_| {}).await;
    assert_eq!(create(&server, "a").await.code, 201);
    let binding = json!({"target": {"kind": "Node", "name": "n"}, "metadata": {"annotations": {"x": "y"}}});
    assert_eq!(
        post(&server, &format!("{PODS}/a/binding"), &binding).await.code,
        201
    );
    let headers = [("content-type", "application/merge-patch+json")];
    let patch = json!({"metadata": {"labels": {"x": "y"}}}).to_string();
    assert_eq!(
        send(
            &server,
            Method::PATCH,
            &format!("{PODS}/a"),
            &headers,
            patch.clone()
        )
        .await
        .unwrap()
        .code,
        200
    );
    assert_eq!(
        send(
            &server,
            Method::PATCH,
            &format!("{PODS}/a/status"),
            &headers,
            patch
        )
        .await
        .unwrap()
        .code,
        200
    );
    assert_eq!(
        send(&server, Method::DELETE, &format!("{PODS}/a"), &[], "")
            .await
            .unwrap()
            .code,
        200
    );
    let summary = |asked: &Value| {
        [
            &asked["operation"],
            &asked["kind"]["kind"],
            &asked["subResource"],
            &asked["options"]["kind"],
        ]
        .map(|v| v.as_str().unwrap_or("-").to_owned())
        .join(" ")
    };
    let asked = webhook.asked();
    assert_eq!(
        asked.iter().map(summary).collect::<Vec<_>>(),
        [
            "CREATE Pod - CreateOptions",
            "CREATE Binding binding CreateOptions",
            "UPDATE Pod - PatchOptions",
            "DELETE Pod - DeleteOptions"
        ]
    );
    assert_eq!(asked[1]["object"]["metadata"]["annotations"]["x"], "y");
    assert_eq!(asked[2]["oldObject"]["metadata"]["labels"], Value::Null);
    assert_eq!(asked[2]["object"]["metadata"]["labels"]["x"], "y");
    assert!(asked[3]["object"].is_null() && asked[3]["oldObject"]["metadata"]["labels"]["x"] == "y");
}

#[rstest]
#[case::other_namespace(json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}), false)]
#[case::not_these_namespaces(json!({"namespaceSelector": {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}]}}), true)]
#[case::labelled_objects(json!({"objectSelector": {"matchLabels": {"app": "x"}}}), false)]
#[case::cluster_scoped(json!({"rules": [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*"], "scope": "Cluster"}]}), false)]
#[case::all_resources(json!({"rules": [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": ["*"]}]}), true)]
#[case::subresources_only(json!({"rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/*"]}]}), true)]
#[case::binding_only(json!({"rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}]}), false)]
#[tokio::test]
async fn webhooks_are_called_for_selected_objects_only(#[case] change: Value, #[case] is_asked: bool) {
    let webhook = Webhook::start(|_| allow()).await;
    let server = start().await;
    let merge = |hook: &mut Value| {
        hook.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
    };
    webhook.register(&server, VALIDATING, merge).await;
    assert_eq!(create(&server, "a").await.code, 201);
    assert_eq!(!webhook.asked().is_empty(), is_asked);
}

#[tokio::test]
async fn a_failing_call_fails_the_request_unless_the_policy_is_ignore() {
    let (server, ignoring) = (start().await, start().await);
    let webhook = Webhook::start(|_| json!({"allowed": true, "uid": "another"})).await;
    webhook.register(&server, VALIDATING, |_| {}).await;
    webhook
        .register(&ignoring, VALIDATING, |hook| {
            hook["failurePolicy"] = json!("Ignore");
        })
        .await;
    let answer = create(&server, "a").await;
    assert_eq!(
        (answer.code, answer.json()["reason"].as_str().unwrap()),
        (500, "InternalError")
    );
    let begin = "Internal error occurred: failed calling webhook \"pods.test.example\": received invalid webhook response: expected response.uid=";
    assert!(
        answer.json()["message"].as_str().unwrap().starts_with(begin),
        "{}",
        answer.text
    );
    assert_eq!(create(&ignoring, "a").await.code, 201);
    assert_eq!(webhook.asked().len(), 2);
}

#[tokio::test]
async fn the_certificate_of_a_webhook_is_verified() {
    let (webhook, other) = (
        Webhook::start(|_| allow()).await,
        Webhook::start(|_| allow()).await,
    );
    let url = format!("https://127.0.0.1:{}/review", webhook.address.port());
    let bundle = |hook: &Webhook| ByteString(hook.ca.clone().into_bytes());
    let trusted = start().await;
    register(
        &trusted,
        VALIDATING,
        json!({"url": url, "caBundle": bundle(&webhook)}),
        |_| {},
    )
    .await;
    assert_eq!(create(&trusted, "a").await.code, 201);
    let untrusted = start().await;
    register(
        &untrusted,
        VALIDATING,
        json!({"url": url, "caBundle": bundle(&other)}),
        |_| {},
    )
    .await;
    let answer = create(&untrusted, "a").await;
    assert_eq!(answer.code, 500);
    assert!(
        answer
            .text
            .contains("failed to call webhook: Post \\\"https://127.0.0.1:")
            && answer.text.contains("certificate"),
        "{}",
        answer.text
    );
    let misnamed = start().await;
    misnamed
        .objects()
        .route_service("system", "other", 443, webhook.address);
    let service = json!({"namespace": "system", "name": "other"});
    register(
        &misnamed,
        VALIDATING,
        json!({"service": service, "caBundle": bundle(&webhook)}),
        |_| {},
    )
    .await;
    let answer = create(&misnamed, "a").await;
    assert!(
        answer.text.contains("https://other.system.svc:443/?timeout=10s")
            && answer.text.contains("certificate"),
        "{}",
        answer.text
    );
}

#[tokio::test]
async fn webhooks_return_warnings_and_dry_runs_need_their_consent() {
    let webhook = Webhook::start(|_| json!({"allowed": true, "warnings": ["mind the \"gap\""]})).await;
    let server = start().await;
    webhook.register(&server, VALIDATING, |_| {}).await;
    let answer = create(&server, "a").await;
    assert_eq!(answer.headers["warning"], "299 - \"mind the \\\"gap\\\"\"");
    let dry = post(&server, &format!("{PODS}?dryRun=All"), &pod("b")).await;
    assert_eq!(
        (dry.code, webhook.asked()[1]["dryRun"].as_bool()),
        (201, Some(true))
    );
    assert_eq!(get(&server, &format!("{PODS}/b"), "").await.code, 404);
}

#[tokio::test]
async fn invalid_webhook_configurations_are_refused() {
    let server = start().await;
    let hook = json!({"name": "short", "clientConfig": {"url": "http://x"}, "sideEffects": "Some", "admissionReviewVersions": []});
    let object = json!({"metadata": {"name": "x"}, "webhooks": [hook]});
    let answer = post(
        &server,
        "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
        &object,
    )
    .await;
    let text = answer.text;
    assert_eq!(answer.code, 422);
    for part in [
        "three segments",
        "admissionReviewVersions",
        "sideEffects",
        "'https' is the only allowed",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// A condition that cannot be evaluated is a failure of the webhook, which its `failurePolicy` judges.
#[rstest]
#[case::met("object.metadata.name == 'p'", "Fail", 201, 1)]
#[case::not_met("object.metadata.name == 'q'", "Fail", 201, 0)]
#[case::no_expression("object.metadata.", "Ignore", 201, 0)]
#[case::no_expression_that_must_be_one("object.metadata.", "Fail", 500, 0)]
#[tokio::test]
async fn match_conditions_are_evaluated(
    #[case] expression: &str,
    #[case] policy: &str,
    #[case] code: u16,
    #[case] n_asked: usize,
) {
    let server = start().await;
    let webhook = Webhook::start(|_| allow()).await;
    let change = |hook: &mut Value| {
        hook["matchConditions"] = json!([{"name": "c", "expression": expression}]);
        hook["failurePolicy"] = json!(policy);
    };
    webhook.register(&server, VALIDATING, change).await;
    assert_eq!(
        (create(&server, "p").await.code, webhook.asked().len()),
        (code, n_asked)
    );
}

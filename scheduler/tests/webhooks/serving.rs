//! Real connections: who trusts whom, and rotation under load.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use daemon::http_server::{CurrentTls, HttpServer};
use daemon::metrics_text::MetricsText;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use scheduler::admission::Rules;
use scheduler::admission::server::{Webhooks, router};
use scheduler::certificates::Keeper;
use scheduler::certificates::issue::{CertificateOrder, issue};
use scheduler::certificates::server_tls::Clients;
use scheduler::extender::{Extender, router as extender_router};
use scheduler::offline;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::keeping::{DAY, HOST, keeper, part};

async fn start(tls: CurrentTls, routes: axum::Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = HttpServer {
        tls: Some(tls),
        read_timeout: Duration::from_secs(5),
        ..HttpServer::new(listener, routes, 64)
    };
    tokio::spawn(server.serve(CancellationToken::new()));
    address
}

fn webhooks(registry: &mut Registry) -> axum::Router {
    let index = offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty());
    let webhooks = Webhooks::new(
        Rules::default(),
        scheduler::index::Shared::new(index),
        false,
        registry,
    );
    router(Arc::new(webhooks), "/gpushare-scheduler")
}

/// A client that trusts what the Secret says now, with a certificate of its own or without.
fn client(api: &Api, certificate: Option<(Vec<u8>, Vec<u8>)>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(CertificateDer::pem_slice_iter(&part(api, "ca.crt")).map(Result::unwrap));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = CertificateDer::pem_slice_iter(&certificate)
                .map(Result::unwrap)
                .collect();
            builder
                .with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(&key).unwrap())
                .unwrap()
        }
    };
    TlsConnector::from(Arc::new(config))
}

async fn connect(connector: &TlsConnector, address: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
    connector
        .connect(
            ServerName::try_from(HOST).unwrap(),
            TcpStream::connect(address).await?,
        )
        .await
}

async fn post(stream: TlsStream<TcpStream>, path: &str, body: String) -> (StatusCode, Value) {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let request = Request::post(path)
        .header("host", HOST)
        .body(Full::<bytes::Bytes>::from(body))
        .unwrap();
    let reply = sender.send_request(request).await.unwrap();
    let status = reply.status();
    let body = reply.into_body().collect().await.unwrap().to_bytes();
    let answer = serde_json::from_slice(&body);
    (
        status,
        answer.unwrap_or_else(|_| String::from_utf8_lossy(&body).into()),
    )
}

fn review(uid: usize) -> String {
    let container = json!({"name": "c", "resources": {"limits": {"koordinator.sh/gpu-memory-ratio": "200"}}});
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": uid.to_string(), "operation": "CREATE", "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"metadata": {"name": "p"}, "spec": {"containers": [container]}}}})
    .to_string()
}

async fn assert_reviewed(connector: &TlsConnector, address: SocketAddr, uid: usize) {
    let stream = connect(connector, address).await.unwrap();
    let (status, answer) = post(stream, "/gpushare-scheduler/webhook/mutate", review(uid)).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["response"]["uid"], uid.to_string());
    assert_eq!(
        (&answer["response"]["allowed"], &answer["response"]["patchType"]),
        (&json!(true), &json!("JSONPatch"))
    );
}

#[tokio::test]
async fn the_authority_in_the_secret_verifies_the_webhooks() {
    let (api, mut registry) = (Api::default(), Registry::default());
    let mut keeper = keeper(&api, &mut registry);
    let address = start(keeper.add_server(Clients::Any).unwrap(), webhooks(&mut registry)).await;
    let other = Api::default();
    crate::keeping::keeper(&other, &mut Registry::default())
        .reconcile(SystemTime::now())
        .await
        .unwrap();
    assert!(
        connect(&client(&other, None), address).await.is_err(),
        "there is no certificate yet"
    );
    keeper.reconcile(SystemTime::now()).await.unwrap();
    assert_reviewed(&client(&api, None), address, 1).await;
    assert!(
        connect(&client(&other, None), address).await.is_err(),
        "another authority"
    );
    let mut metrics = String::new();
    prometheus_client::encoding::text::encode(&mut metrics, &registry).unwrap();
    assert!(
        metrics.contains("certificate_expiry_timestamp_seconds{certificate=\"server\"} 1"),
        "{metrics}"
    );
}

/// Clients that keep calling while certificates are replaced, with the authorities that they learnt at the beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_fails_during_a_rotation() {
    let (api, mut registry) = (Api::default(), Registry::default());
    let mut keeper = keeper(&api, &mut registry);
    let address = start(keeper.add_server(Clients::Any).unwrap(), webhooks(&mut registry)).await;
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let authority = part(&api, "ca.crt");
    let (done, n_reviews) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let connector = client(&api, None);
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (connector, done, n_reviews) = (connector.clone(), Arc::clone(&done), Arc::clone(&n_reviews));
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    assert_reviewed(&connector, address, n_reviews.fetch_add(1, Ordering::Relaxed)).await;
                }
            })
        })
        .collect();
    let mut shown = vec![part(&api, "tls.crt")];
    for rotation in 1..=8 {
        await_reviews(&n_reviews, rotation * 20).await;
        rotate(&api, &mut keeper).await;
        shown.push(part(&api, "tls.crt"));
    }
    await_reviews(&n_reviews, 200).await;
    done.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.await.unwrap();
    }
    shown.sort();
    shown.dedup();
    assert_eq!(shown.len(), 9, "every rotation brought another certificate");
    assert_eq!(part(&api, "ca.crt"), authority);
    let mut metrics = String::new();
    prometheus_client::encoding::text::encode(&mut metrics, &registry).unwrap();
    assert!(metrics.contains("certificate_rotations_total 8"), "{metrics}");
}

/// Another replica, or an administrator, has removed the certificate from the Secret: a new one is issued.
async fn rotate(api: &Api, keeper: &mut Keeper) {
    let mut secret = api.object(crate::api::SECRET).unwrap();
    secret["data"].as_object_mut().unwrap().remove("tls.crt");
    api.put(crate::api::SECRET, secret);
    keeper.reconcile(SystemTime::now()).await.unwrap();
}

async fn await_reviews(n_reviews: &AtomicUsize, n: usize) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while n_reviews.load(Ordering::Relaxed) < n {
        assert!(
            tokio::time::Instant::now() < deadline,
            "reviews do not get through"
        );
        tokio::task::yield_now().await;
    }
}

/// A connection that stands outlives the rotation.
#[tokio::test]
async fn a_rotation_does_not_close_open_connections() {
    let (api, mut registry) = (Api::default(), Registry::default());
    let mut keeper = keeper(&api, &mut registry);
    let address = start(keeper.add_server(Clients::Any).unwrap(), webhooks(&mut registry)).await;
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let stream = connect(&client(&api, None), address).await.unwrap();
    keeper.reconcile(SystemTime::now() + 61 * DAY).await.unwrap();
    let (status, _) = post(stream, "/gpushare-scheduler/webhook/validate", review(1)).await;
    assert_eq!(status, StatusCode::OK);
}

/// The extender's verbs, with certificates from the Secret on both sides.
#[tokio::test]
async fn the_extender_accepts_client_certificates_of_the_same_authority() {
    let (api, mut registry) = (Api::default(), Registry::default());
    let mut keeper = keeper(&api, &mut registry);
    let serving = scheduler::config::Serving {
        tls_from_secret: true,
        ..scheduler::config::Serving::default()
    };
    let index = scheduler::index::Shared::new(offline::index(
        std::iter::empty(),
        std::iter::empty(),
        std::iter::empty(),
    ));
    let leadership = scheduler::leader::Leadership::alone();
    let metrics = scheduler::metrics::Metrics::register(&mut registry, index.clone(), &leadership);
    let binder = scheduler::bind::Binder::new(api.client(), Duration::from_secs(4), leadership);
    let extender = Arc::new(Extender::new(index, metrics, binder, &serving));
    let routes = extender_router(extender, MetricsText::new(Registry::default()));
    let address = start(keeper.add_server(Clients::OwnAuthority).unwrap(), routes).await;
    keeper.reconcile(SystemTime::now()).await.unwrap();

    let path = "/gpushare-scheduler/filter";
    let (status, _) = post(
        connect(&client(&api, None), address).await.unwrap(),
        path,
        "{}".to_owned(),
    )
    .await;
    assert_eq!(status, StatusCode::FORBIDDEN, "no certificate");
    let server_s_own = Some((part(&api, "tls.crt"), part(&api, "tls.key")));
    let refused = async {
        connect(&client(&api, server_s_own), address)
            .await
            .map(|stream| post(stream, path, "{}".to_owned()))
    };
    match refused.await {
        Err(_) => {}
        Ok(reply) => assert!(
            tokio::spawn(reply).await.is_err(),
            "a server's certificate makes no client"
        ),
    }

    let folder = tempfile::tempdir().unwrap();
    let (secret, namespace) = ("certificates".to_owned(), "gpushare-system".to_owned());
    let order = CertificateOrder {
        secret,
        namespace,
        name: "kube-scheduler".to_owned(),
        lifetime: 365 * DAY,
    };
    issue(api.client(), &order, folder.path()).await.unwrap();
    let read = |file: &str| std::fs::read(folder.path().join(file)).unwrap();
    let connector = client(&api, Some((read("client.crt"), read("client.key"))));
    let (status, _) = post(connect(&connector, address).await.unwrap(), path, "{}".to_owned()).await;
    assert_eq!(
        status,
        StatusCode::BAD_REQUEST,
        "past the door, where an empty request is no filter"
    );
    rotate(&api, &mut keeper).await;
    let (status, _) = post(connect(&connector, address).await.unwrap(), path, "{}".to_owned()).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "also after a rotation");
}

/// The API server shows a certificate where its `--admission-control-config-file` names one; the webhooks refuse other clients
/// then.
#[tokio::test]
async fn webhooks_need_a_client_certificate_where_authorities_are_configured() {
    let (api, mut registry) = (Api::default(), Registry::default());
    let of_clients = [Api::default(), Api::default()];
    for other in &of_clients {
        keeper(other, &mut Registry::default())
            .reconcile(SystemTime::now())
            .await
            .unwrap();
    }
    let [old, new] = of_clients.each_ref().map(|other| part(other, "ca.crt"));
    let folder = tempfile::tempdir().unwrap();
    let authorities = folder.path().join("ca.crt");
    std::fs::write(&authorities, "nonsense").unwrap();
    let mut keeper = keeper(&api, &mut registry);
    let error = format!(
        "{:#}",
        keeper
            .add_server(Clients::SignedBy(authorities.clone()))
            .unwrap_err()
    );
    assert!(error.contains("ca.crt: the file holds none"), "{error}");
    std::fs::write(&authorities, old).unwrap();
    let index = scheduler::index::Shared::new(offline::index(
        std::iter::empty(),
        std::iter::empty(),
        std::iter::empty(),
    ));
    let webhooks = Webhooks::new(Rules::default(), index, true, &mut registry);
    let routes = router(Arc::new(webhooks), "/gpushare-scheduler");
    let address = start(
        keeper.add_server(Clients::SignedBy(authorities.clone())).unwrap(),
        routes,
    )
    .await;
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let path = "/gpushare-scheduler/webhook/validate";
    let (status, refusal) = post(
        connect(&client(&api, None), address).await.unwrap(),
        path,
        review(1),
    )
    .await;
    assert_eq!(status, StatusCode::FORBIDDEN, "no certificate");
    assert!(
        refusal.as_str().unwrap().contains("--webhook-client-ca-file"),
        "{refusal}"
    );
    let mut answered = Vec::new();
    for other in &of_clients {
        let issued = tempfile::tempdir().unwrap();
        let (secret, namespace) = ("certificates".to_owned(), "gpushare-system".to_owned());
        let order = CertificateOrder {
            secret,
            namespace,
            name: "kube-apiserver".to_owned(),
            lifetime: 365 * DAY,
        };
        issue(other.client(), &order, issued.path()).await.unwrap();
        let read = |file: &str| std::fs::read(issued.path().join(file)).unwrap();
        answered.push(client(&api, Some((read("client.crt"), read("client.key")))));
    }
    let (status, _) = post(connect(&answered[0], address).await.unwrap(), path, review(2)).await;
    assert_eq!(status, StatusCode::OK);
    std::fs::write(&authorities, "half").unwrap();
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let (status, _) = post(connect(&answered[0], address).await.unwrap(), path, review(3)).await;
    assert_eq!(status, StatusCode::OK, "a file of no use changes nothing");
    std::fs::write(&authorities, new).unwrap();
    keeper.reconcile(SystemTime::now()).await.unwrap();
    let (status, _) = post(connect(&answered[1], address).await.unwrap(), path, review(4)).await;
    assert_eq!(status, StatusCode::OK, "another authority is taken in");
}

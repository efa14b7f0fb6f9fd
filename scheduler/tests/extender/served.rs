//! The routes over real connections: in the clear, over TLS with client certificates, slow clients, and the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use daemon::http_server::{CurrentTls, HttpServer};
use prometheus_client::registry::Registry;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use scheduler::certificates::files::CertificateFiles;
use scheduler::certificates::metrics::CertificateMetrics;
use scheduler::config::{Serving, TlsFiles};

use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use crate::api::Fault;
use crate::objects::units;
use crate::world::World;

/// A server on a port of its own.
struct Server {
    address: SocketAddr,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

async fn start(world: &World, tls: Option<CurrentTls>, read_timeout: Duration) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let server = HttpServer {
        tls,
        read_timeout,
        ..HttpServer::new(listener, world.router.clone(), 64)
    };
    let task = tokio::spawn(server.serve(stop.clone()));
    Server { address, stop, task }
}

/// One HTTP/1.1 request. Returns the whole reply, or the failure.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    method: &str,
    path: &str,
    body: &str,
) -> std::io::Result<String> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut reply = Vec::new();
    match stream.read_to_end(&mut reply).await {
        Err(error) if reply.is_empty() => Err(error),
        _ => Ok(String::from_utf8(reply).unwrap()),
    }
}

#[tokio::test]
async fn http_is_served_until_the_process_stops() {
    let pod = units("p", 10);
    let world = World::new().with_node("n1", &[100]).with_pod(&pod);
    world.api.fail_posts([Fault::Slow(Duration::from_millis(300))]);
    let server = start(&world, None, Duration::from_secs(5)).await;
    let connect = || TcpStream::connect(server.address);
    let reply = exchange(connect().await.unwrap(), "GET", "/readyz", "")
        .await
        .unwrap();
    assert!(
        reply.starts_with("HTTP/1.1 200 OK") && reply.ends_with("ok\n"),
        "{reply}"
    );
    let bind =
        json!({"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n1"}).to_string();
    let stream = connect().await.unwrap();
    let binding =
        tokio::spawn(async move { exchange(stream, "POST", "/gpushare-scheduler/bind", &bind).await });
    while world.api.bindings().is_empty() {
        tokio::task::yield_now().await;
    }
    server.stop.cancel();
    let reply = binding.await.unwrap().unwrap();
    assert!(
        reply.ends_with(r#"{"Error":""}"#),
        "a request in work is answered: {reply}"
    );
    tokio::time::timeout(Duration::from_secs(5), server.task)
        .await
        .unwrap()
        .unwrap();
    assert!(connect().await.is_err(), "the port is closed");
}

#[tokio::test]
async fn connections_that_send_no_complete_request_are_closed() {
    let serving = Serving {
        read_timeout: Duration::from_millis(200),
        ..Serving::default()
    };
    let world = World::unsynced(&serving);
    let server = start(&world, None, serving.read_timeout).await;
    for sent in [
        "",
        "POST /gpushare-scheduler/filter HTTP/1.1\r\nhost: x\r\n",
        "POST /gpushare-scheduler/filter HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n{",
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut reply = String::new();
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut reply))
            .await
            .expect("the server should hang up")
            .unwrap();
        assert!(
            reply.is_empty() || reply.starts_with("HTTP/1.1 408"),
            "{sent:?}: {reply}"
        );
    }
}

/// Loads files for a server without metrics.
fn load(files: TlsFiles) -> anyhow::Result<CertificateFiles> {
    let metrics = CertificateMetrics::register(&mut Registry::default());
    CertificateFiles::load(files, metrics, ["extender", "extender-client-ca"])
}

/// Certificates of a test, in files.
struct Certificates {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let certificates = Self {
            dir: tempfile::tempdir().unwrap(),
            authority,
        };
        certificates.write("ca.pem", &certificates.authority.pem());
        for (name, usage) in [
            ("server", ExtendedKeyUsagePurpose::ServerAuth),
            ("client", ExtendedKeyUsagePurpose::ClientAuth),
        ] {
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &certificates.authority).unwrap();
            certificates.write(&format!("{name}.pem"), &certificate.pem());
            certificates.write(&format!("{name}-key.pem"), &key.serialize_pem());
        }
        certificates
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.dir.path().join(file), text).unwrap();
    }

    fn files(&self) -> TlsFiles {
        let path = |file| self.dir.path().join(file);
        TlsFiles {
            cert: path("server.pem"),
            key: path("server-key.pem"),
            client_ca: Some(path("ca.pem")),
        }
    }

    /// A connection with the certificate of this directory's client, or with none.
    async fn connect(
        &self,
        address: SocketAddr,
        client: Option<&Self>,
        trust: &Self,
    ) -> std::io::Result<impl AsyncRead + AsyncWrite + Unpin> {
        let mut roots = RootCertStore::empty();
        roots.add(trust.authority.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => config.with_no_client_auth(),
            Some(client) => {
                let path = |file| client.dir.path().join(file);
                let chain = vec![CertificateDer::from_pem_file(path("client.pem")).unwrap()];
                config
                    .with_client_auth_cert(
                        chain,
                        PrivateKeyDer::from_pem_file(path("client-key.pem")).unwrap(),
                    )
                    .unwrap()
            }
        };
        let stream = TcpStream::connect(address).await?;
        TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from("localhost").unwrap(), stream)
            .await
    }
}

/// Every client that could reach the old extender's port could bind any pod anywhere (E15).
#[tokio::test]
async fn verbs_need_a_client_certificate_and_probes_do_not() {
    let certificates = Certificates::new();
    let serving = Serving {
        tls: Some(certificates.files()),
        ..Serving::default()
    };
    let world = World::unsynced(&serving);
    let tls = load(certificates.files()).unwrap().current();
    let server = start(&world, Some(tls), Duration::from_secs(5)).await;
    let request = async |client: Option<&Certificates>, method, path: &str| {
        let stream = certificates
            .connect(server.address, client, &certificates)
            .await?;
        exchange(stream, method, path, "{}").await
    };
    for verb in ["filter", "prioritize", "bind"] {
        let path = format!("/gpushare-scheduler/{verb}");
        let reply = request(None, "POST", &path).await.unwrap();
        assert!(
            reply.starts_with("HTTP/1.1 403") && reply.contains("demands a client certificate"),
            "{reply}"
        );
        let reply = request(Some(&certificates), "POST", &path).await.unwrap();
        assert!(
            reply.starts_with("HTTP/1.1 400") && reply.contains("missing field"),
            "past the door: {reply}"
        );
    }
    let reply = request(None, "GET", "/healthz").await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let stranger = Certificates::new();
    let refused = request(Some(&stranger), "POST", "/gpushare-scheduler/bind").await;
    assert!(
        refused.is_err(),
        "a certificate of another authority ends the handshake: {refused:?}"
    );
}

#[test]
fn the_error_names_an_unusable_certificate_file() {
    let certificates = Certificates::new();
    let error = |files: &TlsFiles| format!("{:#}", load(files.clone()).map(drop).unwrap_err());
    let mut files = certificates.files();
    files.key = certificates.dir.path().join("client-key.pem");
    assert!(error(&files).contains("server.pem with key"), "{}", error(&files));
    files.key = certificates.dir.path().join("absent.pem");
    assert!(error(&files).contains("absent.pem"), "{}", error(&files));
    certificates.write("empty.pem", "");
    files = TlsFiles {
        cert: certificates.dir.path().join("empty.pem"),
        ..certificates.files()
    };
    assert!(
        error(&files).contains("empty.pem: the file holds none"),
        "{}",
        error(&files)
    );
}

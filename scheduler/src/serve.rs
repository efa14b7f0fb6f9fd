//! Accepts connections and serves one router on them, over TCP or TLS, until it is stopped.
//!
//! Knows nothing about the routes. It checks the certificates of clients, and marks requests with [`ClientCertificate`] and
//! [`ClientName`].

mod head_limit;
pub mod tls;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use daemon::panics::named;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;
use tracing::{debug, warn};

use crate::certificates::validity::common_name;
use head_limit::{Conversation, HeadLimit};
use tls::CurrentTls;

/// Time for which requests in work may go on after the stop.
const DRAIN: Duration = Duration::from_secs(10);

/// Time for which a client may keep an idle connection: longer than the 90 s of Go's HTTP client, which does not repeat a POST on
/// a connection that was just closed.
const KEEP_ALIVE: Duration = Duration::from_secs(120);

/// The largest HTTP/2 frame, in bytes: a request with thousands of names takes a few frames.
const FRAME: u32 = 256 << 10;

/// The ALPN name of HTTP/2.
pub(crate) const H2: &[u8] = b"h2";

/// Marks a request whose client has a certificate that the configured authorities signed.
#[derive(Clone, Copy, Debug)]
pub struct ClientCertificate;

/// The client of a request, for people: the common name of its certificate, or its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientName(pub Arc<str>);

/// The client of a connection.
#[derive(Clone, Debug)]
struct ConnectionClient {
    has_certificate: bool,
    name: ClientName,
}

impl ConnectionClient {
    fn of(address: SocketAddr, certificates: Option<&[CertificateDer<'_>]>) -> Self {
        let common_name = certificates.and_then(|chain| common_name(chain.first()?));
        Self {
            has_certificate: certificates.is_some(),
            name: ClientName(common_name.unwrap_or_else(|| address.ip().to_string()).into()),
        }
    }
}

/// Serves until `stop` completes, then lets the requests in work end.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<CurrentTls>,
    read_timeout: Duration,
    stop: impl Future<Output = ()>,
) {
    let (_sender, never) = watch::channel(0);
    serve_with_resets(listener, router, tls, read_timeout, never, stop).await;
}

/// Serves as [`serve`] does. Whenever `resets` changes, all connections end once their requests in work are answered.
pub async fn serve_with_resets(
    listener: TcpListener,
    router: Router,
    tls: Option<CurrentTls>,
    read_timeout: Duration,
    mut resets: watch::Receiver<u64>,
    stop: impl Future<Output = ()>,
) {
    let mut graceful = GracefulShutdown::new();
    let mut earlier = JoinSet::new();
    let connection = AcceptedConnection {
        router,
        tls,
        read_timeout,
    };
    tokio::pin!(stop);
    loop {
        let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = &mut stop => break,
                    Ok(()) = resets.changed() => {
                        earlier.spawn(std::mem::take(&mut graceful).shutdown());
        // Drops what has ended, so that many resets do not pile up.
                        while earlier.try_join_next().is_some() {}
                        continue;
                    }
                };
        match accepted {
            Ok((stream, address)) => {
                tokio::spawn(named(
                    "connection",
                    connection.clone().run(stream, address, graceful.watcher()),
                ));
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                // With all file descriptors in use, accept fails at once: the pause keeps the loop from spinning.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
    // Clients that connect now are refused at once, and try another replica.
    drop(listener);
    earlier.spawn(graceful.shutdown());
    if tokio::time::timeout(DRAIN, earlier.join_all()).await.is_err() {
        warn!("some requests did not end in time");
    }
}

#[derive(Clone)]
struct AcceptedConnection {
    router: Router,
    tls: Option<CurrentTls>,
    read_timeout: Duration,
}

impl AcceptedConnection {
    async fn run(self, stream: TcpStream, address: SocketAddr, watcher: Watcher) {
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let Some(acceptor) = self.tls.as_ref().map(CurrentTls::acceptor) else {
            return self
                .http1(stream, ConnectionClient::of(address, None), watcher)
                .await;
        };
        match tokio::time::timeout(self.read_timeout, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => {
                let (_, session) = stream.get_ref();
                let client = ConnectionClient::of(address, session.peer_certificates());
                match session.alpn_protocol() {
                    Some(H2) => self.http2(stream, client, watcher).await,
                    _ => self.http1(stream, client, watcher).await,
                }
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
            Err(_) => debug!("TLS handshake took too long"),
        }
    }

    async fn http1(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        client: ConnectionClient,
        watcher: Watcher,
    ) {
        let conversation = Conversation::new(self.read_timeout);
        let stream = HeadLimit::new(stream, conversation.clone());
        let mut builder = http1::Builder::new();
        // From the end of a request to the head of the next: `HeadLimit` ends slow heads.
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(KEEP_ALIVE + self.read_timeout);
        let router = self.router;
        let service = service_fn(move |request| {
            let answering = conversation.answering();
            let answer = answer(router.clone(), request, client.clone());
            async move {
                let answer = answer.await;
                drop(answering);
                answer
            }
        });
        end(watcher
            .watch(builder.serve_connection(TokioIo::new(stream), service))
            .await);
    }

    async fn http2(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        client: ConnectionClient,
        watcher: Watcher,
    ) {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.read_timeout)
            .keep_alive_timeout(self.read_timeout);
        builder.max_frame_size(FRAME);
        let router = self.router;
        let service = service_fn(move |request| answer(router.clone(), request, client.clone()));
        end(watcher
            .watch(builder.serve_connection(TokioIo::new(stream), service))
            .await);
    }
}

fn end(ended: Result<(), hyper::Error>) {
    if let Err(error) = ended {
        debug!(%error, "connection ended");
    }
}

async fn answer(
    router: Router,
    request: Request<Incoming>,
    client: ConnectionClient,
) -> Result<Response<Body>, Infallible> {
    let mut request = request.map(Body::new);
    if client.has_certificate {
        request.extensions_mut().insert(ClientCertificate);
    }
    request.extensions_mut().insert(client.name);
    router.oneshot(request).await
}

#[cfg(test)]
mod tests;

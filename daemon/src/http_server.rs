//! An HTTP server over TCP or TLS, with limits for slow clients.
//!
//! Nothing here knows the routes. The server checks the certificates of clients, and marks requests with [`ClientCertificate`]
//! and [`ClientName`].

mod conversation;
mod head_limit;
mod places;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use axum::body::Body;
use http::{Extensions, Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::log_limit::LogLimit;
use crate::x509::common_name;
use conversation::{Answering, AnsweringBody, Conversation, KEEP_ALIVE};
use head_limit::HeadLimit;
use places::Places;

/// Time within which the head (request line and headers) of a request must have arrived.
pub const READ_TIMEOUT: Duration = Duration::from_secs(10);

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The largest HTTP/2 frame, in bytes: a request with thousands of node names takes a few frames.
const MAX_FRAME_BYTES: u32 = 256 << 10;

const H2: &[u8] = b"h2";

/// The ALPN names that the TLS settings of a server must offer.
pub const ALPN_PROTOCOLS: [&[u8]; 2] = [H2, b"http/1.1"];

static NOT_ACCEPTED: LogLimit = LogLimit::new();

/// The TLS settings of new connections; open connections keep the settings that they began with.
pub type CurrentTls = watch::Receiver<Arc<ServerConfig>>;

/// Marks a request whose client has a certificate that the configured authorities signed.
#[derive(Clone, Copy, Debug)]
pub struct ClientCertificate;

/// The client of a request, for people: the common name of its certificate, or its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientName(pub Arc<str>);

/// Listens on an address, and logs it.
pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    // With port 0 the kernel has chosen one.
    info!(address = %listener.local_addr().unwrap_or(address), "listening");
    Ok(listener)
}

/// A server of one router on one address.
#[derive(Debug)]
pub struct HttpServer {
    /// The listener of the server's address.
    pub listener: TcpListener,
    /// The routes that the server serves.
    pub router: Router,
    /// The TLS settings; `None` for a server in plain text.
    pub tls: Option<CurrentTls>,
    /// The most connections at a time.
    pub most_connections: usize,
    /// Time within which a TLS handshake, and the head of a request, must have arrived.
    pub read_timeout: Duration,
    /// Changes whenever the server has to close all connections, so that clients connect again.
    pub connection_resets: watch::Receiver<u64>,
}

impl HttpServer {
    /// A server in plain text that never resets its connections.
    pub fn new(listener: TcpListener, router: Router, most_connections: usize) -> Self {
        // Without a sender the receiver never sees a change; its value is not read.
        let (_, never) = watch::channel(0);
        Self {
            listener,
            router,
            tls: None,
            most_connections,
            read_timeout: READ_TIMEOUT,
            connection_resets: never,
        }
    }

    /// Serves until `stop` is cancelled, and returns once the requests in work are answered, which the caller limits in time.
    pub async fn serve(mut self, stop: CancellationToken) {
        let settings = ConnectionSettings {
            router: self.router,
            tls: self.tls,
            read_timeout: self.read_timeout,
        };
        let places = Places::new(self.most_connections);
        let mut open = OpenConnections::default();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = stop.cancelled() => break,
                Ok(()) = self.connection_resets.changed() => {
                    open.close();
                    continue;
                }
            };
            match accepted {
                Ok((stream, address)) => {
                    let has_handshake = settings.tls.is_some();
                    let conversation = Conversation::new(address.ip(), settings.read_timeout, has_handshake);
                    let (settings, watcher) = (settings.clone(), open.current.watcher());
                    let serving = settings.serve(stream, address, conversation.clone(), watcher);
                    places.serve(conversation, serving);
                }
                Err(error) => {
                    if let Some(left_out) = NOT_ACCEPTED.next_line() {
                        warn!(%error, left_out, "cannot accept a connection");
                    }
                    // With all file descriptors in use, accept fails at once: the pause keeps the loop from spinning.
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        // Clients that connect now are refused at once, and try another replica.
        drop(self.listener);
        open.close();
        open.closing.join_all().await;
    }
}

#[derive(Default)]
struct OpenConnections {
    /// Connections that were accepted since the last reset.
    current: GracefulShutdown,
    /// One task for each reset: it ends when the connections from before the reset have closed.
    closing: JoinSet<()>,
}

impl OpenConnections {
    /// Closes all connections that are open now, each once its requests in work are answered.
    fn close(&mut self) {
        self.closing.spawn(std::mem::take(&mut self.current).shutdown());
        // A finished task keeps its memory until it is joined, and a replica may reset its connections for months.
        while self.closing.try_join_next().is_some() {}
    }
}

/// The marks of the requests of a client at this address, with the chain of certificates that it has shown.
fn marks(address: SocketAddr, certificates: Option<&[CertificateDer<'_>]>) -> Extensions {
    let mut marks = Extensions::new();
    if certificates.is_some() {
        marks.insert(ClientCertificate);
    }
    let common_name = certificates.and_then(|chain| common_name(chain.first()?));
    let name = common_name.unwrap_or_else(|| address.ip().to_string());
    marks.insert(ClientName(name.into()));
    marks
}

#[derive(Clone)]
struct ConnectionSettings {
    router: Router,
    tls: Option<CurrentTls>,
    read_timeout: Duration,
}

impl ConnectionSettings {
    async fn serve(
        self,
        stream: TcpStream,
        address: SocketAddr,
        conversation: Conversation,
        watcher: Watcher,
    ) {
        // Answers are written whole or in large pieces, so Nagle's algorithm, which waits for more bytes, would only delay them.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let Some(tls) = &self.tls else {
            let client = marks(address, None);
            return self.serve_http1(stream, client, conversation, watcher).await;
        };
        let acceptor = TlsAcceptor::from(Arc::clone(&tls.borrow()));
        match tokio::time::timeout(self.read_timeout, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => {
                conversation.note_handshake();
                let (_, session) = stream.get_ref();
                let client = marks(address, session.peer_certificates());
                match session.alpn_protocol() {
                    Some(H2) => self.serve_http2(stream, client, conversation, watcher).await,
                    _ => self.serve_http1(stream, client, conversation, watcher).await,
                }
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake failed"),
            Err(_) => debug!("TLS handshake took too long"),
        }
    }

    /// Serves one HTTP/1.1 connection until it ends, or until `watcher` asks for its end after the request in work.
    async fn serve_http1(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        client: Extensions,
        conversation: Conversation,
        watcher: Watcher,
    ) {
        let stream = HeadLimit::new(stream, conversation.clone());
        let mut builder = http1::Builder::new();
        // hyper counts from the end of a request to the head of the next, so this limits idle connections. `HeadLimit` ends
        // slow heads.
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(KEEP_ALIVE + self.read_timeout);
        let router = self.router;
        let service = service_fn(move |request| {
            answer(router.clone(), request, client.clone(), conversation.answering())
        });
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        log_end(watcher.watch(connection).await);
    }

    /// Serves one HTTP/2 connection until it ends, or until `watcher` asks for its end after the requests in work.
    async fn serve_http2(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        client: Extensions,
        conversation: Conversation,
        watcher: Watcher,
    ) {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        // The pings of HTTP/2 find clients that are gone, so that no `HeadLimit` is needed.
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(self.read_timeout)
            .keep_alive_timeout(self.read_timeout)
            .max_frame_size(MAX_FRAME_BYTES);
        let router = self.router;
        let overdue = conversation.clone().overdue();
        let service = service_fn(move |request| {
            answer(router.clone(), request, client.clone(), conversation.answering())
        });
        let connection = builder.serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            ended = watcher.watch(connection) => log_end(ended),
            () = overdue => debug!("connection ended: no request in time"),
        }
    }
}

fn log_end(ended: Result<(), hyper::Error>) {
    // Clients end connections in many ways, so this is no warning.
    if let Err(error) = ended {
        debug!(%error, "connection ended");
    }
}

/// The router's answer to a request, with the marks of the connection's client.
async fn answer(
    router: Router,
    request: Request<Incoming>,
    client: Extensions,
    answering: Answering,
) -> Result<Response<Body>, Infallible> {
    let mut request = request.map(Body::new);
    request.extensions_mut().extend(client);
    let (head, body) = router.oneshot(request).await?.into_parts();
    let body = AnsweringBody {
        body,
        _answering: answering,
    };
    Ok(Response::from_parts(head, Body::new(body)))
}

#[cfg(test)]
mod tests;

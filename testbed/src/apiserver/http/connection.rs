//! Accepts connections and speaks HTTP/1.1 on them until the server stops.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::answer::Hangup;
use super::{Server, router};

/// Serves connections until the server stops, and then until the running requests have ended.
pub(crate) async fn serve(listener: TcpListener, server: Arc<Server>) {
    let stopping = server.stopping.clone();
    let router = router(server);
    let connections = TaskTracker::new();
    loop {
        tokio::select! {
            () = stopping.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok(connection) => {
                    connections.spawn(converse(connection, router.clone(), stopping.clone()));
                }
                Err(error) => tracing::warn!(%error, "cannot accept a connection"),
            },
        }
    }
    connections.close();
    connections.wait().await;
}

async fn converse((stream, peer): (TcpStream, SocketAddr), router: Router, stopping: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, %peer, "cannot set TCP_NODELAY");
    }
    let service = service_fn(move |request| answer(router.clone(), request));
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, %peer, "connection ended");
    }
}

/// One exchange; an error closes the connection without a reply.
async fn answer(router: Router, request: Request<Incoming>) -> Result<Response, io::Error> {
    let response = match router.oneshot(request.map(Body::new)).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    if response.extensions().get::<Hangup>().is_some() {
        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "injected fault"));
    }
    Ok(response)
}

//! Unix sockets of gRPC, and kubelet's listening ones, whose connections end when the kubelet process does.
//!
//! tonic keeps open connections after its server has ended. A killed process would not, so these connections break.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use futures::StreamExt as _;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};

/// A connection that breaks off when its token is cancelled.
#[derive(Debug)]
pub(crate) struct Severable {
    stream: UnixStream,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// Listens at `path`, replacing what is there.
pub(crate) fn listen(
    path: &Path,
    cancel: &CancellationToken,
) -> io::Result<impl Stream<Item = io::Result<Severable>> + use<>> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    remove(path)?;
    let cancel = cancel.clone();
    let incoming = UnixListenerStream::new(UnixListener::bind(path)?);
    Ok(incoming.map(move |stream| {
        stream.map(|stream| Severable {
            stream,
            severed: Box::pin(cancel.clone().cancelled_owned()),
        })
    }))
}

/// Connects to the socket at `path`.
pub(crate) async fn dial(path: &Path) -> Result<Channel, tonic::transport::Error> {
    let path: Arc<Path> = Arc::from(path);
    let connector = tower::service_fn(move |_| {
        let path = Arc::clone(&path);
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // A Unix socket has no host name; "localhost" is the authority that HTTP/2 servers accept.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await
}

/// Removes the socket at `path`, which its listener may have removed already.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Severable {
    fn is_severed(&mut self, cx: &mut Context<'_>) -> bool {
        self.severed.as_mut().poll(cx).is_ready()
    }
}

impl Connected for Severable {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Severable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_severed(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Severable {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_severed(cx) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

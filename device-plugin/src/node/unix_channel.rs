//! gRPC over the sockets of kubelet.

use std::path::Path;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error};

pub(crate) async fn connect(socket: &Path) -> Result<Channel, Error> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used; its host becomes the authority that grpc-go expects.
    let endpoint = Endpoint::from_static("http://localhost");
    endpoint.connect_with_connector(connector).await
}

//! The client of the scheduler's read API: HTTP over a port-forward to one of its pods, or over TCP to an address.

use bytes::{Bytes, BytesMut};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Collected, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::Portforwarder;
use proto::read_api::{PORT, VERSION};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, with_sources};

/// The label selector of the scheduler's pods.
pub(crate) const SCHEDULER: &str = "app.kubernetes.io/name=gpushare-scheduler";
const LEADER: &str = "gpushare/leader";

#[derive(Debug)]
pub(crate) struct ReadApiClient {
    sender: SendRequest<Full<Bytes>>,
    /// The pod or address at the other end, for messages.
    at: String,
}

impl ReadApiClient {
    /// Connects to the address of `--read-api`, or forwards a port to a pod: the leader's, if it is ready.
    pub(crate) async fn connect(connection: &ClusterConnection) -> Result<Self, CommandFailure> {
        if let Some(address) = &connection.args.read_api {
            return match TcpStream::connect(address).await {
                Ok(stream) => Self::handshake(stream, address.clone()).await,
                Err(error) => {
                    let hint = "Correct --read-api, or leave it out to forward a port to the scheduler";
                    Err(no_read_api(address, &format!("{error}. {hint}")))
                }
            };
        }
        Self::forward(connection, &pod_to_ask(connection).await?).await
    }

    /// Forwards a port to a pod of the scheduler.
    pub(crate) async fn forward(connection: &ClusterConnection, pod: &str) -> Result<Self, CommandFailure> {
        let (stream, forwarded) = forward_port(connection, pod).await?;
        // The forwarding ends with the process.
        tokio::spawn(forwarded.join());
        let at = format!("pod {}/{pod}", connection.args.gpushare_namespace);
        Self::handshake(stream, at).await
    }

    /// Begins HTTP on a stream to a pod or an address (`at`).
    pub(crate) async fn handshake(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        at: String,
    ) -> Result<Self, CommandFailure> {
        match handshake(TokioIo::new(stream)).await {
            Ok((sender, connection)) => {
                // hyper moves no byte unless the connection is polled.
                tokio::spawn(connection);
                Ok(Self { sender, at })
            }
            Err(error) => Err(no_read_api(&at, &with_sources(&error))),
        }
    }

    /// The answer to a GET of `path`, which comes after the version in the URL.
    pub(crate) async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, CommandFailure> {
        let response = self.send(Method::GET, path, Bytes::new(), None).await?;
        self.parse(response).await
    }

    /// The answer to a POST of `body` to `path`, which comes after the version in the URL.
    pub(crate) async fn post<T: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, CommandFailure> {
        let body = serde_json::to_vec(body).map_err(CommandFailure::input)?;
        let response = self.send(Method::POST, path, body.into(), None).await?;
        self.parse(response).await
    }

    /// The stream of events after the one with this ID; the connection serves no other request then.
    pub(crate) async fn events_after(&mut self, last: &str) -> Result<EventStream, CommandFailure> {
        let response = self
            .send(Method::GET, "changes", Bytes::new(), Some(last))
            .await?;
        Ok(EventStream {
            body: response.into_body(),
            buffer: BytesMut::new(),
            at: self.at.clone(),
        })
    }

    /// Sends a request; `last` is the ID of the last event that the client has.
    async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: Bytes,
        last: Option<&str>,
    ) -> Result<Response<Incoming>, CommandFailure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("/{VERSION}/{path}"))
            // The read API answers only requests for localhost, so that no web page whose name resolves to 127.0.0.1 can ask it.
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let request = request.body(Full::new(body)).map_err(CommandFailure::input)?;
        // hyper may not have noticed yet that the last answer has ended, and takes the next request only then.
        let sent = match self.sender.ready().await {
            Ok(()) => self.sender.send_request(request).await,
            Err(error) => Err(error),
        };
        let response = sent.map_err(|error| self.unreachable(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = response.into_body().collect().await;
        // The status of an answer that breaks off still says which failure it is.
        let body = body.map(Collected::to_bytes).unwrap_or_default();
        let text = String::from_utf8_lossy(&body).trim().to_owned();
        let at = self.at.clone();
        // The read API explains each refusal; a path that it does not have gets an empty answer.
        Err(match status {
            StatusCode::NOT_FOUND if text.is_empty() => CommandFailure::OldScheduler {
                at,
                reason: "it does not know the path".to_owned(),
            },
            StatusCode::SERVICE_UNAVAILABLE => CommandFailure::Busy { at, reason: text },
            StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND | StatusCode::PAYLOAD_TOO_LARGE => {
                CommandFailure::Refused(text)
            }
            _ => CommandFailure::Api {
                code: status.as_u16(),
                action: format!("ask the read API at {at}"),
                reason: text,
            },
        })
    }

    async fn parse<T: DeserializeOwned>(&self, response: Response<Incoming>) -> Result<T, CommandFailure> {
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| self.unreachable(&error))?;
        serde_json::from_slice(&body.to_bytes()).map_err(|error| CommandFailure::OldScheduler {
            at: self.at.clone(),
            reason: error.to_string(),
        })
    }

    /// The failure of a connection that breaks before an answer has come.
    fn unreachable(&self, error: &hyper::Error) -> CommandFailure {
        let reason = with_sources(error);
        let hint = "Is the scheduler older, or started without --read-listen?";
        no_read_api(&self.at, &format!("{reason}. {hint}"))
    }
}

/// The failure to reach the read API of a pod or an address.
fn no_read_api(at: &str, reason: &str) -> CommandFailure {
    CommandFailure::NoReadApi {
        at: at.to_owned(),
        reason: reason.to_owned(),
    }
}

/// The name of the scheduler's pod to ask: the leader's, or any other ready one if the leader's is not ready.
pub(crate) async fn pod_to_ask(connection: &ClusterConnection) -> Result<String, CommandFailure> {
    let namespace = &connection.args.gpushare_namespace;
    let pods: Vec<Pod> = connection.list(Some(namespace), Some(SCHEDULER)).await?;
    let mut best = None;
    for pod in pods.into_iter().filter(is_ready) {
        let labels = pod.metadata.labels.unwrap_or_default();
        // The leader alone sees bindings that are under way, and is asked by kube-scheduler.
        if best.is_none() || labels.contains_key(LEADER) {
            best = pod.metadata.name;
        }
    }
    best.ok_or_else(|| {
        let reason = format!(
            "no ready pod has the label {SCHEDULER}; is gpushare in another namespace (--gpushare-namespace)?"
        );
        no_read_api(&format!("namespace {namespace}"), &reason)
    })
}

/// A connection to the read API's port of a pod, which lasts as long as the forwarding beside it.
pub(crate) async fn forward_port(
    connection: &ClusterConnection,
    pod: &str,
) -> Result<(impl AsyncRead + AsyncWrite + Unpin + Send + use<>, Portforwarder), CommandFailure> {
    let namespace = &connection.args.gpushare_namespace;
    let at = format!("pod {namespace}/{pod}");
    let api: Api<Pod> = Api::namespaced(connection.client()?, namespace);
    let forwarded = api.portforward(pod, &[PORT]).await;
    let mut forwarded =
        forwarded.map_err(|error| CommandFailure::of_kube(&format!("forward a port to {at}"), error))?;
    let stream = forwarded.take_stream(PORT);
    let stream = stream.ok_or_else(|| no_read_api(&at, "the port-forward has no stream"))?;
    Ok((stream, forwarded))
}

pub(crate) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    // A pod that is being deleted stays ready until its processes end, and then cuts the connection.
    pod.metadata.deletion_timestamp.is_none()
        && conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[derive(Debug)]
pub(crate) struct EventStream {
    body: Incoming,
    /// The bytes that were received after the last whole event.
    buffer: BytesMut,
    /// The pod or address that sends the events, for messages.
    at: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamEvent {
    pub(crate) name: String,
    pub(crate) data: String,
    pub(crate) id: Option<String>,
}

impl EventStream {
    pub(crate) async fn next(&mut self) -> Result<StreamEvent, CommandFailure> {
        loop {
            if let Some(event) = take_event(&mut self.buffer) {
                return Ok(event);
            }
            let frame = match self.body.frame().await {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(no_read_api(&self.at, &with_sources(&error))),
                None => return Err(no_read_api(&self.at, "it ended the stream")),
            };
            // Anything but data is a trailer, of which the read API sends none.
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}

/// Takes the first whole event with data from a buffer; comments are left out.
fn take_event(buffer: &mut BytesMut) -> Option<StreamEvent> {
    loop {
        // An event ends with an empty line; before that line, the buffer has only a part of it.
        let end = buffer.windows(2).position(|window| window == b"\n\n")?;
        let block = buffer.split_to(end + 2);
        let mut event = StreamEvent::default();
        for line in String::from_utf8_lossy(&block).lines() {
            // The scheduler always writes the blank behind the colon, which the standard makes optional.
            match line.split_once(": ") {
                Some(("event", name)) => name.clone_into(&mut event.name),
                Some(("data", data)) => data.clone_into(&mut event.data),
                Some(("id", id)) => event.id = Some(id.to_owned()),
                _ => {}
            }
        }
        if !event.data.is_empty() {
            return Some(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_arrive_in_any_pieces() {
        let text = ":\n\nevent: node\ndata: {\"name\":\"n1\"}\n\nid: e-2\nevent: totals\ndata: {}\n\n";
        for size in 1..text.len() {
            let mut buffer = BytesMut::new();
            let mut events = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                buffer.extend_from_slice(piece);
                while let Some(event) = take_event(&mut buffer) {
                    events.push((event.name, event.data, event.id));
                }
            }
            let node = ("node".to_owned(), "{\"name\":\"n1\"}".to_owned(), None);
            let totals = ("totals".to_owned(), "{}".to_owned(), Some("e-2".to_owned()));
            assert_eq!(events, [node, totals], "pieces of {size}");
        }
    }
}

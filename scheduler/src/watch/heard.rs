//! Notes when the API server last said something about a kind of object.
//!
//! The watch itself says nothing of bookmarks, which are all that comes while nothing changes. So answers are listened to on
//! their way in. What they say is not looked at.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body as HttpBody;
use kube::Client;
use kube::client::Body;
use tokio::time::Instant;
use tower::service_fn;

/// When something was last heard of a kind.
#[derive(Clone, Debug)]
pub struct Heard {
    kind: &'static str,
    at: Arc<Mutex<Instant>>,
}

impl Heard {
    /// Counts from now on.
    pub fn new(kind: &'static str) -> Self {
        Self {
            kind,
            at: Arc::new(Mutex::new(Instant::now())),
        }
    }

    /// The kind.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// How long ago something was heard.
    pub fn age(&self) -> Duration {
        self.at.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Something is heard now.
    fn note(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// A client that notes whatever arrives through it. That there is no such kind counts, other refusals do not.
    pub fn listen(&self, client: &Client) -> Client {
        let namespace = client.default_namespace().to_owned();
        let (client, heard) = (client.clone(), self.clone());
        let listening = service_fn(move |request: Request<Body>| {
            let (client, heard) = (client.clone(), heard.clone());
            async move { Ok::<_, kube::Error>(heard.through(client.send(request).await?)) }
        });
        Client::new(listening, namespace)
    }

    fn through(self, response: Response<Body>) -> Response<impl HttpBody<Data = Bytes, Error = kube::Error>> {
        let status = response.status();
        let counts = status.is_success() || status == StatusCode::NOT_FOUND;
        response.map(|body| {
            body.map_frame(move |frame| {
                if counts {
                    self.note();
                }
                frame
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, TryStreamExt};
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use kube::api::{Api, WatchParams};
    use rstest::rstest;
    use tokio::time::sleep;

    use super::*;

    /// A server that answers every request so, with a line a minute.
    fn server(status: u16, lines: &'static [&'static str]) -> Client {
        let answer = service_fn(move |_: Request<Body>| async move {
            let lines = futures::stream::iter(lines).then(async |line| {
                sleep(Duration::from_secs(60)).await;
                Ok::<_, std::io::Error>(Frame::data(Bytes::from_static(line.as_bytes())))
            });
            Ok::<_, std::io::Error>(
                Response::builder()
                    .status(status)
                    .body(StreamBody::new(Box::pin(lines)))
                    .unwrap(),
            )
        });
        Client::new(answer, "default")
    }

    #[tokio::test(start_paused = true)]
    async fn bookmarks_and_events_are_heard() {
        let heard = Heard::new("pods");
        sleep(Duration::from_secs(5)).await;
        assert_eq!(heard.age(), Duration::from_secs(5), "from the beginning on");
        let client = heard.listen(&server(
            200,
            &[
                "{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"resourceVersion\":\"7\"}}}\n",
                "{\"type\":\"DELETED\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"p\"}}}\n",
            ],
        ));
        let api: Api<proto::pod::Pod> = Api::all(client);
        let mut events = api.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        for _ in 0..2 {
            assert!(events.try_next().await.unwrap().is_some());
            assert_eq!(heard.age(), Duration::ZERO);
        }
        assert!(events.try_next().await.unwrap().is_none());
        sleep(Duration::from_secs(7)).await;
        assert_eq!(heard.age(), Duration::from_secs(7));
    }

    #[rstest]
    #[case::list(200, true)]
    #[case::unknown_kind(404, true)]
    #[case::forbidden(403, false)]
    #[case::broken(500, false)]
    #[tokio::test(start_paused = true)]
    async fn answers_are_heard_and_refusals_are_not(#[case] status: u16, #[case] expected: bool) {
        let heard = Heard::new("devices");
        let client = heard.listen(&server(status, &["{}"]));
        let answer = client
            .request_text(Request::get("/apis").body(Vec::new()).unwrap())
            .await;
        assert_eq!(answer.is_ok(), status == 200);
        assert_eq!(heard.age().is_zero(), expected);
    }
}

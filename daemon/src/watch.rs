//! Watches of the API server: an endless sequence of updates about the objects of one kind.
//!
//! A watch that breaks or hangs begins again after a pause, with a list of all objects. [`WatchLag`] measures the age of a
//! watch's last message.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Body as HttpBody;
use kube::client::Body;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};
use tower::service_fn;
use tracing::{debug, warn};

use crate::api_server::{ANSWER_LIMIT, Backoff, Contact, one_line};

/// The pause after the first failure; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Time without a failure after which the next pause is the shortest one again.
const STABLE: Duration = Duration::from_secs(20);

/// Time without a message or a failure after which a watch is restored; a request may hang for [`ANSWER_LIMIT`].
const RESTORED: Duration = Duration::from_secs(35);

/// An update of a watch.
#[derive(Debug)]
pub enum Update<K> {
    /// An object, or the progress of a list.
    Event(Event<K>),
    /// The API server does not know the kind: its custom resource definition is not installed.
    UnknownKind,
    /// The connection has failed: the objects that were received may be out of date from now on.
    Interrupted,
    /// The connection is back: the objects that were received are up to date again.
    Restored,
}

/// A watch of the objects of one kind.
#[expect(missing_debug_implementations, reason = "a stream of events has none")]
pub struct ObjectWatch<K: 'static> {
    name: &'static str,
    api: Api<K>,
    config: watcher::Config,
    events: BoxStream<'static, watcher::Result<Event<K>>>,
    backoff: Backoff,
    resumed_at: Option<Instant>,
    /// True until a list of all objects is complete. A list arrives without long gaps; after it the watch may be silent for long.
    is_listing: bool,
    is_interrupted: bool,
    /// The step with which the next call of [`Self::next`] begins, if any.
    next: Option<NextStep>,
}

/// A step that is taken before the watch waits for the next message of the API server.
enum NextStep {
    /// Report [`Update::Restored`].
    ReportRestored,
    /// Pause after a failure.
    Pause,
}

impl<K> ObjectWatch<K>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    /// A watch that begins with a list of all objects. Pauses after failures end when `contact` is regained.
    pub fn new(
        name: &'static str,
        (api, contact): (Api<K>, &Contact),
        config: watcher::Config,
        longest_pause: Duration,
    ) -> Self {
        Self {
            name,
            events: watcher::watcher(api.clone(), config.clone()).boxed(),
            api,
            config,
            backoff: contact.backoff((FIRST_PAUSE, longest_pause)),
            resumed_at: None,
            is_listing: true,
            is_interrupted: false,
            next: None,
        }
    }

    /// Begins again with a list of all objects.
    pub fn restart(&mut self) {
        self.events = watcher::watcher(self.api.clone(), self.config.clone()).boxed();
        self.is_listing = true;
    }

    /// Waits for the next update. Dropping the future loses no update.
    pub async fn next(&mut self) -> Update<K> {
        match self.next.take() {
            Some(NextStep::ReportRestored) => return Update::Restored,
            Some(NextStep::Pause) => {
                self.backoff.pause().await;
                self.resumed_at = Some(Instant::now());
            }
            None => {}
        }
        loop {
            let limit = if self.is_listing { ANSWER_LIMIT } else { RESTORED };
            match timeout(limit, self.events.next()).await {
                Ok(Some(Ok(event))) => {
                    self.is_listing = matches!(event, Event::Init | Event::InitApply(_));
                    // `Init` precedes the request of a list, so it does not show that the API server answers.
                    if !self.is_listing && std::mem::take(&mut self.is_interrupted) {
                        self.next = Some(NextStep::ReportRestored);
                    }
                    return Update::Event(event);
                }
                Ok(Some(Err(error))) => return self.fail(&error),
                Err(_) if !self.is_listing => {
                    // A watch without changes is silent, and this one has not failed: if it was interrupted, it works again.
                    if std::mem::take(&mut self.is_interrupted) {
                        return Update::Restored;
                    }
                }
                Err(_) | Ok(None) => {
                    // kube's watcher retries a list that fails, but not one that hangs; its stream never ends.
                    self.restart();
                    return self.interrupt("no answer");
                }
            }
        }
    }

    fn fail(&mut self, error: &watcher::Error) -> Update<K> {
        // The API server answers a list with 404 if it does not know the kind.
        if let watcher::Error::InitialListFailed(kube::Error::Api(status)) = error
            && status.code == 404
        {
            debug!(watch = self.name, "the API server does not know this kind");
            self.note_failure();
            return Update::UnknownKind;
        }
        self.interrupt(&one_line(error))
    }

    fn interrupt(&mut self, problem: &str) -> Update<K> {
        self.note_failure();
        warn!(watch = self.name, error = problem, pause = ?self.backoff.next(), "a watch is interrupted, trying again");
        Update::Interrupted
    }

    /// Has the next call of [`Self::next`] pause first: longer after each of several failures that follow closely.
    fn note_failure(&mut self) {
        self.is_interrupted = true;
        if self.resumed_at.is_none_or(|resumed| resumed.elapsed() >= STABLE) {
            self.backoff.reset();
        }
        self.next = Some(NextStep::Pause);
    }
}

/// The age of the last message of a watch, by the bytes of its answers: kube's watcher drops bookmarks, which are all that the
/// API server sends while no object changes. Clones share it.
#[derive(Clone, Debug)]
pub struct WatchLag {
    kind: &'static str,
    last_message: Arc<Mutex<Instant>>,
}

impl WatchLag {
    /// The lag of a watch that begins now.
    pub fn new(kind: &'static str) -> Self {
        Self {
            kind,
            last_message: Arc::new(Mutex::new(Instant::now())),
        }
    }

    /// The kind of the watched objects, for metrics.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The time since the API server sent the last message of the watch.
    pub fn age(&self) -> Duration {
        self.last_message().elapsed()
    }

    fn last_message(&self) -> MutexGuard<'_, Instant> {
        self.last_message.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same client, except that answers to its requests reset the age: successes, and 404, which shows that no object exists.
    pub fn observe(&self, client: &Client) -> Client {
        let namespace = client.default_namespace().to_owned();
        let (client, lag) = (client.clone(), self.clone());
        let service = service_fn(move |request: Request<Body>| {
            let (client, lag) = (client.clone(), lag.clone());
            async move { Ok::<_, kube::Error>(lag.observe_body(client.send(request).await?)) }
        });
        Client::new(service, namespace)
    }

    /// Passes on an answer of the API server; each piece of its body that arrives resets the age of the last message.
    fn observe_body(
        self,
        response: Response<Body>,
    ) -> Response<impl HttpBody<Data = Bytes, Error = kube::Error>> {
        let status = response.status();
        // 404 shows that the kind is not installed; any other refusal shows nothing of the objects.
        let counts = status.is_success() || status == StatusCode::NOT_FOUND;
        response.map(|body| {
            body.map_frame(move |frame| {
                if counts {
                    *self.last_message() = Instant::now();
                }
                frame
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use k8s_openapi::api::core::v1::Pod;
    use kube::api::WatchParams;
    use rstest::rstest;
    use tokio::sync::mpsc;
    use tokio::time::sleep;

    use super::*;

    /// The updates of a watch of pods whose requests the returned handle answers.
    fn start() -> (
        tower_test::mock::Handle<Request<Body>, Response<Body>>,
        mpsc::UnboundedReceiver<String>,
    ) {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let (sender, news) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let api = Api::<Pod>::all(Client::new(service, "default"));
            let connection = (api, &Contact::default());
            let mut watch = ObjectWatch::new(
                "pods",
                connection,
                watcher::Config::default(),
                Duration::from_secs(2),
            );
            loop {
                let word = match watch.next().await {
                    Update::Event(Event::InitDone) => "listed",
                    Update::Event(_) => continue,
                    Update::UnknownKind => "unknown kind",
                    Update::Interrupted => "interrupted",
                    Update::Restored => "restored",
                };
                let _ = sender.send(word.to_owned());
            }
        });
        (requests, news)
    }

    fn list() -> Response<Body> {
        let list = r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[]}"#;
        Response::builder()
            .body(Body::from(list.as_bytes().to_vec()))
            .unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_without_a_reply_is_requested_again() {
        let (mut requests, mut news) = start();
        let (_, _never_answered) = requests.next_request().await.unwrap();
        let began = Instant::now();
        let (_, answer) = requests.next_request().await.unwrap();
        assert!(
            began.elapsed() < ANSWER_LIMIT + Duration::from_secs(1),
            "{:?}",
            began.elapsed()
        );
        answer.send_response(list());
        let updates = [news.recv().await, news.recv().await, news.recv().await].map(Option::unwrap);
        assert_eq!(updates, ["interrupted", "listed", "restored"]);
    }

    /// After its failure the watch goes on where it was, and no object changes.
    #[tokio::test(start_paused = true)]
    async fn a_quiet_watch_counts_as_restored_once() {
        let (mut requests, mut news) = start();
        let (_, answer) = requests.next_request().await.unwrap();
        answer.send_response(list());
        let (_, watch) = requests.next_request().await.unwrap();
        watch.send_response(Response::builder().status(500).body(Body::empty()).unwrap());
        let (_, _silent) = requests.next_request().await.unwrap();
        let began = Instant::now();
        let updates = [news.recv().await, news.recv().await, news.recv().await].map(Option::unwrap);
        assert_eq!(updates, ["listed", "interrupted", "restored"]);
        assert!(
            began.elapsed() < RESTORED + Duration::from_secs(1),
            "{:?}",
            began.elapsed()
        );
        assert!(timeout(RESTORED * 3, news.recv()).await.is_err());
    }

    /// Pauses grow to their limit and no further, whatever little succeeds in between.
    #[tokio::test(start_paused = true)]
    async fn pauses_are_bounded_and_reset_only_after_a_while() {
        let (mut requests, _news) = start();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            let (_, answer) = requests.next_request().await.unwrap();
            let began = Instant::now();
            answer.send_response(list());
            let (_, watch) = requests.next_request().await.unwrap();
            let gone = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}}"#;
            watch.send_response(
                Response::builder()
                    .body(Body::from(gone.as_bytes().to_vec()))
                    .unwrap(),
            );
            let (_, next) = requests.next_request().await.unwrap();
            pauses.push(began.elapsed().as_millis());
            // The next list fails too, so that every second request is a list again.
            next.send_response(Response::builder().status(500).body(Body::empty()).unwrap());
        }
        // Doubled after each failure, of which there are two in a round, and up to a quarter more.
        let expected = [250, 1000, 2000, 2000, 2000, 2000];
        assert!(
            pauses
                .iter()
                .zip(expected)
                .all(|(pause, least)| (least..=least * 5 / 4 + 10).contains(pause)),
            "{pauses:?}"
        );
    }

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
    async fn bookmarks_and_events_reset_the_lag() {
        let lag = WatchLag::new("pods");
        sleep(Duration::from_secs(5)).await;
        assert_eq!(lag.age(), Duration::from_secs(5), "from the beginning on");
        let client = lag.observe(&server(
            200,
            &[
                "{\"type\":\"BOOKMARK\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"resourceVersion\":\"7\"}}}\n",
                "{\"type\":\"DELETED\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"p\"}}}\n",
            ],
        ));
        let api: Api<Pod> = Api::all(client);
        let mut events = api.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        for _ in 0..2 {
            assert!(events.try_next().await.unwrap().is_some());
            assert_eq!(lag.age(), Duration::ZERO);
        }
        assert!(events.try_next().await.unwrap().is_none());
        sleep(Duration::from_secs(7)).await;
        assert_eq!(lag.age(), Duration::from_secs(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_that_is_not_installed_is_no_interruption() {
        let (mut requests, mut news) = start();
        for _ in 0..3 {
            let (_, answer) = requests.next_request().await.unwrap();
            let status =
                r#"{"kind":"Status","status":"Failure","reason":"NotFound","message":"no","code":404}"#;
            let body = Body::from(status.as_bytes().to_vec());
            answer.send_response(Response::builder().status(404).body(body).unwrap());
            assert_eq!(news.recv().await.unwrap(), "unknown kind");
        }
    }

    #[rstest]
    #[case::list(200, true)]
    #[case::unknown_kind(404, true)]
    #[case::forbidden(403, false)]
    #[case::broken(500, false)]
    #[tokio::test(start_paused = true)]
    async fn answers_reset_the_lag_and_refusals_do_not(#[case] status: u16, #[case] expected: bool) {
        let lag = WatchLag::new("devices");
        let client = lag.observe(&server(status, &["{}"]));
        let answer = client
            .request_text(Request::get("/apis").body(Vec::new()).unwrap())
            .await;
        assert_eq!(answer.is_ok(), status == 200);
        assert_eq!(lag.age().is_zero(), expected);
    }
}

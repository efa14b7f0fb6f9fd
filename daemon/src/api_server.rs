//! The connection to the API server: its client, the pauses of tasks after requests that failed, and errors for the log.
//!
//! Each task has requests and pauses of its own; its pauses grow while the API server does not answer. After such an absence, the
//! first answer to a request of any task ends the pauses of all tasks.

use std::error::Error;
use std::hash::{BuildHasher, RandomState};
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use http::{Response, StatusCode};
use kube::Client;
use kube::client::ClientBuilder;
use kube::core::Status;
use tokio::sync::watch;
use tokio::time::sleep;
use tower::BoxError;
use tower::timeout::TimeoutLayer;
use tower::util::MapResultLayer;

/// Longest time from a request to the beginning of its answer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(30);

const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for which a connection may receive nothing. kube asks for watches of 290 s, so no healthy watch is cut off.
const SILENCE_LIMIT: Duration = Duration::from_secs(300);

/// Time within which the first answer after an absence ends all pauses, so that the plugins of a cluster do not resume at once.
const RESUME_SPREAD: Duration = Duration::from_secs(1);

/// Largest random extension of a pause, as a fraction of the pause.
const JITTER: f64 = 0.25;

/// A client of the API server, and the record of whether its requests get answers. Cheap to clone.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
#[derive(Clone)]
pub struct Connection {
    /// The client of the API server.
    pub client: Client,
    /// The results of the client's requests.
    pub contact: Contact,
}

/// For tests: answers to the requests of this client are not recorded, and end no pauses.
impl From<Client> for Connection {
    fn from(client: Client) -> Self {
        Self {
            client,
            contact: Contact::default(),
        }
    }
}

impl Connection {
    /// Connects as the file of KUBECONFIG, `~/.kube/config`, or the pod's service account says, in this order. Sends no request.
    pub async fn new() -> anyhow::Result<Self> {
        let mut config = kube::Config::infer()
            .await
            .context("no kubeconfig (KUBECONFIG) and no service account to reach the API server with")?;
        // Each task repeats its own requests, and a bind must know that its request was sent only once.
        config.default_retry = false;
        config.connect_timeout = Some(CONNECT_LIMIT);
        config.read_timeout = Some(SILENCE_LIMIT);
        let builder = ClientBuilder::try_from(config).context("cannot make a client of the API server")?;
        let contact = Contact::default();
        let observer = contact.clone();
        // The limit ends with the head of an answer, since a watch may be silent for long after that.
        let builder = builder.with_layer(&TimeoutLayer::new(ANSWER_LIMIT));
        let observe = move |result: Result<Response<_>, BoxError>| observer.observe(result);
        // Around the time limit, so that a request beyond it counts as one without an answer.
        let client = builder.with_layer(&MapResultLayer::new(observe)).build();
        Ok(Self { client, contact })
    }
}

/// True if the last request of a client got no answer. Receivers are notified only by the first answer after it. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Contact(Arc<watch::Sender<bool>>);

impl Contact {
    fn observe<B, E>(&self, result: Result<Response<B>, E>) -> Result<Response<B>, E> {
        // A load balancer answers with these in place of an API server that does not; a 500 comes from the API server itself.
        const NO_SERVER: [StatusCode; 3] = [
            StatusCode::BAD_GATEWAY,
            StatusCode::SERVICE_UNAVAILABLE,
            StatusCode::GATEWAY_TIMEOUT,
        ];
        let is_answer = match &result {
            Ok(response) => !NO_SERVER.contains(&response.status()),
            Err(_) => false,
        };
        self.note(is_answer);
        result
    }

    /// Records whether the API server answered a request; the first answer after an absence ends [`Backoff::pause`]s.
    fn note(&self, is_answer: bool) {
        self.0.send_if_modified(|is_lost| {
            let was_lost = std::mem::replace(is_lost, !is_answer);
            was_lost && is_answer
        });
    }

    /// A receiver that is notified by the first answer after each absence of the API server.
    pub fn regained(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// The pauses of a task after failures: the first is `shortest`, and each further one twice as long, up to `longest`.
    pub fn backoff(&self, (shortest, longest): (Duration, Duration)) -> Backoff {
        Backoff {
            shortest,
            longest,
            next: shortest,
            regained: self.regained(),
        }
    }
}

/// The pauses of one task between attempts of a failing request.
#[derive(Debug)]
pub struct Backoff {
    shortest: Duration,
    longest: Duration,
    next: Duration,
    regained: watch::Receiver<bool>,
}

impl Backoff {
    /// The length of the next pause, without its random extension.
    pub fn next(&self) -> Duration {
        self.next
    }

    /// Makes the next pause the shortest one again.
    pub fn reset(&mut self) {
        self.next = self.shortest;
    }

    /// Pauses after a failure; ends early when the API server answers any request after an absence.
    pub async fn pause(&mut self) {
        // A random extension, so that the daemons of many nodes do not try at the same moment.
        let pause = self.next.mul_f64(1.0 + JITTER * chance());
        self.next = (self.next * 2).min(self.longest);
        let early = async {
            if self.regained.changed().await.is_err() {
                // All clones of `Contact` are gone, so no answer can end the pause any more.
                std::future::pending::<()>().await;
            }
            // All tasks of all nodes see at about the same moment that the API server is back.
            sleep(RESUME_SPREAD.mul_f64(chance())).await;
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = early => {}
        }
    }
}

/// A random number from 0 to 1.
fn chance() -> f64 {
    // Each `RandomState` has keys of its own, which is random enough here and needs no further crate.
    let drawn = u32::try_from(RandomState::new().hash_one(()) >> 32).unwrap_or(u32::MAX);
    f64::from(drawn) / f64::from(u32::MAX)
}

/// An error and its causes in one line for the log, each text once; a status of the API server as its code, reason and message.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in iter::successors(Some(error), |&error| error.source()) {
        if let Some(status) = status(cause) {
            // The texts of errors around a status end with all its fields, most of them noise: they make room for three of them.
            let found = text.find(&cause.to_string()).unwrap_or(text.len());
            text.truncate(found);
            let before = text.trim_end_matches([':', ' ']).trim_end_matches("ApiError");
            let before = before.trim_end_matches([':', ' ']);
            let separator = if before.is_empty() { "" } else { ": " };
            let (code, reason, message) = (status.code, &status.reason, &status.message);
            text = format!("{before}{separator}{code} {reason}: {message}");
            break;
        }
        let words = cause.to_string();
        if text.is_empty() {
            text = words;
        } else if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn status<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    let status = error.downcast_ref::<Status>();
    status.or_else(|| error.downcast_ref::<Box<Status>>().map(Box::as_ref))
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use kube::runtime::watcher;
    use rstest::rstest;
    use tokio::time::Instant;

    use super::*;

    fn forbidden() -> kube::Error {
        let details = serde_json::json!({"name": "n1", "kind": "nodes", "causes": [{"message": "long"}]});
        let status = serde_json::json!({
            "status": "Failure", "code": 403, "reason": "Forbidden", "message": "nodes \"n1\" is\nforbidden", "details": details,
        });
        kube::Error::Api(serde_json::from_value(status).unwrap())
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot write node status")]
    struct WriteError(#[source] kube::Error);

    #[rstest]
    #[case::alone(Box::new(forbidden()), "403 Forbidden: nodes \"n1\" is forbidden")]
    #[case::of_a_list(
        Box::new(watcher::Error::InitialListFailed(forbidden())),
        "failed to perform initial object list: 403 Forbidden: nodes \"n1\" is forbidden"
    )]
    #[case::of_a_write(
        Box::new(WriteError(forbidden())),
        "cannot write node status: 403 Forbidden: nodes \"n1\" is forbidden"
    )]
    #[case::with_context(
        anyhow::Error::new(forbidden()).context("cannot mark").into(),
        "cannot mark: 403 Forbidden: nodes \"n1\" is forbidden"
    )]
    #[case::no_answer_of_the_api_server(
        Box::new(kube::Error::ReadEvents(std::io::Error::other("cut off"))),
        "Error reading events stream: cut off"
    )]
    fn an_error_is_shown_in_one_line(#[case] error: Box<dyn Error + Send + Sync>, #[case] expected: &str) {
        assert_eq!(one_line(&*error), expected);
    }

    const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

    #[rstest]
    #[case::after_an_absence(&[None, None, Some(200)], true)]
    #[case::after_an_absence_with_an_error(&[None, Some(403)], true)]
    #[case::behind_a_load_balancer(&[Some(503), Some(200)], true)]
    #[case::no_absence(&[Some(200), Some(500), Some(200)], false)]
    #[case::still_away(&[Some(200), None, Some(502)], false)]
    fn the_first_answer_after_an_absence_is_noticed(#[case] codes: &[Option<u16>], #[case] expected: bool) {
        let contact = Contact::default();
        let regained = contact.regained();
        for code in codes {
            let response = code.map(|code| Response::builder().status(code).body(()).unwrap());
            let _ = contact.observe(response.ok_or("no connection"));
        }
        assert_eq!(regained.has_changed().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_until_a_success() {
        let mut backoff = Contact::default().backoff(PAUSES);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let began = Instant::now();
            backoff.pause().await;
            pauses.push(began.elapsed().as_secs_f64());
        }
        for (pause, expected) in pauses
            .iter()
            .zip([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0])
        {
            assert!(
                (expected..=expected * (1.0 + JITTER) + 0.002).contains(pause),
                "{pauses:?}"
            );
        }
        backoff.reset();
        assert_eq!(backoff.next(), PAUSES.0);
    }

    /// Two tasks are in a pause of half a minute when a third one gets an answer.
    #[tokio::test(start_paused = true)]
    async fn after_an_answer_all_pauses_end_within_a_second() {
        let contact = Contact::default();
        let mut backoffs = [
            contact.backoff((PAUSES.1, PAUSES.1)),
            contact.backoff((PAUSES.1, PAUSES.1)),
        ];
        let [one, other] = &mut backoffs;
        let pauses = async { tokio::join!(one.pause(), other.pause()) };
        let mut pauses = std::pin::pin!(pauses);
        contact.note(false);
        assert!((&mut pauses).now_or_never().is_none());
        sleep(Duration::from_secs(3)).await;
        let began = Instant::now();
        contact.note(true);
        pauses.await;
        assert!(
            began.elapsed() <= RESUME_SPREAD + Duration::from_millis(2),
            "{:?}",
            began.elapsed()
        );
    }

    /// An answer that came between the failure and the pause is not missed.
    #[tokio::test(start_paused = true)]
    async fn an_answer_before_the_pause_ends_it() {
        let contact = Contact::default();
        let mut backoff = contact.backoff((PAUSES.1, PAUSES.1));
        contact.note(false);
        contact.note(true);
        let began = Instant::now();
        backoff.pause().await;
        assert!(
            began.elapsed() <= RESUME_SPREAD + Duration::from_millis(2),
            "{:?}",
            began.elapsed()
        );
        backoff.pause().await;
        assert!(began.elapsed() >= PAUSES.1, "it ends one pause");
    }
}

//! A watch of the API server that never ends: broken and silent ones are begun again with backoff, and said so once each time.
//!
//! What the events mean is the business of whoever watches.

use std::error::Error;
use std::fmt::Debug;
use std::iter;
use std::time::Duration;

use futures::StreamExt;
use kube::core::Status;
use kube::runtime::watcher;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};
use tracing::warn;

use crate::connection::Contact;

/// The pause after the first failure, doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// How long there must have been no failure for the next one to count as the first.
const STABLE: Duration = Duration::from_secs(20);

/// How long a request may go without the beginning of an answer, and a list without its end.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// How long after a failure a watch without events counts as restored: longer than a request can hang.
const RESTORED: Duration = Duration::from_secs(35);

/// What a watch tells.
#[derive(Debug)]
pub enum News<K> {
    /// An object, or the progress of a list.
    Event(watcher::Event<K>),
    /// What is known may be out of date from now on.
    Interrupted,
    /// What is known is up to date again.
    Restored,
}

/// Hands all news to `take_in` until the task is dropped. Pauses after failures are at most `longest_pause`, and end when `contact`
/// is regained.
pub async fn follow<K>(
    what: &str,
    (api, contact): (Api<K>, &Contact),
    config: watcher::Config,
    longest_pause: Duration,
    mut take_in: impl FnMut(News<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let begin = || watcher(api.clone(), config.clone()).boxed();
    let mut events = begin();
    let mut backoff = contact.backoff((FIRST_PAUSE, longest_pause));
    let mut failed_at: Option<Instant> = None;
    // Between its announcement and its end a list must make progress; a watch may be silent for long.
    let (mut is_listing, mut is_interrupted) = (true, false);
    loop {
        let limit = if is_listing { ANSWER_LIMIT } else { RESTORED };
        let problem = match timeout(limit, events.next()).await {
            Ok(Some(Ok(event))) => {
                is_listing = matches!(event, watcher::Event::Init | watcher::Event::InitApply(_));
                take_in(News::Event(event));
                // A list that has only begun is no sign of life: it is announced before it is asked for.
                if !is_listing && std::mem::take(&mut is_interrupted) {
                    take_in(News::Restored);
                }
                continue;
            }
            Err(_) if !is_listing => {
                if std::mem::take(&mut is_interrupted) {
                    take_in(News::Restored);
                }
                continue;
            }
            Ok(Some(Err(error))) => one_line(&error),
            Err(_) | Ok(None) => {
                (events, is_listing) = (begin(), true);
                "no answer".to_owned()
            }
        };
        if failed_at.is_none_or(|failed| failed.elapsed() >= STABLE) {
            backoff.reset();
        }
        warn!(watch = what, error = problem, pause = ?backoff.next(), "a watch is interrupted, trying again");
        is_interrupted = true;
        take_in(News::Interrupted);
        backoff.pause().await;
        failed_at = Some(Instant::now());
    }
}

/// An error and its causes in one line, without those that it names already.
///
/// Of an answer of the API server only its code, reason and message: an error that carries one would print all of it.
pub fn one_line(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in iter::successors(Some(error), |&error| error.source()) {
        if let Some(status) = status(cause) {
            let found = text.find(&cause.to_string()).unwrap_or(text.len());
            text.truncate(found);
            let before = text
                .trim_end_matches([':', ' '])
                .trim_end_matches("ApiError")
                .trim_end_matches([':', ' ']);
            let separator = if before.is_empty() { "" } else { ": " };
            text = format!(
                "{before}{separator}{} {}: {}",
                status.code, status.reason, status.message
            );
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

/// The answer of the API server, if this is one.
fn status<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    error
        .downcast_ref::<Status>()
        .or_else(|| error.downcast_ref::<Box<Status>>().map(|boxed| &**boxed))
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use proto::pod::Pod;
    use rstest::rstest;
    use tokio::sync::mpsc;

    use super::*;
    use crate::publish::PublishError;

    /// What comes from a watch of pods whose requests are met by the returned handle.
    fn start() -> (
        tower_test::mock::Handle<Request<Body>, Response<Body>>,
        mpsc::UnboundedReceiver<String>,
    ) {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let (sender, news) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let tell = |news| {
                let word = match news {
                    News::Event(watcher::Event::InitDone) => "listed",
                    News::Event(_) => return,
                    News::Interrupted => "interrupted",
                    News::Restored => "restored",
                };
                let _ = sender.send(word.to_owned());
            };
            let api = Api::<Pod>::all(Client::new(service, "default"));
            follow(
                "pods",
                (api, &Contact::default()),
                watcher::Config::default(),
                Duration::from_secs(2),
                tell,
            )
            .await;
        });
        (requests, news)
    }

    fn list() -> Response<Body> {
        let list = r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[]}"#;
        Response::builder()
            .body(Body::from(list.as_bytes().to_vec()))
            .unwrap()
    }

    fn forbidden() -> kube::Error {
        let details = serde_json::json!({"name": "n1", "kind": "nodes", "causes": [{"message": "long"}]});
        let status = serde_json::json!({
            "status": "Failure", "code": 403, "reason": "Forbidden", "message": "nodes \"n1\" is\nforbidden", "details": details,
        });
        kube::Error::Api(serde_json::from_value(status).unwrap())
    }

    #[rstest]
    #[case::alone(Box::new(forbidden()), "403 Forbidden: nodes \"n1\" is forbidden")]
    #[case::of_a_list(
        Box::new(watcher::Error::InitialListFailed(forbidden())),
        "failed to perform initial object list: 403 Forbidden: nodes \"n1\" is forbidden"
    )]
    #[case::of_a_write(
        Box::new(PublishError::Request { what: "node status", source: Box::new(forbidden()) }),
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
    fn errors_in_one_line(#[case] error: Box<dyn Error + Send + Sync>, #[case] expected: &str) {
        assert_eq!(one_line(&*error), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn list_without_answer_is_asked_for_again() {
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
        let told = [news.recv().await, news.recv().await, news.recv().await].map(Option::unwrap);
        assert_eq!(told, ["interrupted", "listed", "restored"]);
    }

    /// Pauses grow to their limit and no further, whatever little succeeds in between.
    #[tokio::test(start_paused = true)]
    async fn pauses_are_bounded_and_forgotten_only_in_time() {
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
}

//! Bindings near the end of the lease, and under a busy API server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response};
use kube::client::Body;
use rstest::rstest;
use tower::service_fn;

use super::*;
use crate::leader::election::LeaseTimes;

const TIMES: LeaseTimes = LeaseTimes {
    lease: secs(15),
    renew: secs(10),
    retry: secs(2),
};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A leader that has just renewed its lease, the number of requests that it has sent to an API server with this answer, and a
/// binding.
fn leader(status: u16) -> (Binder, Arc<AtomicUsize>, PodBinding) {
    let n_sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&n_sent);
    let service = service_fn(move |_: Request<Body>| {
        count.fetch_add(1, Ordering::Relaxed);
        async move {
            Response::builder()
                .status(status)
                .header("Retry-After", "11")
                .body(Body::empty())
        }
    });
    let leadership = Leadership::standby();
    leadership.lead(TIMES, Instant::now().into_std(), true);
    leadership.end_takeover();
    let pod = PodId {
        namespace: "default".to_owned(),
        name: "p".to_owned(),
        uid: "p-uid".to_owned(),
    };
    let binding = PodBinding {
        pod,
        node: "n1".to_owned(),
        annotations: BTreeMap::new(),
        labels: BTreeMap::new(),
    };
    (
        Binder::new(Client::new(service, "default"), secs(6), leadership),
        n_sent,
        binding,
    )
}

/// A bind begins `after` seconds past the last renewal, and may take six seconds. It is sent only if the lease lasts longer, even
/// if no task has noticed the end of the lease.
#[rstest]
#[case::at_once(0, true)]
#[case::as_late_as_possible(9, true)]
#[case::it_might_outlive_the_lease(10, false)]
#[case::the_process_stood_still(600, false)]
#[tokio::test(start_paused = true)]
async fn a_binding_is_sent_only_if_the_lease_covers_it(#[case] after: u64, #[case] is_sent: bool) {
    let (binder, n_sent, binding) = leader(201);
    tokio::time::sleep(secs(after)).await;
    let outcome = binder.bind(&binding, Instant::now() + secs(6)).await;
    let is_withheld = matches!(&outcome, BindOutcome::Refused(why) if why.starts_with("nothing is sent"));
    assert_eq!(
        (outcome == BindOutcome::Bound, is_withheld),
        (is_sent, !is_sent),
        "{outcome:?}"
    );
    assert_eq!(n_sent.load(Ordering::Relaxed), usize::from(is_sent));
}

/// An API server is busy before it writes, never afterwards, so the outcome is known.
#[tokio::test(start_paused = true)]
async fn status_429_means_that_nothing_was_written() {
    let (binder, n_sent, binding) = leader(429);
    let outcome = binder.bind(&binding, Instant::now() + secs(6)).await;
    assert_eq!(outcome, BindOutcome::Busy("429 Too Many Requests".to_owned()));
    assert_eq!(n_sent.load(Ordering::Relaxed), 1);
}

/// A binding is sent again to a busy API server only as long as the lease covers it.
#[tokio::test(start_paused = true)]
async fn a_binding_is_not_sent_again_when_the_lease_may_end() {
    let (binder, n_sent, binding) = leader(429);
    let outcome = binder.bind(&binding, Instant::now() + secs(14)).await;
    assert!(
        matches!(&outcome, BindOutcome::Refused(why) if why.starts_with("nothing is sent")),
        "{outcome:?}"
    );
    assert_eq!(n_sent.load(Ordering::Relaxed), 1);
}

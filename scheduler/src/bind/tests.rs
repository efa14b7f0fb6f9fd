//! What is sent as the time to lead runs out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Request, Response};
use kube::client::Body;
use rstest::rstest;
use tower::service_fn;

use super::*;
use crate::leader::election::Terms;

const TERMS: Terms = Terms {
    lease: secs(15),
    renew: secs(10),
    retry: secs(2),
};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A replica that has just renewed its lease, how much it has sent to an API server that answers so, and a bind.
fn leading(status: u16) -> (Binder, Arc<AtomicUsize>, PodBinding) {
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
    leadership.lead(TERMS, Instant::now().into_std(), true);
    leadership.clear();
    let pod = PodId {
        namespace: "default".to_owned(),
        name: "p".to_owned(),
        uid: "p-uid".to_owned(),
    };
    let order = PodBinding {
        pod,
        node: "n1".to_owned(),
        annotations: BTreeMap::new(),
        labels: BTreeMap::new(),
    };
    (
        Binder::new(Client::new(service, "default"), secs(6), leadership),
        n_sent,
        order,
    )
}

/// A bind begins so long after the last renewal, and may take six seconds: whether it is sent. Nobody has to notice the end.
#[rstest]
#[case::at_once(0, true)]
#[case::as_late_as_possible(9, true)]
#[case::it_might_outlive_the_lease(10, false)]
#[case::the_process_stood_still(600, false)]
#[tokio::test(start_paused = true)]
async fn nothing_is_sent_that_the_lease_does_not_cover(#[case] after: u64, #[case] is_sent: bool) {
    let (binder, n_sent, order) = leading(201);
    tokio::time::sleep(secs(after)).await;
    let outcome = binder.bind(&order, Instant::now() + secs(6)).await;
    let is_withheld = matches!(&outcome, BindOutcome::Refused(why) if why.starts_with("nothing is sent"));
    assert_eq!(
        (outcome == BindOutcome::Bound, is_withheld),
        (is_sent, !is_sent),
        "{outcome:?}"
    );
    assert_eq!(n_sent.load(Ordering::Relaxed), usize::from(is_sent));
}

/// An API server is busy before it writes, never afterwards: nothing need be found out.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_by_a_busy_server() {
    let (binder, n_sent, order) = leading(429);
    let outcome = binder.bind(&order, Instant::now() + secs(6)).await;
    assert_eq!(outcome, BindOutcome::Busy("429 Too Many Requests".to_owned()));
    assert_eq!(n_sent.load(Ordering::Relaxed), 1);
}

/// A busy API server is asked again only as long as the lease covers that.
#[tokio::test(start_paused = true)]
async fn nothing_is_sent_again_when_another_may_lead() {
    let (binder, n_sent, order) = leading(429);
    let outcome = binder.bind(&order, Instant::now() + secs(14)).await;
    assert!(
        matches!(&outcome, BindOutcome::Refused(why) if why.starts_with("nothing is sent")),
        "{outcome:?}"
    );
    assert_eq!(n_sent.load(Ordering::Relaxed), 1);
}

//! Events in, state out: lists replace, errors change nothing, an unknown kind that may be absent is an empty one.

use std::time::Duration;

use futures::stream;
use kube::core::Status;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{Error, Event};

use super::{FIRST_PAUSE, Follow, Pauses, follow};
use crate::index::Shared;

/// After an outage of any length a watch comes back within seconds.
#[test]
fn pauses_stay_short() {
    let mut pauses = Pauses(FIRST_PAUSE);
    for (longest, pause) in [1, 2, 4, 4, 4, 4]
        .map(Duration::from_secs)
        .into_iter()
        .zip(&mut pauses)
    {
        assert!(
            pause >= longest / 2 && pause <= longest,
            "{pause:?} is not {longest:?} or up to half less"
        );
    }
    pauses.reset();
    assert!(pauses.next().unwrap() <= 2 * FIRST_PAUSE);
}

/// Remembers what it is told; objects are plain texts, of a kind that a cluster may do without or not.
#[derive(Debug, Default)]
struct Told<const OPTIONAL: bool>(Vec<String>);

impl<const OPTIONAL: bool> Follow<&'static str> for Told<OPTIONAL> {
    const KIND: &'static str = "texts";
    const MAY_BE_ABSENT: bool = OPTIONAL;

    fn apply(&mut self, object: &'static str) {
        self.0.push(format!("+{object}"));
    }

    fn delete(&mut self, object: &&'static str) {
        self.0.push(format!("-{object}"));
    }

    fn begin_list(&mut self) {
        self.0.push("[".to_owned());
    }

    fn end_list(&mut self) {
        self.0.push("]".to_owned());
    }
}

async fn told<const OPTIONAL: bool>(events: Vec<Result<Event<&'static str>, Error>>) -> String {
    let state = Shared::new(Told::<OPTIONAL>::default());
    follow(stream::iter(events), state.clone()).await;
    let told = &state.read().0;
    told.concat()
}

fn failed(code: u16) -> Error {
    Error::InitialListFailed(kube::Error::Api(
        Status {
            code,
            ..Status::default()
        }
        .boxed(),
    ))
}

#[tokio::test]
async fn events_in_order() {
    let events = [
        Event::Init,
        Event::InitApply("a"),
        Event::InitDone,
        Event::Apply("b"),
        Event::Delete("a"),
        Event::Init,
        Event::InitDone,
    ];
    assert_eq!(told::<false>(events.map(Ok).into()).await, "[+a]+b-a[]");
}

#[tokio::test]
async fn errors_change_nothing() {
    let events = vec![
        Ok(Event::Apply("a")),
        Err(failed(500)),
        Err(failed(403)),
        Err(Error::NoResourceVersion),
        Ok(Event::Apply("b")),
    ];
    assert_eq!(told::<true>(events).await, "+a+b");
}

#[tokio::test]
async fn only_a_kind_that_may_be_absent_is_emptied_by_not_found() {
    assert_eq!(told::<true>(vec![Err(failed(404))]).await, "[]");
    assert_eq!(
        told::<false>(vec![
            Ok(Event::Apply("a")),
            Err(failed(404)),
            Ok(Event::Apply("b"))
        ])
        .await,
        "+a+b"
    );
}

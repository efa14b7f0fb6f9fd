//! Events in, state out: lists replace, errors change nothing, an unknown kind is an empty one.

use futures::stream;
use kube::core::Status;
use kube::runtime::watcher::{Error, Event};

use super::{Follow, follow};
use crate::index::Shared;

/// Remembers what it is told; objects are plain texts.
#[derive(Debug, Default)]
struct Told(Vec<String>);

impl Follow<&'static str> for Told {
    const KIND: &'static str = "texts";

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

async fn told(events: Vec<Result<Event<&'static str>, Error>>) -> String {
    let state = Shared::new(Told::default());
    follow(stream::iter(events), state.clone()).await;
    let told = &state.read().0;
    told.concat()
}

fn failed(code: u16) -> Error {
    Error::InitialListFailed(kube::Error::Api(Status { code, ..Status::default() }.boxed()))
}

#[tokio::test]
async fn events_in_order() {
    let events = [Event::Init, Event::InitApply("a"), Event::InitDone, Event::Apply("b"), Event::Delete("a"), Event::Init, Event::InitDone];
    assert_eq!(told(events.map(Ok).into()).await, "[+a]+b-a[]");
}

#[tokio::test]
async fn errors_change_nothing() {
    let events = vec![Ok(Event::Apply("a")), Err(failed(500)), Err(failed(403)), Err(Error::NoResourceVersion), Ok(Event::Apply("b"))];
    assert_eq!(told(events).await, "+a+b");
}

#[tokio::test]
async fn a_kind_that_is_not_installed_has_no_objects() {
    assert_eq!(told(vec![Err(failed(404))]).await, "[]");
}

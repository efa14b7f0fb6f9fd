//! Updates in, objects out: lists replace, failures change nothing, an unknown kind that may be absent is an empty one.

use std::thread;

use daemon::watch::Update;
use kube::runtime::watcher::Event;

use super::{ObjectStore, apply};
use crate::index::Shared;

/// Records its calls; objects are plain texts, of a kind that a cluster may do without or not.
#[derive(Debug, Default)]
struct Calls<const OPTIONAL: bool>(Vec<String>);

impl<const OPTIONAL: bool> ObjectStore<&'static str> for Calls<OPTIONAL> {
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

fn calls<const OPTIONAL: bool>(updates: impl IntoIterator<Item = Update<&'static str>>) -> String {
    let store = Shared::new(Calls::<OPTIONAL>::default());
    for update in updates {
        apply(update, &store);
    }
    let calls = &store.read().0;
    calls.concat()
}

#[test]
fn events_are_applied_in_order() {
    let events = [
        Event::Init,
        Event::InitApply("a"),
        Event::InitDone,
        Event::Apply("b"),
        Event::Delete("a"),
        Event::Init,
        Event::InitDone,
    ];
    assert_eq!(calls::<false>(events.map(Update::Event)), "[+a]+b-a[]");
}

#[test]
fn interruptions_change_no_object() {
    let updates = [
        Update::Event(Event::Apply("a")),
        Update::Interrupted,
        Update::Restored,
        Update::Event(Event::Apply("b")),
    ];
    assert_eq!(calls::<true>(updates), "+a+b");
}

#[test]
fn an_optional_kind_that_is_not_installed_counts_as_empty() {
    assert_eq!(calls::<true>([Update::UnknownKind]), "[]");
    let updates = [Update::Event(Event::Apply("a")), Update::UnknownKind];
    assert_eq!(calls::<false>(updates), "+a");
}

/// Requests are answered while a long read goes on in many parts, each under a lock of its own.
#[test]
fn a_writer_that_waits_is_next() {
    let state = Shared::new(0);
    for n_written in 1..=100 {
        let first = state.read();
        thread::scope(|scope| {
            scope.spawn(|| *state.write() += 1);
            while state.0.try_read().is_some() {
                thread::yield_now();
            }
            drop(first);
            assert_eq!(*state.read(), n_written);
        });
    }
}

//! The store against a model that keeps a full copy of every past state.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::apiserver::read::{ListQuery, list};

const STORAGE: &str = "/things";

#[derive(Debug, Clone)]
enum Step {
    Put(u8, u8),
    Remove(u8),
    Compact,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..6_u8, any::<u8>()).prop_map(|(key, n)| Step::Put(key, n)),
        3 => (0..6_u8).prop_map(Step::Remove),
        1 => Just(Step::Compact),
    ]
}

fn key(n: u8) -> Key {
    Key::new(if n.is_multiple_of(2) { "a" } else { "b" }, format!("o{n}"))
}

type Model = BTreeMap<Key, u64>;

fn contents(store: &Store, at: u64) -> Option<Model> {
    let mut found = Model::new();
    let slice = Slice {
        at: Some(at),
        ..Slice::default()
    };
    let visit = |key: &Key, version: &Arc<ObjectVersion>| {
        found.insert(key.clone(), version.value["n"].as_u64().unwrap());
        ControlFlow::Continue(())
    };
    store.scan(STORAGE, slice, visit).ok().map(|()| found)
}

/// The state that a watcher builds who starts from a known state.
fn replayed(store: &Store, mut state: Model, from: u64) -> Option<Model> {
    let mut cursor = from;
    loop {
        let (events, seen) = store.events(STORAGE, cursor, 2).ok()?;
        for event in &events {
            assert!(event.version.rv > cursor, "revisions must grow");
            let known = state.contains_key(&event.key);
            assert_eq!(
                known,
                event.change != ChangeKind::Added,
                "additions are of unknown objects"
            );
            if event.change == ChangeKind::Deleted {
                state.remove(&event.key);
            } else {
                state.insert(event.key.clone(), event.version.value["n"].as_u64().unwrap());
            }
        }
        cursor = seen;
        if events.is_empty() {
            return Some(state);
        }
    }
}

proptest! {
    #[test]
    fn every_past_state_is_readable_or_compacted(steps in prop::collection::vec(step(), 1..60), window in 1..40_usize) {
        let mut store = Store::new(window);
        let mut history: Vec<(u64, Model)> = vec![(store.revision(), Model::new())];
        let mut oldest = 0;
        for step in steps {
            let mut model = history.last().unwrap().1.clone();
            match step {
                Step::Put(k, n) => {
                    store.put(STORAGE, key(k), json!({"n": n}));
                    model.insert(key(k), u64::from(n));
                }
                Step::Remove(k) => {
                    let removed = store.remove(STORAGE, &key(k), None).is_some();
                    prop_assert_eq!(removed, model.remove(&key(k)).is_some());
                }
                Step::Compact => {
                    store.compact();
                    oldest = store.revision();
                }
            }
            if store.revision() > history.last().unwrap().0 {
                history.push((store.revision(), model));
            }
        }
        let newest = history.last().unwrap().clone();
        let in_window = |i: usize| history.len() - 1 - i <= window;
        for (i, (rv, model)) in history.iter().enumerate() {
            let readable = *rv >= oldest && in_window(i);
            prop_assert_eq!(contents(&store, *rv), readable.then(|| model.clone()), "state at {}", rv);
            prop_assert_eq!(replayed(&store, model.clone(), *rv), readable.then(|| newest.1.clone()), "replay from {}", rv);
        }
    }
}

#[test]
fn pages_show_the_state_of_the_first_page() {
    let mut store = Store::new(100);
    for i in 0..5 {
        store.put(STORAGE, Key::new("ns", format!("o{i}")), json!({"n": i}));
    }
    let first = list(
        &store,
        STORAGE,
        &ListQuery {
            limit: Some(2),
            ..ListQuery::default()
        },
    )
    .unwrap();
    assert_eq!((first.items.len(), first.remaining), (2, Some(3)));
    store.remove(STORAGE, &Key::new("ns", "o2"), None);
    store.put(STORAGE, Key::new("ns", "o3"), json!({"n": 33}));
    store.put(STORAGE, Key::new("ns", "o9"), json!({"n": 9}));
    let rest = ListQuery {
        token: first.next.clone(),
        ..ListQuery::default()
    };
    let second = list(&store, STORAGE, &rest).unwrap();
    let seen: Vec<_> = second
        .items
        .iter()
        .map(|v| v.value["n"].as_i64().unwrap())
        .collect();
    assert_eq!(seen, [2, 3, 4]);
    assert_eq!(second.revision, first.revision);
    store.compact();
    assert_eq!(list(&store, STORAGE, &rest).unwrap_err().code, 410);
}

#[test]
fn a_list_at_a_future_revision_times_out() {
    let error = list(
        &Store::new(1),
        STORAGE,
        &ListQuery {
            revision: Some(99),
            ..ListQuery::default()
        },
    )
    .unwrap_err();
    assert_eq!((error.code, error.reason), (504, "Timeout"));
}

#[test]
fn a_collection_first_used_after_a_compaction_has_no_earlier_events() {
    let mut store = Store::new(10);
    store.put("/others", Key::new("", "x"), json!({}));
    store.compact();
    assert!(store.events(STORAGE, 1, 10).is_err());
    store.put(STORAGE, Key::new("", "x"), json!({}));
    assert!(store.events(STORAGE, 1, 10).is_err());
    assert_eq!(store.events(STORAGE, 2, 10).unwrap().0.len(), 1);
}

//! One bind at a time per pod; binds of different pods do not wait for one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use tokio::sync::OwnedMutexGuard;

/// Whose turn it is, by pod UID.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<FxHashMap<Box<str>, Arc<tokio::sync::Mutex<()>>>>);

/// A pod's turn, until dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    uid: Box<str>,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Turns {
    /// Waits until nobody else has this pod's turn.
    pub(super) async fn take(&self, uid: &str) -> Turn<'_> {
        let turn = Arc::clone(self.map().entry(uid.into()).or_default());
        Turn { turns: self, uid: uid.into(), guard: Some(turn.lock_owned().await) }
    }

    fn map(&self) -> MutexGuard<'_, FxHashMap<Box<str>, Arc<tokio::sync::Mutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut map = self.turns.map();
        self.guard.take();
        // Whoever waits holds the entry too.
        if map.get(&self.uid).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            map.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Turns;

    #[tokio::test]
    async fn one_at_a_time_per_pod_and_nothing_left_behind() {
        let turns = Turns::default();
        let first = turns.take("a").await;
        let other = turns.take("b").await;
        let mut second = std::pin::pin!(turns.take("a"));
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        let second = second.await;
        assert_eq!(turns.map().len(), 2);
        drop((second, other));
        assert_eq!(turns.map().len(), 0);
    }
}

//! Whose turn it is: one bind at a time per pod, and on one node in the order of decision.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use tokio::sync::OwnedMutexGuard;

/// Whose turn it is, by pod UID or by node name; and what is handed on with the turn.
#[derive(Debug, Default)]
pub(super) struct Turns<T = ()>(Mutex<Locks<T>>);

type Locks<T> = FxHashMap<Box<str>, Arc<tokio::sync::Mutex<T>>>;

/// The turn at one key, until dropped.
#[derive(Debug)]
pub(super) struct Turn<'a, T = ()> {
    turns: &'a Turns<T>,
    key: Box<str>,
    guard: Option<OwnedMutexGuard<T>>,
}

impl<T: Default> Turns<T> {
    /// Waits until nobody else has the turn at this key; first come, first served.
    pub(super) async fn take(&self, key: &str) -> Turn<'_, T> {
        let lock = Arc::clone(self.map().entry(key.into()).or_default());
        // Made before the wait, so that the entry goes even if the wait is given up.
        let mut turn = Turn {
            turns: self,
            key: key.into(),
            guard: None,
        };
        turn.guard = Some(lock.lock_owned().await);
        turn
    }
}

impl<T> Turns<T> {
    fn map(&self) -> MutexGuard<'_, Locks<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Turn<'_, T> {
    /// What whoever had the turn before has left, as long as somebody waited.
    pub(super) fn value(&mut self) -> Option<&mut T> {
        self.guard.as_deref_mut()
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let mut map = self.turns.map();
        self.guard.take();
        // Whoever waits holds the entry too.
        if map
            .get(&self.key)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            map.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Turns;

    #[tokio::test]
    async fn one_at_a_time_per_pod_and_nothing_left_behind() {
        let turns = Turns::<()>::default();
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

    #[tokio::test]
    async fn giving_up_leaves_nothing_behind() {
        let turns = Turns::<()>::default();
        let first = turns.take("a").await;
        let mut second = Box::pin(turns.take("a"));
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        drop(second);
        assert_eq!(turns.map().len(), 0);
    }
}

//! Locks by key: one holder of each key at a time.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use tokio::sync::OwnedMutexGuard;

/// A lock for each key, taken in the order of arrival. A holder may leave a value to the next one that waits.
#[derive(Debug, Default)]
pub(crate) struct KeyedLock<T = ()>(Mutex<Locks<T>>);

type Locks<T> = FxHashMap<Box<str>, Arc<tokio::sync::Mutex<T>>>;

/// Holds the lock of one key until dropped.
#[derive(Debug)]
pub(crate) struct KeyGuard<'a, T = ()> {
    locks: &'a KeyedLock<T>,
    key: Box<str>,
    /// `None` while the lock is waited for.
    guard: Option<OwnedMutexGuard<T>>,
}

impl<T: Default> KeyedLock<T> {
    /// Waits until the lock of this key is free, and takes it. The first use of a key adds its entry.
    pub(crate) async fn lock(&self, key: &str) -> KeyGuard<'_, T> {
        let lock = Arc::clone(self.0.lock().entry(key.into()).or_default());
        // Made before the wait, so that its drop removes the entry even if the wait is given up.
        let mut guard = KeyGuard {
            locks: self,
            key: key.into(),
            guard: None,
        };
        guard.guard = Some(lock.lock_owned().await);
        guard
    }
}

impl<T> KeyedLock<T> {
    /// The number of tasks that hold the lock of a key or wait for it.
    pub(crate) fn n_users(&self, key: &str) -> usize {
        // The entry has one reference, each of the tasks another.
        let entries = self.0.lock();
        entries.get(key).map_or(0, |lock| Arc::strong_count(lock) - 1)
    }
}

impl<T> KeyGuard<'_, T> {
    /// The value that the holders of the key leave to each other.
    pub(crate) fn value(&mut self) -> Option<&mut T> {
        self.guard.as_deref_mut()
    }
}

impl<T> Drop for KeyGuard<'_, T> {
    /// Releases the lock, and removes the entry of its key if no other task waits for it.
    fn drop(&mut self) {
        let mut entries = self.locks.0.lock();
        self.guard.take();
        // Each task that waits for the lock has a reference of its own.
        if entries.get(&self.key).map(Arc::strong_count) == Some(1) {
            entries.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn each_key_has_one_holder_and_leaves_no_entry() {
        let locks = KeyedLock::<()>::default();
        let first = locks.lock("a").await;
        let other = locks.lock("b").await;
        let mut second = pin!(locks.lock("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(first);
        let second = second.await;
        assert_eq!(locks.0.lock().len(), 2);
        drop((second, other));
        assert_eq!(locks.0.lock().len(), 0);
    }

    #[tokio::test]
    async fn a_cancelled_wait_leaves_no_entry() {
        let locks = KeyedLock::<()>::default();
        let first = locks.lock("a").await;
        let mut second = Box::pin(locks.lock("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(first);
        drop(second);
        assert_eq!(locks.0.lock().len(), 0);
    }
}

//! What is remembered of the pods that filters were asked about. Bounded: the oldest go first.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Most pods that are remembered.
const MAX_PODS: usize = 4096;

/// One thing for each pod, by UID.
#[derive(Debug)]
pub(super) struct Remembered<T> {
    pods: FxHashMap<Box<str>, T>,
    order: VecDeque<Box<str>>,
}

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Self { pods: FxHashMap::default(), order: VecDeque::new() }
    }
}

impl<T> Remembered<T> {
    /// Remembers this of a pod; what was remembered of it before.
    pub(super) fn put(&mut self, uid: &str, what: T) -> Option<T> {
        let before = self.pods.insert(uid.into(), what);
        if before.is_none() {
            self.order.push_back(uid.into());
            if self.order.len() > MAX_PODS
                && let Some(oldest) = self.order.pop_front()
            {
                self.pods.remove(&oldest);
            }
        }
        before
    }

    /// What is remembered of a pod, to be changed.
    pub(super) fn get_mut(&mut self, uid: &str) -> Option<&mut T> {
        self.pods.get_mut(uid)
    }

    /// What is remembered of a pod.
    pub(super) fn get(&self, uid: &str) -> Option<&T> {
        self.pods.get(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PODS, Remembered};

    #[test]
    fn holds_the_latest_only() {
        let mut remembered = Remembered::default();
        for at in 0..=MAX_PODS {
            assert_eq!(remembered.put(&at.to_string(), at), None);
            assert_eq!(remembered.put(&at.to_string(), at), Some(at));
        }
        assert_eq!((remembered.pods.len(), remembered.order.len()), (MAX_PODS, MAX_PODS));
        assert!(remembered.get("0").is_none() && remembered.get("1").is_some());
    }
}

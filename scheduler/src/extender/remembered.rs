//! Bounded memory of the pods that filters were asked about. The pods that were used least recently go first.

use rustc_hash::FxHashMap;

/// Most pods that are remembered for certain; as many again may be.
const MAX_PODS: usize = 4096;

/// One value for each pod, by UID, in two generations: a value that is used moves to the young one, and when that is full, the
/// old one is forgotten and the young one becomes old.
#[derive(Debug)]
pub(super) struct Remembered<T> {
    young: FxHashMap<Box<str>, T>,
    old: FxHashMap<Box<str>, T>,
}

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Self {
            young: FxHashMap::default(),
            old: FxHashMap::default(),
        }
    }
}

impl<T> Remembered<T> {
    /// Remembers this of a pod; what was remembered of it before.
    pub(super) fn put(&mut self, uid: &str, what: T) -> Option<T> {
        if let Some(known) = self.young.get_mut(uid) {
            return Some(std::mem::replace(known, what));
        }
        let before = self.old.remove(uid);
        self.insert(uid.into(), what);
        before
    }

    /// What is remembered of a pod, to be changed.
    pub(super) fn get_mut(&mut self, uid: &str) -> Option<&mut T> {
        if let Some((uid, what)) = self.old.remove_entry(uid) {
            self.insert(uid, what);
        }
        self.young.get_mut(uid)
    }

    /// The values of all pods, in no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.young
            .iter()
            .chain(&self.old)
            .map(|(uid, what)| (&**uid, what))
    }

    /// What is remembered of a pod.
    pub(super) fn get(&mut self, uid: &str) -> Option<&T> {
        self.get_mut(uid).map(|what| &*what)
    }

    fn insert(&mut self, uid: Box<str>, what: T) {
        if self.young.len() >= MAX_PODS {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(uid, what);
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PODS, Remembered};

    #[test]
    fn forgets_what_was_not_used_for_longest() {
        let mut remembered = Remembered::default();
        for at in 0..4 * MAX_PODS {
            assert_eq!(remembered.put(&at.to_string(), at), None);
            assert_eq!(remembered.put(&at.to_string(), at), Some(at));
            assert_eq!(remembered.get("0"), Some(&0), "it is asked for all the time");
        }
        assert!(remembered.young.len() <= MAX_PODS && remembered.old.len() <= MAX_PODS);
        assert_eq!(remembered.get("1"), None);
        let latest = (4 * MAX_PODS - 1).to_string();
        assert!(remembered.get_mut(&latest).is_some());
    }
}

//! Bounded memory of pods: the least recently used go first.

use rustc_hash::FxHashMap;

/// The number of pods that are remembered for certain; up to twice as many may be.
const CAPACITY: usize = 4096;

/// One value for each pod, by UID.
///
/// Values lie in two generations. One that is used moves to the young one; when that is full, the old one is dropped and the
/// young one becomes old.
#[derive(Debug)]
pub(super) struct RecentPods<T> {
    young: FxHashMap<Box<str>, T>,
    old: FxHashMap<Box<str>, T>,
}

impl<T> Default for RecentPods<T> {
    fn default() -> Self {
        Self {
            young: FxHashMap::default(),
            old: FxHashMap::default(),
        }
    }
}

impl<T> RecentPods<T> {
    /// Returns the value that the new one replaces.
    pub(super) fn insert(&mut self, uid: &str, value: T) -> Option<T> {
        if let Some(known) = self.young.get_mut(uid) {
            return Some(std::mem::replace(known, value));
        }
        let replaced = self.old.remove(uid);
        self.insert_young(uid.into(), value);
        replaced
    }

    pub(super) fn remove(&mut self, uid: &str) {
        self.young.remove(uid);
        self.old.remove(uid);
    }

    /// The value of a pod, which counts as used now.
    pub(super) fn get_mut(&mut self, uid: &str) -> Option<&mut T> {
        // A use makes the value young again, so that it outlives those that are not used.
        if let Some((uid, value)) = self.old.remove_entry(uid) {
            self.insert_young(uid, value);
        }
        self.young.get_mut(uid)
    }

    /// The value of a pod, or a new one; it counts as used now.
    pub(super) fn get_or_default(&mut self, uid: &str) -> &mut T
    where
        T: Default,
    {
        if self.get_mut(uid).is_none() {
            self.insert_young(uid.into(), T::default());
        }
        self.young.entry(uid.into()).or_default()
    }

    /// Forgets the pods that were there at the last sweep too and that are not shown: they are gone. With more pods than are
    /// remembered for certain only the least recently used of them go.
    pub(super) fn sweep(&mut self, is_shown: impl Fn(&str) -> bool) {
        self.old.retain(|uid, _| is_shown(uid));
        if self.old.len() + self.young.len() <= CAPACITY {
            self.old.extend(self.young.drain());
            self.young.shrink_to_fit();
        }
        self.old.shrink_to_fit();
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        let values = self.young.iter().chain(&self.old);
        values.map(|(uid, value)| (&**uid, value))
    }

    /// Inserts a value as the one used last. When the young generation is full it becomes the old one, and
    /// the values of the former old one are dropped.
    fn insert_young(&mut self, uid: Box<str>, value: T) {
        // Constant time, unlike the removal of the single least recently used value from a map.
        if self.young.len() >= CAPACITY {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(uid, value);
    }
}

#[cfg(test)]
mod tests {
    use super::{CAPACITY, RecentPods};

    #[test]
    fn the_least_recently_used_pods_are_dropped() {
        let mut pods = RecentPods::default();
        for nth in 0..4 * CAPACITY {
            assert_eq!(pods.insert(&nth.to_string(), nth), None);
            assert_eq!(pods.insert(&nth.to_string(), nth), Some(nth));
            assert_eq!(pods.get_mut("0"), Some(&mut 0), "used all the time");
        }
        assert!(pods.young.len() <= CAPACITY && pods.old.len() <= CAPACITY);
        assert_eq!(pods.get_mut("1"), None);
        let latest = (4 * CAPACITY - 1).to_string();
        assert!(pods.get_mut(&latest).is_some());
    }

    #[test]
    fn a_sweep_forgets_pods_that_are_gone_and_no_new_ones() {
        let mut pods = RecentPods::default();
        pods.insert("shown", 1);
        pods.insert("gone", 2);
        // A watch may show a pod later than kube-scheduler asks about it.
        pods.sweep(|uid| uid == "shown");
        pods.insert("new", 3);
        pods.sweep(|uid| uid == "shown");
        let mut left: Vec<_> = pods.iter().collect();
        left.sort_unstable();
        assert_eq!(left, [("new", &3), ("shown", &1)]);
    }

    #[test]
    fn sweeps_keep_no_more_pods_than_before() {
        let mut pods = RecentPods::default();
        for nth in 0..6 * CAPACITY {
            pods.insert(&nth.to_string(), nth);
            if nth % 1000 == 0 {
                pods.sweep(|_| true);
            }
        }
        assert!(pods.iter().count() <= 2 * CAPACITY, "{}", pods.iter().count());
    }
}

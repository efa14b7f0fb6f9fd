//! Pods that filters were asked about, for binds that come before the watch shows the pod. Bounded: the oldest go first.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::accounting::PodFacts;

/// Most pods that are remembered.
const MAX_PODS: usize = 4096;

/// The pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Remembered {
    pods: FxHashMap<Box<str>, PodFacts>,
    order: VecDeque<Box<str>>,
}

impl Remembered {
    pub(super) fn put(&mut self, uid: &str, facts: &PodFacts) {
        if self.pods.insert(uid.into(), facts.clone()).is_some() {
            return;
        }
        self.order.push_back(uid.into());
        if self.order.len() > MAX_PODS
            && let Some(oldest) = self.order.pop_front()
        {
            self.pods.remove(&oldest);
        }
    }

    pub(super) fn get(&self, uid: &str) -> Option<PodFacts> {
        self.pods.get(uid).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PODS, Remembered};
    use crate::accounting::{Ask, PodFacts};

    #[test]
    fn holds_the_latest_only() {
        let error = proto::request::RequestError::Rule { place: String::new(), rule: String::new() };
        let facts = PodFacts { namespace: "".into(), name: "".into(), ask: Ask::Invalid(Box::new(error)), isolation: None, bound: None };
        let mut remembered = Remembered::default();
        for at in 0..=MAX_PODS {
            remembered.put(&at.to_string(), &facts);
            remembered.put(&at.to_string(), &facts);
        }
        assert_eq!((remembered.pods.len(), remembered.order.len()), (MAX_PODS, MAX_PODS));
        assert!(remembered.get("0").is_none() && remembered.get("1").is_some());
    }
}

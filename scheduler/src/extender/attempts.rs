//! The outcome of our choices of a node: a pod that failed on a node for the node's own state is sent to the next best one.
//!
//! Nothing else makes a node worse for a pod: not the API server that is busy, a bind that came too late, another leader, or
//! another plugin's refusal. kube-scheduler asks again and again about a pod of a gang before it binds the pod, which counts as
//! one attempt. Any other pod that comes back from the same node several times, for reasons that the extender does not learn,
//! is sent elsewhere too, or a plugin that refuses this node for ever would keep the pod from all others.

use std::time::{Duration, Instant};

use super::remembered::Remembered;

/// The number of times that a pod comes back from a node, without a failure reported, before it is sent to another.
const SILENT_RETURNS: u32 = 3;

/// The time for which a pod avoids a node on which it failed.
const AVOIDED_FOR: Duration = Duration::from_secs(5 * 60);

/// Most nodes that a pod avoids; the oldest go first.
const MOST_AVOIDED: usize = 16;

/// The state of a pod's attempts.
#[derive(Debug, Default)]
struct Attempt {
    /// The node that it was sent to last, and the number of times it came back from there without a failure reported.
    open: Option<(Box<str>, u32)>,
    /// The nodes on which it failed, and the time until which it avoids each.
    avoided: Vec<(Box<str>, Instant)>,
}

/// The last attempts of pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Attempts(Remembered<Attempt>);

impl Attempts {
    /// A pod is asked about: the nodes that it had better avoid.
    pub(super) fn ask(&mut self, uid: &str, is_in_gang: bool, now: Instant) -> Vec<Box<str>> {
        let Some(attempt) = self.0.get_mut(uid) else {
            return Vec::new();
        };
        if let Some((_, n_returns)) = attempt.open.as_mut().filter(|_| !is_in_gang) {
            *n_returns += 1;
        }
        if let Some((node, _)) = attempt
            .open
            .take_if(|(_, n_returns)| *n_returns >= SILENT_RETURNS)
        {
            attempt.avoid(&node, now);
        }
        attempt.avoided(now)
    }

    /// The nodes that a pod had better avoid.
    pub(super) fn avoided(&mut self, uid: &str, now: Instant) -> Vec<Box<str>> {
        self.0
            .get_mut(uid)
            .map(|attempt| attempt.avoided(now))
            .unwrap_or_default()
    }

    /// A pod is sent to a node.
    pub(super) fn begin(&mut self, uid: &str, node: &str) {
        match self.0.get_mut(uid) {
            Some(Attempt {
                open: Some((open, _)),
                ..
            }) if **open == *node => {}
            Some(attempt) => attempt.open = Some((node.into(), 0)),
            None => {
                self.0.put(
                    uid,
                    Attempt {
                        open: Some((node.into(), 0)),
                        avoided: Vec::new(),
                    },
                );
            }
        }
    }

    /// A pod cannot be bound to a node for what the node has.
    pub(super) fn fail(&mut self, uid: &str, node: &str, now: Instant) {
        if self.0.get(uid).is_none() {
            self.0.put(uid, Attempt::default());
        }
        if let Some(attempt) = self.0.get_mut(uid) {
            attempt.open = None;
            attempt.avoid(node, now);
        }
    }

    /// A pod was not bound for a reason that has nothing to do with the node.
    pub(super) fn excuse(&mut self, uid: &str) {
        if let Some(attempt) = self.0.get_mut(uid) {
            attempt.open = None;
        }
    }
}

impl Attempt {
    fn avoid(&mut self, node: &str, now: Instant) {
        self.avoided.retain(|(avoided, _)| **avoided != *node);
        if self.avoided.len() >= MOST_AVOIDED {
            self.avoided.remove(0);
        }
        self.avoided.push((node.into(), now + AVOIDED_FOR));
    }

    fn avoided(&mut self, now: Instant) -> Vec<Box<str>> {
        self.avoided.retain(|(_, until)| *until > now);
        self.avoided.iter().map(|(node, _)| node.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(nodes: &[Box<str>]) -> Vec<&str> {
        nodes.iter().map(|node| &**node).collect()
    }

    #[test]
    fn only_a_failure_for_the_node_is_remembered_and_not_for_ever() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        assert!(attempts.ask("a", false, now).is_empty());
        attempts.begin("a", "n1");
        assert!(attempts.ask("a", false, now).is_empty(), "no word of a failure");
        attempts.excuse("a");
        attempts.fail("a", "n1", now);
        attempts.fail("a", "n2", now + Duration::from_secs(1));
        assert_eq!(names(&attempts.ask("a", false, now)), ["n1", "n2"]);
        assert!(
            attempts.ask("b", false, now).is_empty(),
            "others are not affected"
        );
        assert_eq!(names(&attempts.avoided("a", now + AVOIDED_FOR)), ["n2"]);
    }

    #[test]
    fn a_pod_that_returns_without_a_word_again_and_again_is_sent_elsewhere_unless_it_is_in_a_gang() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        let mut returns = |uid: &str, is_in_gang| {
            attempts.begin(uid, "n1");
            attempts.ask(uid, is_in_gang, now).len()
        };
        assert_eq!([(); 4].map(|()| returns("alone", false)), [0, 0, 1, 1]);
        assert_eq!([(); 4].map(|()| returns("member", true)), [0; 4]);
    }

    #[test]
    fn avoids_the_latest_only() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for at in 0..2 * MOST_AVOIDED {
            attempts.fail("a", &format!("n{at}"), now);
        }
        let avoided = attempts.avoided("a", now);
        assert_eq!((avoided.len(), &*avoided[0]), (MOST_AVOIDED, "n16"));
    }
}

//! The attempts to bind pods to nodes that `filter` chose: a pod that failed on a node for the node's own state is sent to the
//! next best one.
//!
//! Only the node's state counts against it, not an API server that is busy, a bind that came too late, another leader, or
//! another plugin's refusal. A pod that returns from the same node several times without a reported failure is sent elsewhere
//! too, since a plugin that refuses this node for ever would keep the pod from all others. Members of gangs are excepted:
//! kube-scheduler asks about a member many times before it binds the gang, which is one attempt.

use std::time::{Duration, Instant};

use super::recent_pods::RecentPods;

/// The number of returns from a node without a reported failure after which the pod avoids the node.
const SILENT_RETURNS: u32 = 3;

/// The time for which a pod avoids a node.
const AVOIDED_FOR: Duration = Duration::from_secs(5 * 60);

/// The most nodes that a pod avoids; the oldest give way.
const MAX_AVOIDED: usize = 16;

/// The attempts of pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Attempts(RecentPods<PodAttempts>);

#[derive(Debug, Default)]
struct PodAttempts {
    /// The node that the pod was sent to, and the number of times it returned without a reported failure.
    open: Option<(Box<str>, u32)>,
    /// The nodes that the pod avoids, with the time until which it does.
    avoided: Vec<(Box<str>, Instant)>,
}

impl Attempts {
    /// Counts the return of a pod from the node of its open attempt, if it has one. Returns the nodes that the pod avoids.
    pub(super) fn begin(&mut self, uid: &str, is_gang_member: bool, now: Instant) -> Vec<Box<str>> {
        let Some(attempt) = self.0.get_mut(uid) else {
            return Vec::new();
        };
        // kube-scheduler may place the members of a gang several times before it binds any of them.
        if let Some((node, n_returns)) = attempt.open.as_mut().filter(|_| !is_gang_member) {
            // kube-scheduler would not ask again if it had bound the pod, and a failed bind has closed the attempt.
            *n_returns += 1;
            if *n_returns >= SILENT_RETURNS {
                let node = node.clone();
                attempt.open = None;
                attempt.avoid(&node, now);
            }
        }
        attempt.avoided(now)
    }

    /// The nodes that a pod avoids.
    pub(super) fn avoided(&mut self, uid: &str, now: Instant) -> Vec<Box<str>> {
        self.0
            .get_mut(uid)
            .map(|attempt| attempt.avoided(now))
            .unwrap_or_default()
    }

    /// Opens an attempt: `filter` names this node alone, or as the best one.
    pub(super) fn send(&mut self, uid: &str, node: &str) {
        let attempt = self.0.get_or_default(uid);
        // The same node again continues the attempt, so that returns add up.
        if attempt.open.as_ref().is_none_or(|(open, _)| **open != *node) {
            attempt.open = Some((node.into(), 0));
        }
    }

    /// Closes an attempt whose bind failed for the state of the node, which the pod avoids from now on.
    pub(super) fn fail(&mut self, uid: &str, node: &str, now: Instant) {
        let attempt = self.0.get_or_default(uid);
        attempt.open = None;
        attempt.avoid(node, now);
    }

    /// Closes an attempt that failed for a reason which has nothing to do with the node.
    pub(super) fn close(&mut self, uid: &str) {
        if let Some(attempt) = self.0.get_mut(uid) {
            attempt.open = None;
        }
    }
}

impl PodAttempts {
    /// Has the pod avoid a node for a while. Beyond `MAX_AVOIDED` nodes the pod avoids the oldest one no longer.
    fn avoid(&mut self, node: &str, now: Instant) {
        // A node that fails again becomes the latest.
        self.avoided.retain(|(avoided, _)| **avoided != *node);
        if self.avoided.len() >= MAX_AVOIDED {
            self.avoided.remove(0);
        }
        self.avoided.push((node.into(), now + AVOIDED_FOR));
    }

    /// The nodes that the pod avoids now; those whose time is over are dropped.
    fn avoided(&mut self, now: Instant) -> Vec<Box<str>> {
        // A node may have room again later, or its fault may be mended.
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
    fn a_failure_caused_by_the_node_is_remembered_for_a_while() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        assert!(attempts.begin("a", false, now).is_empty());
        attempts.send("a", "n1");
        assert!(
            attempts.begin("a", false, now).is_empty(),
            "no failure is reported"
        );
        attempts.close("a");
        attempts.fail("a", "n1", now);
        attempts.fail("a", "n2", now + Duration::from_secs(1));
        assert_eq!(names(&attempts.begin("a", false, now)), ["n1", "n2"]);
        assert!(
            attempts.begin("b", false, now).is_empty(),
            "others are not affected"
        );
        assert_eq!(names(&attempts.avoided("a", now + AVOIDED_FOR)), ["n2"]);
    }

    #[test]
    fn a_pod_that_is_filtered_repeatedly_gets_another_node_unless_it_is_in_a_gang() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        let mut returns = |uid: &str, is_in_gang| {
            attempts.send(uid, "n1");
            attempts.begin(uid, is_in_gang, now).len()
        };
        assert_eq!([(); 4].map(|()| returns("alone", false)), [0, 0, 1, 1]);
        assert_eq!([(); 4].map(|()| returns("member", true)), [0; 4]);
    }

    #[test]
    fn a_pod_avoids_the_latest_nodes_only() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        for at in 0..2 * MAX_AVOIDED {
            attempts.fail("a", &format!("n{at}"), now);
        }
        let avoided = attempts.avoided("a", now);
        assert_eq!((avoided.len(), &*avoided[0]), (MAX_AVOIDED, "n16"));
    }
}

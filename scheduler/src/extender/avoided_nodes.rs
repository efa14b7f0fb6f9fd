//! The nodes that pods avoid: a pod whose bind failed for the state of a node is sent to the next best one.
//!
//! A pod that returns from the same node several times without a reported failure is sent elsewhere too, since a plugin that
//! refuses this node for ever would keep the pod from all others. Members of gangs are excepted: kube-scheduler asks about a
//! member many times before it binds the gang.

use std::time::{Duration, Instant};

use super::recent_pods::RecentPods;

/// The number of returns from a node without a reported failure after which the pod avoids the node.
const SILENT_RETURNS: u32 = 3;

const AVOIDED_FOR: Duration = Duration::from_secs(5 * 60);

/// The most nodes that a pod avoids; the oldest give way.
const MAX_AVOIDED: usize = 16;

/// The nodes that pods avoid and the nodes that they were sent to, by the UIDs of the pods.
#[derive(Debug, Default)]
pub(super) struct AvoidedNodes(pub(super) RecentPods<TriedNodes>);

#[derive(Debug, Default)]
pub(super) struct TriedNodes {
    /// The node that the last answer of `filter` named, and the number of times the pod returned from it without a reported
    /// failure; `None` once a failure was reported.
    sent_to: Option<(Box<str>, u32)>,
    /// The nodes that the pod avoids, with the time until which it does.
    avoided: Vec<(Box<str>, Instant)>,
}

impl AvoidedNodes {
    /// Counts the return of a pod from the node that `filter` sent it to, if there is one. Returns the nodes that the pod avoids.
    pub(super) fn count_return(&mut self, uid: &str, is_gang_member: bool, now: Instant) -> Vec<Box<str>> {
        let Some(tried) = self.0.get_mut(uid) else {
            return Vec::new();
        };
        // kube-scheduler may place the members of a gang several times before it binds any of them.
        if !is_gang_member && let Some((node, n_returns)) = &mut tried.sent_to {
            // kube-scheduler would not ask again if it had bound the pod, and a failed bind has ended the count.
            *n_returns += 1;
            if *n_returns >= SILENT_RETURNS {
                let node = node.clone();
                tried.sent_to = None;
                tried.avoid(&node, now);
            }
        }
        tried.avoided(now)
    }

    pub(super) fn avoided(&mut self, uid: &str, now: Instant) -> Vec<Box<str>> {
        let tried = self.0.get_mut(uid);
        tried.map(|tried| tried.avoided(now)).unwrap_or_default()
    }

    /// Notes that the answer of `filter` for a pod names this node alone, or as the best one.
    pub(super) fn note_sent(&mut self, uid: &str, node: &str) {
        let sent_to = &mut self.0.get_or_default(uid).sent_to;
        // For the same node the count goes on, so that returns add up.
        if sent_to.as_ref().is_none_or(|(sent_to, _)| **sent_to != *node) {
            *sent_to = Some((node.into(), 0));
        }
    }

    /// Notes a bind that failed for the state of the node, which the pod avoids from now on.
    pub(super) fn note_failed(&mut self, uid: &str, node: &str, now: Instant) {
        let tried = self.0.get_or_default(uid);
        tried.sent_to = None;
        tried.avoid(node, now);
    }

    /// Ends the count of a pod's returns, after a failure that has nothing to do with the node, or a request that no node fits.
    pub(super) fn end_count(&mut self, uid: &str) {
        if let Some(tried) = self.0.get_mut(uid) {
            tried.sent_to = None;
        }
    }
}

impl TriedNodes {
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
        let (mut avoided_nodes, now) = (AvoidedNodes::default(), Instant::now());
        assert!(avoided_nodes.count_return("a", false, now).is_empty());
        avoided_nodes.note_sent("a", "n1");
        assert!(
            avoided_nodes.count_return("a", false, now).is_empty(),
            "no failure is reported"
        );
        avoided_nodes.end_count("a");
        avoided_nodes.note_failed("a", "n1", now);
        avoided_nodes.note_failed("a", "n2", now + Duration::from_secs(1));
        assert_eq!(names(&avoided_nodes.count_return("a", false, now)), ["n1", "n2"]);
        assert!(
            avoided_nodes.count_return("b", false, now).is_empty(),
            "others are not affected"
        );
        assert_eq!(names(&avoided_nodes.avoided("a", now + AVOIDED_FOR)), ["n2"]);
    }

    #[test]
    fn a_pod_that_is_filtered_repeatedly_gets_another_node_unless_it_is_in_a_gang() {
        let (mut avoided_nodes, now) = (AvoidedNodes::default(), Instant::now());
        let mut returns = |uid: &str, is_in_gang| {
            avoided_nodes.note_sent(uid, "n1");
            avoided_nodes.count_return(uid, is_in_gang, now).len()
        };
        assert_eq!([(); 4].map(|()| returns("alone", false)), [0, 0, 1, 1]);
        assert_eq!([(); 4].map(|()| returns("member", true)), [0; 4]);
    }

    #[test]
    fn a_pod_avoids_the_latest_nodes_only() {
        let (mut avoided_nodes, now) = (AvoidedNodes::default(), Instant::now());
        for at in 0..2 * MAX_AVOIDED {
            avoided_nodes.note_failed("a", &format!("n{at}"), now);
        }
        let avoided = avoided_nodes.avoided("a", now);
        assert_eq!((avoided.len(), &*avoided[0]), (MAX_AVOIDED, "n16"));
    }
}

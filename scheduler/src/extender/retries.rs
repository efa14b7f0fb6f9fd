//! The pods that were refused for a sample of the nodes: kube-scheduler is to try them again soon, and those alone.
//!
//! kube-scheduler tries a refused pod again when something happens in the cluster, and otherwise after five minutes. It takes
//! the refusal of a sample for one of all nodes, although a node that was not asked about has room. kube-scheduler writes the
//! text of a refusal into the pod's condition, sees that as an event of the pod, and tries the pod again after its back-off, but
//! writes nothing if the text is the one that is there. So the text changes between two such refusals of a pod; where nothing
//! fits it is constant.
//!
//! kube-scheduler 1.33 and later does not even wait out the back-off while it has nothing else to do, so that a pod may be tried
//! fifty times a second. That finds the node that samples missed, and must not go on for ever: after a number of refusals in a
//! row the text is constant until something changes here.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::remembered::Remembered;

/// Most pods that are tried again so: any of them that is bound is an event, upon which all others are tried.
const MOST_PODS: usize = 64;

/// A pod that was not asked about for as long makes place for others: back-offs are 10 s at most unless configured otherwise.
const GONE_AFTER: Duration = Duration::from_secs(60);

/// kube-scheduler looks at no fewer nodes, if there are as many: a shorter list of names is no sample.
pub(super) const LEAST_SAMPLE: usize = 100;

/// The cause of such refusals, in a word for metrics.
pub(super) const SAMPLE: &str = "sample";

/// The texts that two refusals in a row differ by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Variation {
    is_odd: bool,
}

/// The state of pods that were refused.
#[derive(Debug, Default)]
pub(super) struct Retries {
    pods: FxHashMap<Box<str>, Retried>,
    /// The set of nodes that each pod was refused for last.
    samples: Remembered<u64>,
}

/// A pod that is tried again.
#[derive(Clone, Copy, Debug)]
struct Retried {
    last: Instant,
    is_odd: bool,
    n_in_row: usize,
    /// The number of times room had been made when it was refused last.
    n_openings: u64,
}

/// A refusal for a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    /// The number of refusals in a row that may differ.
    pub(super) most: usize,
    /// The number of times room has been made anywhere.
    pub(super) n_openings: u64,
}

/// The number of refusals for samples in a row that differ: twice as many as it takes to go through all nodes, and a few more,
/// as searches for other pods move on the beginning too.
pub(super) fn rounds(n_nodes: usize, n_asked: usize) -> usize {
    2 * n_nodes.div_ceil(n_asked.max(1)) + 8
}

impl Variation {
    /// The text that is appended to the refusal of one node.
    pub(super) const fn text(self) -> &'static str {
        if self.is_odd {
            " (a node that was not asked about has room: trying once more)"
        } else {
            " (a node that was not asked about has room: trying again)"
        }
    }
}

impl Retries {
    /// A pod is refused: the text that it gets, unless it or too many others are tried again already.
    pub(super) fn vary(&mut self, uid: &str, refusal: Refusal, now: Instant) -> Option<Variation> {
        let Refusal { most, n_openings } = refusal;
        if let Some(retried) = self.pods.get_mut(uid) {
            let is_new =
                retried.n_openings != n_openings || now.saturating_duration_since(retried.last) >= GONE_AFTER;
            let n_in_row = if is_new { 0 } else { retried.n_in_row };
            *retried = Retried {
                last: now,
                is_odd: !retried.is_odd,
                n_in_row: n_in_row + 1,
                n_openings,
            };
            return (n_in_row < most).then_some(Variation {
                is_odd: retried.is_odd,
            });
        }
        if self.pods.len() >= MOST_PODS {
            self.pods
                .retain(|_, retried| now.saturating_duration_since(retried.last) < GONE_AFTER);
        }
        if self.pods.len() >= MOST_PODS {
            return None;
        }
        self.pods.insert(
            uid.into(),
            Retried {
                last: now,
                is_odd: false,
                n_in_row: 1,
                n_openings,
            },
        );
        Some(Variation { is_odd: false })
    }

    /// A pod is not refused, or nothing fits it anywhere.
    pub(super) fn end(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Returns true if a pod that was refused for this set of nodes may have been refused for a sample: the same set twice
    /// in a row is all that kube-scheduler's own filters let through, as samples begin where the one before ended.
    pub(super) fn is_sample(&mut self, uid: &str, set: u64) -> bool {
        self.samples.put(uid, set) != Some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn refusal(n_openings: u64) -> Refusal {
        Refusal { most: 5, n_openings }
    }

    #[test]
    fn the_text_changes_from_refusal_to_refusal() {
        let (mut retries, now) = (Retries::default(), Instant::now());
        let texts: Vec<&str> = (0..3)
            .filter_map(|_| retries.vary("a", refusal(0), now))
            .map(Variation::text)
            .collect();
        assert!(texts.len() == 3 && texts[0] != texts[1] && texts[0] == texts[2]);
    }

    #[test]
    fn only_so_many_pods_are_tried_again() {
        let (mut retries, now) = (Retries::default(), Instant::now());
        let varied = (0..MOST_PODS + 10)
            .filter(|at| retries.vary(&at.to_string(), refusal(0), now).is_some())
            .count();
        assert_eq!(varied, MOST_PODS);
        retries.end("0");
        let mut is_varied = |uid: &str, at| retries.vary(uid, refusal(0), at).is_some();
        assert!(is_varied("another", now) && !is_varied("a third", now));
        assert!(is_varied("a third", now + GONE_AFTER), "the others have gone");
    }

    /// An idle kube-scheduler tries a pod again at once, whatever its back-off.
    #[test]
    fn a_pod_is_not_tried_again_for_ever_while_nothing_changes() {
        let (mut retries, now) = (Retries::default(), Instant::now());
        let mut n_varied = |n_openings, at| {
            (0..20)
                .filter(|_| retries.vary("a", refusal(n_openings), at).is_some())
                .count()
        };
        assert_eq!([n_varied(1, now), n_varied(1, now), n_varied(2, now)], [5, 0, 5]);
        assert_eq!(
            n_varied(2, now + GONE_AFTER),
            5,
            "kube-scheduler itself tries it after five minutes"
        );
        assert_eq!((rounds(500, 230), rounds(15_000, 750)), (14, 48));
    }

    #[test]
    fn the_same_nodes_twice_are_no_sample() {
        let mut retries = Retries::default();
        assert_eq!(
            [1, 2, 2, 1].map(|set| retries.is_sample("a", set)),
            [true, true, false, true]
        );
    }
}

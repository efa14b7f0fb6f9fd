//! Verdicts on nodes that earlier questions brought, so that a question costs what has changed since the last one like it.
//!
//! For each kind of question there is one word per node: the version of the node that was judged, and the verdict on it.
//! Words are read and written whole and without locks, so that many requests may use and mend them while they ask. A word
//! whose version is not the node's own counts for nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::class::ClassRequest;
use crate::host::HostAmounts;
use crate::policy::Policies;
use crate::rank::Score;
use crate::reason::Reason;
use crate::request::{Ask, GpuAsk};
use crate::wishes::Wishes;

/// Kinds of questions that are remembered; the one that has not been asked for longest gives way.
const MAX_QUESTIONS: usize = 128;

/// Bits of a verdict; the rest of a word is a version, which comes again after 68 billion changes.
const VERDICT_BITS: u32 = 28;
const VERSION_MASK: u64 = u64::MAX >> VERDICT_BITS;
/// The word of a node that has not been judged: its version comes last of all.
const UNKNOWN: u64 = u64::MAX;
/// Says that a verdict is a refusal.
const REFUSED: u32 = 1 << (VERDICT_BITS - 1);

/// Everything that an answer depends on besides the node.
#[derive(Debug, PartialEq)]
pub(crate) struct Question {
    gpus: GpuAsk,
    others: Box<[ClassRequest]>,
    wishes: Option<Wishes>,
    host: HostAmounts,
    pub(crate) policies: Policies,
    forecasts: u32,
}

/// The verdicts on all nodes that one kind of question has brought.
#[derive(Debug)]
pub(crate) struct Ranking {
    /// By the node's place in the fleet.
    words: Box<[AtomicU64]>,
}

/// What is remembered of all kinds of questions.
#[derive(Debug, Default)]
pub(crate) struct Rankings {
    /// The one that was asked last is last.
    known: Mutex<Vec<(Arc<Question>, Arc<Ranking>)>>,
}

impl Question {
    /// What it asks of a node.
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask {
            gpus: self.gpus,
            others: &self.others,
            wishes: self.wishes.as_ref(),
            host: self.host,
        }
    }

    fn is(&self, ask: &Ask<'_>, policies: Policies, forecasts: u32) -> bool {
        let plain = (self.gpus, self.host, self.policies, self.forecasts)
            == (ask.gpus, ask.host, policies, forecasts);
        plain && *self.others == *ask.others && self.wishes.as_ref() == ask.wishes
    }
}

impl Rankings {
    /// What is remembered of such a question, with room for so many nodes.
    pub(crate) fn of(
        &self,
        ask: &Ask<'_>,
        policies: Policies,
        forecasts: u32,
        n_nodes: usize,
    ) -> Arc<Ranking> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let found = known
            .iter()
            .rposition(|(question, _)| question.is(ask, policies, forecasts));
        let (question, ranking) = if let Some(at) = found {
            known.remove(at)
        } else {
            let alike = |(question, _): &(Arc<Question>, _)| question.forecasts == forecasts;
            if known.iter().filter(|known| alike(known)).count() >= MAX_QUESTIONS
                && let Some(oldest) = known.iter().position(alike)
            {
                known.remove(oldest);
            }
            let Ask {
                gpus,
                others,
                wishes,
                host,
            } = *ask;
            let question = Question {
                gpus,
                others: others.into(),
                wishes: wishes.cloned(),
                host,
                policies,
                forecasts,
            };
            (Arc::new(question), Arc::new(Ranking::with_room_for(n_nodes)))
        };
        let ranking = if ranking.words.len() < n_nodes {
            Arc::new(ranking.grown(n_nodes))
        } else {
            ranking
        };
        known.push((question, Arc::clone(&ranking)));
        ranking
    }

    /// The questions that have been asked under these forecasts, the last one last.
    pub(crate) fn questions(&self, forecasts: u32) -> Vec<Arc<Question>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .iter()
            .map(|(question, _)| question)
            .filter(|question| question.forecasts == forecasts)
            .map(Arc::clone)
            .collect()
    }

    /// Forgets what was asked under other forecasts: it is of no use any more.
    pub(crate) fn forget_all_but(&mut self, forecasts: u32) {
        let known = self.known.get_mut().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(question, _)| question.forecasts == forecasts);
    }
}

fn refusal(verdict: u32) -> Option<Reason> {
    Reason::ALL.get((verdict & !REFUSED) as usize).copied()
}

impl Ranking {
    fn with_room_for(n_nodes: usize) -> Self {
        Self {
            words: (0..n_nodes).map(|_| AtomicU64::new(UNKNOWN)).collect(),
        }
    }

    /// The same with room for nodes that have come since, and for some more.
    fn grown(&self, n_nodes: usize) -> Self {
        let known = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        let words = known
            .chain(std::iter::repeat(UNKNOWN))
            .take(n_nodes + n_nodes / 4)
            .map(AtomicU64::new);
        Self {
            words: words.collect(),
        }
    }

    /// The verdict on a node of this version, if it is known.
    #[inline]
    pub(crate) fn get(&self, index: u32, version: u64) -> Option<Result<Score, Reason>> {
        let word = self.words.get(index as usize)?.load(Ordering::Relaxed);
        if word >> VERDICT_BITS != version & VERSION_MASK {
            return None;
        }
        let verdict = u32::try_from(word & ((1 << VERDICT_BITS) - 1)).unwrap_or(0);
        if verdict & REFUSED == 0 {
            Some(Ok(Score::of_points(verdict)))
        } else {
            refusal(verdict).map(Err)
        }
    }

    pub(crate) fn put(&self, index: u32, version: u64, verdict: Result<Score, Reason>) {
        let verdict = match verdict {
            Ok(score) => score.points(),
            Err(reason) => {
                REFUSED
                    | Reason::ALL
                        .iter()
                        .position(|known| *known == reason)
                        .and_then(|at| u32::try_from(at).ok())
                        .unwrap_or(0)
            }
        };
        if let Some(word) = self.words.get(index as usize) {
            word.store(
                (version & VERSION_MASK) << VERDICT_BITS | u64::from(verdict),
                Ordering::Relaxed,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_node_that_was_never_judged_nothing_is_known() {
        let ranking = Ranking::with_room_for(2);
        ranking.put(0, 7, Err(Reason::NoDevice));
        let grown = ranking.grown(4);
        assert_eq!(
            [7, 8].map(|version| grown.get(0, version)),
            [Some(Err(Reason::NoDevice)), None]
        );
        assert!((1..4).all(|index| grown.get(index, 0).is_none()));
    }
}

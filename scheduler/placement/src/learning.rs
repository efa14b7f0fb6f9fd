//! Learning without a pause: what is to be expected is worked out anew, and the questions of the day are put to all nodes
//! under it, before it counts. Requests meanwhile are answered as before.
//!
//! Who does not care calls [`Fleet::learn`], which takes it on at once.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::asking::Asking;
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::ranking::Question;
use crate::workload::Spec;

/// Nodes that one question is put to at a time.
const STRETCH: usize = 64;

/// Questions that are put to all nodes under what is to be expected next.
#[derive(Debug)]
pub struct Rehearsal {
    /// The one that is put now is last.
    questions: Vec<Arc<Question>>,
    /// The place in the fleet from which it has not been put yet.
    from: usize,
    forecasts: u32,
}

impl Fleet {
    /// Has the policies that look ahead expect pods as they are now; whether that is news.
    ///
    /// Pods that ask for no devices count where they run beside GPUs, and without being told of in the workload.
    pub fn learn(&mut self) -> bool {
        let is_news = self.begin_learning();
        self.end_learning();
        is_news
    }

    /// Works out what is to be expected of pods as they are now, in place of what was about to be [expected](Self::end_learning);
    /// whether that is news.
    pub fn begin_learning(&mut self) -> bool {
        let sample = self.workload().sample(self.beside.workload());
        self.next = self.forecasts.after(sample, self.n_forecasts);
        if let Some(next) = &self.next {
            self.n_forecasts = next.number();
        }
        self.next.is_some()
    }

    /// The questions that have been asked since policies learnt last, to be put to all nodes; `None` if nothing is being learnt.
    pub fn rehearsal(&self) -> Option<Rehearsal> {
        let next = self.next.as_ref()?;
        Some(Rehearsal {
            questions: self.rankings.questions(self.forecasts.number()),
            from: 0,
            forecasts: next.number(),
        })
    }

    /// Puts a question to some nodes, a fraction of a millisecond's work; whether there are more.
    ///
    /// The fleet may change between two stretches.
    pub fn rehearse(&self, rehearsal: &mut Rehearsal) -> bool {
        let Some(next) = self
            .next
            .as_ref()
            .filter(|next| next.number() == rehearsal.forecasts)
        else {
            return false;
        };
        let Some(question) = rehearsal.questions.last() else {
            return false;
        };
        let mut asking = Asking::under(self, next, question.ask(), Hints::Respect);
        let stretch = self.slots.iter().zip(0..).skip(rehearsal.from).take(STRETCH);
        for (slot, index) in stretch.filter(|(slot, _)| slot.node.is_some()) {
            // What comes of it is remembered, a refusal too.
            asking
                .verdict(NodeId::new(index, slot.generation), question.policies)
                .ok();
        }
        rehearsal.from += STRETCH;
        if rehearsal.from >= self.slots.len() {
            rehearsal.from = 0;
            rehearsal.questions.pop();
        }
        !rehearsal.questions.is_empty()
    }

    /// Has the policies that look ahead expect what was worked out last, if that has not happened yet.
    pub fn end_learning(&mut self) {
        if let Some(next) = self.next.take() {
            self.forecasts = next;
            self.rankings.forget_all_but(self.forecasts.number());
        }
    }

    /// What policies that look ahead expect of pods to come: each kind, and how many of a thousand pods are of it; the commonest
    /// first. Nothing before the first lesson.
    pub fn expected(&self) -> Vec<(Spec, u32)> {
        let sample = self.forecasts.sample();
        let mut counts: BTreeMap<Spec, usize> = BTreeMap::new();
        for spec in sample {
            *counts.entry(*spec).or_default() += 1;
        }
        let permille =
            |n: usize| u32::try_from((n * 1000 + sample.len() / 2) / sample.len().max(1)).unwrap_or(1000);
        let mut expected: Vec<(Spec, u32)> =
            counts.into_iter().map(|(spec, n)| (spec, permille(n))).collect();
        expected.sort_by_key(|(_, permille)| Reverse(*permille));
        expected
    }

    /// Whether something has been worked out that is not expected yet.
    pub fn is_learning(&self) -> bool {
        self.next.is_some()
    }
}

#[cfg(test)]
mod tests;

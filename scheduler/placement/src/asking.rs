//! One question to many nodes: an answer that takes work is shared between nodes that are alike.
//!
//! Nodes that were bought together have one shape, and most of them one of few states, so that a question with wishes is
//! worked out a few times and not thousands of times.

use rustc_hash::FxHashMap;

use crate::brief::Brief;
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::policy::Policies;
use crate::rank::Score;
use crate::reason::Reason;
use crate::request::Ask;
use crate::state::{State, StateId};

/// A question, with the answers that are known.
#[derive(Debug)]
pub struct Asking<'a> {
    fleet: &'a Fleet,
    ask: Ask<'a>,
    hints: Hints<'a>,
    known: FxHashMap<Alike, Known>,
}

/// What nodes have in common that give the same answer.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Alike {
    /// A state that some node is in, no hint counted.
    Kept(StateId),
    /// A state with the hints that count.
    Hinted(State),
}

/// What is known of all nodes in one state.
#[derive(Debug)]
struct Known {
    fit: Result<(), Reason>,
    score: Option<(Policies, Score)>,
}

impl<'a> Asking<'a> {
    /// A question that has not been put to any node.
    pub fn new(fleet: &'a Fleet, ask: impl Into<Ask<'a>>, hints: Hints<'a>) -> Self {
        Self { fleet, ask: ask.into(), hints, known: FxHashMap::default() }
    }

    /// What [`Fleet::fit`] says of a node.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn fit(&mut self, node: NodeId) -> Result<(), Reason> {
        let brief = self.fleet.brief_of(node).ok_or(Reason::NoDevice)?;
        if self.takes_work(brief)
            && let Some(known) = self.known(node, brief)
        {
            return known.fit;
        }
        self.fleet.fit(node, self.ask, self.hints)
    }

    /// What [`Fleet::score`] says of a node.
    pub fn score(&mut self, node: NodeId, policies: Policies) -> Score {
        let (fleet, ask, hints) = (self.fleet, self.ask, self.hints);
        let Some(brief) = fleet.brief_of(node) else { return Score::default() };
        let score = || fleet.score(node, ask, policies, hints);
        if !self.takes_work(brief) {
            return score();
        }
        let Some(known) = self.known(node, brief) else { return score() };
        match known.score {
            _ if known.fit.is_err() => Score::default(),
            Some((of, score)) if of == policies => score,
            _ => known.score.insert((policies, score())).1,
        }
    }

    /// How many different nodes the answer has been worked out for.
    pub fn n_known(&self) -> usize {
        self.known.len()
    }

    /// Whether more is to be done than a few comparisons.
    fn takes_work(&self, brief: &Brief) -> bool {
        self.ask.wishes.is_some() || brief.has_rules || !self.ask.others.is_empty()
    }

    /// What is known of nodes in the same state; `None` if no other is in it.
    fn known(&mut self, node: NodeId, brief: &Brief) -> Option<&mut Known> {
        let (fleet, ask, hints) = (self.fleet, self.ask, self.hints);
        let hinted = if brief.has_hints { fleet.node(node).filter(|node| node.any_hint_counts(hints)) } else { None };
        let alike = match hinted {
            Some(node) if node.is_varied() => Alike::Hinted(node.state_under(hints)),
            Some(_) => return None,
            None => Alike::Kept(brief.state?),
        };
        let fit = || Known { fit: fleet.fit(node, ask, hints), score: None };
        Some(self.known.entry(alike).or_insert_with(fit))
    }
}

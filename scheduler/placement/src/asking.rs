//! One question to many nodes: an answer that takes work is shared between nodes that are alike.
//!
//! Nodes that were bought together have one shape, and most of them one of few states, so that a question with wishes is
//! worked out a few times and not thousands of times.

use std::borrow::Cow;

use rustc_hash::FxHashMap;

use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::node::Node;
use crate::policy::Policies;
use crate::rank::Score;
use crate::reason::Reason;
use crate::request::Ask;
use crate::state::State;

/// A question, with the answers that are known.
#[derive(Debug)]
pub struct Asking<'a> {
    fleet: &'a Fleet,
    ask: Ask<'a>,
    hints: Hints<'a>,
    known: FxHashMap<u64, Known<'a>>,
}

/// What is known of all nodes like one.
#[derive(Debug)]
struct Known<'a> {
    node: &'a Node,
    state: Cow<'a, State>,
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
        let node = self.fleet.node(node).ok_or(Reason::NoDevice)?;
        if !self.takes_work(node) {
            return node.fit_all(self.ask, self.hints);
        }
        let (ask, hints) = (self.ask, self.hints);
        self.known(node).map_or_else(|| node.fit_all(ask, hints), |known| known.fit)
    }

    /// What [`Fleet::score`] says of a node.
    pub fn score(&mut self, node: NodeId, policies: Policies) -> Score {
        let (fleet, ask, hints) = (self.fleet, self.ask, self.hints);
        let Some(node) = fleet.node(node) else { return Score::default() };
        let score = || node.score(ask, policies, &fleet.weights, hints);
        if !self.takes_work(node) {
            return score();
        }
        let Some(known) = self.known(node) else { return score() };
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
    fn takes_work(&self, node: &Node) -> bool {
        self.ask.wishes.is_some() || node.has_rules || !self.ask.others.is_empty()
    }

    /// What is known of nodes like this one; `None` if none can be compared with it.
    fn known(&mut self, node: &'a Node) -> Option<&mut Known<'a>> {
        let state = node.comparable(self.hints)?;
        let (ask, hints) = (self.ask, self.hints);
        let known = self.known.entry(state.hash).or_insert_with(|| {
            let fit = node.fit_all(ask, hints);
            Known { node, state: state.clone(), fit, score: None }
        });
        node.is_like(&state, known.node, &known.state).then_some(known)
    }
}

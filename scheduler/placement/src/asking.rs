//! One question to many nodes: an answer that takes work is shared between nodes that are alike.
//!
//! Nodes that were bought together have one shape, and most of them one of few states, so that a question with wishes is
//! worked out a few times and not thousands of times.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::brief::Brief;
use crate::fill::{Forecasts, Outlook, Terms};
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::policy::{NodePolicy, Policies};
use crate::rank::{Order, Score};
use crate::ranking::Ranking;
use crate::reason::Reason;
use crate::request::Ask;
use crate::state::{State, StateId};

/// A question, with the answers that are known.
#[derive(Debug)]
pub struct Asking<'a> {
    fleet: &'a Fleet,
    forecasts: &'a Forecasts,
    ask: Ask<'a>,
    hints: Hints<'a>,
    known: FxHashMap<Alike, Known>,
    /// What earlier questions of this kind have brought, and by which policies.
    ranking: Option<(Policies, Arc<Ranking>)>,
    /// Index of the node that the asker's own hint is on.
    own: Option<u32>,
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
#[derive(Debug, Default)]
struct Known {
    fit: Option<Result<(), Reason>>,
    /// By these policies.
    judged: Option<(Policies, Judged)>,
}

/// What a verdict on alike nodes comes to.
#[derive(Debug)]
enum Judged {
    /// The same for each of them.
    Verdict(Result<Score, Reason>),
    /// The GPUs that are taken of each; how good that is depends on what else of the node is free.
    Rows(Result<Vec<usize>, Reason>),
}

impl<'a> Asking<'a> {
    /// A question that has not been put to any node.
    pub fn new(fleet: &'a Fleet, ask: impl Into<Ask<'a>>, hints: Hints<'a>) -> Self {
        Self::under(fleet, &fleet.forecasts, ask.into(), hints)
    }

    /// The same question under other forecasts than those that count.
    pub(crate) fn under(fleet: &'a Fleet, forecasts: &'a Forecasts, ask: Ask<'a>, hints: Hints<'a>) -> Self {
        let own = if let Hints::RespectOthers(own) = hints {
            fleet.hinted.get(own).copied()
        } else {
            None
        };
        Self {
            fleet,
            forecasts,
            ask,
            hints,
            known: FxHashMap::default(),
            ranking: None,
            own,
        }
    }

    /// What [`Fleet::fit`] and [`Fleet::score`] say of a node: from memory, unless it has changed since the last question of
    /// this kind.
    ///
    /// # Errors
    /// As [`Fleet::fit`].
    #[inline]
    pub fn verdict(&mut self, node: NodeId, policies: Policies) -> Result<Score, Reason> {
        let brief = self.fleet.brief_of(node).ok_or(Reason::NoDevice)?;
        let remembered = self.remembered(node.index(), policies);
        remembered.unwrap_or_else(|| self.find_out(node, *brief, policies))
    }

    /// The verdict that an earlier question of this kind has brought on the node at a place, if nothing has changed there
    /// since: what [`Self::verdict`] would say. Knows nothing before the first verdict by these policies.
    #[inline]
    pub fn remembered(&self, index: u32, policies: Policies) -> Option<Result<Score, Reason>> {
        let (of, ranking) = self.ranking.as_ref()?;
        if *of == policies && !self.may_be_special(index) {
            ranking.get(index, self.fleet.version_at(index))
        } else {
            None
        }
    }

    /// Whether an answer may be the asker's own: it has a hint there, or does not heed those of others.
    #[inline]
    fn may_be_special(&self, index: u32) -> bool {
        self.own == Some(index) || self.hints == Hints::Ignore
    }

    /// The verdict where something stands in the way of a quick one.
    #[inline(never)]
    fn find_out(&mut self, node: NodeId, brief: Brief, policies: Policies) -> Result<Score, Reason> {
        if brief.has_hints && self.may_be_special(node.index()) {
            return self.judge(node, &brief, policies);
        }
        let (ranking, version) = (self.ranking(policies), self.fleet.version_at(node.index()));
        if let Some(verdict) = ranking.get(node.index(), version) {
            return verdict;
        }
        let verdict = self.judge(node, &brief, policies);
        ranking.put(node.index(), version, verdict);
        verdict
    }

    /// What earlier questions of this kind have brought.
    fn ranking(&mut self, policies: Policies) -> Arc<Ranking> {
        if let Some((_, ranking)) = self.ranking.as_ref().filter(|(of, _)| *of == policies) {
            return Arc::clone(ranking);
        }
        let fleet = self.fleet;
        let ranking = fleet
            .rankings
            .of(&self.ask, policies, self.forecasts.number(), fleet.slots.len());
        self.ranking = Some((policies, Arc::clone(&ranking)));
        ranking
    }

    fn judge(&mut self, node: NodeId, brief: &Brief, policies: Policies) -> Result<Score, Reason> {
        let (fleet, ask, hints) = (self.fleet, self.ask, self.hints);
        let outlook = Outlook {
            forecasts: self.forecasts,
            host: ask.host,
        };
        let at = fleet.node(node).ok_or(Reason::NoDevice)?;
        let anew = || at.verdict(ask, policies, &fleet.weights, outlook, hints);
        let known = if at.looks_ahead(ask) {
            None
        } else {
            self.known(node, brief)
        };
        let Some(known) = known else { return anew() };
        let judged = match &mut known.judged {
            Some((of, judged)) if *of == policies => judged,
            judged => {
                let order = Order {
                    policy: policies.device,
                    weights: &fleet.weights,
                    outlook: None,
                };
                let found = match policies.node {
                    NodePolicy::Fill => Judged::Rows(at.rows_by_rules(ask, order, hints)),
                    _ => Judged::Verdict(anew()),
                };
                &mut judged.insert((policies, found)).1
            }
        };
        match judged {
            Judged::Verdict(verdict) => *verdict,
            Judged::Rows(Err(reason)) => Err(*reason),
            Judged::Rows(Ok(rows)) => Ok(Score::from(at.price_of(ask, rows, outlook, hints).cost)),
        }
    }

    /// What [`Fleet::fit`] says of a node.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn fit(&mut self, node: NodeId) -> Result<(), Reason> {
        let (fleet, ask, hints) = (self.fleet, self.ask, self.hints);
        let brief = fleet.brief_of(node).ok_or(Reason::NoDevice)?;
        let fit = || fleet.fit(node, ask, hints);
        let known = if self.takes_work(brief) {
            self.known(node, brief)
        } else {
            None
        };
        known.map_or_else(fit, |known| *known.fit.get_or_insert_with(fit))
    }

    /// The best nodes, the best first, of those on which a verdict of this kind is remembered or the asker has a hint: a look at
    /// every node, but nothing is worked out.
    pub fn leaders(&mut self, n: usize, policies: Policies) -> Vec<(NodeId, Score)> {
        let ranking = self.ranking(policies);
        let mut leaders: Vec<(NodeId, Score)> = Vec::with_capacity(n + 1);
        for (index, slot) in (0..)
            .zip(&self.fleet.slots)
            .filter(|(_, slot)| slot.node.is_some())
        {
            let node = NodeId::new(index, slot.generation);
            let verdict = match ranking.get(index, self.fleet.version_at(index)) {
                _ if self.may_be_special(index) => Some(self.verdict(node, policies)),
                remembered => remembered,
            };
            let Some(Ok(score)) = verdict else { continue };
            let at = leaders.partition_point(|(_, known)| *known >= score);
            if at < n {
                leaders.insert(at, (node, score));
                leaders.truncate(n);
            }
        }
        leaders
    }

    /// Why a node is as good as the verdict on it says: the terms of what it costs. `None` where there is no room, or where
    /// another policy than [`NodePolicy::Fill`] decides.
    pub fn terms(&self, node: NodeId, policies: Policies) -> Option<Terms> {
        let node = self
            .fleet
            .node(node)
            .filter(|_| policies.node == NodePolicy::Fill)?;
        let outlook = Outlook {
            forecasts: self.forecasts,
            host: self.ask.host,
        };
        let looks_ahead = node.looks_ahead(self.ask).then_some(outlook);
        let order = Order {
            policy: policies.device,
            weights: &self.fleet.weights,
            outlook: looks_ahead,
        };
        node.price(self.ask, order, outlook, self.hints)
            .ok()
            .map(|price| price.terms)
    }

    /// How many different nodes the answer has been worked out for.
    pub fn n_known(&self) -> usize {
        self.known.len()
    }

    /// Whether more is to be done than a few comparisons.
    fn takes_work(&self, brief: &Brief) -> bool {
        self.ask.wishes.is_some() || brief.has_rules || !self.ask.others.is_empty()
    }

    /// What is known of nodes in the same state; `None` where nodes are not compared.
    fn known(&mut self, node: NodeId, brief: &Brief) -> Option<&mut Known> {
        let (fleet, hints) = (self.fleet, self.hints);
        let hinted = if brief.has_hints {
            fleet.node(node).filter(|node| node.any_hint_counts(hints))
        } else {
            None
        };
        let alike = match hinted {
            Some(node) if node.is_varied() => Alike::Hinted(node.state_under(hints)),
            Some(_) => return None,
            None => Alike::Kept(brief.state?),
        };
        Some(self.known.entry(alike).or_default())
    }
}

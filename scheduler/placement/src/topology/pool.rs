//! Devices of one type that a request may take, in order of preference.

use std::borrow::Cow;

use crate::shape::Spot;
use crate::topology::sets::{MAX_MEMBERS, Set};
use crate::wishes::Kind;

/// A device that may be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Its place in the inventory, which orders devices by minor.
    pub(crate) at: usize,
    pub(crate) spot: Spot,
    /// Its place in the order of preference: 0 for the best, equals share one.
    pub(crate) level: u32,
}

/// All devices of one type that may be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) kind: Kind,
    /// How many are asked for.
    pub(crate) n: usize,
    /// By rising minor.
    pub(crate) candidates: Vec<Candidate>,
}

impl Pool {
    /// Candidates from keys that are smaller for what is preferred.
    pub(crate) fn new<K: Ord>(kind: Kind, n: usize, keyed: &[(usize, Spot, K)]) -> Self {
        let mut order: Vec<&K> = keyed.iter().map(|(.., key)| key).collect();
        order.sort_unstable();
        order.dedup();
        let level = |key: &K| u32::try_from(order.partition_point(|other| *other < key)).unwrap_or(u32::MAX);
        let candidates = keyed
            .iter()
            .map(|(at, spot, key)| Candidate {
                at: *at,
                spot: *spot,
                level: level(key),
            })
            .collect();
        Self { kind, n, candidates }
    }

    /// With the preferred candidates only, so many that sets of them can be formed.
    pub(crate) fn narrowed(&self) -> Cow<'_, Self> {
        if self.candidates.len() <= MAX_MEMBERS {
            return Cow::Borrowed(self);
        }
        let mut pool = self.clone();
        pool.candidates
            .sort_by_key(|candidate| (candidate.level, candidate.at));
        pool.candidates.truncate(MAX_MEMBERS);
        pool.candidates.sort_by_key(|candidate| candidate.at);
        Cow::Owned(pool)
    }

    /// The candidates that such a thing holds of.
    pub(crate) fn those(&self, holds: impl Fn(&Candidate) -> bool) -> Set {
        let all = self.candidates.iter().enumerate();
        all.filter(|(_, candidate)| holds(candidate))
            .fold(Set::EMPTY, |set, (at, _)| set.with(at))
    }

    pub(crate) fn all(&self) -> Set {
        self.those(|_| true)
    }

    /// Members of a set, the preferred ones first.
    pub(crate) fn by_preference(&self, set: Set) -> Vec<usize> {
        let mut members: Vec<usize> = set.members().collect();
        members.sort_by_key(|at| (self.level(*at), *at));
        members
    }

    pub(crate) fn level(&self, at: usize) -> u32 {
        self.candidates.get(at).map_or(0, |candidate| candidate.level)
    }

    pub(crate) fn levels(&self, set: Set) -> u32 {
        set.members()
            .fold(0, |sum, at| sum.saturating_add(self.level(at)))
    }

    pub(crate) fn spot(&self, at: usize) -> Spot {
        self.candidates
            .get(at)
            .map(|candidate| candidate.spot)
            .unwrap_or_default()
    }

    /// Places in the inventory of the members of a set.
    pub(crate) fn devices(&self, set: Set) -> Vec<usize> {
        set.members()
            .filter_map(|at| Some(self.candidates.get(at)?.at))
            .collect()
    }

    /// The best ones without any regard to where they sit.
    pub(crate) fn best(&self) -> Vec<usize> {
        let mut order: Vec<&Candidate> = self.candidates.iter().collect();
        order.sort_by_key(|candidate| (candidate.level, candidate.at));
        let mut best: Vec<usize> = order
            .into_iter()
            .take(self.n)
            .map(|candidate| candidate.at)
            .collect();
        best.sort_unstable();
        best
    }
}

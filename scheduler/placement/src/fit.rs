//! Whether a node has room for a request, and if not, what it lacks: the hot path of every filter.

use crate::fleet::{Fleet, NodeId};
use crate::ident::OwnerId;
use crate::node::{Node, Row};
use crate::reason::Reason;
use crate::request::{Need, Request};

/// Which hints count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints<'a> {
    /// None: what is hinted at is free.
    Ignore,
    /// All.
    Respect,
    /// All but those of this owner.
    RespectOthers(&'a str),
}

impl Hints<'_> {
    /// Whether an owner's hint counts.
    pub(crate) fn heeds(self, owner: &OwnerId) -> bool {
        match self {
            Self::Ignore => false,
            Self::Respect => true,
            Self::RespectOthers(own) => owner.as_str() != own,
        }
    }
}

impl Fleet {
    /// Whether a node has room for a request; if not, the reason of the nearest miss.
    ///
    /// A few comparisons per device; nothing is allocated.
    ///
    /// # Errors
    /// The most helpful reason: what would have to change least for the request to fit.
    #[inline]
    pub fn fit(&self, node: NodeId, request: &Request, hints: Hints<'_>) -> Result<(), Reason> {
        self.node(node).ok_or(Reason::NoDevice)?.fit(request, hints).map(drop)
    }
}

impl Node {
    /// What the request means on this node, if there is room.
    #[inline]
    pub(crate) fn fit(&self, request: &Request, hints: Hints<'_>) -> Result<Need, Reason> {
        let need = self.need(request)?;
        let fitting = self.rows_under(hints).filter(|row| need.on(row.total).within(row.free));
        if fitting.take(need.devices).count() == need.devices { Ok(need) } else { Err(self.miss(need, hints)) }
    }

    pub(crate) fn need(&self, request: &Request) -> Result<Need, Reason> {
        if self.rows.is_empty() {
            return Err(Reason::NoDevice);
        }
        Need::of(request, self.unit_bytes())
    }

    /// Why a need that does not fit does not.
    fn miss(&self, need: Need, hints: Hints<'_>) -> Reason {
        let is_large_enough = |row: &Row| need.on(row.total).within(row.total);
        if self.rows.iter().filter(|row| is_large_enough(row)).count() < need.devices {
            return Reason::TooLarge;
        }
        if self.any_sick {
            let healthy = self.rows.iter().zip(self.gpus()).filter(|(row, gpu)| gpu.healthy && is_large_enough(row));
            if healthy.count() < need.devices {
                return Reason::Unhealthy;
            }
        }
        let mut nearest: Option<(usize, Reason)> = None;
        for (at, row) in self.rows_under(hints).enumerate() {
            if !is_large_enough(&row) || (self.any_sick && self.gpus().get(at).is_some_and(|gpu| !gpu.healthy)) {
                continue;
            }
            let mut lacking = need.on(row.total).lacking(row.free);
            let Some(first) = lacking.next() else { return Reason::TooFew };
            let miss = (1 + lacking.count(), Reason::from(first));
            nearest = Some(nearest.map_or(miss, |nearest| nearest.min(miss)));
        }
        nearest.map_or(Reason::TooLarge, |(_, reason)| reason)
    }
}

//! A pod that holds GPUs, as far as a plan has to know it: its request, what keeps it from moving, and the price of a move.

use std::fmt;

use crate::data::ident::{NodeId, OwnerId};
use crate::data::policy::Policies;
use crate::data::request::{NodeRequest, RequestedGpus};

/// A GiB that is held for one hour, in byte-seconds: the price of a restart.
const GIB_HOUR: u128 = (1 << 30) * 3600;

/// A pod that holds GPUs.
#[derive(Clone, Debug)]
pub struct Holder<'a> {
    /// The pod, by its UID.
    pub owner: OwnerId,
    /// The request of its successor, with CPU and memory.
    pub request: NodeRequest<'a>,
    /// The policies by which its successor gets its place.
    pub policies: Policies,
    /// The nodes that its successor may go to by all rules that the engine does not know, in rising order; `None` for all nodes.
    pub nodes: Option<&'a [NodeId]>,
    /// Its priority: of moves that rank alike otherwise, that of the pod with the lowest priority is tried first.
    pub priority: i32,
    /// Seconds for which it has run.
    pub run_seconds: u64,
    /// The reason for which it must not move, as far as the caller knows; `None` if there is none.
    pub stays: Option<Obstacle>,
}

impl Holder<'_> {
    /// The reason for which the pod stays whatever places there are for its successor.
    pub(super) fn obstacle(&self, min_run_seconds: u64) -> Option<Obstacle> {
        let is_unknown = self.request.gpus == RequestedGpus::Nothing;
        let is_young = self.run_seconds < min_run_seconds;
        let found = self.stays.clone().or(is_unknown.then_some(Obstacle::Unknown));
        found.or(is_young.then_some(Obstacle::Young))
    }
}

/// Why a holder stays where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It has no controller, so that it would have no successor.
    NoController,
    /// The controller of this kind, such as `DaemonSet`, creates no successor on another node.
    Controller(Box<str>),
    /// It is being deleted already.
    Leaving,
    /// Its annotation forbids the eviction.
    Annotation,
    /// A disruption budget has no room.
    Budget {
        /// The budget's name.
        name: Box<str>,
        /// The evictions that the budget allows, 0 or less.
        allowed: i64,
    },
    /// Several disruption budgets select it, which the Eviction API does not support.
    Budgets,
    /// Its group has to stay together, and other members are bound.
    Group,
    /// Its binding is under way.
    Binding,
    /// Node affinity binds it to its node.
    Affinity,
    /// A volume may bind it to its node.
    Volume,
    /// A volume binds it to its node, or to others that do not take it.
    BoundVolume,
    /// It has run for less than [`Limits::min_run_seconds`](crate::Limits::min_run_seconds).
    Young,
    /// The caller knows no request of it.
    Unknown,
    /// No other place has room for its successor, by CPU and memory too.
    NoPlace,
    /// Its own place is the best for its successor.
    Returns,
    /// The plan has no move left: [`Limits::max_moves`](crate::Limits::max_moves), or the bound of the search.
    Limit,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoController => "it has no controller that would create a successor",
            Self::Controller(kind) => {
                return write!(f, "its controller ({kind}) creates no successor on another node");
            }
            Self::Leaving => "it is being deleted already",
            Self::Annotation => "its annotation forbids the eviction",
            Self::Budget { name, allowed } => {
                return write!(f, "disruption budget {name} allows {allowed} evictions");
            }
            Self::Budgets => "several disruption budgets select it, which the Eviction API does not support",
            Self::Group => "its group has to stay together, and other members are bound",
            Self::Binding => "its binding is under way",
            Self::Affinity => "node affinity binds it to its node",
            Self::Volume => "it may be bound to its node by a volume",
            Self::BoundVolume => "its volumes and its other rules leave it no other node",
            Self::Young => "it has run for less than --min-runtime",
            Self::Unknown => "its request is not known",
            Self::NoPlace => "no other place has room for it",
            Self::Returns => "its successor would come back to the same GPUs",
            Self::Limit => "--max-moves, or the bound of the search, leaves no move for it",
        })
    }
}

/// The price of moves: restarts, and the work that they may lose.
///
/// In byte-seconds it is `restarts x 2^30 x 3600 + sum over the moves (bytes held x seconds run)`: a restart counts as one GiB
/// held for one hour. The bytes are the GPU memory that the pod holds on all its GPUs. Sums stop at the end of their range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Price {
    /// Number of pods that restart.
    pub n_restarts: u32,
    /// Bytes held times seconds run, summed over these pods.
    pub byte_seconds: u128,
}

impl Price {
    /// The price of one move.
    pub(super) fn of_move(bytes: u64, run_seconds: u64) -> Self {
        Self {
            n_restarts: 1,
            byte_seconds: u128::from(bytes) * u128::from(run_seconds),
        }
    }

    /// The price as one number, in byte-seconds.
    pub fn total(self) -> u128 {
        self.byte_seconds
            .saturating_add(u128::from(self.n_restarts) * GIB_HOUR)
    }

    /// The memory held times the time run in GiB hours, rounded to two digits after the point.
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown, to people")]
    pub fn gib_hours(self) -> f64 {
        (self.byte_seconds as f64 / GIB_HOUR as f64 * 100.0).round() / 100.0
    }

    /// The price of both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            n_restarts: self.n_restarts.saturating_add(other.n_restarts),
            byte_seconds: self.byte_seconds.saturating_add(other.byte_seconds),
        }
    }
}

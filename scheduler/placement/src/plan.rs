//! Plans: moves of pods by which a node or some of its GPUs become empty, or by which free memory comes together on one GPU.
//!
//! A move is an eviction: the controller of the pod creates a successor, which takes the best place by the engine, with all
//! earlier moves counted and the pod gone. So a plan chooses the pods that move and their order, and not their targets. It moves
//! each pod once at most, and only holders of the GPUs that become empty or free. Of the plans that it finds to reach the goal it
//! returns the one with the least [`Price`]; all moves are tried on copies of nodes.

mod evacuation;
mod free;
mod goal;
mod holder;
mod join;
mod trials;

use crate::data::holding::Placement;
use crate::data::ident::{NodeId, OwnerId};
use crate::fleet::Fleet;

pub use goal::{Goal, Limits, PlanError, nodes_with_gpus};
pub use holder::{Holder, Obstacle, Price};

/// Moves for a goal, in the order in which they have to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The moves.
    pub moves: Vec<Move>,
    /// The holders that keep GPUs from being empty or free, each with the reason for which it stays. Empty for
    /// [`Goal::Join`], and for a [`Goal::Free`] that is reached.
    pub left: Vec<(OwnerId, Obstacle)>,
    /// True if the moves reach the goal; otherwise they come nearest to it. Holders that must not move do not keep a node from
    /// being empty in this sense.
    pub is_reached: bool,
    /// Bytes of memory that the moved pods leave on the GPUs of the goal; for [`Goal::Join`] the sum over all nodes by which
    /// their largest free block grows.
    pub gain_bytes: u64,
    /// The price of all moves.
    pub price: Price,
}

/// The move of one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The pod, by its UID.
    pub owner: OwnerId,
    /// The node that it leaves.
    pub from: NodeId,
    /// Minors of the GPUs that it leaves.
    pub from_gpus: Vec<u32>,
    /// The node of its successor.
    pub to: NodeId,
    /// The devices of its successor.
    pub placement: Placement,
}

/// Plans the moves for a goal. `holders` are the pods that the caller knows, in any order and each once; all others stay.
///
/// # Errors
/// If the goal names a node, GPUs or amounts that the fleet does not have.
pub fn plan(
    fleet: &Fleet,
    goal: Goal<'_>,
    holders: &[Holder<'_>],
    limits: Limits,
) -> Result<Plan, PlanError> {
    let mut trials = trials::Trials::new(fleet, holders, limits);
    match goal {
        Goal::EmptyNode(node) => {
            let gpus = goal::gpus_of(fleet, node, None)?;
            Ok(evacuation::empty(&mut trials, node, gpus))
        }
        Goal::EmptyGpus(node, minors) => {
            let gpus = goal::gpus_of(fleet, node, Some(minors))?;
            Ok(evacuation::empty(&mut trials, node, gpus))
        }
        Goal::Free { bytes, n_gpus, nodes } => {
            goal::check_free(fleet, bytes, n_gpus, nodes)?;
            Ok(free::free(&mut trials, bytes, n_gpus, nodes))
        }
        Goal::Join => Ok(join::join(&mut trials)),
    }
}

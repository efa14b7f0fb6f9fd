//! Trials: placements on copies of nodes, which show how many more pods would fit. The fleet itself does not change.

use crate::choice::group::{GroupRequest, GroupRoom, GroupSearch, room_for_group};
use crate::choice::node_choice::{choose_devices, score};
use crate::data::holding::{Held, Hints, Holdings, Origin, Placement};
use crate::data::ident::{NodeId, OwnerId};
use crate::data::policy::{Policies, Score};
use crate::data::reason::Reason;
use crate::data::request::NodeRequest;
use crate::fleet::Fleet;
use crate::state::node::Node;

/// Copies of nodes, and the placements that were tried on them.
#[derive(Debug, Default)]
pub struct Trial {
    copies: Vec<Node>,
    n_placements: u32,
}

impl Trial {
    /// Copies a node with its holdings and hints; returns the number of the copy, or `None` if the node is gone.
    pub fn copy(&mut self, fleet: &Fleet, node: NodeId) -> Option<usize> {
        let copy = fleet.nodes.get(node)?.copy_with_hints(|_| true);
        self.copies.push(copy);
        Some(self.copies.len() - 1)
    }

    /// Copies a node without any holding, hint or use of its CPU; returns the number of the copy, or `None` if the node is gone.
    pub fn copy_empty(&mut self, fleet: &Fleet, node: NodeId) -> Option<usize> {
        let copy = fleet.nodes.get(node)?.emptied();
        self.copies.push(copy);
        Some(self.copies.len() - 1)
    }

    /// Opens all GPUs of a copy, as those of a node that is added are.
    pub fn open(&mut self, copy: usize) {
        if let Some(node) = self.copies.get_mut(copy) {
            node.open();
        }
    }

    /// The score of a copy for a request.
    ///
    /// # Errors
    /// The reason for which there is no room.
    pub fn score(
        &mut self,
        fleet: &Fleet,
        copy: usize,
        request: NodeRequest<'_>,
        policies: Policies,
    ) -> Result<Score, Reason> {
        let node = self.copies.get_mut(copy).ok_or(Reason::NoDevice)?;
        // The last placement has changed the copy.
        node.value_cache.clear();
        score(node, request, policies, fleet.context(Hints::Respect))
    }

    /// Room on a copy for all members of a group in one domain; nothing is placed.
    ///
    /// # Errors
    /// As those of [`Fleet::room_for_group`].
    pub fn room_for_group(
        &self,
        fleet: &Fleet,
        copy: usize,
        request: &GroupRequest<'_>,
        search: &mut GroupSearch,
    ) -> Result<GroupRoom, usize> {
        let node = self.copies.get(copy).ok_or(0_usize)?;
        room_for_group(node, request, fleet.context(Hints::Respect), search)
    }

    /// Places a request on a copy, where it stays.
    ///
    /// # Errors
    /// The reason for which there is no room.
    pub fn place(
        &mut self,
        fleet: &Fleet,
        copy: usize,
        request: NodeRequest<'_>,
        policies: Policies,
    ) -> Result<Placement, Reason> {
        let node = self.copies.get_mut(copy).ok_or(Reason::NoDevice)?;
        node.value_cache.clear();
        let placement = choose_devices(node, request, policies.device, fleet.context(Hints::Respect))?;
        self.n_placements += 1;
        // No UID of a pod has a slash, so that this owner is none of the fleet's.
        let owner = OwnerId::from(format!("trial/{}", self.n_placements).as_str());
        node.insert_held(Held {
            owner,
            origin: Origin::Decision,
            holdings: Holdings::from(&placement),
        });
        // The next request must see the CPU and memory that this request takes, as kube-scheduler would.
        node.host.used = node.host.used.plus(request.host);
        Ok(placement)
    }
}

//! The fleet: the engine's interface, over all nodes, their holdings and hints, and the workload model. An owner of holdings or
//! hints is a pod, by its UID.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::batch::cache::ScoreCache;
use crate::batch::evaluation::BatchEvaluation;
use crate::batch::next_model::NextModel;
#[cfg(any(test, feature = "check"))]
use crate::check::{Violation, check, check_group};
use crate::choice::admit::{ReserveError, admit};
use crate::choice::cost::{ChoiceContext, WorkloadModel};
#[cfg(any(test, feature = "check"))]
use crate::choice::group::SharedDomain;
use crate::choice::group::{GroupRequest, GroupRoom, GroupSearch, room_for_group};
use crate::choice::node_choice::{choose_devices, fit, misfit, score};
use crate::choice::preempt::{Preemption, Victims, preempt};
use crate::data::amounts::HostAmounts;
use crate::data::holding::{Held, Hints, Holdings, Origin, Placement};
use crate::data::ident::{DeviceId, NodeId, OwnerId};
use crate::data::indices_where;
use crate::data::inventory::Inventory;
use crate::data::misfit::Misfit;
use crate::data::policy::{DevicePolicy, Policies, ResourceWeights, Score};
use crate::data::reason::Reason;
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::data::workload::{PodProfile, Workload};
use crate::explain::{DeviceFit, NodeView, explain};
use crate::state::node::{HostUse, NodeCopy};
use crate::state::nodes::Nodes;

/// All nodes with their devices, holdings and hints.
#[derive(Debug, Default)]
pub struct Fleet {
    pub(crate) nodes: Nodes,
    weights: ResourceWeights,
    workload: Workload,
    pub(crate) model: WorkloadModel,
    /// The number of the latest workload model, whether it took effect or not.
    n_models: AtomicU64,
    cache: ScoreCache,
}

/// Facts, reservations and hints.
impl Fleet {
    /// A fleet without nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same fleet with these weights of resources, for the policies that score by them; by default no resource has a weight.
    #[must_use]
    pub fn with_weights(self, weights: ResourceWeights) -> Self {
        Self { weights, ..self }
    }

    /// A fleet without nodes, with the weights and the workload of this one.
    #[must_use]
    pub fn without_nodes(&self) -> Self {
        Self {
            weights: self.weights.clone(),
            workload: self.workload.clone(),
            model: self.model.clone(),
            // Later models must not have the number of the one that is taken over.
            n_models: AtomicU64::new(self.model.number),
            ..Self::default()
        }
    }

    /// A copy of a node for another fleet; `None` if the node is gone.
    pub fn copy_node(&self, id: NodeId) -> Option<NodeCopy> {
        let node = self.nodes.get(id)?;
        let mut host_uses = Vec::with_capacity(node.held.len());
        for Held { owner, .. } in &node.held {
            // Holdings and use of CPU are reported apart, and need not be of one node.
            if let Some(used) = self.nodes.host_uses.get(owner)
                && used.node_index == id.index
            {
                host_uses.push((owner.clone(), *used));
            }
        }
        let node = node.copy();
        Some(NodeCopy { node, host_uses })
    }

    /// A copy of a node without any holding, hint or use of its CPU and memory; `None` if the node is gone.
    pub fn copy_empty_node(&self, id: NodeId) -> Option<NodeCopy> {
        Some(NodeCopy {
            node: self.nodes.get(id)?.emptied(),
            host_uses: Vec::new(),
        })
    }

    /// Adds a copy of a node of another fleet. This fleet must have no node of its name.
    pub fn insert(&mut self, copy: NodeCopy) -> NodeId {
        let id = self.nodes.insert(copy.node);
        // Not by `set_host_use`: the node's sums, which come with the copy, have these amounts already.
        for (owner, used) in copy.host_uses {
            let node_index = id.index;
            self.nodes.host_uses.insert(owner, HostUse { node_index, ..used });
        }
        id
    }

    /// Sets a node's devices, and computes again what its holdings take of them.
    ///
    /// Devices that cannot be used are left out and reported.
    pub fn set_inventory(&mut self, node: &str, mut inventory: Inventory) -> Vec<String> {
        let problems = inventory.normalize();
        if let Some(gpu) = inventory.model() {
            self.model.add_gpu_model(gpu);
        }
        self.nodes.set_inventory(node, inventory);
        problems
    }

    /// Removes a node's devices: the node, or its report, is gone. The holdings on the node stay until they are released.
    pub fn remove_inventory(&mut self, node: &str) {
        self.nodes.remove_inventory(node);
    }

    /// Sets a fact: the holdings of an owner, in place of everything that it held, reserved or hinted at before.
    ///
    /// Facts are never refused; a fact that exceeds a device leaves nothing free there. The node need not be known yet.
    pub fn hold(&mut self, owner: &OwnerId, node: &str, holdings: impl Into<Holdings>) {
        let index = self.nodes.enter(node);
        self.nodes.hold(owner, index, Origin::Fact, holdings.into());
    }

    /// Reserves a placement. Hints of other owners do not count; the owner's own hint is removed.
    ///
    /// # Errors
    /// If it would oversubscribe a device in any dimension, a device is unhealthy, closed or gone, or the owner holds something
    /// already.
    pub fn reserve(
        &mut self,
        owner: &OwnerId,
        node: NodeId,
        placement: &Placement,
    ) -> Result<(), ReserveError> {
        let Some(target) = self.nodes.get(node) else {
            return Err(ReserveError("the node is gone".to_owned()));
        };
        if let Some(index) = self.nodes.owners.get(owner)
            && let Some(current) = self.nodes.at(*index)
        {
            // A second reservation would move or double the pod.
            let text = format!("the pod already holds other shares on node {}", current.name);
            return Err(ReserveError(text));
        }
        admit(target, placement)?;
        // Counted at once: the watch shows the bound pod later, as a fact that takes the place of this decision.
        self.nodes
            .hold(owner, node.index, Origin::Decision, Holdings::from(placement));
        Ok(())
    }

    /// Returns true if a node has room for a placement, as [`Self::reserve`] checks it; hints do not count.
    pub fn admits(&self, node: NodeId, placement: &Placement) -> bool {
        let node = self.nodes.get(node);
        node.is_some_and(|node| admit(node, placement).is_ok())
    }

    /// Removes an owner's holdings and hint; returns false if it held nothing.
    pub fn release(&mut self, owner: &str) -> bool {
        self.nodes.release(owner)
    }

    /// Sets the placement that an owner is expected to reserve soon, in place of its earlier hint; returns false if it
    /// already holds something or the node is gone. The caller decides when a hint expires.
    pub fn hint(&mut self, owner: &OwnerId, node: NodeId, placement: &Placement) -> bool {
        self.nodes.hint(owner, node, placement)
    }

    /// Removes an owner's hint; returns false if it had none.
    pub fn unhint(&mut self, owner: &str) -> bool {
        self.nodes.unhint(owner)
    }

    /// Sets the CPU and memory that a node has for pods; `None` if they are not known.
    pub fn set_host(&mut self, node: &str, total: Option<HostAmounts>) {
        self.nodes.set_host(node, total);
    }

    /// Sets the CPU and memory that an owner uses of a node, in place of its former use. `is_daemon` is true for a pod that is
    /// tied to one node, as one of a `DaemonSet` is: the workload model does not count it.
    pub fn set_host_use(&mut self, owner: &OwnerId, node: &str, amounts: HostAmounts, is_daemon: bool) {
        self.nodes.set_host_use(owner, node, amounts, is_daemon);
    }

    /// Removes the CPU and memory that an owner uses.
    pub fn clear_host_use(&mut self, owner: &str) {
        self.nodes.clear_host_use(owner);
    }

    /// Counts a change in [`Self::n_openings`] that the engine does not see, such as a hint that ended without a reservation.
    pub fn note_opening(&mut self) {
        self.nodes.n_openings += 1;
    }
}

/// Look-ups and views.
impl Fleet {
    /// Finds a node by its name; `None` if nothing is known of it.
    #[inline]
    pub fn node_id(&self, name: &str) -> Option<NodeId> {
        self.nodes.names.get(name).copied()
    }

    /// Number of changes so far of the table of node names: results of [`Self::node_id`] hold as long as it is the same.
    pub fn names_version(&self) -> u64 {
        self.nodes.names_version
    }

    /// Number of changes so far by which a request that was refused may fit now: grows with every inventory, release and holding
    /// that takes the place of another.
    pub fn n_openings(&self) -> u64 {
        self.nodes.n_openings
    }

    /// Number of changes of all nodes so far.
    pub fn n_changes(&self) -> u64 {
        self.nodes.n_changes
    }

    /// Number of owners that hold something.
    pub fn n_owners(&self) -> usize {
        self.nodes.owners.len()
    }

    /// Number of hints.
    pub fn n_hints(&self) -> usize {
        self.nodes.hinted.len()
    }

    /// Every node, in a fixed but arbitrary order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeView<'_>> {
        self.nodes.iter().map(|(id, node)| NodeView::new(id, node))
    }

    /// Every node with its version, which grows with every change of the node.
    pub fn node_versions(&self) -> impl Iterator<Item = (NodeId, u64)> {
        let summaries = (0..).zip(&self.nodes.summaries);
        let existing = summaries.filter(|(_, summary)| summary.exists);
        existing.map(|(index, summary)| (summary.node_at(index), summary.version))
    }

    /// One node; `None` if it is gone.
    pub fn view(&self, id: NodeId) -> Option<NodeView<'_>> {
        Some(NodeView::new(id, self.nodes.get(id)?))
    }

    /// The holding of an owner.
    pub fn held_by(&self, owner: &str) -> Option<&Held> {
        self.nodes.at(*self.nodes.owners.get(owner)?)?.held_by(owner)
    }

    /// The CPU and memory that an owner uses, if known.
    pub fn host_use_of(&self, owner: &str) -> Option<HostAmounts> {
        Some(self.nodes.host_uses.get(owner)?.amounts)
    }

    /// Every violated invariant; empty if there is none.
    ///
    /// Shares whose GPU, amount or record is doubtful do not count as oversubscription. Holdings of unhealthy devices, or
    /// of nodes that are gone, violate nothing. Only decisions can violate exclusive use: facts stand.
    #[cfg(any(test, feature = "check"))]
    pub fn check(&self) -> Vec<Violation> {
        check(&self.nodes)
    }

    /// The violation of members of a group that hold devices outside of one domain.
    #[cfg(any(test, feature = "check"))]
    pub fn check_group(&self, members: &[OwnerId], domain: SharedDomain) -> Option<Violation> {
        check_group(&self.nodes, members, domain)
    }
}

/// Decisions on one node, and the evaluation of many.
impl Fleet {
    /// Checks that a node has room for a request. For GPUs alone, without constraints, this takes a few comparisons per GPU and
    /// no allocation, unless the partition table of the node binds or a pod has exclusive use of devices there.
    ///
    /// # Errors
    /// The most helpful reason: the least change by which the request would fit.
    #[inline]
    pub fn fit<'r>(
        &self,
        node: NodeId,
        request: impl Into<NodeRequest<'r>>,
        hints: Hints<'_>,
    ) -> Result<(), Reason> {
        let node = self.nodes.get(node).ok_or(Reason::NoDevice)?;
        fit(node, request.into(), hints)
    }

    /// The detailed explanation of a refusal, in the terms of the node; `None` if there is room. Slower than [`Self::fit`].
    pub fn misfit<'r>(
        &self,
        node: NodeId,
        request: impl Into<NodeRequest<'r>>,
        hints: Hints<'_>,
    ) -> Option<Misfit> {
        match self.nodes.get(node) {
            Some(node) => misfit(node, request.into(), hints),
            None => Some(Reason::NoDevice.into()),
        }
    }

    /// The devices to take on a node for a request.
    pub fn choose_devices<'r>(
        &self,
        node: NodeId,
        request: impl Into<NodeRequest<'r>>,
        policy: DevicePolicy,
        hints: Hints<'_>,
    ) -> Result<Placement, Reason> {
        let node = self.nodes.get(node).ok_or(Reason::NoDevice)?;
        choose_devices(node, self.context(request.into(), policy, hints))
    }

    /// The score of a node for a request after the best choice of its devices; 0 if there is no room.
    #[cfg(any(test, feature = "check"))]
    pub fn score<'r>(
        &self,
        node: NodeId,
        request: impl Into<NodeRequest<'r>>,
        policies: Policies,
        hints: Hints<'_>,
    ) -> Score {
        let context = self.context(request.into(), policies.device, hints);
        match self.nodes.get(node) {
            Some(node) => score(node, policies.node, context).unwrap_or_default(),
            None => Score::default(),
        }
    }

    /// Compares a request with every GPU of a node, by minor; empty if it asks for neither shares nor whole GPUs.
    ///
    /// # Errors
    /// The reason for which the request compares with no GPU at all.
    pub fn explain(
        &self,
        node: NodeId,
        request: impl Into<RequestedGpus>,
        hints: Hints<'_>,
    ) -> Result<Vec<DeviceFit<'_>>, Reason> {
        let node = self.nodes.get(node).ok_or(Reason::NoDevice)?;
        explain(node, request.into(), hints)
    }

    /// The victims by which a request fits on a node, none if it fits as it is; `None` if evicting all pods that may be
    /// evicted does not help.
    pub fn preempt(
        &self,
        node: NodeId,
        request: NodeRequest<'_>,
        preemption: Preemption<'_>,
    ) -> Option<Victims> {
        preempt(self.nodes.get(node)?, request, preemption)
    }

    /// Room on a node for all members of a group in one domain.
    ///
    /// # Errors
    /// The most members for which one domain of the node has room, at most [`MAX_GROUP`](crate::MAX_GROUP). This may be all that
    /// need room, where no link group could hold the whole group on an empty node.
    pub fn room_for_group(
        &self,
        node: NodeId,
        request: &GroupRequest<'_>,
        hints: Hints<'_>,
        search: &mut GroupSearch,
    ) -> Result<GroupRoom, usize> {
        let node = self.nodes.get(node).ok_or(0_usize)?;
        let context = self.context(request.member, request.policies.device, hints);
        room_for_group(node, request, context, search)
    }

    /// The devices to take on a node for a request, its GPUs only from `gpus`. The owners in `gone` count as holding nothing, and
    /// the hints of those in `uncounted` do not count.
    pub fn choose_devices_among(
        &self,
        node: NodeId,
        request: NodeRequest<'_>,
        policy: DevicePolicy,
        gpus: Option<&[DeviceId]>,
        (gone, uncounted): (&[OwnerId], &[OwnerId]),
    ) -> Result<Placement, Reason> {
        let node = self.nodes.get(node).ok_or(Reason::NoDevice)?;
        let mut copy = node.copy_with_hints(|owner| !uncounted.contains(owner));
        for owner in gone {
            copy.remove_held(owner.as_str());
        }
        if let Some(gpus) = gpus {
            let among: Vec<usize> = indices_where(node.gpus(), |gpu| gpus.contains(&gpu.id)).collect();
            copy.offer_only(&among);
        }
        choose_devices(&copy, self.context(request, policy, Hints::Respect))
    }

    /// Prepares the evaluation of many nodes for one request.
    pub fn evaluation<'a>(
        &'a self,
        request: impl Into<NodeRequest<'a>>,
        policies: Policies,
        hints: Hints<'a>,
    ) -> BatchEvaluation<'a> {
        let request = request.into();
        let scores = self.cache.scores(&request, policies, &self.nodes);
        let context = self.context(request, policies.device, hints);
        BatchEvaluation::new(&self.nodes, context, policies.node, scores)
    }

    /// The inputs of a choice besides the node, with the workload model in effect.
    pub(crate) fn context<'a>(
        &'a self,
        request: NodeRequest<'a>,
        policy: DevicePolicy,
        hints: Hints<'a>,
    ) -> ChoiceContext<'a> {
        ChoiceContext {
            request,
            policy,
            weights: &self.weights,
            model: &self.model,
            hints,
        }
    }
}

/// Placements on copies of nodes, which show how many more pods would fit. The fleet itself does not change.
impl Fleet {
    /// The score of a copy for a request.
    pub fn score_copy(
        &self,
        copy: &NodeCopy,
        request: NodeRequest<'_>,
        policies: Policies,
    ) -> Result<Score, Reason> {
        let context = self.context(request, policies.device, Hints::Respect);
        score(&copy.node, policies.node, context)
    }

    /// As [`Self::room_for_group`], on a copy; nothing is placed.
    pub fn room_on_copy(
        &self,
        copy: &NodeCopy,
        request: &GroupRequest<'_>,
        search: &mut GroupSearch,
    ) -> Result<GroupRoom, usize> {
        let context = self.context(request.member, request.policies.device, Hints::Respect);
        room_for_group(&copy.node, request, context, search)
    }

    /// Places a request on a copy, which then counts its devices, CPU and memory as in use.
    pub fn place_on_copy(
        &self,
        copy: &mut NodeCopy,
        request: NodeRequest<'_>,
        policies: Policies,
    ) -> Result<Placement, Reason> {
        let context = self.context(request, policies.device, Hints::Respect);
        let placement = choose_devices(&copy.node, context)?;
        copy.node.put_on_copy(&placement, request.host);
        Ok(placement)
    }
}

/// The workload model: a sample of the present pods, from which the policy `fill` expects the pods to come.
impl Fleet {
    /// The pods that ask for GPUs. Changes take effect with the [next model](Self::next_model).
    pub fn workload(&self) -> &Workload {
        &self.workload
    }

    /// The pods that ask for GPUs, to add to and to remove from.
    pub fn workload_mut(&mut self) -> &mut Workload {
        &mut self.workload
    }

    /// The workload model of the present pods, CPU-only pods on nodes with GPUs included; `None` if it is the one in effect.
    pub fn next_model(&self) -> Option<NextModel> {
        let sample = self.workload.sample(&self.nodes.cpu_only);
        if sample == self.model.sample {
            return None;
        }
        let number = 1 + self.n_models.fetch_add(1, Ordering::Relaxed);
        let gpus = self.model.gpu_models().collect();
        let model = WorkloadModel::new(number, sample);
        Some(NextModel::new(model, gpus, self.cache.without_results()))
    }

    /// Puts a workload model of this fleet into effect. `next` then holds the one before, whose many results the caller can drop
    /// after it has released its lock of the fleet.
    pub fn set_model(&mut self, next: &mut NextModel) {
        // A node with another model of GPU may have come since the last preparation.
        next.model.add_gpu_models_of(&self.model);
        std::mem::swap(&mut self.model, &mut next.model);
        std::mem::swap(&mut self.cache, &mut next.cache);
    }

    /// Puts the workload model of the present pods into effect at once; returns false if it is so already. The next request of
    /// each kind then simulates all nodes.
    pub fn refresh_workload_model(&mut self) -> bool {
        let Some(mut next) = self.next_model() else {
            return false;
        };
        self.set_model(&mut next);
        true
    }

    /// The pods that the model expects: each kind, and its number in a thousand pods, the commonest first. Empty before the first
    /// model takes effect.
    pub fn expected_workload(&self) -> Vec<(PodProfile, u32)> {
        let sample = &self.model.sample;
        let mut counts: BTreeMap<PodProfile, usize> = BTreeMap::new();
        for profile in sample {
            *counts.entry(*profile).or_default() += 1;
        }
        let mut expected = Vec::with_capacity(counts.len());
        for (profile, n) in counts {
            let permille = (n * 1000 + sample.len() / 2) / sample.len().max(1);
            expected.push((profile, u32::try_from(permille).unwrap_or(1000)));
        }
        // A stable sort, so that kinds of one number keep the order of the map and two answers are equal.
        expected.sort_by_key(|(_, permille)| Reverse(*permille));
        expected
    }
}

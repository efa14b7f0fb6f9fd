//! What binds decide before the API server knows: devices chosen and reserved, until the watch shows them or they fall.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use placement::{
    DeviceShare, Hints, Holdings, Inventory, NodeId, OwnerId, Placement, Reason, RequestedGpus, ReserveError,
};
use proto::device::{TYPE_GPU, VirtualFunction};
use proto::quantity::Quantity;
use proto::record::{DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::{Dialect, GpuRequest, Memory};
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use super::pods::PodEntry;
use super::{Index, NodeAsk, NodeState};
use crate::accounting::{Bound, PodFacts};
use crate::bind::{PodBinding, PodId, PodLookup};
use crate::inventory::record_id;

/// How long a write whose answer was lost may still be under way: far longer than the time in which the API server was
/// asked to give up.
const UNDER_WAY: Duration = Duration::from_secs(60);

/// A bind that was decided and is not yet seen.
#[derive(Clone, Debug)]
pub struct Assumption {
    /// The binding as it is written, every time it is written.
    pub order: PodBinding,
    /// Its assume timestamp, which tells it from every other decision.
    pub stamp: u64,
    /// How far it has come.
    pub phase: Phase,
    /// When it came so far.
    pub since: Instant,
    /// Whether a list has left its pod out since it was written.
    pub(super) unlisted: bool,
    /// Whether this replica has ceased to lead since it was decided.
    pub(super) outlived: bool,
}

/// How far a decision has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Being written.
    Writing,
    /// Written; the watch has not shown it yet.
    Written,
    /// Nobody knows whether it was written.
    Doubtful,
}

/// A decision at one moment, which tells whether it has moved on since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Names the decision.
    pub stamp: u64,
    /// How far it has come.
    pub phase: Phase,
    since: Instant,
}

/// What a bind should do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assumed {
    /// Write this.
    Write {
        /// The binding.
        order: PodBinding,
        /// Names the decision.
        stamp: u64,
        /// Whether it has been written before, with an outcome that is not known.
        repeated: bool,
    },
    /// Nothing: the watch has shown the pod on that very node.
    AlreadyBound,
}

/// Why a bind cannot be decided; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AssumeError {
    /// The pod is on another node.
    #[error("the pod is already bound to node {node:?}")]
    BoundElsewhere {
        /// Where it is.
        node: String,
    },
    /// An earlier bind to another node may have got through.
    #[error("an earlier bind of the pod to node {node:?} is not settled yet")]
    AssumedElsewhere {
        /// Where it may be.
        node: String,
    },
    /// An earlier bind to the same node may have got through, and must not be repeated.
    #[error("an earlier bind of the pod is not settled yet; another replica may have decided since")]
    Outlived,
    /// The request breaks a rule.
    #[error("{detail}")]
    Invalid {
        /// The rule.
        detail: String,
    },
    /// No room.
    #[error("node {node:?}: {reason}{}", .detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default())]
    NoRoom {
        /// The node.
        node: String,
        /// What is missing.
        reason: Reason,
        /// The rule, and how near the node comes, if there is more to say.
        detail: Option<String>,
    },
    /// The engine refused its own choice.
    #[error("node {node:?} cannot take the pod")]
    Reserve {
        /// The node.
        node: String,
        /// Why.
        #[source]
        source: ReserveError,
    },
}

impl Index {
    /// Chooses devices for a pod on a node and reserves them; for a decision that stands already, the same again.
    ///
    /// # Errors
    /// Why the pod cannot be bound there.
    pub fn assume(
        &mut self,
        pod: &PodId,
        facts: &PodFacts,
        node: &str,
        nanos: u64,
        now: Instant,
    ) -> Result<Assumed, AssumeError> {
        let entry = self.pods.get_mut(pod.uid.as_str());
        if let Some(bound) = entry
            .as_ref()
            .and_then(|entry| entry.facts.bound.as_ref())
            .or(facts.bound.as_ref())
        {
            let same = *bound.node == *node;
            return if same {
                Ok(Assumed::AlreadyBound)
            } else {
                Err(AssumeError::BoundElsewhere {
                    node: bound.node.to_string(),
                })
            };
        }
        if let Some(assumption) = entry.and_then(|entry| entry.assumption.as_mut()) {
            return assumption.again(node, now);
        }
        // kube-scheduler may have seen a new node before us; what it has is not known until we see it too.
        if !self.knows_node(node) {
            return Err(AssumeError::NoRoom {
                node: node.to_owned(),
                reason: Reason::NoDevice,
                detail: None,
            });
        }
        let ask = self
            .ask(&pod.uid, facts)
            .map_err(|error| AssumeError::Invalid {
                detail: error.to_string(),
            })?
            .unwrap_or_default();
        let placement = self.choose(&ask, node)?;
        let stamp = self.stamps.next(nanos);
        let mut annotations = self
            .record(facts.ask.gpus(), node, &placement, stamp)
            .annotations();
        // Where nothing is chosen here, a record that came with a copied pod must not be taken for what was chosen.
        annotations
            .entry(DEVICE_ALLOCATED.to_owned())
            .or_insert_with(|| "{}".to_owned());
        let order = PodBinding {
            pod: pod.clone(),
            node: node.to_owned(),
            annotations,
            labels: facts.labels_on(node),
        };
        let assumption = Assumption {
            order: order.clone(),
            stamp,
            phase: Phase::Writing,
            since: now,
            unlisted: false,
            outlived: false,
        };
        let entry = self
            .pods
            .entry(OwnerId::from(pod.uid.as_str()))
            .or_insert_with(|| PodEntry::new(facts.clone()));
        entry.assumption = Some(Box::new(assumption));
        self.end_hint(&pod.uid, Some(node));
        let owner = self.owner(&pod.uid);
        self.fleet.set_host_use(&owner, node, facts.host);
        Ok(Assumed::Write {
            order,
            stamp,
            repeated: false,
        })
    }

    /// Chooses and reserves. Room that is hinted at is taken only if there is no other.
    fn choose(&mut self, ask: &NodeAsk<'_>, node: &str) -> Result<Placement, AssumeError> {
        let no_room = |index: &Self, reason| AssumeError::NoRoom {
            node: node.to_owned(),
            reason,
            detail: index.detail(node, ask, reason),
        };
        let owner = self.owner(ask.uid);
        let Some(id) = self
            .fit_somehow(node, ask)
            .map_err(|reason| no_room(self, reason))?
        else {
            return Ok(self.hold_unknown(&owner, ask, node));
        };
        let choose = |hints| self.fleet.choose(id, ask.devices(), ask.policies.device, hints);
        let placement = choose(Hints::RespectOthers(ask.uid))
            .or_else(|_| choose(Hints::Ignore))
            .map_err(|reason| no_room(self, reason))?;
        if placement == Placement::default() {
            return Ok(placement);
        }
        match self.fleet.reserve(&owner, id, &placement) {
            Ok(()) => Ok(placement),
            Err(source) => Err(AssumeError::Reserve {
                node: node.to_owned(),
                source,
            }),
        }
    }

    /// The node's place in the fleet, if anything is known of its devices or nothing need be.
    fn fit_somehow(&self, node: &str, ask: &NodeAsk<'_>) -> Result<Option<NodeId>, Reason> {
        match self.fleet.node_id(node) {
            Some(id) => self.refuse_unserved(node, ask).map(|()| Some(id)),
            None => self.fit(node, ask),
        }
    }

    /// Takes note of what a pod will hold on a node of whose devices nothing is known: kubelet decides.
    fn hold_unknown(&mut self, owner: &OwnerId, ask: &NodeAsk<'_>, node: &str) -> Placement {
        let mut placement = Placement::default();
        if let RequestedGpus::Whole(n) = ask.gpus {
            (placement.unknown_whole, placement.is_vendor) = (n, true);
            self.fleet.hold(owner, node, Holdings::from(&placement));
        }
        placement
    }

    /// What the pod's annotations will say.
    fn record(&self, request: Option<&GpuRequest>, node: &str, placement: &Placement, stamp: u64) -> Record {
        let state = self.nodes.get(node);
        let opaque = state.is_some_and(NodeState::is_opaque);
        let view = self.fleet.node_id(node).and_then(|node| self.fleet.view(node));
        let inventory = view.and_then(placement::NodeView::inventory);
        let mut allocations = DeviceAllocations::new();
        for share in &placement.shares {
            allocations
                .entry(TYPE_GPU.to_owned())
                .or_default()
                .push(allocation(share, inventory, opaque));
        }
        for share in &placement.others {
            allocations
                .entry(share.kind.to_string())
                .or_default()
                .push(allocation_of_other(share));
        }
        let memory = request.map(|request| (request.dialect, request.memory));
        let gpushare = match (memory, placement.shares.first()) {
            (Some((Dialect::Gpushare, Memory::Units(pod_units))), Some(share)) => Some(GpushareRecord {
                idx: share.minor,
                pod_units,
                device_units: inventory
                    .and_then(|inventory| units_of(share, inventory))
                    .unwrap_or_default(),
                assigned: false,
            }),
            _ => None,
        };
        Record {
            allocations,
            assumed_at: Some(stamp),
            gpushare,
        }
    }

    /// A decision has been written.
    pub fn confirm(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.advance(uid, stamp, Phase::Written, now);
    }

    /// The pod of a decision is on the node that was decided; what it holds there is what its annotations say, as
    /// somebody else may have written them.
    pub fn confirm_found(
        &mut self,
        uid: &str,
        stamp: u64,
        annotations: &BTreeMap<String, String>,
        now: Instant,
    ) {
        self.confirm(uid, stamp, now);
        let entry = self.pods.get_mut(uid);
        let assumption = entry
            .and_then(|entry| entry.assumption.as_mut())
            .filter(|assumption| assumption.stamp == stamp);
        let Some(assumption) = assumption else { return };
        if Bound::read(&assumption.order.node, Some(annotations)).assumed_at != Some(stamp) {
            assumption.order.annotations.clone_from(annotations);
            let owner = self.owner(uid);
            self.account(&owner);
        }
    }

    /// Nobody knows whether a decision has been written.
    pub fn doubt(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.advance(uid, stamp, Phase::Doubtful, now);
    }

    fn advance(&mut self, uid: &str, stamp: u64, phase: Phase, now: Instant) {
        let entry = self.pods.get_mut(uid);
        if let Some(assumption) = entry
            .and_then(|entry| entry.assumption.as_mut())
            .filter(|assumption| assumption.stamp == stamp)
        {
            assumption.phase = phase;
            assumption.since = now;
            assumption.unlisted = false;
        }
    }

    /// A decision has certainly not been written, and will not be: its devices are free again.
    pub fn forget(&mut self, uid: &str, stamp: u64) {
        let Some(entry) = self.pods.get_mut(uid) else {
            return;
        };
        if entry
            .assumption
            .take_if(|assumption| assumption.stamp == stamp)
            .is_none()
        {
            return;
        }
        entry.problem = None;
        let unseen = entry.list == 0;
        self.fleet.release(uid);
        self.fleet.clear_host_use(uid);
        if unseen {
            self.remove_pod(uid);
        }
    }

    /// How far a pod's decision has come; `None` once it is seen or has fallen.
    pub fn moment(&self, uid: &str) -> Option<Moment> {
        Some(self.pods.get(uid)?.assumption.as_ref()?.moment())
    }

    /// The node that a pod's open decision names.
    pub fn assumed_node(&self, uid: &str) -> Option<&str> {
        Some(self.pods.get(uid)?.assumption.as_ref()?.order.node.as_str())
    }

    /// Settles a decision by what a look at its pod has found since `moment`, if it has not moved on; whether it now is
    /// settled.
    ///
    /// That the pod is not bound settles nothing for a while: the write may still be under way.
    pub fn settle(&mut self, uid: &str, moment: Moment, found: &PodLookup, now: Instant) -> bool {
        let Some(assumption) = self.pods.get(uid).and_then(|entry| entry.assumption.as_ref()) else {
            return true;
        };
        if assumption.moment() != moment {
            return false;
        }
        let n_openings = self.fleet.n_openings();
        match found {
            PodLookup::Bound { node, annotations } if *node == assumption.order.node => {
                self.confirm_found(uid, moment.stamp, annotations, now);
            }
            PodLookup::Unbound if now.saturating_duration_since(moment.since) < UNDER_WAY => return false,
            PodLookup::Gone => self.remove_pod(uid),
            // If somebody else has bound it, the watch will say to what; the room here is free.
            PodLookup::Bound { .. } | PodLookup::Unbound => self.forget(uid, moment.stamp),
        }
        self.note_silent_since(n_openings);
        true
    }

    /// Decisions that were written long ago and have not been seen, and those that a list should have shown.
    pub fn overdue(&self, now: Instant, limit: Duration) -> Vec<(PodId, Moment)> {
        let open = self.pods.values().filter_map(|entry| entry.assumption.as_deref());
        let is_overdue = |assumption: &&Assumption| {
            assumption.unlisted || now.saturating_duration_since(assumption.since) >= limit
        };
        open.filter(is_overdue)
            .map(|assumption| (assumption.order.pod.clone(), assumption.moment()))
            .collect()
    }
}

impl Assumption {
    fn moment(&self) -> Moment {
        Moment {
            stamp: self.stamp,
            phase: self.phase,
            since: self.since,
        }
    }

    /// The same decision once more, if it is asked for the same node.
    fn again(&mut self, node: &str, now: Instant) -> Result<Assumed, AssumeError> {
        if self.order.node != node {
            return Err(AssumeError::AssumedElsewhere {
                node: self.order.node.clone(),
            });
        }
        if self.outlived {
            return Err(AssumeError::Outlived);
        }
        self.phase = Phase::Writing;
        self.since = now;
        Ok(Assumed::Write {
            order: self.order.clone(),
            stamp: self.stamp,
            repeated: true,
        })
    }
}

/// Koordinator's entry for one device.
fn allocation(share: &placement::Share, inventory: Option<&Inventory>, opaque: bool) -> DeviceAllocation {
    let mut resources = BTreeMap::new();
    let is_seen_only = share.amounts.memory == placement::Memory::ZERO && share.amounts.core == 0;
    let mut put =
        |resource: &str, amount: u64| resources.insert(resource.to_owned(), Quantity::from_unsigned(amount));
    if share.amounts.core > 0 {
        put(GPU_CORE, share.amounts.core.into());
    }
    // Bytes of a node whose unit is unknown are made up and must not be written down.
    if !opaque && !is_seen_only {
        put(GPU_MEMORY, share.amounts.memory.bytes_ceil());
    }
    let gpu = inventory.and_then(|inventory| inventory.gpus.iter().find(|gpu| gpu.uuid == share.gpu));
    if let Some(gpu) = gpu.filter(|_| !is_seen_only) {
        put(
            GPU_MEMORY_RATIO,
            share.amounts.memory.percent_of(gpu.total().memory).into(),
        );
    }
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources,
        id: record_id(share.gpu.as_str()).to_owned(),
        extension: None,
    }
}

/// Koordinator's entry for one device of another type.
fn allocation_of_other(share: &DeviceShare) -> DeviceAllocation {
    let amounts = share.amounts.iter();
    let functions = share.functions.iter();
    let functions = functions.map(|function| VirtualFunction {
        minor: function.minor,
        bus_id: function.id.to_string(),
    });
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources: amounts
            .map(|(resource, amount)| (resource.to_string(), Quantity::from_unsigned(*amount)))
            .collect(),
        id: record_id(share.id.as_str()).to_owned(),
        extension: None,
    }
    .with_functions(&functions.collect::<Vec<_>>())
}

/// Whole units of the node on the chosen device.
fn units_of(share: &placement::Share, inventory: &Inventory) -> Option<u64> {
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == share.gpu)?;
    gpu.memory_bytes.checked_div(inventory.unit_bytes?)
}

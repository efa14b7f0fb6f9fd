//! The pure placement engine: finds the devices of a node that have room for a request, scores nodes, and keeps account of the
//! owner of each part of a device. It knows no Kubernetes, wire format, clock, file, network or randomness.
//!
//! Callers bring inventories, facts (holdings that watches report), decisions (placements they are about to bind) and hints
//! (placements they expect to bind soon) into a [`Fleet`] and query it. Amounts are per device: memory in hundredths of a byte
//! ([`Memory`]), core in percent, slots in pods, and named resources. A device with more holdings than room has nothing free.
//!
//! Each module builds only on those before it: `data` (values), `state` (nodes and every change of them), `choice` (decisions on
//! one node), `batch` (evaluations of many nodes, and their caches), with `explain` (views for users) beside these; `fleet` is
//! the interface to all of them, and `plan` tries moves of pods on copies of nodes. `check` computes everything again, naively,
//! for tests and the laboratory: daemons are built without it.

mod batch;
#[cfg(any(test, feature = "check"))]
mod check;
mod choice;
mod data;
mod explain;
mod fleet;
mod plan;
mod state;

pub use batch::evaluation::BatchEvaluation;
pub use batch::next_model::NextModel;
#[cfg(any(test, feature = "check"))]
pub use check::Violation;
pub use choice::admit::ReserveError;
pub use choice::group::{GroupRequest, GroupRoom, GroupSearch, MAX_GROUP, SharedDomain};
pub use choice::preempt::{Evictable, EvictionCost, Preemption, Victims, n_violations};
pub use data::amounts::{Amounts, HostAmounts, Memory, NamedAmounts};
pub use data::constraints::{
    Constraints, DeviceConstraint, Exclusion, JointAllocation, LabelCondition, PartitionConstraint,
    Requirement, Scope, Selector, Strategy,
};
pub use data::device::{
    Device, DeviceAttributes, DeviceLocation, DeviceRef, Devices, DevicesOfType, FunctionGroup, Labels,
    LimitLevel, VirtualFunction,
};
pub use data::holding::{Held, HeldMemory, HeldPart, Hints, Holdings, Origin, Placement, Share};
pub use data::ident::{DeviceId, DeviceType, FunctionId, NodeId, OwnerId, ResourceName, SwitchId};
pub use data::inventory::{Inventory, LinkGroup, Partition, PartitionTable};
pub use data::misfit::Misfit;
pub use data::policy::{
    DevicePolicy, NodePolicy, Policies, PolicyError, ResourceUsage, ResourceWeights, Score, ScoringStrategy,
};
pub use data::reason::Reason;
pub use data::request::{DeviceRequest, NodeRequest, RequestedGpus, RequestedMemory, ShareRequest};
pub use data::workload::{PodProfile, Workload};
pub use explain::{DeviceFit, DeviceView, HolderView, NodeView};
pub use fleet::Fleet;
pub use plan::{Goal, Holder, Limits, Move, Obstacle, Plan, PlanError, Price, nodes_with_gpus, plan};
pub use state::node::NodeCopy;

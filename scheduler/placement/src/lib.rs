//! The pure placement engine. It finds the devices of a node that have room for a request, scores nodes, and keeps account of the
//! owner of each part of a device.
//!
//! It knows no Kubernetes, wire format, clock, file, network, environment or randomness: the same calls give the same
//! answers. Callers bring inventories, facts (holdings that watches report), decisions (placements they are about to bind) and
//! hints (placements they expect to bind soon) into a [`Fleet`] and query it.
//!
//! One device model serves GPUs, RDMA adapters, FPGAs and all other types. A [`Device`] has an ID, amounts and attributes; a
//! [`HeldPart`] is a part of a device that a pod holds by its record (its annotations), and a [`Share`] a chosen part. Charges
//! are the amounts that parts take of devices (`state/charges`); from them free amounts (`state/node`) and the use of devices
//! (`state/occupancy`) follow, the same way for each type; one set of rules (`choice/topology/eligible`) leaves the candidates of
//! each type. GPUs differ where their hardware does: their amounts are dense rows, since every request compares with them
//! (`choice/gpu_room`), they have partitions and links (`choice/topology/groups`), and pods can ask for whole GPUs by the
//! vendor's resource name (`nvidia.com/gpu`).
//!
//! Amounts are per device: memory in hundredths of a byte ([`Memory`]), core in percent, slots in pods, and named resources.
//! Nothing wraps around: a device with more holdings than room has nothing free.
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
pub use data::amounts::{Amounts, Dimension, HostAmounts, Memory, NamedAmounts};
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
pub use state::node_copy::NodeCopy;

//! Pure engine: which GPUs, and other devices, of a node have room for a request, how good a node is, and who holds what.
//!
//! Knows no Kubernetes, wire format, clock, file, network, environment or randomness: the same calls give the same
//! answers. Callers bring inventories, facts (what watches say pods hold), decisions (what they are about to bind) and
//! hints (what they expect to bind soon) into a [`Fleet`] and ask it.
//!
//! Amounts are per device: memory in hundredths of a byte ([`Memory`]), core in percent, slots in pods. Nothing wraps
//! around: a device that holds more than it has simply has nothing free.

mod amounts;
mod asking;
mod beside;
mod brief;
mod charge;
mod check;
mod class;
mod fill;
mod fit;
mod fleet;
mod forecast;
mod gpu;
mod holding;
mod host;
mod ident;
mod learning;
mod memory;
mod miss;
mod names;
mod node;
mod points;
mod policy;
mod preempt;
mod rank;
mod ranking;
mod reason;
mod request;
mod reserve;
mod rows;
mod selector;
mod shape;
mod state;
mod topology;
mod traits;
mod view;
mod weigh;
mod whole;
mod wishes;
mod workload;

pub use amounts::{Amounts, Dimension};
pub use asking::Asking;
pub use check::Violation;
pub use class::{Class, ClassRequest, Device, DeviceRef, DeviceShare, DeviceView, HeldDevice, NamedAmounts};
pub use fill::Terms;
pub use fit::Hints;
pub use fleet::{Fleet, NodeId};
pub use gpu::{Gpu, Inventory, InventoryProblem};
pub use holding::{GpuRef, HeldMemory, HeldShare, Holding, Holdings, Origin, Placement, Share};
pub use host::{HostAmounts, HostLoad};
pub use ident::{DeviceId, DeviceType, FunctionId, GpuUuid, OwnerId, ResourceName, SwitchId};
pub use learning::Rehearsal;
pub use memory::Memory;
pub use miss::{Miss, NoPartition, Tally};
pub use policy::{DevicePolicy, NodePolicy, Policies, PolicyError};
pub use preempt::{Evictable, Preemption, Victims, n_violations};
pub use rank::Score;
pub use reason::Reason;
pub use request::{Ask, GpuAsk, MemoryAsk, Request};
pub use reserve::ReserveError;
pub use selector::{Requirement, Selector, Test};
pub use traits::{Function, FunctionGroup, Labels, LinkGroup, Partition, PartitionTable, Place, Traits};
pub use view::{DeviceVerdict, Doubt, GpuView, HeldView, HolderView, NodeView};
pub use weigh::{Leaning, Usage, Weights};
pub use wishes::{Exclusion, Joint, Kind, PartitionWish, Scope, Strategy, Wish, Wishes};
pub use workload::{Spec, Workload};

//! The read API of the scheduler: versioned JSON about nodes, GPUs and pods, for `kubectl gpushare`, live pages and other tools.
//!
//! Every amount of memory is in bytes, every amount of computing power (`core`) in percent of one GPU. Within one version, fields
//! may be added, and no field is removed or changes its meaning. `docs/cli.md` lists the paths.

mod plan;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pod::{GroupKind, is_default};
use crate::pod_group::{DomainPolicy, GroupDomain};

pub use plan::{
    LeftPod, MAX_AFFINITY_PARTS, MAX_PLANNED_MOVES, MAX_PODS_WITH_VOLUMES, PlanAnswer, PlanGoal, PlanLimits,
    PlanPrice, PlanRequest, PlannedMove, PodVolumes,
};

/// The version of the JSON; the first part of every path, as in `/v1/state`.
pub const VERSION: &str = "v1";

/// The TCP port of this API and the live page, without credentials, on the pod's loopback address, for port-forwards.
pub const PORT: u16 = 12346;

/// The answer of `GET state`: the cluster in one snapshot, at most a second old.
// Every type here reads absent fields as empty, since a scheduler of an older version leaves newer fields out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct State {
    /// Always [`VERSION`].
    pub api_version: String,
    /// Identifies the snapshot among those of all replicas; also the `ETag` of this answer, and the ID of the event about it.
    // A text, because revisions of two processes cannot be compared.
    pub revision: String,
    /// The time of the answer, RFC 3339 in whole seconds.
    pub time: String,
    /// The replica that answers.
    pub replica: Replica,
    /// Sums over the GPUs of all nodes.
    pub totals: Totals,
    /// Sums by GPU model; the empty name stands for nodes that report no model.
    pub models: BTreeMap<String, Totals>,
    /// Nodes that share GPUs or have a problem, by name.
    pub nodes: Vec<Node>,
    /// Pods that ask for devices and have no node, at most a thousand.
    // Bounded: a failed rollout may leave tens of thousands, and no client shows as many.
    pub pending: Vec<PendingPod>,
    /// The number of all pods that ask for devices and have no node.
    pub pending_total: usize,
    /// With `?use=true`: the names of nodes of which the GPU memory in use is not known, by the reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub use_unknown: BTreeMap<String, Vec<String>>,
    /// True if the client may not list the pods of all namespaces: names of pods are left out where it may not.
    #[serde(skip_serializing_if = "is_default")]
    pub names_hidden: bool,
}

/// One replica of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Replica {
    /// The version of the replica's program, such as `0.1.0`.
    pub version: String,
    /// True if the replica holds the Lease, or is the only one.
    pub leading: bool,
    /// The reason that the replica is not ready; absent if it is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// The number of filter requests that kube-scheduler has sent since the replica started.
    pub filter_requests: u64,
    /// Seconds since the last filter request; absent before the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_filter_seconds: Option<u64>,
    /// The clients that have sent filter requests, at most eight.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub filter_clients: Vec<FilterClient>,
}

/// A client that has sent filter requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilterClient {
    /// The common name of the client's certificate, or its address.
    pub name: String,
    /// The `User-Agent` header of the client's requests.
    pub user_agent: String,
    /// The number of filter requests that the client has sent.
    pub requests: u64,
    /// The time of the client's last filter request, in unix seconds.
    // Unix seconds, where `State::time` is a text: clients compute with this one.
    pub last: u64,
}

/// Sums over the GPUs of one or more nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Totals {
    /// The number of nodes with GPUs.
    pub nodes: u32,
    /// The number of GPUs, unhealthy ones included.
    pub gpus: u32,
    /// The number of unhealthy GPUs.
    pub unhealthy: u32,
    /// Bytes of memory.
    pub memory: Amount,
    /// Bytes of memory that are free on GPUs which take pods, but where no typical pod fits; see [`Gpu::stranded`].
    pub stranded: u64,
    /// Bytes of free memory that no new pod gets: on unhealthy and closed GPUs, and on nodes whose device plugin does not serve.
    pub unusable: u64,
    /// Computing power in percent of one GPU: eight whole GPUs have 800.
    pub core: Amount,
    /// Bytes of memory in use by any process, on GPUs that device plugins measure; only in the history, absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
}

/// A total, and the part of it that pods hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Amount {
    /// The total, in the unit of the field that has the amount.
    pub total: u64,
    /// The part that the scheduler counts for pods, in the same unit; more than `total` on an overcommitted device.
    pub allocated: u64,
}

/// A node that shares GPUs, or whose report has a problem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Node {
    /// The node's name.
    pub name: String,
    /// The model of the node's GPUs; absent if the node reports none, or several.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// Bytes of one memory unit (`aliyun.com/gpu-mem`); absent if the node serves none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u64>,
    /// The faults of the node's Device object and annotations, by which the scheduler cannot use a part of them; in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The reason that the node's device plugin keeps the scheduler from placing pods here; absent if the plugin serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// The node's GPUs, in the order of their minor numbers.
    pub gpus: Vec<Gpu>,
    /// The node's devices of other types, by type and minor number; absent if it has none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_devices: Vec<OtherDevice>,
}

/// A device of another type than GPU, such as a network adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OtherDevice {
    /// The device's type, such as `rdma` or `fpga`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The device's ID in the Device object.
    pub id: String,
    /// The device's minor number.
    pub minor: u32,
    /// False if the device takes no new pods.
    pub healthy: bool,
    /// The device's amounts by resource name, in the unit of the resource.
    pub resources: BTreeMap<String, FreeAmount>,
    /// The numbers of the device's virtual functions (SR-IOV); absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_functions: Option<FreeAmount>,
    /// The number of the device's NUMA node; absent if the node does not report it.
    #[serde(rename = "numaNode", skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// The PCIe switch or root complex above the device; absent if the node does not report it.
    #[serde(rename = "pcieID", skip_serializing_if = "Option::is_none")]
    pub pcie: Option<String>,
}

/// A total, and the part of it that no pod holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FreeAmount {
    /// The part that no pod holds.
    pub free: u64,
    /// The total.
    pub total: u64,
}

/// One GPU of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// The number of the GPU's device file: 0 for `/dev/nvidia0`.
    pub minor: u32,
    /// The driver's UUID; absent if the node does not report it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    /// False if the device plugin has found the GPU unhealthy: it takes no new pods, and its pods stay.
    pub healthy: bool,
    /// True if an annotation of the node closes the GPU for maintenance: it takes no new pods, and its pods stay.
    #[serde(skip_serializing_if = "is_default")]
    pub closed: bool,
    /// Bytes of memory.
    pub memory: Amount,
    /// Bytes of free memory where no typical pod fits: no request that 2 % or more of the pods have. Absent for 0.
    #[serde(skip_serializing_if = "is_default")]
    pub stranded: u64,
    /// Computing power in percent; a whole GPU has 100 unless its Device object says otherwise.
    pub core: Amount,
    /// Slots for pods that share the GPU, 100 by default.
    pub sharers: Amount,
    /// The number of the GPU's NUMA node; absent if the node does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// The PCIe switch or root complex above the GPU; absent if the node does not report it.
    #[serde(rename = "pcieID", skip_serializing_if = "Option::is_none")]
    pub pcie: Option<String>,
    /// The level at which memory limits are enforced: `none`, `hami-core` or `driver`; absent if its node reports none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<String>,
    /// Bytes of memory in use by any process; only with `?use=true`, and if the node's device plugin measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// The pods that hold a part of the GPU, in the order of namespace and name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
}

/// A pod that holds a part of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Holder {
    /// The pod's namespace; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// The pod's name; absent if the client may not see it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The pod's request in words, such as `8.0 GiB`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub asked: String,
    /// Bytes of memory that the scheduler counts for the pod on this GPU; its containers may use no more.
    pub memory: u64,
    /// Percent of this GPU's computing power that the scheduler counts for the pod; absent for 0.
    #[serde(skip_serializing_if = "is_default")]
    pub core: u64,
    /// Bytes of this GPU's memory in use by the pod's containers; only with `?use=true`, and if the node's plugin measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// True if one of the pod's containers uses over 5 % more memory of this GPU than its share; only beside `used`.
    #[serde(skip_serializing_if = "is_default")]
    pub over_share: bool,
    /// True if the scheduler has chosen this GPU, and the API server has not shown the binding yet.
    #[serde(skip_serializing_if = "is_default")]
    pub assumed: bool,
    /// The reason that the scheduler cannot read the pod's record; it then counts the most that the pod may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The GPUs of the pod's record that the node lacks now, by UUID or else minor. Where the plugin checks starts, the amount of
    /// each is counted on one GPU, else on all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<String>,
}

/// A pod that asks for devices and has no node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PendingPod {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The pod's request in words, such as `8.0 GiB`.
    pub asked: String,
    /// Equal for pods with equal requests and equal rules for nodes: an explanation of one holds for all. Below 2^53.
    pub kind: u64,
}

/// The sums at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HistoryPoint {
    /// The time of the sums, in unix seconds.
    pub time: u64,
    /// The number of pods that asked for devices and had no node.
    pub pending: usize,
    /// Sums by GPU model; models after the 32nd are summed up under the name `others`.
    pub models: BTreeMap<String, Totals>,
}

/// The answer of `GET history`: the last 24 hours, as far back as this replica's process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct History {
    /// Always [`VERSION`].
    pub api_version: String,
    /// One point a minute, the oldest first.
    pub points: Vec<HistoryPoint>,
}

/// The answer of `GET pods/NAMESPACE/NAME/explain`: the pod's node, or the reasons that it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Explanation {
    /// Always [`VERSION`].
    pub api_version: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID.
    pub uid: String,
    /// The pod's request in words, such as `8.0 GiB`.
    pub asked: String,
    /// The rule that the pod's request breaks whatever node it is tried on; absent if it breaks none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
    /// The doubt about a valid request, with the amount that was probably meant; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The pod's node; absent while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// True if the scheduler has chosen `node`, and the API server has not shown the binding yet.
    #[serde(skip_serializing_if = "is_default")]
    pub assumed: bool,
    /// The GPUs of the pod's record that its node does not have any more, by UUID, or by minor where the record has no UUID.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<String>,
    /// Bytes of memory that are counted for the pod on GPUs of its node, by minor; absent unless a GPU of its record is gone.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub counted_on: BTreeMap<u32, u64>,
    /// The group that the pod is a member of; absent for a pod of no group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<ExplainedGroup>,
    /// The number of nodes; 0 for a pod that has a node.
    pub nodes: u32,
    /// The number of nodes that take the pod now: by kube-scheduler's own checks, by the pod's request and by the nodes' devices.
    pub fitting: u32,
    /// The names of the scheduling gates for whose removal kube-scheduler waits; absent if there is none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<String>,
    /// Sentences for people: first the reason that decides, then what would help. Absent for a pod that has a node.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub summary: Vec<String>,
    /// kube-scheduler's own reasons for its last attempt's outcome, from the condition `PodScheduled`, without its words on
    /// preemption. They may name a reason that is not evaluated here, such as ports. Absent if they repeat `invalid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube_scheduler: Option<String>,
    /// The number of nodes that refuse the pod, by the reason. kube-scheduler counts a node under each scarce resource.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, u32>,
    /// Verdicts of single nodes: up to 3 that take the pod, then the 5 nearest of those that refuse; with `?all=true` all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub verdicts: Vec<NodeVerdict>,
}

/// A group of pods that are placed together, and the places of its members.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExplainedGroup {
    /// The name; the namespace is that of the pod.
    pub name: String,
    /// The mechanism that places the members together.
    pub kind: GroupKind,
    /// The least number of members that are placed together; 1 if it is not known.
    pub size: u32,
    /// The domain that all members have to share.
    pub domain: GroupDomain,
    /// The outcome if no domain has room for all of them.
    pub policy: DomainPolicy,
    /// The names of members whose own annotations wish something else, which does not count; at most 64.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub differing: Vec<String>,
    /// The members that are bound or being bound, at most 64; absent for the domain `any`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    // Bounded: a group of the coscheduling plugin may have thousands.
    pub bound: Vec<MemberPlace>,
    /// The room that is kept for the other members; absent if none is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room: Option<ExplainedRoom>,
    /// The text with which the members are refused; absent if they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Room that is kept for the members of a group on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExplainedRoom {
    /// The node's name.
    pub node: String,
    /// The places of members that kube-scheduler has asked about.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<MemberPlace>,
    /// The number of places that are kept for members to come.
    pub open: u32,
    /// The GPUs of these places, by their minor numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub open_gpus: Vec<u32>,
}

/// The place of one member of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MemberPlace {
    /// The pod's name, or its UID while no watch has shown the pod.
    pub name: String,
    /// The node's name.
    pub node: String,
    /// The member's GPUs, by their minor numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<u32>,
}

/// The verdict of one node on a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeVerdict {
    /// The node's name.
    pub node: String,
    /// True if the node takes the pod.
    pub fits: bool,
    /// The part of the verdict that refuses the pod; absent if the node takes the pod, or the scheduler is of an older version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_by: Option<RefusedBy>,
    /// The reason as kube-scheduler reports it: its own, or the one that filter gives; absent if the node takes the pod.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The rule that the node breaks and the amounts that it lacks, where `reason` does not say them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// A smallest set of pods whose end makes room; absent if none was found. Searched for the three nearest nodes alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    // A search may take thousands of comparisons, so that further nodes have none.
    pub would_fit_without: Vec<PodName>,
    /// The verdicts of the node's GPUs, those nearest to a fit first; absent if the pod asks for no GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuVerdict>,
}

/// The parts of a node's verdict on a pod, in the order in which they decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefusedBy {
    /// kube-scheduler's own checks: cordon, taints, node affinity, sums of requests.
    KubeScheduler,
    /// The pod's request, which breaks a rule on every node.
    Request,
    /// The node's devices.
    Devices,
}

/// The verdict of one GPU on a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuVerdict {
    /// The number of the GPU's device file: 0 for `/dev/nvidia0`.
    pub minor: u32,
    /// True if the GPU has room for the amounts that the pod needs of it.
    pub fits: bool,
    /// The reason that the GPU has no room, in words without amounts; absent if it has room.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The amounts that the GPU lacks, or the reason if it lacks none; absent if it has room.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub lacks: String,
    /// Bytes of memory that the pod needs of the GPU.
    pub needed: u64,
    /// Bytes of memory that are free for the pod.
    pub free: u64,
    /// Percent of computing power that the pod needs of the GPU.
    pub needed_core: u32,
    /// Percent of computing power that is free for the pod.
    pub free_core: u32,
    /// True if all of the GPU's slots for pods are taken.
    #[serde(skip_serializing_if = "is_default")]
    pub no_sharer: bool,
}

/// A pod by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodName {
    /// The pod's namespace; empty if the client may not see it.
    pub namespace: String,
    /// The pod's name; empty if the client may not see it.
    pub name: String,
}

/// The body of `POST fit`, which asks how many equal pods fit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitRequest {
    /// The pod, as a manifest has it; a node name in it is ignored.
    pub pod: crate::pod::Pod,
    /// The number of pods, up to [`MAX_REPLICAS`].
    pub replicas: u32,
    /// Nodes to try that the cluster does not have, together up to [`MAX_ADDED_NODES`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_nodes: Vec<AddedNodes>,
    /// The domain that all pods, at most 64, have to share. Absent, the pod's annotation `gpushare/group-domain` counts, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<GroupDomain>,
}

/// Nodes that are tried as if the cluster had them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddedNodes {
    /// The name of an existing node; the added nodes are copies of it without pods.
    pub like: String,
    /// The number of added nodes.
    pub count: u32,
}

/// Largest number of pods in one [`FitRequest`]; more are refused with HTTP 400.
pub const MAX_REPLICAS: u32 = 10_000;
/// Largest number of added nodes in one [`FitRequest`]; more are refused with HTTP 400.
pub const MAX_ADDED_NODES: u32 = 1_000;

/// The answer of `POST fit`: the number of equal pods that fit now, by kube-scheduler's own checks (taints, node affinity, sums
/// of requests) and by devices. Not evaluated are volumes, ports, spreading and affinity to pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitAnswer {
    /// Always [`VERSION`].
    pub api_version: String,
    /// The pod's request in words, such as `8.0 GiB`.
    pub asked: String,
    /// The number of pods in the request.
    pub replicas: u32,
    /// The number of pods that fit, at most `replicas`; with a domain the most that one has room for.
    pub fitting: u32,
    /// The domain that all pods have to share; absent if they may be on different nodes.
    #[serde(skip_serializing_if = "is_default")]
    pub domain: GroupDomain,
    /// The number of nodes with a domain that has room for all pods; absent for 0, and without a domain.
    #[serde(skip_serializing_if = "is_default")]
    pub nodes_with_room: u32,
    /// The rule that the pod's request breaks whatever node it is tried on; absent if it breaks none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
    /// The nodes of the pods that fit, in the order of their first pods. With a domain the one node of all, if all fit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<FitPlacement>,
    /// The number of nodes that refuse the next pod, or with a domain all pods, by reason. Absent if all pods fit.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub blocked: BTreeMap<String, u32>,
}

/// Pods that would be placed on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitPlacement {
    /// The node's name; that of an added node is the copied node's name with `+1`, `+2` and so on.
    pub node: String,
    /// The number of pods that fit there.
    pub pods: u32,
    /// The number of those pods on each GPU, by its minor number.
    pub gpus: BTreeMap<u32, u32>,
}

/// The weight of a [`Finding`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    // In rising order, by which `doctor` sorts.
    /// The check has found no fault.
    #[default]
    Ok,
    /// The check could not be made.
    Unknown,
    /// The checked object works now, and may fail.
    Warning,
    /// The checked object does not work.
    Error,
}

/// The result of one check of the installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Finding {
    /// The name of the check, words with hyphens such as `gpu-health`.
    pub check: String,
    /// The weight of the finding.
    pub severity: Severity,
    /// The checked object, such as `node n1`; absent if the check is about the whole cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub object: String,
    /// The result of the check, in a sentence.
    pub message: String,
    /// The action that mends a fault, in a sentence; absent where there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// The answer of `GET doctor`: the findings of one replica about itself and about the nodes that it sees.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Diagnosis {
    /// Always [`VERSION`].
    pub api_version: String,
    /// The replica that answers.
    pub replica: Replica,
    /// The findings, those without a fault included.
    pub findings: Vec<Finding>,
}

impl Totals {
    /// The sums over the GPUs of one node.
    pub fn of_node(node: &Node) -> Self {
        let mut totals = Self::default();
        for gpu in &node.gpus {
            totals.gpus += 1;
            totals.unhealthy += u32::from(!gpu.healthy);
            totals.memory.add(gpu.memory);
            totals.core.add(gpu.core);
            if !gpu.healthy || gpu.closed || node.plugin.is_some() {
                totals.unusable = totals.unusable.saturating_add(gpu.memory.free());
            } else {
                totals.stranded = totals.stranded.saturating_add(gpu.stranded);
            }
        }
        // A node may be part of the state for its problems alone.
        totals.nodes = u32::from(totals.gpus > 0);
        totals
    }

    /// Adds the sums over other nodes.
    pub fn add(&mut self, other: &Self) {
        self.nodes = self.nodes.saturating_add(other.nodes);
        self.gpus = self.gpus.saturating_add(other.gpus);
        self.unhealthy = self.unhealthy.saturating_add(other.unhealthy);
        self.memory.add(other.memory);
        self.core.add(other.core);
        self.stranded = self.stranded.saturating_add(other.stranded);
        self.unusable = self.unusable.saturating_add(other.unusable);
        // If no GPU is measured, the memory in use stays absent, which does not mean 0.
        if let Some(used) = other.used {
            self.add_used(used);
        }
    }

    /// Adds GPU memory in use, in bytes.
    pub fn add_used(&mut self, bytes: u64) {
        self.used = Some(self.used.unwrap_or_default().saturating_add(bytes));
    }
}

impl Amount {
    /// The part that no pod holds.
    pub fn free(self) -> u64 {
        // An overcommitted device has nothing free.
        self.total.saturating_sub(self.allocated)
    }

    fn add(&mut self, other: Self) {
        self.total = self.total.saturating_add(other.total);
        self.allocated = self.allocated.saturating_add(other.allocated);
    }
}

impl Holder {
    /// Namespace and name, or the UID if names are hidden.
    pub fn display_name(&self) -> String {
        plan::display_name(&self.namespace, &self.name, &self.uid)
    }
}

impl Node {
    /// Removes names and namespaces of pods, except in namespaces for which `sees` returns true.
    pub fn hide_names(&mut self, sees: impl Fn(&str) -> bool) {
        for holder in self.gpus.iter_mut().flat_map(|gpu| &mut gpu.holders) {
            // The UID stays, so that a client can count the pods of a node.
            if !sees(&holder.namespace) {
                holder.namespace.clear();
                holder.name.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(healthy: bool, stranded: u64) -> Gpu {
        Gpu {
            healthy,
            stranded,
            memory: Amount {
                total: 16,
                allocated: 10,
            },
            ..Gpu::default()
        }
    }

    fn totals(plugin: Option<&str>) -> Totals {
        Totals::of_node(&Node {
            plugin: plugin.map(str::to_owned),
            gpus: vec![gpu(true, 0), gpu(true, 6), gpu(false, 0)],
            ..Node::default()
        })
    }

    #[test]
    fn memory_of_closed_gpus_is_unusable() {
        let closed = Gpu {
            closed: true,
            ..gpu(true, 0)
        };
        let totals = Totals::of_node(&Node {
            gpus: vec![closed, gpu(true, 6)],
            ..Node::default()
        });
        assert_eq!((totals.stranded, totals.unusable, totals.unhealthy), (6, 6, 0));
    }

    #[test]
    fn memory_of_gpus_that_take_no_pods_is_unusable() {
        let served = totals(None);
        assert_eq!((served.stranded, served.unusable), (6, 6));
        let away = totals(Some("its device plugin has not served kubelet for 4 minutes"));
        assert_eq!((away.stranded, away.unusable), (0, 18));
    }
}

//! The read API of the scheduler: versioned JSON about nodes, GPUs and pods, for `kubectl gpushare`, live pages and other tools.
//!
//! Amounts of memory are bytes, computing power is percent of one GPU. Fields may be added; within one version none changes its
//! meaning or goes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The version of the JSON, and the first part of every path.
pub const VERSION: &str = "v1";

/// The port of the listener that only clients on the loopback address reach, such as port-forwards.
pub const PORT: u16 = 12346;

/// The port of the listener of the live page, on the loopback address too.
pub const PAGE_PORT: u16 = 12347;

/// The state of the cluster in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct State {
    /// [`VERSION`].
    pub api_version: String,
    /// Identifies the snapshot; also its `ETag` and the ID of an event.
    pub revision: String,
    /// The time of the snapshot, RFC 3339.
    pub time: String,
    /// The replica that answers.
    pub replica: Replica,
    /// Sums over all nodes.
    pub totals: Totals,
    /// Sums by GPU model.
    pub models: BTreeMap<String, Totals>,
    /// Nodes that share GPUs or have a problem, by name.
    pub nodes: Vec<Node>,
    /// Pods that ask for devices and have no node, a thousand at most.
    pub pending: Vec<PendingPod>,
    /// The number of all such pods.
    pub pending_total: usize,
    /// Nodes of which the memory in use is not known, by the reason, if the client has asked for it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub use_unknown: BTreeMap<String, Vec<String>>,
    /// True if names of pods are left out, because the client may not list the pods of all namespaces. Those of namespaces whose
    /// pods it may list are there.
    #[serde(skip_serializing_if = "is_false")]
    pub names_hidden: bool,
}

/// One replica of the scheduler.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Replica {
    /// Its version.
    pub version: String,
    /// True if it holds the Lease, or is the only replica.
    pub leading: bool,
    /// The reason for which it is not ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_ready: Option<String>,
    /// The number of filter requests from kube-scheduler since its start.
    pub filter_requests: u64,
    /// Seconds since the last of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_filter_seconds: Option<u64>,
    /// The clients that have sent them, eight at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub filter_clients: Vec<FilterClient>,
}

/// A client that has sent filter requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FilterClient {
    /// The common name of its certificate, or its address.
    pub name: String,
    /// The program that it says it is.
    pub user_agent: String,
    /// The number of its requests.
    pub requests: u64,
    /// The time of the last of them in unix seconds.
    pub last: u64,
}

/// Sums over GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Totals {
    /// Nodes with GPUs.
    pub nodes: u32,
    /// GPUs.
    pub gpus: u32,
    /// Unhealthy ones among them.
    pub unhealthy: u32,
    /// Memory.
    pub memory: Amount,
    /// Free memory of GPUs on which no typical pod fits, although they take pods.
    pub stranded: u64,
    /// Free memory that no new pod gets: of unhealthy GPUs, and of nodes that are offered to no pods, or to few, on account of their
    /// device plugin.
    pub unusable: u64,
    /// Computing power in percent of one GPU.
    pub core: Amount,
    /// Memory in use on the GPUs that a device plugin measures; only in the history, and only if some plugin measures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
}

/// A total, and the part of it that pods hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Amount {
    /// Everything.
    pub total: u64,
    /// The part that pods hold, or may hold; more than `total` on an overcommitted device.
    pub allocated: u64,
}

/// One node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// The model of its GPUs, if it reports one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub model: String,
    /// Bytes of one memory unit, if it serves units.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<u64>,
    /// Problems of its report.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The reason for which it is offered to no pods, or to few, on account of its device plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plugin: Option<String>,
    /// Its GPUs, by minor.
    pub gpus: Vec<Gpu>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// Minor number.
    pub minor: u32,
    /// UUID, empty if it is not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    /// False if it takes no new pods.
    pub healthy: bool,
    /// Memory.
    pub memory: Amount,
    /// Its free memory, if no typical pod fits on it.
    #[serde(skip_serializing_if = "is_zero")]
    pub stranded: u64,
    /// Computing power, of which a whole GPU usually has 100 percent.
    pub core: Amount,
    /// Pods that may share it.
    pub sharers: Amount,
    /// NUMA node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<u32>,
    /// The level at which limits of memory are enforced, if its node reports one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<String>,
    /// Memory in use by any process, if the client has asked for it and the plugin of the node measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// The pods that hold a part of it, by namespace and name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
}

/// The part of one pod in one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Holder {
    /// Namespace; empty if names are hidden.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Name; empty if names are hidden.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// UID.
    pub uid: String,
    /// The request of the pod, for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub asked: String,
    /// The memory that it holds on this GPU, and may use at most.
    pub memory: u64,
    /// The computing power that it holds on this GPU.
    #[serde(skip_serializing_if = "is_zero")]
    pub core: u64,
    /// Memory in use by its containers, if the client has asked for it and the plugin of the node measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// True if the scheduler has decided it, and no watch has shown the binding yet.
    #[serde(skip_serializing_if = "is_false")]
    pub assumed: bool,
    /// The reason for which it is counted conservatively.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A pod that asks for devices and has no node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PendingPod {
    /// Namespace; empty if names are hidden.
    pub namespace: String,
    /// Name; empty if names are hidden.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Its request, for people.
    pub asked: String,
}

/// Sums over one minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HistoryPoint {
    /// Unix seconds.
    pub time: u64,
    /// Pods that waited.
    pub pending: usize,
    /// By GPU model.
    pub models: BTreeMap<String, Totals>,
}

/// The last 24 hours, as far as this replica has seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct History {
    /// [`VERSION`].
    pub api_version: String,
    /// One point a minute, the oldest first.
    pub points: Vec<HistoryPoint>,
}

/// The state of one pod: its place, or the reasons for which it has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Explanation {
    /// [`VERSION`].
    pub api_version: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Its request, for people.
    pub asked: String,
    /// The rule that the request breaks on every node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
    /// Its node, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// True if the binding to that node is not confirmed yet.
    #[serde(skip_serializing_if = "is_false")]
    pub assumed: bool,
    /// Nodes with devices.
    pub nodes: u32,
    /// Those that have room now.
    pub fitting: u32,
    /// The number of nodes that refuse the pod, by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons: BTreeMap<String, u32>,
    /// Verdicts of single nodes: those that fit, then the nearest misses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub verdicts: Vec<NodeVerdict>,
}

/// The verdict of one node on a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeVerdict {
    /// The node.
    pub node: String,
    /// True if it has room.
    pub fits: bool,
    /// The reason that filter gives to kube-scheduler; empty if it fits.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The rule, and how near the node comes, where that says more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Pods whose end makes room, a smallest choice of them; empty if no such choice was found.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub would_fit_without: Vec<PodName>,
    /// The verdicts of its GPUs, the nearest first, if the pod asks for GPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuVerdict>,
}

/// The verdict of one GPU on a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuVerdict {
    /// Minor number.
    pub minor: u32,
    /// True if it has room.
    pub fits: bool,
    /// The reason if it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Memory that the pod needs of it.
    pub needed: u64,
    /// Memory that is free for new pods.
    pub free: u64,
    /// Computing power that the pod needs of it.
    pub needed_core: u32,
    /// Computing power that is free for new pods.
    pub free_core: u32,
    /// True if it has no place for one more sharer.
    #[serde(skip_serializing_if = "is_false")]
    pub no_sharer: bool,
}

/// A pod by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// The question how many equal pods fit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitRequest {
    /// The pod, as in a manifest.
    pub pod: crate::pod::Pod,
    /// The number of pods.
    pub replicas: u32,
    /// Nodes that the cluster does not have yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub add_nodes: Vec<AddedNodes>,
}

/// Nodes that are tried as if the cluster had them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddedNodes {
    /// An existing node, of which they are empty copies.
    pub like: String,
    /// Their number.
    pub count: u32,
}

/// The most pods of one [`FitRequest`].
pub const MAX_REPLICAS: u32 = 10_000;
/// The most added nodes of one [`FitRequest`].
pub const MAX_ADDED_NODES: u32 = 1_000;

/// The number of equal pods that fit now, by the devices that they ask for, and by CPU and memory where those of the node are known.
/// Taints, affinity and other resources are kube-scheduler's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitAnswer {
    /// [`VERSION`].
    pub api_version: String,
    /// The request of the pod, for people.
    pub asked: String,
    /// The number of pods that was asked about.
    pub replicas: u32,
    /// The number of them that fit.
    pub fitting: u32,
    /// The rule that the request breaks on every node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub invalid: Option<String>,
    /// The nodes that the pods would be placed on, in the order of placement.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub placements: Vec<FitPlacement>,
    /// The number of nodes that refuse the next pod, by reason, if not all pods fit.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub blocked: BTreeMap<String, u32>,
}

/// Pods that would be placed on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FitPlacement {
    /// The node; an added one has the name of the node that it copies, and `+` with a number.
    pub node: String,
    /// The number of pods.
    pub pods: u32,
    /// Pods by minor number of the GPU.
    pub gpus: BTreeMap<u32, u32>,
}

/// The weight of a [`Finding`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// As it should be.
    #[default]
    Ok,
    /// Could not be checked.
    Unknown,
    /// Works, and will not always.
    Warning,
    /// Does not work.
    Error,
}

/// The result of one check of the installation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Finding {
    /// The check, a word with hyphens.
    pub check: String,
    /// Its weight.
    pub severity: Severity,
    /// The object that was checked, such as `node n1`; empty for the cluster.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub object: String,
    /// The result.
    pub message: String,
    /// The action that mends it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// The findings of one replica about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Diagnosis {
    /// [`VERSION`].
    pub api_version: String,
    /// The replica.
    pub replica: Replica,
    /// The findings.
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
            if !gpu.healthy || node.plugin.is_some() {
                totals.unusable = totals.unusable.saturating_add(gpu.memory.free());
            } else {
                totals.stranded = totals.stranded.saturating_add(gpu.stranded);
            }
        }
        totals.nodes = u32::from(totals.gpus > 0);
        totals
    }

    /// Adds other sums.
    pub fn add(&mut self, other: &Self) {
        self.nodes = self.nodes.saturating_add(other.nodes);
        self.gpus = self.gpus.saturating_add(other.gpus);
        self.unhealthy = self.unhealthy.saturating_add(other.unhealthy);
        self.memory.add(other.memory);
        self.core.add(other.core);
        self.stranded = self.stranded.saturating_add(other.stranded);
        self.unusable = self.unusable.saturating_add(other.unusable);
        if let Some(used) = other.used {
            self.add_used(used);
        }
    }

    /// Adds memory in use.
    pub fn add_used(&mut self, bytes: u64) {
        self.used = Some(self.used.unwrap_or_default().saturating_add(bytes));
    }
}

impl Amount {
    /// The part that no pod holds.
    pub fn free(self) -> u64 {
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
        if self.name.is_empty() {
            self.uid.clone()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }
}

impl Node {
    /// Removes the names of pods, but for those of the namespaces that a client sees.
    pub fn hide_names(&mut self, sees: impl Fn(&str) -> bool) {
        for holder in self.gpus.iter_mut().flat_map(|gpu| &mut gpu.holders) {
            if !sees(&holder.namespace) {
                holder.namespace.clear();
                holder.name.clear();
            }
        }
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes fields by reference"
)]
fn is_false(value: &bool) -> bool {
    !*value
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes fields by reference"
)]
fn is_zero(value: &u64) -> bool {
    *value == 0
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
    fn memory_of_gpus_that_take_no_pods_is_unusable() {
        let served = totals(None);
        assert_eq!((served.stranded, served.unusable), (6, 6));
        let away = totals(Some("its device plugin has not served kubelet for 4 minutes"));
        assert_eq!((away.stranded, away.unusable), (0, 18));
    }
}

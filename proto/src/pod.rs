//! The fields of a Pod that gpushare reads, decoded from watches and from the extender's requests.
//!
//! Decoding skips all other fields, so that 40,000 pods take little time and memory. `kubectl gpushare fits` and tests encode
//! pods, without the fields that `fits` does not evaluate (`skip_serializing`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use group::{KOORDINATOR_MIN_AVAILABLE, n_members};
use scheduling::{is_set, length};

pub(crate) mod group;
mod node_affinity;
mod scheduling;

pub use group::{GroupKind, GroupRef};
pub use node_affinity::{NameRule, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
pub use scheduling::{
    Affinity, AffinityTerms, NodeAffinity, PodCondition, SchedulingGroup, SpreadConstraint, Taint,
    Toleration, Volume,
};

/// Annotation of a mirror pod: kubelet's copy in the API of a static pod, which it runs whatever the API server answers.
pub const MIRROR: &str = "kubernetes.io/config.mirror";

/// Annotation of a pod that requests no amounts and wants to see all GPUs of its node: `"true"`.
pub const ALL_DEVICES: &str = "gpushare/all-devices";

/// Annotation of a pod that no plan moves, and that is not evicted so that another pod has room: `"false"`.
pub const EVICT: &str = "gpushare/evict";

const SYSTEM_NAMESPACE: &str = "kube-system";

/// The type of the pod condition in which kube-scheduler reports its last attempt.
const POD_SCHEDULED: &str = "PodScheduled";

/// The reason of the condition [`POD_SCHEDULED`] if no node fits.
const UNSCHEDULABLE: &str = "Unschedulable";

/// The fields of a Pod that gpushare reads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Pod)]
#[serde(default)]
pub struct Pod {
    /// Name, namespace, UID, labels, annotations and deletion timestamp.
    pub metadata: ObjectMeta,
    /// Its containers, its demands on nodes, and the node it is bound to.
    pub spec: PodSpec,
    /// Its phase and conditions.
    pub status: PodStatus,
}

/// The desired state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The pod's node; `None` until the pod is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Ordinary init containers and sidecars, in the order in which kubelet starts them.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<Container>,
    /// App containers, in order.
    #[serde(deserialize_with = "null_as_default")]
    pub containers: Vec<Container>,
    /// Containers that a user added to the running pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub ephemeral_containers: Vec<Container>,
    /// Labels that the node must have.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub node_selector: BTreeMap<String, String>,
    /// Node and pod affinity.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub affinity: Affinity,
    /// Rules for spreading pods over nodes and zones.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub topology_spread_constraints: Vec<SpreadConstraint>,
    /// Tolerations of nodes' taints.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub tolerations: Vec<Toleration>,
    /// The priority; kube-scheduler may preempt the pod for one of higher priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// `Never` for a pod for which no other pod is evicted.
    #[serde(skip_serializing)]
    pub preemption_policy: Option<String>,
    /// The time that the pod's processes have to end.
    #[serde(skip_serializing)]
    pub termination_grace_period_seconds: Option<i64>,
    /// Pod-level resources, which replace the sum over the containers for CPU and memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// The name of the pod's `RuntimeClass`.
    #[serde(skip_serializing)]
    pub runtime_class_name: Option<String>,
    /// Amounts that the pod's `RuntimeClass` adds to those of the containers.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub overhead: BTreeMap<String, QuantityText>,
    /// The number of claims of devices by Dynamic Resource Allocation (DRA).
    #[serde(rename = "resourceClaims", deserialize_with = "length", skip_serializing)]
    pub n_resource_claims: usize,
    /// Volumes; only their kinds are read.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub volumes: Vec<Volume>,
    /// The scheduling gates, which other components have to remove before kube-scheduler tries the pod.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub scheduling_gates: Vec<SchedulingGate>,
    /// The `PodGroup` that kube-scheduler places as a whole, with the feature gate `GenericWorkload`.
    #[serde(skip_serializing)]
    pub scheduling_group: Option<SchedulingGroup>,
}

/// A mark that keeps kube-scheduler from trying a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SchedulingGate {
    /// The gate's name, with the domain of the component that removes it; unique in the pod.
    pub name: String,
}

/// One container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// The container's name; unique in the pod.
    pub name: String,
    /// Restart policy of the container itself; `Always` on an init container makes it a sidecar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    /// Variables of the manifest. kubelet puts them after those of device plugins, and the last value counts.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<Variable>,
    /// The ports that the manifest names.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub ports: Vec<ContainerPort>,
    /// The container's privileges.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub security_context: SecurityContext,
    /// Limits and requests.
    #[serde(deserialize_with = "null_as_default")]
    pub resources: ResourceRequirements,
}

/// The privileges of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SecurityContext {
    /// True for a container that sees every device of its node.
    pub privileged: Option<bool>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerPort {
    /// The port's name; empty if it has none.
    pub name: String,
    /// The port number at the pod's address.
    pub container_port: i32,
}

/// An environment variable of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Variable {
    /// The variable's name.
    pub name: String,
    /// The value; `None` if it is empty, as the API server leaves out empty fields, or if `value_from` has its source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The field, `ConfigMap` or `Secret` that the value comes from.
    #[serde(rename = "valueFrom", skip_serializing_if = "Option::is_none")]
    pub value_from: Option<serde_json::Value>,
}

impl Variable {
    /// The value that the pod's spec has; `None` if it comes from another object or field.
    pub fn own_value(&self) -> Option<&str> {
        match self.value_from {
            Some(_) => None,
            None => Some(self.value.as_deref().unwrap_or_default()),
        }
    }
}

/// Limits and requests, as texts: a quantity that does not parse must not hide the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceRequirements {
    /// Upper bounds by resource. kubelet allocates device IDs for the limits of extended resources.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub limits: BTreeMap<String, QuantityText>,
    /// Amounts that kube-scheduler counts, by resource; the API server demands that those of extended resources equal the limits.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub requests: BTreeMap<String, QuantityText>,
}

/// A quantity as the manifest has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum QuantityText {
    /// A text, as the API server writes every quantity.
    Text(String),
    /// A bare number of units, as a manifest may have it.
    Number(i64),
    /// Any other JSON, which is no quantity.
    Other(serde_json::Value),
}

/// Returns true for the reasons with which kubelet fails a pod at admission, without having started it.
pub fn is_refusal_of_kubelet(reason: &str) -> bool {
    // `OutOfcpu`, `OutOfpods` and the like, the device manager's error, and the topology manager's.
    reason.starts_with("OutOf") || ["UnexpectedAdmissionError", "TopologyAffinityError"].contains(&reason)
}

/// The observed state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The address of the pod, once it has one.
    #[serde(rename = "podIP", skip_serializing)]
    pub pod_ip: Option<String>,
    /// The time at which kubelet first saw the pod; kubelet writes no status of a pod that it has neither admitted nor refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<String>,
    /// The node that kube-scheduler reserves for the pod while preempted pods end there or a binding is prepared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nominated_node_name: Option<String>,
    /// True if kube-scheduler created a claim for extended resources which a DRA driver serves.
    #[serde(
        rename = "extendedResourceClaimStatus",
        deserialize_with = "is_set",
        skip_serializing
    )]
    pub has_extended_resource_claim: bool,
    /// The reason of the phase in CamelCase, such as `UnexpectedAdmissionError` if kubelet refused the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The reason of the phase in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The conditions that components have written.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<PodCondition>,
    /// The states of the pod's app containers, written by kubelet.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub container_statuses: Vec<ContainerStatus>,
    /// The states of the pod's init containers, sidecars included.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub init_container_statuses: Vec<ContainerStatus>,
}

/// The status of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// The container's name.
    pub name: String,
    /// The container runtime's name and the container's ID there, such as `containerd://0123…`; empty before it was created.
    #[serde(rename = "containerID", deserialize_with = "null_as_default")]
    pub container_id: String,
    /// True if the container runs and its readiness probe succeeds.
    pub ready: bool,
    /// The state; empty until kubelet has reported one.
    #[serde(deserialize_with = "null_as_default")]
    pub state: ContainerState,
}

/// The state of a container, of which only `running` is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// Present while the container's process runs.
    pub running: Option<ContainerRunning>,
}

/// A container whose process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerRunning {
    /// The time of the start, RFC 3339 in whole seconds of the node's clock.
    pub started_at: Option<String>,
}

impl Pod {
    /// Returns true if the pod's processes have ended for good, so that its devices are free. With a deletion timestamp they may
    /// still run until the grace period ends.
    pub fn is_terminal(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Returns true if the pod would be placed on no other node: a pod of a `DaemonSet`, or the mirror of a static pod.
    pub fn is_tied_to_node(&self) -> bool {
        // kubelet makes the Node the controller of a static pod's mirror.
        matches!(self.controller_kind(), Some("DaemonSet" | "Node"))
    }

    /// The kind of the controller that creates another pod in the place of this one; `None` without a controller.
    pub fn controller_kind(&self) -> Option<&str> {
        let mut owners = self.metadata.owner_references.iter().flatten();
        let controller = owners.find(|owner| owner.controller == Some(true))?;
        Some(&controller.kind)
    }

    /// Returns true if the pod may be evicted for a more important one, as another comes in its place, on any node.
    pub fn may_be_evicted(&self) -> bool {
        self.controller_kind().is_some()
            && !self.is_tied_to_node()
            && self.metadata.namespace.as_deref() != Some(SYSTEM_NAMESPACE)
            && self.annotation(EVICT) != Some("false")
    }

    /// The unix time at which this field manager wrote the pod's nomination; `i64::MAX` if it is not known, `None` without one.
    pub fn nominated_at_by(&self, manager: &str) -> Option<i64> {
        self.nominated_node()?;
        for entry in self.metadata.managed_fields.iter().flatten() {
            if let Some(fields) = &entry.fields_v1
                && entry.manager.as_deref() == Some(manager)
                && fields.0.pointer("/f:status/f:nominatedNodeName").is_some()
            {
                let time = entry.time.as_ref();
                return Some(time.map_or(i64::MAX, |time| time.0.as_second()));
            }
        }
        None
    }

    /// Returns true if the pod may hold devices of DRA drivers, which kubelet prepares before its containers start.
    pub fn uses_claims(&self) -> bool {
        // With the feature gate `DRAExtendedResource` a pod may have a claim that its spec does not show.
        self.spec.n_resource_claims > 0 || self.status.has_extended_resource_claim
    }

    /// Returns true if kube-scheduler may wait for volumes or DRA claims before it binds the pod, unless they are bound already.
    pub fn may_wait_for_claims(&self) -> bool {
        let mut volumes = self.spec.volumes.iter();
        self.uses_claims() || volumes.any(|volume| volume.is_claimed || volume.is_ephemeral)
    }

    /// Returns true if the pod has a deletion timestamp.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// The pod's priority; 0 if it has none, as for kube-scheduler.
    pub fn priority(&self) -> i32 {
        // The API server fills the field in from the priority class; only a manifest lacks it.
        self.spec.priority.unwrap_or(0)
    }

    /// The node that kube-scheduler reserves for the pod.
    pub fn nominated_node(&self) -> Option<&str> {
        let node = self.status.nominated_node_name.as_deref();
        // An empty text is no nomination.
        node.filter(|node| !node.is_empty())
    }

    /// The condition of the last attempt to schedule the pod, if that attempt failed.
    pub fn failed_attempt(&self) -> Option<&PodCondition> {
        // With any other reason, such as `SchedulingGated`, kube-scheduler has not tried the pod.
        self.unscheduled_condition()
            .filter(|condition| condition.reason == UNSCHEDULABLE || condition.is_error())
    }

    /// The condition `PodScheduled` with the status `False`, which has kube-scheduler's reason in its own words.
    pub fn unscheduled_condition(&self) -> Option<&PodCondition> {
        let mut conditions = self.status.conditions.iter();
        conditions.find(|condition| condition.kind == POD_SCHEDULED && condition.status == "False")
    }

    /// Returns true if a scheduler places the pod together with others or not at all, by any mechanism of [`GroupKind`].
    pub fn is_in_gang(&self) -> bool {
        self.group().is_some()
    }

    /// The least number of members of the pod's gang that may run, by Koordinator's annotation; `None` if it is no number.
    pub fn gang_min_available(&self) -> Option<u32> {
        let written = self.annotation(KOORDINATOR_MIN_AVAILABLE)?;
        written.parse().ok().map(n_members)
    }

    /// The name of the pod's `PodGroup`, in the pod's namespace.
    pub fn pod_group(&self) -> Option<&str> {
        self.spec.scheduling_group.as_ref()?.pod_group_name.as_deref()
    }

    /// The object's resource version, which grows with every write; `None` if it has none.
    pub fn version(&self) -> Option<u64> {
        // Kubernetes defines it as a number since 1.35; API servers on etcd wrote numbers before.
        self.metadata.resource_version.as_deref()?.parse().ok()
    }

    /// The value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// The pod's UID; empty for an object that the API server has not stored.
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// `namespace/name`, for messages.
    pub fn display_name(&self) -> String {
        let namespace = self.metadata.namespace.as_deref().unwrap_or("default");
        let name = self.metadata.name.as_deref().unwrap_or("(unnamed)");
        format!("{namespace}/{name}")
    }
}

impl PodSpec {
    /// Init containers and sidecars, then app containers: the order in which kubelet allocates their devices.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Returns true if the pod prefers some of the nodes that it may run on.
    pub fn has_preferences(&self) -> bool {
        let affinity = &self.affinity;
        let mut spreads = self.topology_spread_constraints.iter();
        affinity.node_affinity.n_preferred > 0
            || affinity.pod_affinity.n_preferred > 0
            || affinity.pod_anti_affinity.n_preferred > 0
            || spreads.any(|spread| spread.when_unsatisfiable == "ScheduleAnyway")
    }

    /// Returns true if the pod has required rules about other pods: affinity, anti-affinity or spreading.
    pub fn has_required_pod_rules(&self) -> bool {
        let affinity = &self.affinity;
        let mut spreads = self.topology_spread_constraints.iter();
        affinity.pod_affinity.is_required
            || affinity.pod_anti_affinity.is_required
            || spreads.any(|spread| spread.when_unsatisfiable == "DoNotSchedule")
    }

    /// Returns true if the pod does not tolerate one of the `PreferNoSchedule` taints.
    pub fn avoids(&self, taints: &[Taint]) -> bool {
        let mut preferences = taints.iter().filter(|taint| taint.is_prefer_no_schedule());
        preferences.any(|taint| !taint.is_tolerated_by(&self.tolerations))
    }
}

impl Container {
    /// Returns true if this init container keeps running beside the app containers.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// The amount of a resource that kubelet allocates: the limit, or the request if there is no limit.
    pub fn quantity(&self, resource: &str) -> Option<&QuantityText> {
        // They are equal in a pod from the API server; a manifest may have either.
        let ResourceRequirements { limits, requests } = &self.resources;
        limits.get(resource).or_else(|| requests.get(resource))
    }

    /// The amount of each resource that kubelet allocates, as [`Self::quantity`] has it.
    pub fn quantities(&self) -> impl Iterator<Item = (&String, &QuantityText)> {
        let ResourceRequirements { limits, requests } = &self.resources;
        let requests = requests.iter();
        let unlimited = requests.filter(|(resource, _)| !limits.contains_key(*resource));
        limits.iter().chain(unlimited)
    }

    /// Returns true if the container requests more than zero of a resource. A quantity that does not parse counts as more.
    pub fn asks_for(&self, resource: &str) -> bool {
        self.quantity(resource).is_some_and(|amount| !amount.is_zero())
    }
}

impl QuantityText {
    /// Returns true if the quantity parses and is zero.
    pub fn is_zero(&self) -> bool {
        self.quantity().ok() == Some(Quantity::default())
    }

    /// The value in whole units, rounded up as Kubernetes does; 0 for a quantity that does not parse or is negative.
    pub fn units(&self) -> u64 {
        self.thousandths().div_ceil(1000)
    }

    /// The value in thousandths of a unit, rounded up; 0 for a quantity that does not parse or is negative.
    pub fn thousandths(&self) -> u64 {
        let thousandths = self.quantity().map(Quantity::thousandths).unwrap_or_default();
        u64::try_from(thousandths).unwrap_or(0)
    }

    /// The parsed value; else the text or JSON that is not a quantity.
    pub fn quantity(&self) -> Result<Quantity, Cow<'_, str>> {
        match self {
            Self::Text(text) => text.parse().map_err(|_| Cow::Borrowed(text.as_str())),
            Self::Number(units) => Ok(Quantity::from_integer(*units)),
            Self::Other(value) => Err(Cow::Owned(value.to_string())),
        }
    }
}

/// Reads `null` as the default value: Go writes nil slices and maps as `null`.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    // serde's own `default` covers absent fields alone.
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// Returns true for a value that JSON leaves out, as Go does with `omitempty`.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests;

//! The parts of a Pod that gpushare reads, decoded from watches and from the extender's requests.
//!
//! Decoding skips everything else of the pod, so that 40,000 pods take little time and memory.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

mod scheduling;

pub use scheduling::{
    Affinity, AffinityTerms, PodCondition, SchedulingGroup, SpreadConstraint, Taint, Toleration, Volume,
};

/// Annotation of a pod that requests no amounts and wants to see all GPUs of its node: `"true"`.
pub const ALL_DEVICES: &str = "gpushare/all-devices";

/// The type of the condition that kube-scheduler writes.
const POD_SCHEDULED: &str = "PodScheduled";

/// Reason of that condition if no node fits.
const UNSCHEDULABLE: &str = "Unschedulable";

/// Labels of the pods of a group that a coscheduling plugin places together, newest first.
const GROUP_LABELS: [&str; 2] = [
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
];

/// Annotation of the pods of a gang that Koordinator's coscheduling plugin places together.
const GANG_ANNOTATION: &str = "gang.scheduling.koordinator.sh/name";

/// A pod as gpushare sees it.
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
    /// `None` until the pod is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Ordinary init containers and sidecars, in order.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub init_containers: Vec<Container>,
    /// App containers, in order.
    #[serde(deserialize_with = "null_as_default")]
    pub containers: Vec<Container>,
    /// Node and pod affinity.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub affinity: Affinity,
    /// Rules for spreading pods over nodes and zones.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub topology_spread_constraints: Vec<SpreadConstraint>,
    /// Taints that the pod tolerates.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub tolerations: Vec<Toleration>,
    /// Pods of higher priority may preempt this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Pod-level resources, which replace the sum over the containers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Amounts of the pod's runtime class, on top of the containers'.
    #[serde(
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub overhead: BTreeMap<String, QuantityText>,
    /// Claims of devices of DRA drivers.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub resource_claims: Vec<PodResourceClaim>,
    /// Volumes, of which only the kind is read.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub volumes: Vec<Volume>,
    /// The `PodGroup` that kube-scheduler places as a whole, with the feature gate `GenericWorkload`.
    #[serde(skip_serializing)]
    pub scheduling_group: Option<SchedulingGroup>,
}

/// A claim that a pod uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodResourceClaim {
    /// The name that the pod's containers use for the claim; unique in the pod.
    pub name: String,
}

/// One container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Unique in the pod.
    pub name: String,
    /// `Always` on an init container makes it a sidecar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    /// Variables of the manifest, which win over those of device plugins.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<Variable>,
    /// The ports that the manifest names.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub ports: Vec<ContainerPort>,
    /// Limits and requests.
    #[serde(deserialize_with = "null_as_default")]
    pub resources: ResourceRequirements,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerPort {
    /// Empty if it has none.
    pub name: String,
    /// The number, at the pod's address.
    pub container_port: i32,
}

/// An environment variable of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// `None` if the value comes from a field, a `ConfigMap` or a `Secret`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

/// Limits and requests, as texts: a quantity that does not parse must not hide the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceRequirements {
    /// Upper bounds; kubelet asks device plugins for these.
    #[serde(
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub limits: BTreeMap<String, QuantityText>,
    /// Amounts that kube-scheduler counts; for extended resources the API server keeps them equal to the limits.
    #[serde(
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub requests: BTreeMap<String, QuantityText>,
}

/// A quantity as the manifest has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum QuantityText {
    /// The usual form.
    Text(String),
    /// A bare number.
    Number(i64),
    /// Any other JSON, which has no value.
    Other(serde_json::Value),
}

/// The observed state of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Pending, Running, Succeeded, Failed or Unknown.
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
    /// The claim that kube-scheduler created for extended resources which a DRA driver serves.
    #[serde(skip_serializing)]
    pub extended_resource_claim_status: Option<ExtendedResourceClaim>,
    /// CamelCase reason of the phase; kubelet's, where kubelet refused the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Sentence for the phase; kubelet's, where kubelet refused the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The conditions that components have written.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<PodCondition>,
    /// The states of its app containers, written by kubelet.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub container_statuses: Vec<ContainerStatus>,
    /// The states of its init containers, sidecars included.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub init_container_statuses: Vec<ContainerStatus>,
}

/// The status of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// Its name.
    pub name: String,
    /// The container runtime's name and the container's ID there, such as `containerd://0123…`; empty before it was created.
    #[serde(rename = "containerID", deserialize_with = "null_as_default")]
    pub container_id: String,
    /// True if it runs and its readiness probe succeeds.
    pub ready: bool,
    /// Empty until kubelet has reported a state.
    #[serde(deserialize_with = "null_as_default")]
    pub state: ContainerState,
}

/// The state of a container, of which only `running` is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// Set while its process runs.
    pub running: Option<ContainerRunning>,
}

/// A container whose process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerRunning {
    /// The time of the start, in whole seconds of the node's clock.
    pub started_at: Option<String>,
}

/// A claim for extended resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ExtendedResourceClaim {
    /// Its name, in the namespace of the pod.
    pub resource_claim_name: String,
}

impl Pod {
    /// Returns true if its processes have ended for good, so that its devices are free.
    ///
    /// A deletion timestamp does not mean that: the processes may still run.
    pub fn is_terminal(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Returns true if it runs on its node because of that node and would be placed on no other: a pod of a `DaemonSet`, or
    /// the mirror of a static pod.
    pub fn is_tied_to_node(&self) -> bool {
        let mut owners = self.metadata.owner_references.iter().flatten();
        // kubelet owns the mirror of a static pod by its Node.
        owners.any(|owner| {
            owner.controller == Some(true) && ["DaemonSet", "Node"].contains(&owner.kind.as_str())
        })
    }

    /// Returns true if it may hold devices of DRA drivers, which kubelet prepares before its containers start.
    pub fn uses_claims(&self) -> bool {
        !self.spec.resource_claims.is_empty() || self.status.extended_resource_claim_status.is_some()
    }

    /// Returns true if kube-scheduler may wait before it binds the pod: for its volumes, or for the devices of its claims.
    ///
    /// The pod alone does not show which of its claims are bound already.
    pub fn may_wait_for_claims(&self) -> bool {
        let mut volumes = self.spec.volumes.iter();
        self.uses_claims() || volumes.any(|volume| volume.is_claimed || volume.is_ephemeral)
    }

    /// Returns true if it has a deletion timestamp.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Its priority; 0 if it has none.
    pub fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }

    /// The node that kube-scheduler reserves for it.
    pub fn nominated_node(&self) -> Option<&str> {
        let node = self.status.nominated_node_name.as_deref();
        // An empty text is no nomination.
        node.filter(|node| !node.is_empty())
    }

    /// The condition of the last attempt to schedule it, if that attempt failed.
    pub fn failed_attempt(&self) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| {
            condition.kind == POD_SCHEDULED
                && condition.status == "False"
                && (condition.reason == UNSCHEDULABLE || condition.is_error())
        })
    }

    /// Returns true if a scheduler places the pod together with others or not at all: as a member of a `PodGroup`, or by a
    /// coscheduling plugin.
    pub fn is_in_gang(&self) -> bool {
        let labels = self.metadata.labels.as_ref();
        let annotations = self.metadata.annotations.as_ref();
        self.spec.scheduling_group.is_some()
            || labels.is_some_and(|labels| GROUP_LABELS.iter().any(|key| labels.contains_key(*key)))
            || annotations.is_some_and(|annotations| annotations.contains_key(GANG_ANNOTATION))
    }

    /// The name of its `PodGroup`, in its namespace.
    pub fn pod_group(&self) -> Option<&str> {
        self.spec.scheduling_group.as_ref()?.pod_group_name.as_deref()
    }

    /// The object's resource version, which grows with every write; `None` if it has none.
    pub fn version(&self) -> Option<u64> {
        self.metadata.resource_version.as_deref()?.parse().ok()
    }

    /// UID, or the empty text for an object that was never stored.
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// `namespace/name`, for people.
    pub fn display_name(&self) -> String {
        let namespace = self.metadata.namespace.as_deref().unwrap_or("default");
        let name = self.metadata.name.as_deref().unwrap_or("(unnamed)");
        format!("{namespace}/{name}")
    }
}

impl PodSpec {
    /// Init containers and sidecars, then app containers: kubelet's order.
    pub fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Returns true if the pod prefers some of the nodes that it may run on.
    pub fn has_preferences(&self) -> bool {
        let Affinity {
            node_affinity,
            pod_affinity,
            pod_anti_affinity,
        } = &self.affinity;
        let mut terms = [node_affinity, pod_affinity, pod_anti_affinity].into_iter();
        let mut spreads = self.topology_spread_constraints.iter();
        terms.any(|terms| terms.n_preferred > 0) || spreads.any(SpreadConstraint::is_preference)
    }

    /// Returns true if the pod requires that certain pods are, or are not, near by.
    pub fn has_required_pod_rules(&self) -> bool {
        let affinity = &self.affinity;
        let mut spreads = self.topology_spread_constraints.iter();
        affinity.pod_affinity.is_required
            || affinity.pod_anti_affinity.is_required
            || spreads.any(SpreadConstraint::is_required)
    }

    /// Returns true if the pod does not tolerate one of the `PreferNoSchedule` taints.
    pub fn avoids(&self, taints: &[Taint]) -> bool {
        let tolerates = |taint: &Taint| self.tolerations.iter().any(|toleration| toleration.covers(taint));
        taints
            .iter()
            .any(|taint| taint.is_prefer_no_schedule() && !tolerates(taint))
    }
}

impl Container {
    /// Returns true if this init container keeps running beside the app containers.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// The amount of a resource that kubelet allocates: the limit, or the request if there is no limit.
    pub fn quantity(&self, resource: &str) -> Option<&QuantityText> {
        let ResourceRequirements { limits, requests } = &self.resources;
        limits.get(resource).or_else(|| requests.get(resource))
    }

    /// Returns true if it requests more than zero of a resource.
    pub fn asks_for(&self, resource: &str) -> bool {
        self.quantity(resource).is_some_and(|amount| !amount.is_zero())
    }
}

impl QuantityText {
    /// Returns true if the quantity parses and is zero.
    pub fn is_zero(&self) -> bool {
        self.quantity().ok() == Some(Quantity::default())
    }

    /// Whole units, rounded up; 0 for a quantity that does not parse or is negative.
    pub fn units(&self) -> u64 {
        self.thousandths().div_ceil(1000)
    }

    /// Thousandths; 0 for a quantity that does not parse or is negative.
    pub(crate) fn thousandths(&self) -> u64 {
        let thousandths = self.quantity().map(Quantity::thousandths).unwrap_or_default();
        u64::try_from(thousandths).unwrap_or(0)
    }

    /// The value.
    ///
    /// # Errors
    /// The text, if it is not a quantity.
    pub fn quantity(&self) -> Result<Quantity, Cow<'_, str>> {
        match self {
            Self::Text(text) => text.parse().map_err(|_| Cow::Borrowed(text.as_str())),
            Self::Number(units) => Ok(Quantity::from_integer(*units)),
            Self::Other(value) => Err(Cow::Owned(value.to_string())),
        }
    }
}

/// Reads `null` as the default: Go writes nil slices and maps so.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[cfg(test)]
mod tests;

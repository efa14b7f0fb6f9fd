//! The parts of a Pod that gpushare reads, decoded from watches and from the extender's requests.
//!
//! Everything else of the pod is skipped while decoding, so that 40,000 pods cost little.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

mod placing;
mod scheduling;

pub use placing::{Affinity, Preferred, SpreadConstraint, Taint, Toleration};
pub use scheduling::{PodCondition, SchedulingGroup, Volume};

/// Annotation by which a pod that declares no amounts asks to share and see all GPUs of its node: `"true"`.
pub const ALL_DEVICES: &str = "gpushare/all-devices";

/// A pod as gpushare sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pod {
    /// Name, namespace, UID, annotations and the deletion mark.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it asks for and where it is bound.
    #[serde(default)]
    pub spec: PodSpec,
    /// Its phase, and whether kubelet has taken it on.
    #[serde(default)]
    pub status: PodStatus,
}

/// What a pod asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Empty until the pod is bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Ordinary init containers and sidecars, in order.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub init_containers: Vec<Container>,
    /// App containers, in order.
    #[serde(default, deserialize_with = "null_as_default")]
    pub containers: Vec<Container>,
    /// What it would rather be near, or far from.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub affinity: Affinity,
    /// How it is spread beside others like it.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub topology_spread_constraints: Vec<SpreadConstraint>,
    /// The taints that it does not mind.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub tolerations: Vec<Toleration>,
    /// Its rank among pods: one of a higher priority may have it evicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// What the pod as a whole asks for, in place of what its containers ask for together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// What running it takes besides.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub overhead: BTreeMap<String, QuantityText>,
    /// The claims by which its containers get devices of DRA drivers.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub resource_claims: Vec<PodResourceClaim>,
    /// Its volumes, of which only their kind is read.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub volumes: Vec<Volume>,
    /// The `PodGroup` that kube-scheduler places as a whole, with the gate `GenericWorkload`.
    #[serde(default, skip_serializing)]
    pub scheduling_group: Option<SchedulingGroup>,
}

/// A claim that a pod uses, by the name that its containers know it by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct PodResourceClaim {
    /// Unique in the pod.
    #[serde(default)]
    pub name: String,
}

/// One container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// Unique in the pod.
    #[serde(default)]
    pub name: String,
    /// `Always` on an init container makes it a sidecar.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    /// Variables that its author sets, which win over those of device plugins.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub env: Vec<Variable>,
    /// Limits and requests.
    #[serde(default, deserialize_with = "null_as_default")]
    pub resources: ResourceRequirements,
}

/// A variable of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variable {
    /// Its name.
    #[serde(default)]
    pub name: String,
    /// Its value, if that stands in the pod itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

impl Container {
    /// Whether this init container keeps running beside the app containers.
    pub fn is_sidecar(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }

    /// Whether it names a resource, and not with a zero.
    pub fn asks_for(&self, resource: &str) -> bool {
        let ResourceRequirements { limits, requests } = &self.resources;
        let amount = limits.get(resource).or_else(|| requests.get(resource));
        amount.is_some_and(|amount| !amount.is_zero())
    }
}

/// Limits and requests of a container, as texts: a quantity that does not parse must not hide the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceRequirements {
    /// Upper bounds; kubelet asks device plugins for these.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub limits: BTreeMap<String, QuantityText>,
    /// What the scheduler counts; for extended resources the API server keeps them equal to the limits.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub requests: BTreeMap<String, QuantityText>,
}

/// A quantity as the pod's author wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum QuantityText {
    /// The usual form.
    Text(String),
    /// A bare number.
    Number(i64),
    /// Anything else, which is an error of whoever asks for its value.
    Other(serde_json::Value),
}

impl QuantityText {
    /// Returns true if the quantity is zero.
    pub fn is_zero(&self) -> bool {
        self.quantity().ok() == Some(Quantity::default())
    }

    /// Whole units, rounded up; 0 of a quantity that does not parse or is negative.
    pub fn units(&self) -> u64 {
        self.thousandths().div_ceil(1000)
    }

    /// Thousandths; 0 of a quantity that does not parse or is negative.
    pub(crate) fn thousandths(&self) -> u64 {
        self.quantity()
            .ok()
            .and_then(|quantity| u64::try_from(quantity.thousandths()).ok())
            .unwrap_or(0)
    }

    /// The value, or the text that is none.
    pub fn quantity(&self) -> Result<Quantity, Cow<'_, str>> {
        match self {
            Self::Text(text) => text.parse().map_err(|_| Cow::Borrowed(text.as_str())),
            Self::Number(units) => Ok(Quantity::from_integer(*units)),
            Self::Other(value) => Err(Cow::Owned(value.to_string())),
        }
    }
}

/// How far a pod has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// Pending, Running, Succeeded, Failed or Unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// When kubelet took the pod on; it writes no status of a pod that it has neither admitted nor refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<String>,
    /// The node that kube-scheduler keeps for the pod, while the pods that it evicted there end or a binding is prepared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nominated_node_name: Option<String>,
    /// The claim that kube-scheduler made for extended resources of the pod which a DRA driver serves.
    #[serde(default, skip_serializing)]
    pub extended_resource_claim_status: Option<ExtendedResourceClaim>,
    /// A word for why the pod is in its phase; kubelet's, where it refused the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// A sentence for why; kubelet's, where it refused the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The conditions that components have written.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub conditions: Vec<PodCondition>,
    /// The state of its app containers, by kubelet.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing)]
    pub container_statuses: Vec<ContainerStatus>,
}

/// The state of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ContainerStatus {
    /// True if it runs and its readiness probe succeeds.
    #[serde(default)]
    pub ready: bool,
    /// Its state; empty until kubelet has reported one.
    #[serde(default, deserialize_with = "null_as_default")]
    pub state: ContainerState,
}

/// What a container does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ContainerState {
    /// Set while its process runs.
    #[serde(default)]
    pub running: Option<ContainerRunning>,
}

/// A container whose process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerRunning {
    /// The time of the start, in whole seconds by the clock of the node.
    #[serde(default)]
    pub started_at: Option<String>,
}

/// A claim for extended resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExtendedResourceClaim {
    /// Its name, in the namespace of the pod.
    #[serde(default)]
    pub resource_claim_name: String,
}

impl Pod {
    /// Whether its processes have ended for good, so that its devices are free.
    ///
    /// A deletion timestamp alone does not say so: the process may still run.
    pub fn is_terminal(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    /// Returns true if it is on its node because of that node and would be placed on no other: a pod of a `DaemonSet`, or the
    /// image of a static pod.
    pub fn is_tied_to_node(&self) -> bool {
        let mut owners = self.metadata.owner_references.iter().flatten();
        owners.any(|owner| {
            owner.controller == Some(true) && ["DaemonSet", "Node"].contains(&owner.kind.as_str())
        })
    }

    /// Returns true if it may hold devices of DRA drivers, which kubelet prepares before its containers start.
    pub fn uses_claims(&self) -> bool {
        !self.spec.resource_claims.is_empty() || self.status.extended_resource_claim_status.is_some()
    }

    /// Whether somebody has asked for its deletion.
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Its rank among pods; 0 unless said otherwise.
    pub fn priority(&self) -> i32 {
        self.spec.priority.unwrap_or(0)
    }

    /// The node that kube-scheduler keeps for it.
    pub fn nominated_node(&self) -> Option<&str> {
        self.status
            .nominated_node_name
            .as_deref()
            .filter(|node| !node.is_empty())
    }

    /// UID, or the empty text for an object that was never stored.
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// `namespace/name`, for people.
    pub fn display_name(&self) -> String {
        let namespace = self.metadata.namespace.as_deref().unwrap_or("default");
        format!(
            "{namespace}/{}",
            self.metadata.name.as_deref().unwrap_or("(unnamed)")
        )
    }
}

/// Go writes nil slices and maps as `null`.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl Resource for Pod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

//! The fields of a Pod that the model of kubelet uses, read once from the API object.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EnvFromSource, EnvVar, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use proto::quantity::Quantity;

use super::probe_program::PROGRAM;
use crate::kube_scheduler::ResourceAmounts;
use crate::pod_fields::has_ended;

/// The part of a pod's life in which a container runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerType {
    /// To completion, before the containers after it.
    Init,
    /// A restartable init container: from its turn to the end of the pod.
    Sidecar,
    /// After all init containers.
    App,
    /// Added to a pod that runs, for debugging; never started again.
    Ephemeral,
}

/// One container as the pod's author wrote it.
#[derive(Clone, Debug)]
pub(crate) struct ContainerSpec {
    pub(crate) name: String,
    pub(crate) image: String,
    pub(crate) kind: ContainerType,
    /// Whole units of each limit. Limits in parts of units, as of CPU, are left out: plugins serve whole devices.
    pub(crate) limits: BTreeMap<String, i64>,
    pub(crate) env: Vec<EnvVar>,
    pub(crate) env_from: Vec<EnvFromSource>,
    pub(crate) claims: Vec<String>,
    pub(crate) is_privileged: bool,
    /// The commands of `gpu-probe`; empty if the container runs another program.
    pub(crate) probe_commands: Vec<String>,
}

#[derive(Clone, Debug)]
pub(crate) struct KubeletPod {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) annotations: BTreeMap<String, String>,
    pub(crate) created: Option<Timestamp>,
    /// Init containers and sidecars, then app containers, then ephemeral ones, each in the author's order.
    pub(crate) containers: Vec<ContainerSpec>,
    pub(crate) runtime_class: Option<String>,
    /// Names of `ResourceClaim`s, by the names under which containers use them.
    pub(crate) claims: BTreeMap<String, String>,
    pub(crate) requests: ResourceAmounts,
    /// True for `restartPolicy: Always`, the default.
    pub(crate) restarts: bool,
    pub(crate) deleting: bool,
    /// Phase Succeeded or Failed in the API.
    pub(crate) terminal: bool,
}

impl KubeletPod {
    /// Reads the fields of a pod that kubelet needs; `None` if the pod has no UID or spec.
    pub(crate) fn read(pod: &Pod) -> Option<Self> {
        let uid = pod.metadata.uid.clone()?;
        let spec = pod.spec.as_ref()?;
        let mut containers = Vec::new();
        for container in spec.init_containers.iter().flatten() {
            let kind = match container.restart_policy.as_deref() {
                Some("Always") => ContainerType::Sidecar,
                _ => ContainerType::Init,
            };
            containers.push(read_container(container, kind));
        }
        for container in &spec.containers {
            containers.push(read_container(container, ContainerType::App));
        }
        for container in spec.ephemeral_containers.iter().flatten() {
            // The fields that kubelet reads here have the same names.
            let fields = serde_json::to_value(container).ok()?;
            let container = serde_json::from_value(fields).ok()?;
            containers.push(read_container(&container, ContainerType::Ephemeral));
        }
        let claims = spec.resource_claims.iter().flatten();
        Some(Self {
            uid,
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            annotations: pod.annotations().clone(),
            created: pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
            runtime_class: spec.runtime_class_name.clone(),
            claims: claims
                .filter_map(|claim| Some((claim.name.clone(), claim.resource_claim_name.clone()?)))
                .collect(),
            requests: ResourceAmounts::of_pod(pod).unwrap_or_default(),
            containers,
            restarts: spec.restart_policy.as_deref().unwrap_or("Always") == "Always",
            deleting: pod.metadata.deletion_timestamp.is_some(),
            terminal: has_ended(pod),
        })
    }

    /// `namespace/name`, for people and for seeds.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

fn read_container(container: &Container, kind: ContainerType) -> ContainerSpec {
    let resources = container.resources.clone().unwrap_or_default();
    let mut limits = BTreeMap::new();
    for (name, amount) in resources.limits.iter().flatten() {
        limits.extend(whole_units(&amount.0).map(|amount| (name.clone(), amount)));
    }
    let claims = resources.claims.into_iter().flatten();
    let security = container.security_context.as_ref();
    let command = container.command.as_deref().unwrap_or_default();
    let probe_commands = match command {
        [program, commands @ ..] if program == PROGRAM => commands.to_vec(),
        _ => Vec::new(),
    };
    ContainerSpec {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        kind,
        limits,
        claims: claims.map(|claim| claim.name).collect(),
        is_privileged: security.is_some_and(|context| context.privileged == Some(true)),
        env: container.env.clone().unwrap_or_default(),
        env_from: container.env_from.clone().unwrap_or_default(),
        probe_commands,
    }
}

/// An amount in whole units; `None` if it is not whole.
fn whole_units(text: &str) -> Option<i64> {
    text.parse::<Quantity>().ok()?.integer()
}

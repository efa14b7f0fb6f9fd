//! What is decoded of a pod from the watch of this node.
//!
//! Like [`proto::pod::Pod`], plus the one field of status that tells whether kubelet has admitted the pod.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::NamespaceResourceScope;
use proto::pod::PodSpec;
use serde::{Deserialize, Serialize};

use super::Stage;

/// A pod as it comes from the API server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WatchedPod {
    /// Name, namespace, UID, annotations and the deletion mark.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it asks for and where it is bound.
    #[serde(default)]
    pub spec: PodSpec,
    /// How far it has come.
    #[serde(default)]
    pub status: WatchedStatus,
}

/// How far a pod has come.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchedStatus {
    /// Pending, Running, Succeeded, Failed or Unknown.
    #[serde(default)]
    pub phase: Option<String>,
    /// When kubelet took the pod on; it writes no status of a pod that it has not admitted or refused.
    #[serde(default)]
    pub start_time: Option<String>,
}

impl WatchedPod {
    pub(super) fn stage(&self) -> Stage {
        match self.status.phase.as_deref() {
            Some("Succeeded" | "Failed") => Stage::Terminal,
            Some("Running" | "Unknown") => Stage::Running,
            _ if self.status.start_time.is_some() => Stage::Admitted,
            _ => Stage::Bound,
        }
    }
}

impl kube::Resource for WatchedPod {
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

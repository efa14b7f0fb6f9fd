//! The pods of this node that one kubelet process knows.
//!
//! A pod is active from its arrival until it has ended. Devices of other pods are free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc::UnboundedSender;

use super::pod::KubeletPod;

/// A message to the task that runs one pod.
#[derive(Debug)]
pub(crate) enum PodCommand {
    /// The pod has a `deletionTimestamp`.
    Delete,
    /// The API server has removed the pod.
    Remove,
    /// The pod has more ephemeral containers.
    Update(Arc<KubeletPod>),
    Restart(String),
}

#[derive(Debug)]
pub(crate) struct PodRecord {
    pub(crate) spec: Arc<KubeletPod>,
    /// True if the pod was rejected, has finished or was terminated: its devices are free.
    pub(crate) ended: bool,
    pub(crate) started: Timestamp,
    /// Sends commands to the task that runs the pod, once the pod is admitted.
    pub(crate) worker: Option<UnboundedSender<PodCommand>>,
    /// Conditions as last reported, with the time of their last change.
    pub(crate) conditions: BTreeMap<&'static str, (bool, Timestamp)>,
}

impl PodRecord {
    /// Sends a command to the pod's task; false if there is none or it has ended.
    pub(crate) fn send(&self, command: PodCommand) -> bool {
        self.worker
            .as_ref()
            .is_some_and(|worker| worker.send(command).is_ok())
    }
}

#[derive(Debug, Default)]
pub(crate) struct PodTable {
    /// The pods that kubelet knows, by UID.
    pub(crate) records: BTreeMap<String, PodRecord>,
    /// True once every pod of the first list has been admitted or refused.
    pub(crate) sources_ready: bool,
}

impl PodTable {
    /// Adds a pod that kubelet has seen for the first time.
    pub(crate) fn arrive(&mut self, spec: &Arc<KubeletPod>) {
        let record = PodRecord {
            spec: Arc::clone(spec),
            ended: spec.terminal,
            started: Timestamp::now(),
            worker: None,
            conditions: BTreeMap::new(),
        };
        self.records.insert(spec.uid.clone(), record);
    }

    pub(crate) fn end(&mut self, uid: &str) {
        if let Some(record) = self.records.get_mut(uid) {
            record.ended = true;
        }
    }

    pub(crate) fn active(&self) -> impl Iterator<Item = &Arc<KubeletPod>> {
        let active = self.records.values().filter(|record| !record.ended);
        active.map(|record| &record.spec)
    }

    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        self.active().map(|pod| pod.uid.clone()).collect()
    }
}

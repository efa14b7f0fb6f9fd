//! The pods of this node that one kubelet process knows, and which of them still count.
//!
//! A pod is active from its arrival to its end; devices of pods that are not active are free to take.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc::UnboundedSender;

use super::pod::PodSpec;
use super::pod_worker::Command;

#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) spec: Arc<PodSpec>,
    /// Rejected, finished or terminated: its devices are free to take.
    pub(crate) ended: bool,
    pub(crate) started: Timestamp,
    /// Reaches the task that runs the pod, once it is admitted.
    pub(crate) worker: Option<UnboundedSender<Command>>,
    /// Conditions as last reported, with the time of their last change.
    pub(crate) conditions: BTreeMap<&'static str, (bool, Timestamp)>,
}

/// By UID.
#[derive(Debug, Default)]
pub(crate) struct Pods(pub(crate) BTreeMap<String, Record>);

impl Pods {
    pub(crate) fn arrive(&mut self, spec: &Arc<PodSpec>, ended: bool) {
        let started = Timestamp::now();
        let record = Record {
            spec: Arc::clone(spec),
            ended,
            started,
            worker: None,
            conditions: BTreeMap::new(),
        };
        self.0.insert(spec.uid.clone(), record);
    }

    pub(crate) fn end(&mut self, uid: &str) {
        if let Some(record) = self.0.get_mut(uid) {
            record.ended = true;
        }
    }

    pub(crate) fn active(&self) -> impl Iterator<Item = &Arc<PodSpec>> {
        self.0
            .values()
            .filter(|record| !record.ended)
            .map(|record| &record.spec)
    }

    pub(crate) fn active_uids(&self) -> BTreeSet<String> {
        self.active().map(|pod| pod.uid.clone()).collect()
    }

    pub(crate) fn find_active(&self, namespace: &str, name: &str) -> Option<&Arc<PodSpec>> {
        self.active()
            .find(|pod| pod.namespace == namespace && pod.name == name)
    }
}

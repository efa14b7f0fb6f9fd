//! What has been answered, per pod UID and container. Lives as long as the process.

use std::collections::{BTreeMap, BTreeSet};

use crate::pods::{NodePod, PodUid, Pods};
use crate::served::Served;

use super::Found;

/// One answered call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The resource.
    pub resource: Served,
    /// How many device IDs it was about.
    pub count: u64,
}

/// The answered calls of every pod of this node.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    steps: BTreeMap<PodUid, Vec<Step>>,
    /// The pod of the latest answered call, as long as it has calls to come.
    admitting: Option<PodUid>,
    /// Pods whose admission ended, or seemed to end, before all calls came.
    doubtful: BTreeSet<PodUid>,
    /// Pods that were told an error: kubelet has failed them for good.
    refused: BTreeSet<PodUid>,
    /// Pods that were bound before this process began to keep books.
    inherited: BTreeSet<PodUid>,
}

impl Ledger {
    /// Notes the pods that are there when the first complete list arrives.
    pub fn inherit(&mut self, pods: &Pods) {
        self.inherited = pods.iter().map(|pod| pod.uid.clone()).collect();
    }

    /// Enters an answered call.
    pub fn record(&mut self, found: Found, pods: &Pods) {
        let Found { pod: uid, steps, corrects, .. } = found;
        if let Some(mistaken) = corrects {
            self.steps.remove(&mistaken);
        } else if let Some(before) = self.admitting.take()
            && before != uid
        {
            // kubelet has gone on to another pod, so the admission before is over.
            self.steps.remove(&before);
            self.doubtful.insert(before);
        }
        self.doubtful.remove(&uid);
        self.steps.insert(uid.clone(), steps);
        let has_more = pods.get(&uid).is_some_and(|pod| !self.is_complete(pod));
        self.admitting = has_more.then_some(uid);
        self.forget_gone(pods);
    }

    /// Enters that the pod's call was answered with an error.
    pub fn refuse(&mut self, uid: &PodUid) {
        self.reopen(uid);
        self.refused.insert(uid.clone());
    }

    /// Enters that the pod's answered calls were none of its own.
    pub fn reopen(&mut self, uid: &PodUid) {
        if self.admitting.as_ref() == Some(uid) {
            self.admitting = None;
        }
        self.steps.remove(uid);
    }

    /// Whether every call that the pod is due for has been answered.
    pub fn is_complete(&self, pod: &NodePod) -> bool {
        let steps = self.steps(&pod.uid);
        let is_answered = |container, resource| steps.iter().any(|step| step.container == container && step.resource == resource);
        let mut due = pod.containers.iter().enumerate().flat_map(|(idx, container)| {
            let asked = Served::ALL.into_iter().filter(|resource| resource.count(container) > 0);
            asked.map(move |resource| (idx, resource))
        });
        !steps.is_empty() && due.all(|(idx, resource)| is_answered(idx, resource))
    }

    /// Drops what is known of pods that no longer exist.
    fn forget_gone(&mut self, pods: &Pods) {
        self.steps.retain(|uid, _| pods.get(uid).is_some());
        for set in [&mut self.doubtful, &mut self.refused, &mut self.inherited] {
            set.retain(|uid| pods.get(uid).is_some());
        }
    }

    pub(super) fn steps(&self, uid: &PodUid) -> &[Step] {
        self.steps.get(uid).map_or(&[], Vec::as_slice)
    }

    pub(super) fn admitting(&self) -> Option<&PodUid> {
        self.admitting.as_ref()
    }

    pub(super) fn is_doubtful(&self, uid: &PodUid) -> bool {
        self.doubtful.contains(uid)
    }

    pub(super) fn is_refused(&self, uid: &PodUid) -> bool {
        self.refused.contains(uid)
    }

    pub(super) fn is_inherited(&self, uid: &PodUid) -> bool {
        self.inherited.contains(uid)
    }
}

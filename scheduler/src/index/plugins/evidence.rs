//! The evidence about one node's device plugin: its pods, and the annotation of the node in which it reports that it serves.

use std::net::SocketAddr;

use k8s_openapi::jiff::Timestamp;
use proto::plugin_reports::{PLUGIN_NAMES, PluginState};
use proto::pod::Pod;

use super::Away;

const LABEL: &str = "app.kubernetes.io/name";

/// The name of the port at which the plugin serves its metrics, as shipped.
const METRICS_PORT: &str = "health";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PluginPod {
    pub(super) uid: Box<str>,
    /// True if it is being deleted, or has ended.
    is_leaving: bool,
    /// The start of its container, if that runs.
    started: Option<Timestamp>,
    /// True if its readiness probe succeeds, which it does while all resources are registered.
    is_ready: bool,
    /// True if the readiness probe fails after it had succeeded, and the plugin has reported nothing since: the process may hang.
    is_silent: bool,
    metrics: Option<SocketAddr>,
    /// The serial number of the newest list when a list or a watch event last showed it.
    list: u32,
}

/// The signs of whether one node's device plugin serves: its pods, and the node's annotation in which it reports.
#[derive(Debug, Default)]
pub(super) struct PluginEvidence {
    pods: Vec<PluginPod>,
    state: Option<PluginState>,
    /// The last annotation of a plugin that has been gone for long: it does not count, even if a watch shows it again.
    outdated: Option<PluginState>,
    /// UID of a plugin's pod that is gone, until a plugin reports that it serves.
    gone: Option<Box<str>>,
    /// Set when a plugin begins to serve; `NodePlugin::update_standing` clears it.
    pub(super) shows_life: bool,
}

impl PluginPod {
    /// Reads a pod and the name of its node; `None` for a pod without the label, or of no `DaemonSet`: it is no plugin.
    pub(super) fn of(pod: &Pod, list: u32) -> Option<(&str, Self)> {
        let node = pod.spec.node_name.as_deref()?;
        let name = pod.metadata.labels.as_ref()?.get(LABEL)?;
        if !PLUGIN_NAMES.contains(&name.as_str()) {
            return None;
        }
        let mut owners = pod.metadata.owner_references.iter().flatten();
        if !owners.any(|owner| owner.kind == "DaemonSet" && owner.controller == Some(true)) {
            return None;
        }
        let container = pod.status.container_statuses.first();
        let running = container.and_then(|container| container.state.running.as_ref());
        let started = running.and_then(|running| running.started_at.as_deref()?.parse().ok());
        let plugin_pod = Self {
            uid: pod.uid().into(),
            is_leaving: pod.is_deleting() || pod.is_terminal(),
            started,
            is_ready: started.is_some() && container.is_some_and(|container| container.ready),
            is_silent: false,
            metrics: metrics_address(pod),
            list,
        };
        Some((node, plugin_pod))
    }

    /// Returns true if kubelet can admit pods by this plugin.
    fn serves(&self, state: Option<&PluginState>) -> bool {
        let Some(started) = self.started.filter(|_| !self.is_leaving) else {
            return false;
        };
        // The report of the process that runs counts for more than the probe: kubelet probes only every few seconds.
        if let Some(state) = state
            // A report from before the start of the container was written by its predecessor.
            && state.since >= started
            && state.pod.as_deref().is_none_or(|uid| *uid == *self.uid)
        {
            return state.serving && !self.is_silent;
        }
        self.is_ready
    }

    /// Returns true if the process of this pod has ended without a deletion of the pod, as its later state `now` shows.
    fn has_crashed(&self, now: &Self) -> bool {
        self.started.is_some() && self.started != now.started && !now.is_leaving
    }
}

/// The pod's address and the port that it names for metrics.
fn metrics_address(pod: &Pod) -> Option<SocketAddr> {
    let ip = pod.status.pod_ip.as_deref()?.parse().ok()?;
    let mut ports = pod.spec.containers.iter().flat_map(|container| &container.ports);
    let port = ports.find(|port| port.name == METRICS_PORT)?;
    Some(SocketAddr::new(ip, u16::try_from(port.container_port).ok()?))
}

impl PluginEvidence {
    /// The UID of the plugin's pod that runs and serves metrics, and the address of its metrics.
    pub(super) fn metrics(&self) -> Option<(&str, SocketAddr)> {
        let mut pods = self.pods.iter();
        let pod = pods.find(|pod| pod.started.is_some() && !pod.is_leaving && pod.metrics.is_some())?;
        Some((&*pod.uid, pod.metrics?))
    }

    /// Adds or replaces a pod of the plugin. Returns true if the process of the pod has ended since the last call, without a
    /// deletion of the pod.
    pub(super) fn put_pod(&mut self, mut pod: PluginPod) -> bool {
        let served = self.serves();
        let mut has_crashed = false;
        if let Some(known) = self.pods.iter_mut().find(|known| known.uid == pod.uid) {
            let was_ready = known.is_ready || known.is_silent;
            pod.is_silent = was_ready && known.started == pod.started && !pod.is_ready;
            has_crashed = known.has_crashed(&pod);
            *known = pod;
        } else {
            self.pods.push(pod);
        }
        self.shows_life |= !served && self.serves();
        has_crashed
    }

    /// Removes a pod that is gone. Its plugin counts as gone until a plugin reports that it serves.
    pub(super) fn remove_pod(&mut self, uid: &str) {
        self.pods.retain(|pod| *pod.uid != *uid);
        self.gone = Some(uid.into());
    }

    pub(super) fn set_state(&mut self, state: Option<PluginState>) {
        // Watches go on to show the annotation of a plugin that has been gone for long.
        if self.state == state || (state.is_some() && self.outdated == state) {
            return;
        }
        if let Some(state) = &state {
            // The watch of nodes may show the last report of a pod after the watch of pods has shown its end.
            let is_of_gone = state.pod.is_some() && state.pod.as_deref() == self.gone.as_deref();
            if state.serving && !is_of_gone {
                self.gone = None;
                self.shows_life = true;
            }
        }
        self.state = state;
        // A process that reports does not hang.
        for pod in &mut self.pods {
            pod.is_silent = false;
        }
    }

    /// The reason for which the plugin is away; `None` if it serves, or if no plugin was seen.
    pub(super) fn reason_away(&self) -> Option<Away> {
        if self.serves() {
            return None;
        }
        if self.pods.is_empty() {
            return match (&self.state, &self.gone) {
                (None, None) => None,
                (Some(state), None) if state.serving => None,
                _ => Some(Away::Gone),
            };
        }
        let are_leaving = self.pods.iter().all(|pod| pod.is_leaving);
        Some(if are_leaving {
            Away::Ending
        } else {
            Away::NotServing
        })
    }

    /// Returns true if kubelet can admit pods by one of the plugin's pods.
    fn serves(&self) -> bool {
        self.pods.iter().any(|pod| pod.serves(self.state.as_ref()))
    }

    /// Returns true if a plugin that serves began to do so in a later second than `at`, by the clock of the node.
    pub(super) fn began_to_serve_after(&self, at: Timestamp) -> bool {
        // Kubernetes writes times of containers in whole seconds, so that equal seconds prove no order.
        let is_later = |since: Timestamp| since.as_second() > at.as_second();
        let state = self.state.as_ref();
        state.is_some_and(|state| state.serving && is_later(state.since))
            || (self.pods.iter()).any(|pod| pod.is_ready && pod.started.is_some_and(is_later))
    }

    /// Returns true if a plugin was seen that has not been gone for long.
    pub(super) fn shows_plugin(&self) -> bool {
        !self.pods.is_empty() || self.state.is_some() || self.gone.is_some()
    }

    /// Returns true if there is no evidence to keep.
    pub(super) fn is_empty(&self) -> bool {
        !self.shows_plugin() && self.outdated.is_none()
    }

    /// Ends the evidence of a plugin that has been gone for long: its node is like one without a plugin of this project.
    pub(super) fn forget_absent(&mut self) {
        (self.outdated, self.gone) = (self.state.take(), None);
    }

    /// The UIDs of the pods that the list with this number did not show.
    pub(super) fn unlisted(&self, list: u32) -> impl Iterator<Item = &str> {
        let unlisted = self.pods.iter().filter(move |pod| pod.list != list);
        unlisted.map(|pod| &*pod.uid)
    }
}

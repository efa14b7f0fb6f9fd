//! The pods and the annotation by which one node's plugin is known, and what they say together.

use std::net::SocketAddr;

use k8s_openapi::jiff::Timestamp;
use proto::plugin_reports::PluginState;
use proto::pod::Pod;

use super::Away;

/// The label of the plugin's pods.
const LABEL: &str = "app.kubernetes.io/name";

/// The name of the port at which the plugin serves its metrics, as shipped.
const METRICS_PORT: &str = "health";

/// Its values, as shipped.
const NAMES: [&str; 2] = ["gpushare-device-plugin", "gpushare-device-plugin-whole-gpus"];

/// One pod of the device plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PluginPod {
    pub(super) uid: Box<str>,
    /// True if it is being deleted, or has ended.
    is_leaving: bool,
    /// The start of its container, if that runs.
    started: Option<Timestamp>,
    /// True if its readiness probe succeeds, which it does while all resources are registered.
    is_ready: bool,
    /// True if the probe fails that has succeeded since the plugin's last word: the process hangs, and says nothing itself.
    is_silent: bool,
    /// The address at which it serves its metrics.
    metrics: Option<SocketAddr>,
    /// Number of the list that named it last.
    list: u32,
}

/// What is known of one node's plugin.
#[derive(Debug, Default)]
pub(super) struct PluginEvidence {
    pods: Vec<PluginPod>,
    /// The annotation of the node.
    state: Option<PluginState>,
    /// An annotation that counts no more, as the plugin has been gone for long.
    outdated: Option<PluginState>,
    /// UID of a plugin's pod that is gone, until a plugin reports that it serves.
    gone: Option<Box<str>>,
    /// Set when a plugin begins to serve, and cleared by its reader.
    pub(super) shows_life: bool,
}

impl PluginPod {
    /// The node of a pod, and the pod, if it is a plugin's: one of a `DaemonSet` that bears the label.
    pub(super) fn of(pod: &Pod, list: u32) -> Option<(&str, Self)> {
        let node = pod.spec.node_name.as_deref()?;
        let is_labelled = pod
            .metadata
            .labels
            .as_ref()?
            .get(LABEL)
            .is_some_and(|name| NAMES.contains(&name.as_str()));
        let mut owners = pod.metadata.owner_references.iter().flatten();
        let is_of_daemon_set =
            owners.any(|owner| owner.kind == "DaemonSet" && owner.controller == Some(true));
        if !is_labelled || !is_of_daemon_set {
            return None;
        }
        let container = pod.status.container_statuses.first();
        let running = container.and_then(|container| container.state.running.as_ref());
        let started = running.and_then(|running| running.started_at.as_deref()?.parse().ok());
        let is_leaving = pod.is_deleting() || pod.is_terminal();
        let is_ready = started.is_some() && container.is_some_and(|container| container.ready);
        Some((
            node,
            Self {
                uid: pod.uid().into(),
                is_leaving,
                started,
                is_ready,
                is_silent: false,
                metrics: metrics_address(pod),
                list,
            },
        ))
    }

    /// Returns true if kubelet can admit pods by this plugin.
    ///
    /// The plugin's word is newer than the probe's, if it is one of the process that runs: kubelet probes every few seconds.
    fn serves(&self, state: Option<&PluginState>) -> bool {
        let Some(started) = self.started.filter(|_| !self.is_leaving) else {
            return false;
        };
        let is_of_this_pod = |state: &PluginState| state.pod.as_deref().is_none_or(|uid| *uid == *self.uid);
        // A report from before the start of the container was written by its predecessor.
        match state.filter(|state| state.since >= started && is_of_this_pod(state)) {
            Some(state) => state.serving && !self.is_silent,
            None => self.is_ready,
        }
    }

    /// Returns true if the process of this pod has ended since and not by a deletion.
    fn has_died(&self, now: &Self) -> bool {
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
    /// The pod that runs and serves metrics, and its address.
    pub(super) fn metrics(&self) -> Option<(&str, SocketAddr)> {
        let mut running = self
            .pods
            .iter()
            .filter(|pod| pod.started.is_some() && !pod.is_leaving);
        running.find_map(|pod| Some((&*pod.uid, pod.metrics?)))
    }

    /// Takes in a pod. Returns true if its process has died.
    pub(super) fn see(&mut self, seen: PluginPod) -> bool {
        let served = self.serves();
        let known = self.pods.iter_mut().find(|pod| pod.uid == seen.uid);
        let fails = |known: &PluginPod| {
            (known.is_ready || known.is_silent) && known.started == seen.started && !seen.is_ready
        };
        let seen = PluginPod {
            is_silent: known.as_deref().is_some_and(fails),
            ..seen
        };
        let has_died = known.as_ref().is_some_and(|known| known.has_died(&seen));
        match known {
            Some(known) => *known = seen,
            None => self.pods.push(seen),
        }
        self.shows_life |= !served && self.serves();
        has_died
    }

    /// A pod is gone.
    pub(super) fn lose(&mut self, uid: &str) {
        self.pods.retain(|pod| *pod.uid != *uid);
        self.gone = Some(uid.into());
    }

    /// Takes in the annotation.
    pub(super) fn tell(&mut self, state: Option<PluginState>) {
        if self.state == state || (state.is_some() && self.outdated == state) {
            return;
        }
        let is_of_gone =
            |state: &PluginState| state.pod.is_some() && state.pod.as_deref() == self.gone.as_deref();
        if state
            .as_ref()
            .is_some_and(|state| state.serving && !is_of_gone(state))
        {
            self.gone = None;
            self.shows_life = true;
        }
        self.state = state;
        for pod in &mut self.pods {
            pod.is_silent = false;
        }
    }

    /// The reason for which the plugin is away; `None` if it serves, or nothing is known.
    pub(super) fn away(&self) -> Option<Away> {
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
        Some(if self.pods.iter().all(|pod| pod.is_leaving) {
            Away::Ending
        } else {
            Away::NotServing
        })
    }

    fn serves(&self) -> bool {
        self.pods.iter().any(|pod| pod.serves(self.state.as_ref()))
    }

    /// Returns true if a plugin has shown that it served after this second, by the clock of the node.
    pub(super) fn has_served_after(&self, at: Timestamp) -> bool {
        let by_word = self
            .state
            .as_ref()
            .filter(|state| state.serving)
            .map(|state| state.since);
        let by_probe = self
            .pods
            .iter()
            .filter(|pod| pod.is_ready)
            .filter_map(|pod| pod.started);
        by_probe
            .chain(by_word)
            .any(|since| since.as_second() > at.as_second())
    }

    pub(super) fn has_no_pod(&self) -> bool {
        self.pods.is_empty()
    }

    /// Returns true if a plugin was seen, and not gone for long.
    pub(super) fn is_any(&self) -> bool {
        !self.pods.is_empty() || self.state.is_some() || self.gone.is_some()
    }

    /// Returns true if nothing need be kept.
    pub(super) fn is_void(&self) -> bool {
        !self.is_any() && self.outdated.is_none()
    }

    /// Forgets a plugin that has been gone for long.
    pub(super) fn forget_absent(&mut self) {
        (self.outdated, self.gone) = (self.state.take(), None);
    }

    /// The pods that a list did not name, by UID.
    pub(super) fn unlisted(&self, list: u32) -> impl Iterator<Item = &str> {
        self.pods
            .iter()
            .filter(move |pod| pod.list != list)
            .map(|pod| &*pod.uid)
    }
}

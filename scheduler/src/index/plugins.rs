//! The nodes whose device plugin is away, so that kubelet would fail the pods that ask for its resources for good.
//!
//! Three signs show that a plugin is away: its pod is being deleted, is gone or does not run; its annotation of the Node says so
//! ([`PluginState`]); a pod has failed on the node. After a failure the node is left out for a while, or until the plugin shows
//! that it serves. A plugin whose process has ended without a deletion of its pod is tried with few pods at a time for a while.
//! A node of which neither a plugin's pod nor the annotation was seen may have another project's plugin, and is never left out.
//!
//! Watches bring no time: what they show counts at once, and its deadline from the next [`Plugins::advance`] on.

mod evidence;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use proto::plugin_reports::PluginState;
use proto::pod::Pod;
use rustc_hash::{FxHashMap, FxHashSet};
use tracing::info;

use evidence::{PluginEvidence, PluginPod};

/// The most pods that are on their way to a node whose plugin is on trial: as many are lost if the plugin ends again.
pub(super) const TRIED_AT_ONCE: usize = 3;

/// The time for which a plugin on trial must have served before its node is like others.
const TRIAL: Duration = Duration::from_secs(30);

/// The time for which a node is left out after pods have failed there, doubled while they go on failing.
const FIRST_PAUSE: Duration = Duration::from_secs(5);

/// The longest time for which a node is left out after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The time without failures after which the next failure on a node gets the first pause again.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(10 * 60);

/// The time for which a plugin that is gone keeps pods from its node: kubelet takes its resources from the node after five
/// minutes, and whatever offers them later is another plugin.
const GONE_COUNTS_FOR: Duration = Duration::from_secs(6 * 60);

/// Parts of kubelet's messages (1.36) about pods that it fails while the plugin of a resource is away: all devices are unhealthy
/// when the device list is closed, the resource is unknown after a restart of kubelet, and a call meets a socket that is closed.
const AWAY_MESSAGES: [&str; 4] = [
    "unhealthy devices",
    "unregistered device",
    "has been stopped",
    "code = Unavailable",
];

/// The reason for which the plugin of a node counts as away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Away {
    #[error("the device plugin's pod is being deleted")]
    Ending,
    /// The plugin's pod does not run, or the plugin is not registered with kubelet.
    #[error("the device plugin is not registered with kubelet")]
    NotServing,
    /// The plugin's pod is gone, or the plugin reports that it does not serve, and no pod of a plugin is on the node.
    #[error("the device plugin has ended")]
    Gone,
    #[error("kubelet has just failed a pod there, as the device plugin was away")]
    Refusing,
}

/// The pods that a node takes on account of its plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    #[default]
    Offered,
    /// The node takes [few](TRIED_AT_ONCE) pods at a time.
    Tried,
    Out(Away),
}

#[derive(Debug, Default)]
pub(super) struct Plugins {
    /// The namespace of the plugins' pods.
    namespace: Option<Box<str>>,
    nodes: FxHashMap<Box<str>, NodePlugin>,
    /// The nodes of the plugins' pods, by UID.
    by_pod: FxHashMap<Box<str>, Box<str>>,
    /// The nodes with deadlines that begin at the next [`Plugins::advance`].
    not_begun: FxHashSet<Box<str>>,
    next: Option<Instant>,
    /// Number of nodes that are not [offered](Standing::Offered) without limit.
    n_limited: usize,
}

#[derive(Debug, Default)]
struct NodePlugin {
    evidence: PluginEvidence,
    standing: Standing,
    /// Set while the node is left out because kubelet has failed a pod there.
    pause: Option<Deadline>,
    /// The length of the last pause, and its beginning.
    last_pause: Option<(Duration, Instant)>,
    /// Set from the unexpected end of a plugin, or a failure of a pod, until the plugin has served for [`TRIAL`].
    trial: Option<Deadline>,
    /// Set while the plugin is [gone](Away::Gone).
    gone: Option<Deadline>,
}

/// The end of a time span that an object from a watch begins. Watches bring no time, so the span begins a moment later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deadline {
    /// The span begins at the next [`Plugins::advance`].
    NotBegun,
    At(Instant),
}

impl Deadline {
    /// Begins a time span that has not begun: it lasts from `now` on. Leaves any other deadline as it is.
    fn begin(deadline: &mut Option<Self>, now: Instant, lasts: Duration) {
        if *deadline == Some(Self::NotBegun) {
            *deadline = now.checked_add(lasts).map(Self::At);
        }
    }

    /// Removes a deadline that is over; returns true if it was.
    fn take_if_over(deadline: &mut Option<Self>, now: Instant) -> bool {
        let is_over = |deadline: &mut Self| matches!(deadline, Self::At(at) if *at <= now);
        deadline.take_if(is_over).is_some()
    }

    /// The time of a deadline; `None` if there is none, or its time span has not begun.
    fn at(deadline: Option<Self>) -> Option<Instant> {
        match deadline? {
            Self::At(at) => Some(at),
            Self::NotBegun => None,
        }
    }
}

impl Plugins {
    /// The state before any list of objects, for plugins whose pods are in this namespace.
    pub(super) fn of_namespace(namespace: &str) -> Self {
        Self {
            namespace: Some(namespace.into()),
            ..Self::default()
        }
    }

    /// Returns true if no node is left out or tried: filters then skip the look-up of each node.
    #[inline]
    pub(super) const fn all_serve(&self) -> bool {
        self.n_limited == 0
    }

    /// The pods that a node takes on account of its plugin.
    #[inline]
    pub(super) fn standing(&self, node: &str) -> Standing {
        let plugin = self.nodes.get(node);
        plugin.map(|plugin| plugin.standing).unwrap_or_default()
    }

    /// The UID of the plugin's pod on a node, and the address of its metrics, if it serves them.
    pub(super) fn metrics(&self, node: &str) -> Option<(&str, SocketAddr)> {
        self.nodes.get(node)?.evidence.metrics()
    }

    pub(super) fn n_left_out(&self) -> usize {
        let is_out = |plugin: &&NodePlugin| matches!(plugin.standing, Standing::Out(_));
        self.nodes.values().filter(is_out).count()
    }

    /// Adds or replaces a pod that a list of this number, or a watch after it, shows. Returns true if a node takes more pods than
    /// before.
    pub(super) fn put_pod(&mut self, pod: &Pod, list: u32) -> bool {
        // Any user may create pods in other namespaces.
        if self.namespace.is_none() || pod.metadata.namespace.as_deref() != self.namespace.as_deref() {
            return false;
        }
        let Some((node, plugin_pod)) = PluginPod::of(pod, list) else {
            // The plugin's label may have been taken away from the pod.
            return self.remove_pod(pod.uid());
        };
        // A deletion may come with a pod that names no node any more.
        self.by_pod.insert(plugin_pod.uid.clone(), node.into());
        let plugin = self.nodes.entry(node.into()).or_default();
        if plugin.evidence.put_pod(plugin_pod) {
            plugin.trial = Some(Deadline::NotBegun);
        }
        self.update_standing(node)
    }

    /// Removes a pod that is gone. Returns true if a node takes more pods than before.
    pub(super) fn remove_pod(&mut self, uid: &str) -> bool {
        let Some(node) = self.by_pod.remove(uid) else {
            return false;
        };
        if let Some(plugin) = self.nodes.get_mut(&node) {
            plugin.evidence.remove_pod(uid);
        }
        self.update_standing(&node)
    }

    /// Removes the pods that a complete list did not name. Returns true if a node takes more pods than before.
    pub(super) fn end_list(&mut self, list: u32) -> bool {
        let mut unlisted: Vec<Box<str>> = Vec::new();
        for plugin in self.nodes.values() {
            unlisted.extend(plugin.evidence.unlisted(list).map(Into::into));
        }
        let mut takes_more = false;
        for uid in unlisted {
            takes_more |= self.remove_pod(&uid);
        }
        takes_more
    }

    /// Replaces the report in a node's annotation. Returns true if the node takes more pods than before.
    pub(super) fn set_state(&mut self, node: &str, state: Option<PluginState>) -> bool {
        // Most clusters have nodes without GPUs, which need no entry.
        if state.is_none() && !self.nodes.contains_key(node) {
            return false;
        }
        let plugin = self.nodes.entry(node.into()).or_default();
        plugin.evidence.set_state(state);
        self.update_standing(node)
    }

    pub(super) fn forget_node(&mut self, node: &str) {
        if let Some(plugin) = self.nodes.remove(node) {
            self.n_limited -= usize::from(plugin.standing != Standing::Offered);
            // Pods of a deleted node may be deleted later; they must not bring its entry back.
            self.by_pod.retain(|_, of_pod| **of_pod != *node);
        }
    }

    /// Notes a pod that kubelet has failed on a node, if kubelet's message shows that a plugin was away.
    pub(super) fn note_failure(&mut self, node: &str, pod: &Pod) {
        if failed_without_plugin(pod) {
            let started = pod.status.start_time.as_deref();
            self.fail(node, started.and_then(|time| time.parse().ok()));
        }
    }

    /// Leaves out a node whose kubelet has failed a pod; `at` is the time of the failure by the clock of the node.
    pub(super) fn fail(&mut self, node: &str, at: Option<Timestamp>) {
        // A plugin that no pod and no report has shown may be another project's: nothing would show that it is back.
        let plugin = self.nodes.get_mut(node);
        let Some(plugin) = plugin.filter(|plugin| plugin.evidence.shows_plugin()) else {
            return;
        };
        // The failure is older than the plugin that serves now.
        if at.is_some_and(|at| plugin.evidence.began_to_serve_after(at)) {
            return;
        }
        plugin.pause.get_or_insert(Deadline::NotBegun);
        plugin.trial = Some(Deadline::NotBegun);
        self.update_standing(node);
    }

    /// Returns true if [`Self::advance`] has something to do.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.not_begun.is_empty() || self.next.is_some_and(|next| next <= now)
    }

    /// Lets new deadlines begin, and ends deadlines that are over. Returns true if a node takes more pods than before.
    pub(super) fn advance(&mut self, now: Instant) -> bool {
        let mut changed: Vec<Box<str>> = self.not_begun.drain().collect();
        for node in &changed {
            if let Some(plugin) = self.nodes.get_mut(node) {
                plugin.begin(now);
            }
        }
        if self.next.is_some_and(|next| next <= now) {
            for (node, plugin) in &mut self.nodes {
                if plugin.end_deadlines(now) {
                    changed.push(node.clone());
                }
            }
        }
        let mut takes_more = false;
        for node in &changed {
            takes_more |= self.update_standing(node);
        }
        self.next = self.nodes.values().filter_map(NodePlugin::next).min();
        takes_more
    }

    /// Updates the standing of a node, the number of limited nodes and the deadlines to begin. Returns true if the node takes
    /// more pods than before.
    fn update_standing(&mut self, node: &str) -> bool {
        let Some(plugin) = self.nodes.get_mut(node) else {
            return false;
        };
        let before = plugin.standing;
        plugin.update_standing();
        let after = plugin.standing;
        if plugin.has_not_begun() {
            self.not_begun.insert(node.into());
        }
        if plugin.evidence.is_empty() && after == Standing::Offered {
            self.nodes.remove(node);
        }
        self.n_limited += usize::from(after != Standing::Offered);
        self.n_limited -= usize::from(before != Standing::Offered);
        match (before, after) {
            (Standing::Out(_), Standing::Offered | Standing::Tried) => {
                info!(node, "the node's device plugin serves, pods are sent there");
                true
            }
            (Standing::Offered | Standing::Tried, Standing::Out(away)) => {
                info!(node, reason = %away, "no pods are sent to the node");
                false
            }
            _ => (before, after) == (Standing::Tried, Standing::Offered),
        }
    }
}

/// Returns true if kubelet has failed a pod because a plugin was away, and not because the plugin or another part refused it.
fn failed_without_plugin(pod: &Pod) -> bool {
    let message = pod.status.message.as_deref().unwrap_or_default();
    pod.status.reason.as_deref() == Some("UnexpectedAdmissionError")
        && AWAY_MESSAGES.iter().any(|words| message.contains(words))
}

impl NodePlugin {
    fn update_standing(&mut self) {
        // A new pod, or a newer report, proves more than a failure that came before it.
        if std::mem::take(&mut self.evidence.shows_life) {
            self.pause = None;
        }
        let away = self.evidence.reason_away();
        if away != Some(Away::Gone) {
            self.gone = None;
        } else if self.gone.is_none() {
            self.gone = Some(Deadline::NotBegun);
        }
        self.standing = match away.or(self.pause.map(|_| Away::Refusing)) {
            Some(away) => Standing::Out(away),
            None if self.trial.is_some() => Standing::Tried,
            None => Standing::Offered,
        };
        // The trial begins when the plugin serves again.
        if self.trial.is_some() && self.standing != Standing::Tried {
            self.trial = Some(Deadline::NotBegun);
        }
    }

    /// Returns true if a deadline waits for [`Self::begin`].
    fn has_not_begun(&self) -> bool {
        let begins_trial = self.standing == Standing::Tried && self.trial == Some(Deadline::NotBegun);
        begins_trial || [self.pause, self.gone].contains(&Some(Deadline::NotBegun))
    }

    /// Begins the pause, the trial and the time of a gone plugin now, where they are set and have not begun. A pause soon after
    /// the previous one lasts twice as long.
    fn begin(&mut self, now: Instant) {
        if self.pause == Some(Deadline::NotBegun) {
            let lasts = match self.last_pause {
                Some((lasted, began)) if now.saturating_duration_since(began) < FORGOTTEN_AFTER => {
                    (lasted * 2).min(LONGEST_PAUSE)
                }
                _ => FIRST_PAUSE,
            };
            self.last_pause = Some((lasts, now));
            Deadline::begin(&mut self.pause, now, lasts);
        }
        Deadline::begin(&mut self.gone, now, GONE_COUNTS_FOR);
        if self.standing == Standing::Tried {
            Deadline::begin(&mut self.trial, now, TRIAL);
        }
    }

    /// Ends the deadlines that are over, and returns true if any was.
    fn end_deadlines(&mut self, now: Instant) -> bool {
        let mut has_ended = Deadline::take_if_over(&mut self.gone, now);
        // By now kubelet has taken the plugin's resources from the node.
        if has_ended {
            self.evidence.forget_absent();
        }
        has_ended |= Deadline::take_if_over(&mut self.pause, now);
        has_ended |= Deadline::take_if_over(&mut self.trial, now);
        has_ended
    }

    /// The first of this node's deadlines whose time spans have begun.
    fn next(&self) -> Option<Instant> {
        let deadlines = [self.pause, self.trial, self.gone];
        deadlines.into_iter().filter_map(Deadline::at).min()
    }
}

#[cfg(test)]
mod tests;

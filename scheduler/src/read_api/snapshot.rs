//! The snapshot that answers all reads of the state, and its renewal.
//!
//! A renewal renders only the nodes that have changed, a few at a time under a short read lock, so that no filter waits for it.
//! While no client asks, the snapshot is renewed only once a minute, for the history.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use placement::{NodeId, RequestedGpus};
use proto::read_api::{Finding, Node, PendingPod, Totals};
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::names::{HiddenForms, SeenNames};
use super::node_findings::node_findings;
use crate::index::{Index, Shared, view};

/// The age at which a snapshot is renewed: clients see changes at most this much later.
pub(super) const MAX_AGE: Duration = Duration::from_secs(1);
const NODES_PER_LOCK: usize = 4;
/// Most namespaces that are reviewed for one client, the largest first; names in other namespaces are hidden.
const MAX_REVIEWED: usize = 32;
const MAX_PENDING: usize = 1000;
/// Most removed nodes that are remembered for clients that resume.
const MAX_REMOVED: usize = 4096;

#[derive(Clone, Debug, Default)]
pub(super) struct StateSnapshot {
    /// A text that identifies this process among all replicas and restarts.
    epoch: Arc<str>,
    /// The number of the revision, which grows with every change of the state.
    revision: u64,
    pub(super) nodes: BTreeMap<Arc<str>, Arc<RenderedNode>>,
    /// Removed nodes with the revision that first lacks each, the oldest first.
    removed: VecDeque<(u64, Arc<str>)>,
    /// The oldest revision from which a client can resume: all nodes that were removed since are remembered.
    oldest: u64,
    pub(super) pending: Pending,
    pub(super) totals: Totals,
    pub(super) models: BTreeMap<String, Totals>,
    /// The size of each namespace: the number of nodes with its pods, plus the number of its pending pods.
    namespaces: BTreeMap<Arc<str>, usize>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) revision: u64,
    /// The number of all such pods, of which `pods` has at most [`MAX_PENDING`].
    pub(super) total: usize,
    pub(super) pods: Vec<PendingPod>,
}

/// A node of the state as JSON, with the values that sums and findings need.
#[derive(Debug)]
pub(super) struct RenderedNode {
    pub(super) revision: u64,
    pub(super) json: Bytes,
    /// The findings of `doctor` about the node, with the names of all pods.
    pub(super) findings: Vec<Finding>,
    namespaces: Vec<Arc<str>>,
    hidden_forms: HiddenForms,
    pub(super) model: String,
    totals: Totals,
    plugin: Option<String>,
    /// True if a holder is assumed: the node's version stays the same when the binding is confirmed, and its JSON does not.
    has_assumed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Delta {
    pub(super) changed: Vec<Arc<RenderedNode>>,
    pub(super) removed: Vec<Arc<str>>,
    pub(super) has_pending_changed: bool,
}

impl Delta {
    pub(super) fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty() && !self.has_pending_changed
    }
}

impl StateSnapshot {
    /// The text that identifies the snapshot's revision among those of all processes.
    pub(super) fn id(&self) -> String {
        format!("{}-{}", self.epoch, self.revision)
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// The revision with this text; `None` if another process has issued it, or if a client cannot resume from it any more.
    pub(super) fn parse_id(&self, id: &str) -> Option<u64> {
        let (epoch, revision) = id.rsplit_once('-')?;
        let revision: u64 = revision.parse().ok()?;
        // A revision that is still to come is of another process with the same epoch, or made up.
        (epoch == &*self.epoch && (self.oldest..=self.revision).contains(&revision)).then_some(revision)
    }

    /// The nodes after the one of this name, in the order of names; all nodes without a name.
    pub(super) fn nodes_after(
        &self,
        name: Option<&Arc<str>>,
    ) -> impl Iterator<Item = (&Arc<str>, &Arc<RenderedNode>)> + use<'_> {
        let from = name.map_or(Bound::Unbounded, |name| Bound::Excluded(Arc::clone(name)));
        self.nodes.range((from, Bound::Unbounded))
    }

    /// The namespaces that are reviewed for a client without the right to list all pods.
    pub(super) fn largest_namespaces(&self) -> Vec<Arc<str>> {
        let mut by_size: Vec<_> = self.namespaces.iter().collect();
        // The largest first, so that most names are shown where there are more namespaces than can be reviewed.
        by_size.sort_by_key(|(name, size)| (Reverse(**size), Arc::clone(name)));
        by_size.truncate(MAX_REVIEWED);
        by_size.into_iter().map(|(name, _)| Arc::clone(name)).collect()
    }

    /// The changes after a revision; `None` if they are not remembered.
    pub(super) fn changes_since(&self, revision: u64) -> Option<Delta> {
        if revision < self.oldest {
            return None;
        }
        let mut delta = Delta {
            has_pending_changed: self.pending.revision > revision,
            ..Delta::default()
        };
        for node in self.nodes.values().filter(|node| node.revision > revision) {
            delta.changed.push(Arc::clone(node));
        }
        for (removed_at, name) in self.removed.iter().rev() {
            if *removed_at <= revision {
                break;
            }
            // The node may have been created again since.
            if !self.nodes.contains_key(name) {
                delta.removed.push(Arc::clone(name));
            }
        }
        Some(delta)
    }

    fn remove(&mut self, name: &Arc<str>) -> bool {
        if self.nodes.remove(name).is_none() {
            return false;
        }
        // Remembered for clients that resume from an earlier revision.
        self.removed.push_back((self.revision, Arc::clone(name)));
        if self.removed.len() > MAX_REMOVED
            && let Some((revision, _)) = self.removed.pop_front()
        {
            self.oldest = revision;
        }
        true
    }

    fn sum_up(&mut self) {
        // From all nodes, since a node's old totals cannot be subtracted from sums that have saturated.
        self.totals = Totals::default();
        self.models.clear();
        self.namespaces.clear();
        for pod in &self.pending.pods {
            *self.namespaces.entry(pod.namespace.as_str().into()).or_default() += 1;
        }
        for node in self.nodes.values() {
            self.totals.add(&node.totals);
            for namespace in &node.namespaces {
                *self.namespaces.entry(Arc::clone(namespace)).or_default() += 1;
            }
            match self.models.get_mut(&node.model) {
                Some(model) => model.add(&node.totals),
                None => drop(self.models.insert(node.model.clone(), node.totals)),
            }
        }
    }
}

/// Keeps the newest snapshot, and the versions by which changed nodes are found.
#[derive(Debug)]
pub(super) struct StatePublisher {
    index: Shared<Index>,
    snapshot: Arc<StateSnapshot>,
    /// The time at which the last renewal began; `None` before the first.
    renewed: Option<Instant>,
    /// The version at which each node was rendered last, and its name if it is shown.
    rendered: FxHashMap<NodeId, (u64, Option<Arc<str>>)>,
    /// The requests that were typical at the last renewal: they decide which memory is stranded.
    typical: Vec<RequestedGpus>,
    /// False if some device plugin was away at the last renewal.
    all_plugins_served: bool,
}

/// A node, its version, and its name and JSON if it is shown.
type Rendering = (NodeId, u64, Option<(String, RenderedNode)>);

/// The differences between the last snapshot and the index.
struct Changes {
    nodes: Vec<(NodeId, u64)>,
    gone: Vec<NodeId>,
    typical: Vec<RequestedGpus>,
    all_plugins_serve: bool,
    pending: Pending,
}

impl StatePublisher {
    /// Publishes the state of an index; `epoch` identifies this process.
    pub(super) fn new(index: Shared<Index>, epoch: &str) -> Self {
        let snapshot = StateSnapshot {
            epoch: epoch.into(),
            ..StateSnapshot::default()
        };
        Self {
            index,
            snapshot: Arc::new(snapshot),
            // The first snapshot is made when a client or the history asks for one.
            renewed: None,
            rendered: FxHashMap::default(),
            typical: Vec::new(),
            all_plugins_served: true,
        }
    }

    /// The newest snapshot, renewed if it is older than [`MAX_AGE`].
    pub(super) async fn current(&mut self) -> Arc<StateSnapshot> {
        if self.renewed.is_none_or(|renewed| renewed.elapsed() >= MAX_AGE) {
            self.renew().await;
        }
        Arc::clone(&self.snapshot)
    }

    /// Renders the nodes that have changed, and makes a new snapshot if anything has.
    async fn renew(&mut self) {
        // The age counts from here: the nodes are as they are now, however long their rendering takes.
        let began = Instant::now();
        let changes = self.changes();
        let mut nodes = Vec::with_capacity(changes.nodes.len());
        for chunk in changes.nodes.chunks(NODES_PER_LOCK) {
            let mut copies = Vec::with_capacity(chunk.len());
            {
                let index = self.index.read();
                for (id, version) in chunk {
                    let node = view::listed_node(index.filter(), *id, &changes.typical);
                    copies.push((*id, *version, node));
                }
            }
            for (id, version, node) in copies {
                nodes.push((id, version, node.map(RenderedNode::from)));
            }
            // Lets filter requests of the extender run between two chunks of nodes.
            tokio::task::yield_now().await;
        }
        // From here on nothing awaits, so that a cancelled renewal leaves nothing half done.
        self.commit(changes, nodes);
        self.renewed = Some(began);
    }

    /// Finds the nodes that may have changed since the last renewal, by their versions, and reads all that is no part of a node.
    fn changes(&self) -> Changes {
        let (versions, typical, all_plugins_serve, (total, pods)) = {
            let index = self.index.read();
            let versions: Vec<_> = index.fleet().node_versions().collect();
            let typical = view::typical_requests(index.fleet());
            let pending = view::pending_pods(index.filter(), MAX_PENDING);
            (versions, typical, index.all_plugins_serve(), pending)
        };
        let may_plugins_differ = !all_plugins_serve || !self.all_plugins_served;
        let typical_is_same = typical == self.typical;
        let mut nodes = Vec::new();
        let mut n_known = 0;
        for (id, version) in versions {
            let Some((known, name)) = self.rendered.get(&id) else {
                nodes.push((id, version));
                continue;
            };
            n_known += 1;
            let mut is_same = *known == version;
            // A node's version shows neither the end of an assumption, nor the absence of its plugin, nor other typical requests.
            if let Some(name) = name
                && let Some(node) = self.snapshot.nodes.get(name)
            {
                let plugin_is_same =
                    !may_plugins_differ || node.plugin == self.index.read().filter().plugin_problem(name);
                is_same &= !node.has_assumed && plugin_is_same && typical_is_same;
            }
            if !is_same {
                nodes.push((id, version));
            }
        }
        let mut gone = Vec::new();
        // The numbers show that no node is gone, as in almost every renewal.
        if n_known < self.rendered.len() {
            let is_gone = |id: &&NodeId| self.index.read().fleet().view(**id).is_none();
            gone.extend(self.rendered.keys().filter(is_gone).copied());
        }
        Changes {
            nodes,
            gone,
            typical,
            all_plugins_serve,
            pending: Pending {
                // Set by `commit`.
                revision: 0,
                total,
                pods,
            },
        }
    }

    /// Publishes the next snapshot if the rendered nodes, those that are gone or the pending pods differ from the last one.
    fn commit(&mut self, changes: Changes, nodes: Vec<Rendering>) {
        let mut next = StateSnapshot::clone(&self.snapshot);
        next.revision += 1;
        let mut has_changed = false;
        for id in changes.gone {
            if let Some((_, Some(name))) = self.rendered.remove(&id) {
                has_changed |= next.remove(&name);
            }
        }
        for (id, version, node) in nodes {
            let shown_as = self.rendered.get(&id).and_then(|(_, name)| name.clone());
            // A node that shares no GPU any more is not shown.
            let Some((name, mut node)) = node else {
                self.rendered.insert(id, (version, None));
                has_changed |= shown_as.is_some_and(|name| next.remove(&name));
                continue;
            };
            let name: Arc<str> = shown_as.unwrap_or_else(|| name.into());
            self.rendered.insert(id, (version, Some(Arc::clone(&name))));
            // Hints and requests for CPU change a node's version too, but nothing that is shown.
            if next.nodes.get(&name).is_none_or(|known| known.json != node.json) {
                node.revision = next.revision;
                next.nodes.insert(name, Arc::new(node));
                has_changed = true;
            }
        }
        let pending = &changes.pending;
        if (pending.total, &pending.pods) != (next.pending.total, &next.pending.pods) {
            next.pending = Pending {
                revision: next.revision,
                ..changes.pending
            };
            has_changed = true;
        }
        self.typical = changes.typical;
        self.all_plugins_served = changes.all_plugins_serve;
        if has_changed {
            next.sum_up();
            self.snapshot = Arc::new(next);
        }
    }
}

impl RenderedNode {
    pub(super) fn json_for(&self, names: &SeenNames) -> Bytes {
        self.hidden_forms.get(names, &self.namespaces, &self.json)
    }

    /// Serializes a node once, so that all clients share the text; returns it with the node's name.
    fn from(node: Node) -> (String, Self) {
        let (mut has_assumed, mut namespaces) = (false, BTreeSet::new());
        for holder in node.gpus.iter().flat_map(|gpu| &gpu.holders) {
            has_assumed |= holder.assumed;
            if !namespaces.contains(holder.namespace.as_str()) {
                namespaces.insert(Arc::from(holder.namespace.as_str()));
            }
        }
        let rendered = Self {
            // Set by `commit`.
            revision: 0,
            // Structs of texts and numbers always serialize.
            json: serde_json::to_vec(&node).unwrap_or_default().into(),
            findings: node_findings(&node),
            namespaces: namespaces.into_iter().collect(),
            hidden_forms: HiddenForms::default(),
            totals: Totals::of_node(&node),
            model: node.model,
            plugin: node.plugin,
            has_assumed,
        };
        (node.name, rendered)
    }
}

//! A copy of the state in numbers, for metrics.

use super::Index;

/// The state of the index in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes that exist.
    pub n_nodes: u64,
    /// Nodes with GPUs to share.
    pub n_gpu_nodes: u64,
    /// GPUs that are closed for maintenance.
    pub n_closed_gpus: u64,
    /// Pods that hold a share.
    pub n_pods: u64,
    /// Unbound pods that ask for a share.
    pub n_pending: u64,
    /// Assumed pods: binds have decided their nodes, and no watch has shown them bound.
    pub n_assumed: u64,
    /// Pods whose record is counted conservatively, or does not count.
    pub n_conservative: u64,
    /// Pods whose record names more than they request, or other devices than kubelet allocated.
    pub n_contradicting: u64,
    /// Unbound pods for which room is kept (hints), and the places that are kept for groups beside these.
    pub n_hints: u64,
    /// Groups for which room is kept in one domain.
    pub n_group_rooms: u64,
    /// Nodes that rank last because pods failed there.
    pub n_failing: u64,
    /// Nodes that get no pods because their device plugin is away.
    pub n_plugin_away: u64,
    /// Each kind of object, with true if its list is complete.
    pub synced: [(&'static str, bool); 3],
}

impl Snapshot {
    pub(super) fn of(index: &Index) -> Self {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let cluster = &index.cluster;
        let (mut n_pending, mut n_assumed, mut n_conservative, mut n_contradicting) = (0, 0, 0, 0);
        // Not all pods are gone through: they are many, and filters wait meanwhile.
        for entry in cluster.unbound.iter().filter_map(|uid| cluster.pods.get(uid)) {
            let is_assumed = entry.assumption.is_some();
            n_pending += u64::from(!is_assumed && index.requests_devices(&entry.facts));
            n_assumed += u64::from(is_assumed);
        }
        for entry in cluster.doubtful.iter().filter_map(|uid| cluster.pods.get(uid)) {
            n_conservative += u64::from(entry.problem.is_some());
            n_contradicting += u64::from(entry.contradicts);
        }
        Self {
            n_nodes: count(cluster.n_existing),
            n_gpu_nodes: count(cluster.n_gpu_nodes),
            n_closed_gpus: count(cluster.n_closed_gpus),
            n_pods: count(cluster.fleet.n_owners()),
            n_pending,
            n_assumed,
            n_conservative,
            n_contradicting,
            n_hints: count(cluster.fleet.n_hints()),
            n_group_rooms: count(index.hints.n_group_rooms()),
            n_failing: count(index.failing.n_ranking_last),
            n_plugin_away: count(cluster.plugins.n_left_out()),
            synced: index.synced(),
        }
    }
}

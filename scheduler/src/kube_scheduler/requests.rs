//! The requests of pods on their nodes, in kube-scheduler's sums (`NodeResourcesFit`).

use std::collections::BTreeMap;
use std::sync::Arc;

use placement::OwnerId;
use proto::pod::Pod;
use proto::totals::{CPU, HostResources, MEMORY, named_requests};
use rustc_hash::{FxHashMap, FxHashSet};

/// The requests of one pod by resource: thousandths of a CPU under `cpu`, and whole units of every other resource. Has no zeros.
pub type PodRequests = BTreeMap<Box<str>, u64>;

/// The sums of the requests of all pods, by node. A pod counts that is bound and has not ended, or whose binding is under way.
#[derive(Debug, Default)]
pub struct NodeRequests {
    sums: FxHashMap<Arc<str>, RequestSums>,
    /// The pods that are counted, by UID.
    pods: FxHashMap<OwnerId, CountedPod>,
    /// The requests of all pods, equal ones once: pods of one template share theirs.
    distinct: FxHashSet<Arc<PodRequests>>,
}

/// The sums of requests on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestSums {
    /// The number of pods that are counted on the node.
    pub n_pods: u64,
    /// The sum for each resource, in the units of [`PodRequests`]. Pods may request any amount, so `u64` could overflow.
    amounts: BTreeMap<Box<str>, u128>,
}

#[derive(Debug)]
struct CountedPod {
    node: Arc<str>,
    requests: Arc<PodRequests>,
    /// True if the pod is made for this node, as a pod of a `DaemonSet` is.
    is_tied_to_node: bool,
}

/// The requests of a pod, totalled as kube-scheduler does.
pub fn requests_of(pod: &Pod) -> PodRequests {
    let host = HostResources::of_pod(pod);
    let mut requests = PodRequests::from([(CPU.into(), host.cpu_milli), (MEMORY.into(), host.memory)]);
    for (resource, amount) in named_requests(pod) {
        requests.insert(resource.into(), amount);
    }
    // kube-scheduler compares no resource of which a pod requests zero.
    requests.retain(|_, amount| *amount > 0);
    requests
}

impl NodeRequests {
    /// Counts a pod on a node, and no longer where it was counted before.
    pub fn put(&mut self, owner: OwnerId, node: &str, requests: &PodRequests, is_tied_to_node: bool) {
        if let Some(counted) = self.pods.get(&owner)
            && *counted.node == *node
            && *counted.requests == *requests
            && counted.is_tied_to_node == is_tied_to_node
        {
            return;
        }
        self.remove(owner.as_str());
        let requests = if let Some(known) = self.distinct.get(requests) {
            Arc::clone(known)
        } else {
            let requests = Arc::new(requests.clone());
            self.distinct.insert(Arc::clone(&requests));
            requests
        };
        let node = match self.sums.get_key_value(node) {
            Some((node, _)) => Arc::clone(node),
            None => node.into(),
        };
        self.sums.entry(Arc::clone(&node)).or_default().add(&requests);
        let counted = CountedPod {
            node,
            requests,
            is_tied_to_node,
        };
        self.pods.insert(owner, counted);
    }

    /// No longer counts a pod.
    pub fn remove(&mut self, uid: &str) {
        let Some(counted) = self.pods.remove(uid) else {
            return;
        };
        if let Some(sums) = self.sums.get_mut(&counted.node) {
            sums.subtract(&counted.requests);
            if sums.n_pods == 0 {
                self.sums.remove(&counted.node);
            }
        }
        // Only this pod and `distinct` hold them, so no other pod has equal requests.
        if Arc::strong_count(&counted.requests) == 2 {
            self.distinct.remove(&counted.requests);
        }
    }

    /// The sums of requests on a node; `None` if no pod is counted there.
    pub fn on(&self, node: &str) -> Option<&RequestSums> {
        self.sums.get(node)
    }

    /// The sums of the pods on a node that are made for it, as those of `DaemonSet`s: a new node of its kind gets the same ones.
    pub fn of_tied_pods_on(&self, node: &str) -> RequestSums {
        let mut sums = RequestSums::default();
        for counted in self.pods.values() {
            if counted.is_tied_to_node && *counted.node == *node {
                sums.add(&counted.requests);
            }
        }
        sums
    }

    /// The requests of a counted pod.
    pub fn of_pod(&self, uid: &str) -> Option<&PodRequests> {
        Some(&self.pods.get(uid)?.requests)
    }
}

impl RequestSums {
    /// The sum of one resource.
    pub fn of(&self, resource: &str) -> u128 {
        self.amounts.get(resource).copied().unwrap_or(0)
    }

    /// These sums plus the sums `other`.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let mut sums = self.clone();
        sums.n_pods += other.n_pods;
        for (resource, amount) in &other.amounts {
            *sums.amounts.entry(resource.clone()).or_default() += amount;
        }
        sums
    }

    /// Adds the requests of one more pod.
    pub fn add(&mut self, requests: &PodRequests) {
        self.n_pods += 1;
        for (resource, amount) in requests {
            *self.amounts.entry(resource.clone()).or_default() += u128::from(*amount);
        }
    }

    /// Subtracts the requests of a pod that was added.
    pub fn subtract(&mut self, requests: &PodRequests) {
        self.n_pods = self.n_pods.saturating_sub(1);
        for (resource, amount) in requests {
            if let Some(sum) = self.amounts.get_mut(resource) {
                *sum = sum.saturating_sub(u128::from(*amount));
                if *sum == 0 {
                    self.amounts.remove(resource);
                }
            }
        }
    }
}

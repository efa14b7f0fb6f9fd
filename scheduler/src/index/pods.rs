//! Pods as watches show them, turned into holdings.

use std::borrow::Cow;

use placement::{NodeView, OwnerId, PodProfile};
use proto::pod::Pod;
use tracing::warn;

use super::Index;
use super::assume::{Assumption, Phase};
use super::eviction::Eviction;
use super::failing::is_refused_by_kubelet;
use super::hints::Shown;
use crate::accounting::{Bound, PodFacts, Surroundings};
use crate::watch::ObjectStore;

/// What is known of a pod that asks for our resources.
#[derive(Debug)]
pub(super) struct PodEntry {
    pub(super) facts: PodFacts,
    /// What a bind decided, until the watch shows the pod bound.
    pub(super) assumption: Option<Box<Assumption>>,
    /// The reason for which it is counted conservatively, or the fault of its record.
    pub(super) problem: Option<Box<str>>,
    /// True if its record says more than it asks for.
    pub(super) contradicts: bool,
    /// The spec that it is counted as among those that pods usually ask for.
    pub(super) counted: Option<PodProfile>,
    /// The facts by which kube-scheduler chooses victims.
    pub(super) eviction: Eviction,
    /// Number of the list that named it last; 0 if no watch has shown it yet.
    pub(super) list: u32,
}

impl ObjectStore<Pod> for Index {
    const KIND: &'static str = "pods";

    fn apply(&mut self, pod: Pod) {
        let uid = pod.uid();
        if uid.is_empty() {
            return;
        }
        if self.plugins.see_pod(&pod, self.pod_list.number) {
            self.note_silent_opening();
        }
        let facts = PodFacts::of(&pod, &self.names);
        let asked = facts.as_ref().map(|facts| facts.host);
        match facts {
            Some(facts) if !pod.is_terminal() => {
                let is_bound = facts.bound.is_some();
                self.put_pod(uid, facts);
                self.see_eviction(&pod);
                if !is_bound {
                    self.follow_attempt(uid, Shown::of(&pod));
                }
                // Who waits may ask for anything, as often as they like; who is there was let in.
                if is_bound && !pod.is_tied_to_node() {
                    self.count_ask(uid);
                }
            }
            Some(facts) => {
                if let Some(bound) = facts
                    .bound
                    .as_deref()
                    .filter(|_| self.pods.contains_key(uid) && is_refused_by_kubelet(&pod))
                {
                    self.failing.note(&bound.node, uid);
                    self.note_failure(&bound.node, &pod);
                }
                self.remove_pod(uid);
                self.ended.insert(OwnerId::from(uid), self.pod_list.number);
            }
            None => self.remove_pod(uid),
        }
        self.see_use(&pod, asked);
        self.account_given(uid);
        self.keep_for_nominees();
        self.learn_if_news();
    }

    fn delete(&mut self, pod: &Pod) {
        if self.plugins.remove_pod(pod.uid()) {
            self.note_silent_opening();
        }
        self.remove_pod(pod.uid());
        self.see_no_use(pod.uid());
        self.learn_if_news();
        self.ended.remove(pod.uid());
        self.account_given(pod.uid());
        self.keep_for_nominees();
    }

    fn begin_list(&mut self) {
        self.pod_list.begin(self.fleet.n_openings());
    }

    fn end_list(&mut self) {
        let number = self.pod_list.number;
        for entry in self.pods.values_mut().filter(|entry| entry.list != number) {
            if let Some(assumption) = entry
                .assumption
                .as_mut()
                .filter(|assumption| assumption.phase == Phase::Written)
            {
                assumption.unlisted = true;
                // The permit of a notification is kept until it is waited for.
                self.unlisted.notify_one();
            }
        }
        // An assumed pod may be younger than the list; whoever bound it asks what became of it.
        let gone = self
            .pods
            .iter()
            .filter(|(_, entry)| entry.list != number && entry.assumption.is_none());
        let gone: Vec<OwnerId> = gone.map(|(uid, _)| uid.clone()).collect();
        for uid in gone {
            self.remove_pod(uid.as_str());
            self.account_given(uid.as_str());
        }
        self.end_plain_list();
        if self.plugins.end_list(number) {
            self.note_silent_opening();
        }
        let forgotten = self
            .ended
            .extract_if(|_, list| *list != number)
            .map(|(uid, _)| uid);
        for uid in forgotten.collect::<Vec<_>>() {
            self.account_given(uid.as_str());
        }
        if !self.pod_list.synced {
            self.began_with_pending = self
                .pods
                .values()
                .any(|entry| entry.facts.bound.is_none() && self.concerns(&entry.facts));
        }
        self.pod_list.synced = true;
        self.note_silent_since(self.pod_list.n_openings);
        self.keep_for_nominees();
        self.learn();
    }
}

impl Index {
    fn put_pod(&mut self, uid: &str, facts: PodFacts) {
        let list = self.pod_list.number;
        let owner = self.owner(uid);
        let Some(bound) = &facts.bound else {
            let entry = self
                .pods
                .entry(owner)
                .or_insert_with(|| PodEntry::new(facts.clone()));
            let was_bound = entry.facts.bound.is_some() && entry.assumption.is_none();
            entry.facts = facts;
            entry.list = list;
            if was_bound {
                (entry.problem, entry.contradicts) = (None, false);
                self.fleet.release(uid);
            }
            return;
        };
        if let Some(nanos) = bound.assumed_at {
            self.stamps.saw(nanos);
        }
        let node = bound.node.clone();
        let entry = self
            .pods
            .entry(owner.clone())
            .or_insert_with(|| PodEntry::new(facts.clone()));
        let known = entry.facts == facts && entry.assumption.is_none() && entry.list != 0;
        entry.facts = facts;
        entry.list = list;
        entry.assumption = None;
        self.end_hint(uid, Some(&node));
        // A bound pod is shown many times; only its first binding, or a changed record, is news.
        if !known || self.fleet.held_by(uid).is_none() {
            self.account(&owner);
        }
    }

    /// The pod's UID, as the text that is kept already if there is one.
    pub fn owner(&self, uid: &str) -> OwnerId {
        self.pods
            .get_key_value(uid)
            .map_or_else(|| OwnerId::from(uid), |(owner, _)| owner.clone())
    }

    pub(super) fn remove_pod(&mut self, uid: &str) {
        self.end_hint(uid, None);
        self.fleet.release(uid);
        self.nominated.remove(uid);
        let Some(entry) = self.pods.remove(uid) else {
            return;
        };
        let node = entry.bound().map(|bound| bound.node.clone());
        if let Some(state) = node.and_then(|node| self.nodes.get_mut(&*node)) {
            state.unheld.remove(uid);
        }
        self.fleet.clear_host_use(uid);
        if let Some(spec) = entry.counted {
            self.fleet.workload_mut().remove(&spec);
        }
    }

    /// Works out what a pod holds that is bound, or will be once its decision is written.
    pub(super) fn account(&mut self, owner: &OwnerId) {
        let Some(entry) = self.pods.get_mut(owner) else {
            return;
        };
        let Some(bound) = entry.bound() else { return };
        let view = self
            .fleet
            .node_id(&bound.node)
            .and_then(|node| self.fleet.view(node));
        let state = self.nodes.get(&*bound.node);
        // The node's plugin has exchanged the records of two pods; their own annotations follow.
        let exchanged = state.and_then(|node| node.exchanged.get(owner.as_str()));
        let given = state
            .map(|state| state.given_to(owner.as_str()))
            .unwrap_or_default();
        let inventory = view.and_then(NodeView::inventory);
        let report = state
            .map(|state| state.report_on(owner.as_str()))
            .unwrap_or_default();
        let around = Surroundings {
            inventory,
            kinds: &self.kinds,
            given,
            allows_all_devices: self.allows_all_devices,
            report,
        };
        let exchanged = exchanged.map(|record| record.clone().or_units_of(&bound.record));
        let account = entry
            .facts
            .account_of(exchanged.as_ref().unwrap_or(&bound.record), around);
        let problem: Option<Box<str>> = account.problem.map(Into::into);
        if let Some(problem) = problem
            .as_deref()
            .filter(|problem| entry.problem.as_deref() != Some(problem))
        {
            let (namespace, name, node) = (&entry.facts.namespace, &entry.facts.name, &bound.node);
            let contradicts = account.contradicts;
            warn!(%namespace, pod = %name, %node, problem, contradicts, "a pod is counted conservatively, or its record is not believed");
        }
        let is_unheld = account.holdings.is_empty();
        if let Some(state) = self.nodes.get_mut(&*bound.node) {
            if is_unheld && problem.is_some() {
                state.unheld.insert(owner.clone());
            } else {
                state.unheld.remove(owner);
            }
        }
        if is_unheld {
            self.fleet.release(owner.as_str());
        } else {
            self.fleet.hold(owner, &bound.node, account.holdings);
        }
        (entry.problem, entry.contradicts) = (problem, account.contradicts);
    }

    /// Works out anew what pods hold on a node, after its devices or its unit have changed.
    pub(super) fn account_again(&mut self, node: &str) {
        let unheld = self
            .nodes
            .get(node)
            .map(|state| state.unheld.clone())
            .unwrap_or_default();
        let view = self.fleet.node_id(node).and_then(|node| self.fleet.view(node));
        let held: Vec<OwnerId> = view
            .into_iter()
            .flat_map(|node| node.held().map(|held| held.owner.clone()))
            .collect();
        for owner in held.into_iter().chain(unheld) {
            self.account(&owner);
        }
    }
}

impl PodEntry {
    pub(super) fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            assumption: None,
            problem: None,
            contradicts: false,
            counted: None,
            eviction: Eviction::default(),
            list: 0,
        }
    }

    /// Where the pod is and what its record says: as a watch has shown it, or as a decision will write it.
    pub(super) fn bound(&self) -> Option<Cow<'_, Bound>> {
        let assumed = |assumption: &Assumption| {
            Cow::Owned(Bound::read(
                &assumption.order.node,
                Some(&assumption.order.annotations),
            ))
        };
        self.facts
            .bound
            .as_deref()
            .map(Cow::Borrowed)
            .or_else(|| self.assumption.as_deref().map(assumed))
    }
}

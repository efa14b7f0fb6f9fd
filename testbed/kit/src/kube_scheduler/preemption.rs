//! Preemption as in kube-scheduler 1.36: the choice of victims for a pod that fits no node.
//!
//! It models `DefaultPreemption`, `framework/preemption` and `HTTPExtender.ProcessPreemption`. Differences: victims are evicted
//! before the next attempt of any pod and not concurrently, all nodes are candidates and not a sample, and pods that wait in
//! `Permit` or `PreBind` count as bound. Ports, affinity and volumes never cause evictions.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams};
use kube::core::{Selector, SelectorExt};
use kube::{Client, ResourceExt};
use proto::extender::{MetaPod, MetaVictims};
use serde_json::json;
use tracing::debug;

use super::amounts::ResourceAmounts;
use super::cache::CachedNode;
use super::diagnosis::SchedulingDiagnosis;
use super::extender::{ExtenderClient, PreemptionVictims};
use super::fit;
use super::report::{Nomination, namespace, nominated_node, patch_status};
use crate::pod_fields::condition;

/// Type and reason of the condition of an evicted pod.
const DISRUPTION_TARGET: &str = "DisruptionTarget";
const BY_SCHEDULER: &str = "PreemptionByScheduler";

/// The nodes, pods, budgets and extenders that a round looks at.
pub(super) struct PreemptionContext<'a> {
    pub(super) nodes: &'a BTreeMap<String, CachedNode>,
    pub(super) pods: &'a BTreeMap<String, Vec<Arc<Pod>>>,
    pub(super) budgets: &'a [PodDisruptionBudget],
    pub(super) extenders: &'a [ExtenderClient],
}

impl PreemptionContext<'_> {
    /// Chooses the pods to evict, and their node.
    ///
    /// # Errors
    /// There are no victims: the change of the pod's nomination. An error, which kube-scheduler would log, keeps it.
    pub(super) async fn preempt(
        &self,
        pod: &Pod,
        request: &ResourceAmounts,
        diagnosis: &SchedulingDiagnosis,
    ) -> Result<(String, PreemptionVictims), Nomination> {
        if !self.is_eligible(pod, diagnosis) {
            return Err(Nomination::Keep);
        }
        let (mut candidates, mut without_victims) = (BTreeMap::new(), Nomination::Clear);
        for node in diagnosis.preemption_candidates() {
            match self.victims_on(node, pod, request) {
                // kube-scheduler treats a node where the pod fits without any victim as an error.
                Some(victims) if victims.pods.is_empty() => without_victims = Nomination::Keep,
                Some(victims) => drop(candidates.insert(node.to_owned(), victims)),
                None => {}
            }
        }
        if candidates.is_empty() {
            return Err(without_victims);
        }
        match self.ask_extenders(pod, candidates).await {
            // pickOneNodeForPreemption: the node whose victims cost least.
            Ok(candidates) => {
                let cheapest = candidates
                    .into_iter()
                    .min_by_key(|(_, victims)| victims_cost(victims));
                cheapest.ok_or(Nomination::Keep)
            }
            Err(error) => {
                debug!(pod = pod.name_any(), error, "preemption failed");
                Err(Nomination::Keep)
            }
        }
    }

    /// `PodEligibleToPreemptOthers`: a pod may not preempt while victims that were evicted for it are still ending on its
    /// nominated node, unless evictions cannot make it fit there.
    fn is_eligible(&self, pod: &Pod, diagnosis: &SchedulingDiagnosis) -> bool {
        let spec = pod.spec.as_ref();
        if spec.and_then(|spec| spec.preemption_policy.as_deref()) == Some("Never") {
            return false;
        }
        let Some(node) = nominated_node(pod) else {
            return true;
        };
        let refusal = diagnosis.refusals.get(node);
        // A node that no filter has looked at counts as one where evictions cannot help.
        if refusal.is_none_or(|refusal| refusal.unresolvable) {
            return true;
        }
        let mut pods = self.pods.get(node).into_iter().flatten();
        !pods.any(|other| priority(other) < priority(pod) && is_evicted(other))
    }

    /// `SelectVictimsOnNode`: without all less important pods the pod must fit; then as many of them are put back as fit beside
    /// it. `None` if no eviction makes the pod fit.
    fn victims_on(&self, node: &str, pod: &Pod, request: &ResourceAmounts) -> Option<PreemptionVictims> {
        let mut view = self.nodes.get(node)?.clone();
        let mut less_important = self.pods.get(node).cloned().unwrap_or_default();
        less_important.retain(|other| priority(other) < priority(pod));
        // DryRunPreemption offers a node only if a less important pod is there: equal priority evicts nothing.
        if less_important.is_empty() {
            return None;
        }
        less_important.sort_by_key(|pod| importance(pod));
        for pod in &less_important {
            view.used
                .subtract(&ResourceAmounts::of_pod(pod).unwrap_or_default());
        }
        if fit::refusal(pod, request, &view).is_some() {
            return None;
        }
        // Pods whose budget would be violated are put back first, so that they are victims only if nothing else helps.
        let mut ordered = with_violations(&less_important, self.budgets);
        ordered.sort_by_key(|(_, violates)| !violates);
        let mut victims = PreemptionVictims::default();
        for (other, violates) in ordered {
            let amounts = ResourceAmounts::of_pod(&other).unwrap_or_default();
            view.used.add(&amounts);
            if fit::refusal(pod, request, &view).is_some() {
                view.used.subtract(&amounts);
                victims.n_pdb_violations += i64::from(violates);
                victims.pods.push(other);
            }
        }
        victims.pods.sort_by_key(|pod| importance(pod));
        Some(victims)
    }

    /// `callExtenders`: each keeps, changes or drops candidates; a victim that is not on its node fails the round.
    async fn ask_extenders(
        &self,
        pod: &Pod,
        mut candidates: BTreeMap<String, PreemptionVictims>,
    ) -> Result<BTreeMap<String, PreemptionVictims>, String> {
        for extender in self.extenders {
            if extender.configuration.preempt_verb.is_empty() || !extender.is_interested(pod) {
                continue;
            }
            candidates = self.resolve_victims(&extender.preempt(pod, &candidates).await?)?;
            for (node, victims) in &candidates {
                if victims.pods.is_empty() {
                    return Err(format!("expected at least one victim pod on node {node:?}"));
                }
            }
            if candidates.is_empty() {
                break;
            }
        }
        Ok(candidates)
    }

    /// Finds the pods behind the UIDs that an extender answered as victims; an unknown one is an error.
    fn resolve_victims(
        &self,
        answer: &BTreeMap<String, MetaVictims>,
    ) -> Result<BTreeMap<String, PreemptionVictims>, String> {
        let mut candidates = BTreeMap::new();
        for (node, metas) in answer {
            let Some(pods) = self.pods.get(node) else {
                return Err(format!("nodeinfo not found for node name {node:?}"));
            };
            let mut victims = PreemptionVictims {
                pods: Vec::new(),
                n_pdb_violations: metas.n_pdb_violations,
            };
            for MetaPod { uid } in &metas.pods {
                let Some(pod) = pods.iter().find(|pod| pod.metadata.uid.as_ref() == Some(uid)) else {
                    let why = "but the pod is not found on that node";
                    return Err(format!(
                        "claims to preempt pod (UID: {uid}) on node: {node}, {why}"
                    ));
                };
                victims.pods.push(Arc::clone(pod));
            }
            candidates.insert(node.clone(), victims);
        }
        Ok(candidates)
    }
}

/// Evicts the victims that are not being deleted yet: writes a condition with the reason, then deletes them.
pub(super) async fn evict(client: &Client, victims: &PreemptionVictims) {
    for victim in &victims.pods {
        if victim.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let condition = json!({
            "type": DISRUPTION_TARGET, "status": "True", "reason": BY_SCHEDULER,
            "message": "preempting to accommodate a higher priority pod", "lastTransitionTime": Time(Timestamp::now()),
        });
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace(victim));
        let name = victim.name_any();
        // The condition comes first: controllers and users see it on the terminating pod.
        let evicted = match patch_status(client, victim, &json!({"conditions": [condition]})).await {
            Ok(()) => pods.delete(&name, &DeleteParams::default()).await.map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = evicted {
            debug!(pod = name, %error, "a victim is not evicted");
        }
    }
}

/// The cost of a node's victims: violated budgets, highest priority, sum of priorities, number, latest start.
fn victims_cost(victims: &PreemptionVictims) -> (i64, Option<i64>, i64, usize, Reverse<Option<Timestamp>>) {
    let highest = victims.pods.first().map(|pod| priority(pod));
    let mut sum = 0;
    let mut earliest = None;
    for pod in &victims.pods {
        // kube-scheduler shifts every priority to a positive number here, so that more victims never make a smaller sum.
        sum += priority(pod) - i64::from(i32::MIN);
        if Some(priority(pod)) == highest {
            earliest = Some(earliest.map_or(started(pod), |before: Timestamp| before.min(started(pod))));
        }
    }
    (
        victims.n_pdb_violations,
        highest,
        sum,
        victims.pods.len(),
        Reverse(earliest),
    )
}

/// `filterPodsWithPDBViolation`: pairs each pod with true if its eviction violates a budget. The pods use up budgets in order.
fn with_violations(pods: &[Arc<Pod>], budgets: &[PodDisruptionBudget]) -> Vec<(Arc<Pod>, bool)> {
    let mut disruptions_left = Vec::with_capacity(budgets.len());
    for budget in budgets {
        let status = budget.status.as_ref();
        disruptions_left.push(status.and_then(|status| status.disruptions_allowed).unwrap_or(0));
    }
    let mut violations = Vec::new();
    for pod in pods {
        let mut is_violating = false;
        for (budget, disruptions_left) in budgets.iter().zip(&mut disruptions_left) {
            if is_protected_by(budget, pod) {
                debug!(budget = budget.name_any(), "a victim draws on a budget");
                *disruptions_left -= 1;
                is_violating |= *disruptions_left < 0;
            }
        }
        violations.push((Arc::clone(pod), is_violating));
    }
    violations
}

/// Returns true if the eviction of a pod would count against a `PodDisruptionBudget`.
fn is_protected_by(budget: &PodDisruptionBudget, pod: &Pod) -> bool {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.clone());
    let Some(Ok(selector)) = selector.map(Selector::try_from) else {
        return false;
    };
    let disrupted = budget
        .status
        .as_ref()
        .and_then(|status| status.disrupted_pods.as_ref());
    let is_counted_already = disrupted.is_some_and(|disrupted| disrupted.contains_key(&pod.name_any()));
    // kube-scheduler, unlike the disruption controller: an empty selector matches no pod, and no selector a pod without labels.
    budget.namespace() == pod.namespace()
        && !pod.labels().is_empty()
        && !selector.selects_all()
        && selector.matches(pod.labels())
        && !is_counted_already
}

/// Returns true if a pod is being deleted because kube-scheduler evicted it.
fn is_evicted(pod: &Pod) -> bool {
    let Some(target) = condition(pod, DISRUPTION_TARGET) else {
        return false;
    };
    let is_by_scheduler = target.status == "True" && target.reason.as_deref() == Some(BY_SCHEDULER);
    pod.metadata.deletion_timestamp.is_some() && is_by_scheduler
}

pub(super) fn priority(pod: &Pod) -> i64 {
    i64::from(pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0))
}

/// `MoreImportantPod`: higher priority, then longer on its node.
fn importance(pod: &Pod) -> (Reverse<i64>, Timestamp) {
    (Reverse(priority(pod)), started(pod))
}

/// The time at which kubelet started the pod; later than any other for a pod that has not started.
fn started(pod: &Pod) -> Timestamp {
    let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    started.map_or(Timestamp::MAX, |started| started.0)
}

//! The comparison of the verdicts on one cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use kit::kube_scheduler::OfflineAttempt;
use proto::read_api::{Explanation, FitAnswer, FitRequest, NodeVerdict, RefusedBy};
use scheduler::read_api::{explain, fit};
use serde_json::Value;

use super::cluster::{Case, World, name, namespace, typed};

/// A difference between what is said and what is done: the question, and both answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The same for all differences of one kind, so that a case shrinks to one of the same kind.
    pub(crate) question: &'static str,
    pub(crate) text: String,
}

/// The number of answers that were compared.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    clusters: u64,
    pods: u64,
    fits: u64,
    by_kube_scheduler: u64,
    by_request: u64,
    by_devices: u64,
    replicas_placed: u64,
    replicas_refused: u64,
    ends: u64,
    /// The number of verdicts by the reason of the refusal.
    reasons: BTreeMap<String, u64>,
}

impl Tally {
    /// Returns true if each kind of answer was seen often enough.
    pub(crate) fn is_varied(&self) -> bool {
        let least = self.clusters / 20;
        [
            self.fits,
            self.by_kube_scheduler,
            self.by_request,
            self.by_devices,
            self.replicas_placed,
            self.replicas_refused,
            self.ends,
        ]
        .iter()
        .all(|n| *n > least)
    }

    fn count(&mut self, verdict: &NodeVerdict) {
        let counter = match verdict.refused_by {
            None => &mut self.fits,
            Some(RefusedBy::KubeScheduler) => &mut self.by_kube_scheduler,
            Some(RefusedBy::Request) => &mut self.by_request,
            Some(RefusedBy::Devices) => &mut self.by_devices,
        };
        *counter += 1;
        if verdict.refused_by != Some(RefusedBy::Request) {
            // Without the amounts, which are many.
            let reason = verdict.reason.split(" (asked").next().unwrap_or_default();
            *self.reasons.entry(reason.to_owned()).or_default() += 1;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} clusters, {} pods: {} nodes fit, {} refused by kube-scheduler, {} for the request, {} by devices; {} replicas \
             placed, {} times no further one; {} times pods ended",
            self.clusters,
            self.pods,
            self.fits,
            self.by_kube_scheduler,
            self.by_request,
            self.by_devices,
            self.replicas_placed,
            self.replicas_refused,
            self.ends
        )?;
        for (reason, n) in &self.reasons {
            writeln!(f, "{n:8} {reason}")?;
        }
        Ok(())
    }
}

/// Compares all answers about one cluster, each tried pod alone; `None` if all agree.
pub(crate) async fn compare(case: &Case, tally: &mut Tally) -> Option<Difference> {
    tally.clusters += 1;
    for pod in case.tried() {
        // A filter may leave room kept for its pod, so that each pod meets a cluster of its own.
        if let Some(difference) = compare_pod(case, &pod, tally).await {
            return Some(difference);
        }
    }
    None
}

async fn compare_pod(case: &Case, pod: &Value, tally: &mut Tally) -> Option<Difference> {
    let mut world = World::of(case);
    // A pod that asks for no device is none of gpushare's.
    let explanation = explain(world.index(), namespace(pod), name(pod), true)?;
    tally.pods += 1;
    let attempt = match world.attempt(pod).await {
        Ok(attempt) => attempt,
        Err(error) => return differ("attempt", format!("{}: {error}", name(pod))),
    };
    if let Some(difference) = compare_verdicts(case, pod, &explanation, &attempt) {
        return Some(difference);
    }
    for verdict in &explanation.verdicts {
        tally.count(verdict);
        if !verdict.would_fit_without.is_empty() {
            tally.ends += 1;
            if let Some(difference) = check_ends(case, pod, verdict).await {
                return Some(difference);
            }
        }
    }
    compare_fits(case, pod, &explanation, tally).await
}

/// Compares the verdict on each node.
fn compare_verdicts(
    case: &Case,
    pod: &Value,
    explanation: &Explanation,
    attempt: &OfflineAttempt,
) -> Option<Difference> {
    let verdicts = &explanation.verdicts;
    let said: BTreeSet<&str> = verdicts.iter().map(|verdict| verdict.node.as_str()).collect();
    let there: BTreeSet<&str> = case.list("nodes").iter().map(name).collect();
    if said != there || verdicts.len() != there.len() {
        return differ("nodes", format!("{}: {said:?} instead of {there:?}", name(pod)));
    }
    let n_fitting = verdicts.iter().filter(|verdict| verdict.fits).count();
    if explanation.fitting as usize != n_fitting || explanation.nodes as usize != there.len() {
        return differ("counts", format!("{explanation:?}"));
    }
    for verdict in verdicts {
        let refusal = attempt.diagnosis.refusals.get(&verdict.node);
        if let Some(question) = contradiction(explanation, verdict, attempt) {
            let text = format!(
                "{}: {verdict:?} (invalid: {:?}), but kube-scheduler: {refusal:?}",
                name(pod),
                explanation.invalid
            );
            return differ(question, text);
        }
    }
    None
}

/// The question on which a verdict and kube-scheduler differ.
fn contradiction(
    explanation: &Explanation,
    verdict: &NodeVerdict,
    attempt: &OfflineAttempt,
) -> Option<&'static str> {
    let fits = attempt.fitting.contains(&verdict.node);
    if fits != verdict.fits {
        return Some(if fits {
            "refused, but fits"
        } else {
            "fits, but is refused"
        });
    }
    if fits {
        return None;
    }
    // The extender does not say why it refuses a node while another fits.
    let refusal = attempt.diagnosis.refusals.get(&verdict.node);
    let is_by_extender = refusal.is_none_or(|refusal| refusal.by_extender);
    let is_by_kube_scheduler = verdict.refused_by == Some(RefusedBy::KubeScheduler);
    if is_by_kube_scheduler == is_by_extender || verdict.refused_by.is_none() {
        return Some("the refusing part");
    }
    let refusal = refusal?;
    let mut reasons = refusal.reasons.clone();
    reasons.sort();
    let mut said: Vec<&str> = match (verdict.refused_by, &explanation.invalid) {
        (Some(RefusedBy::Request), Some(rule)) => vec![rule],
        (Some(RefusedBy::KubeScheduler), _) => verdict.reason.split(", ").collect(),
        _ => vec![&verdict.reason],
    };
    said.sort_unstable();
    (said != reasons).then_some("the reason")
}

/// Ends the pods that a verdict names: the node must then take the pod.
async fn check_ends(case: &Case, pod: &Value, verdict: &NodeVerdict) -> Option<Difference> {
    let mut after = case.clone();
    let pods = after.objects["pods"].as_array_mut()?;
    let n_before = pods.len();
    pods.retain(|held| {
        let is_named =
            |ended: &proto::read_api::PodName| ended.name == name(held) && ended.namespace == namespace(held);
        !verdict.would_fit_without.iter().any(is_named)
    });
    let text = format!(
        "{} on {} without {:?}",
        name(pod),
        verdict.node,
        verdict.would_fit_without
    );
    if n_before - pods.len() != verdict.would_fit_without.len() {
        return differ("pods that end", text);
    }
    let mut world = World::of(&after);
    let attempt = world.attempt(pod).await.unwrap_or_default();
    if !attempt.fitting.contains(&verdict.node) {
        let refusal = attempt.diagnosis.refusals.get(&verdict.node);
        return differ("fits when pods end", format!("{text}: {refusal:?}"));
    }
    world
        .bind(pod, &verdict.node)
        .err()
        .and_then(|error| differ("bind when pods end", format!("{text}: {error}")))
}

/// Compares the number of equal pods that fit with the number that can be placed one after the other.
async fn compare_fits(
    case: &Case,
    pod: &Value,
    explanation: &Explanation,
    tally: &mut Tally,
) -> Option<Difference> {
    let mut case = case.clone();
    // The pods of the question are other pods; this one would hold nothing while it waits.
    let pods = case.objects["pods"].as_array_mut()?;
    pods.retain(|other| name(other) != name(pod));
    let request = FitRequest {
        pod: typed(pod)?,
        replicas: case.replicas,
        ..FitRequest::default()
    };
    // As the command sends it: a field that is not written would not be asked about.
    let request = serde_json::from_value(serde_json::to_value(&request).ok()?).ok()?;
    let mut world = World::of(&case);
    let answer = match fit(world.index(), &request) {
        Ok(answer) => answer,
        Err(error) => return differ("fits", format!("{}: {error}", name(pod))),
    };
    if answer.invalid != explanation.invalid {
        let text = format!("{:?} and {:?}", answer.invalid, explanation.invalid);
        return differ("invalid by fits and by explain", text);
    }
    let mut placed: BTreeMap<String, u32> = BTreeMap::new();
    for copy in 0..case.replicas {
        let mut replica = pod.clone();
        replica["metadata"]["name"] = format!("{}-{copy}", name(pod)).into();
        replica["metadata"]["uid"] = format!("uid-{}-{copy}", name(pod)).into();
        world.show(&replica);
        let attempt = match world.attempt(&replica).await {
            Ok(attempt) => attempt,
            Err(error) => return differ("attempt", format!("{}: {error}", name(pod))),
        };
        let Some(node) = attempt.chosen else {
            tally.replicas_refused += 1;
            break;
        };
        if let Err(error) = world.bind(&replica, &node) {
            return differ("bind", format!("{} on {node}: {error}", name(pod)));
        }
        tally.replicas_placed += 1;
        *placed.entry(node).or_default() += 1;
    }
    compare_placements(&case, pod, &answer, &placed)
}

fn compare_placements(
    case: &Case,
    pod: &Value,
    answer: &FitAnswer,
    placed: &BTreeMap<String, u32>,
) -> Option<Difference> {
    let n_placed: u32 = placed.values().sum();
    let counted: BTreeMap<String, u32> = answer
        .placements
        .iter()
        .map(|placement| (placement.node.clone(), placement.pods))
        .collect();
    let text = format!("{}: {counted:?} instead of {placed:?}", name(pod));
    if answer.fitting != n_placed || counted.values().sum::<u32>() != n_placed {
        return differ("the number that fits", text);
    }
    // While all fit, kube-scheduler's scores decide between nodes.
    if n_placed < case.replicas && counted != *placed {
        return differ("the number on each node", text);
    }
    None
}

#[expect(clippy::unnecessary_wraps, reason = "every caller returns it")]
fn differ(question: &'static str, text: String) -> Option<Difference> {
    Some(Difference { question, text })
}

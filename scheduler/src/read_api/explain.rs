//! `GET explain`: the node of one pod, or the verdicts of the nodes on the pod, the nearest misses first.
//!
//! Every verdict is that of [`verdict`](crate::verdict): kube-scheduler's own checks, then those of the filter.

mod summary;
mod survey;

use placement::{DeviceFit, Hints, OwnerId};
use proto::read_api::{Explanation, GpuVerdict, NodeVerdict, RefusedBy, VERSION};
use proto::request::GpuRequest;

use crate::accounting::PodFacts;
use crate::index::view::{asked, counted_on};
use crate::index::{Index, ResourceDemand, Shared, group_view};
use crate::kube_scheduler::PodRules;
use crate::verdict::{Asker, Refusal, words};
use summary::summary;
use survey::{Refused, Survey};

/// Most fitting nodes that are listed, unless the client asks for all.
const MAX_FITTING: usize = 3;
/// Most refusing nodes that are listed, unless the client asks for all.
const MAX_NEAREST: usize = 5;
/// Most refusing nodes for which the pods in the way are searched, each of which may take thousands of comparisons.
const MAX_SEARCHES: usize = 3;

/// Explains a pod, with all names, and the verdicts of all nodes if `all`; `None` if no such pod asks for devices.
pub fn explain(index: &Shared<Index>, namespace: &str, name: &str, all: bool) -> Option<Explanation> {
    explain_to(index, namespace, name, all, |_| true)
}

/// [`explain`] for a client that sees the names of pods in the namespaces that `sees` accepts.
pub(super) fn explain_to(
    index: &Shared<Index>,
    namespace: &str,
    name: &str,
    all: bool,
    sees: impl Fn(&str) -> bool,
) -> Option<Explanation> {
    let (uid, facts) = find_pod(&index.read(), namespace, name)?;
    let assumed_on = index.read().assumed_node(uid.as_str()).map(str::to_owned);
    let demand = index.read().demand(uid.as_str(), &facts);
    let bound = facts.bound.as_ref().map(|bound| bound.node.to_string());
    let unit = index.read().common_unit();
    let group = group_view::show(&index.read(), uid.as_str());
    let mut explanation = Explanation {
        api_version: VERSION.to_owned(),
        namespace: facts.namespace.to_string(),
        name: facts.name.to_string(),
        uid: uid.to_string(),
        asked: asked(&facts.request, unit),
        warning: facts.request.gpus().and_then(GpuRequest::warning),
        assumed: bound.is_none() && assumed_on.is_some(),
        node: bound.or(assumed_on),
        group,
        ..Explanation::default()
    };
    if let Some(bound) = &facts.bound {
        let index = index.read();
        explanation.gone = index.gone_gpus(uid.as_str());
        if !explanation.gone.is_empty() {
            explanation.counted_on = counted_on(index.filter(), &bound.node, uid.as_str());
        }
    }
    let demand = match demand {
        Err(rule) => Err(rule.to_string()),
        Ok(Some(demand)) => Ok(demand),
        Ok(None) => return Some(explanation),
    };
    explanation.invalid = demand.as_ref().err().cloned();
    if explanation.node.is_some() {
        return Some(explanation);
    }
    let rules = index.read().rules_of(uid.as_str()).cloned().unwrap_or_default();
    let asker = Asker {
        rules: &rules,
        demand: demand.as_ref().map_err(String::as_str),
    };
    let mut survey = Survey::of(index, uid.as_str(), asker);
    survey.search_ends(index, asker, MAX_SEARCHES);
    survey.hide_names(sees);
    explanation.nodes = count(survey.fitting.len() + survey.refused.len());
    explanation.fitting = count(survey.fitting.len());
    for refused in &survey.refused {
        for reason in &refused.reasons {
            *explanation.reasons.entry(reason.clone()).or_default() += 1;
        }
    }
    explanation.gates = rules.gates.iter().map(ToString::to_string).collect();
    // kube-scheduler's words are left out where they repeat the rule, which the filter has sent to it.
    explanation.kube_scheduler = match (last_attempt(&rules), &explanation.invalid) {
        (Some(words), Some(rule)) if words.contains(rule) => None,
        (attempt, _) => attempt,
    };
    explanation.summary = summary(&survey, asker);
    add_verdicts(&mut explanation, index, &survey, asker, all);
    Some(explanation)
}

/// The pod of this name that asks for devices: while a deleted pod and its replacement have one name, the one that is not bound.
fn find_pod(index: &Index, namespace: &str, name: &str) -> Option<(OwnerId, PodFacts)> {
    let mut found = None;
    for (uid, facts) in index.pods_named(namespace, name) {
        if index.requests_devices(facts) && (found.is_none() || facts.bound.is_none()) {
            found = Some((uid.clone(), facts.clone()));
        }
    }
    found
}

/// The beginnings of kube-scheduler's words on preemption, left out: [`Survey::search_ends`] searches the pods in the way.
const AFTER_REASONS: [&str; 2] = [" no new claims to deallocate", " preemption: "];

/// kube-scheduler's message about its last attempt to schedule the pod, up to [`AFTER_REASONS`], or its one-word reason.
fn last_attempt(rules: &PodRules) -> Option<String> {
    let condition = rules.last_attempt.as_ref()?;
    let text = if condition.message.is_empty() {
        &condition.reason
    } else {
        &condition.message
    };
    let ends = AFTER_REASONS.iter().filter_map(|words| text.find(words));
    let reasons = text.get(..ends.min().unwrap_or(text.len()))?;
    (!reasons.is_empty()).then(|| reasons.to_owned())
}

/// Adds the verdicts that are listed: of all nodes if `all`, or else of the first few.
fn add_verdicts(
    explanation: &mut Explanation,
    index: &Shared<Index>,
    survey: &Survey,
    asker: Asker<'_>,
    all: bool,
) {
    let n_fitting = if all { survey.fitting.len() } else { MAX_FITTING };
    for name in survey.fitting.iter().take(n_fitting) {
        let index = index.read();
        let fits = asker.demand.map(|demand| device_fits(&index, name, demand));
        explanation.verdicts.push(NodeVerdict {
            node: name.to_string(),
            fits: true,
            gpus: gpu_verdicts(&fits.unwrap_or_default()),
            ..NodeVerdict::default()
        });
    }
    let n_refusing = if all { survey.refused.len() } else { MAX_NEAREST };
    for refused in survey.refused.iter().take(n_refusing) {
        // A lock for each node: its detail looks at each device, and watches wait for readers.
        let verdict = refusing_verdict(&index.read(), refused, asker);
        explanation.verdicts.push(verdict);
    }
}

fn refusing_verdict(index: &Index, refused: &Refused, asker: Asker<'_>) -> NodeVerdict {
    let Refused { name, refusal, .. } = refused;
    let (refused_by, are_fits_shown) = match refusal {
        // Free amounts of single GPUs mean nothing where the pod may not go to the node at all.
        Refusal::KubeScheduler(_) => (RefusedBy::KubeScheduler, refusal.is_lack_of_room()),
        Refusal::Request => (RefusedBy::Request, false),
        Refusal::Devices(_) => (RefusedBy::Devices, true),
    };
    let fits = match asker.demand {
        Ok(demand) if are_fits_shown => device_fits(index, name, demand),
        _ => Vec::new(),
    };
    NodeVerdict {
        node: name.to_string(),
        fits: false,
        refused_by: Some(refused_by),
        reason: refused.reasons.join(", "),
        detail: words::detail(index, name, refusal, asker, &fits),
        would_fit_without: refused.would_fit_without.clone(),
        gpus: gpu_verdicts(&fits),
    }
}

/// The fit of each GPU of a node, the nearest first; room that is kept for other pods is not free. Empty if the pod takes no
/// amounts of GPUs, or none that can be compared with this node.
fn device_fits<'a>(index: &'a Index, name: &str, demand: &ResourceDemand<'_>) -> Vec<DeviceFit<'a>> {
    let fleet = index.fleet();
    let hints = Hints::RespectOthers(demand.uid);
    let Some(node) = fleet.node_id(name) else {
        return Vec::new();
    };
    let mut fits = fleet.explain(node, demand.gpus, hints).unwrap_or_default();
    // Cached, since a lack takes divisions, and a survey asks this about every node.
    fits.sort_by_cached_key(|fit| (survey::lack(fit), fit.gpu.minor));
    fits
}

fn gpu_verdicts(fits: &[DeviceFit<'_>]) -> Vec<GpuVerdict> {
    let mut gpus = Vec::with_capacity(fits.len());
    for fit in fits {
        let refusal = fit.fit.err();
        gpus.push(GpuVerdict {
            minor: fit.gpu.minor,
            fits: refusal.is_none(),
            reason: refusal.map_or("", words::gpu_reason).to_owned(),
            lacks: refusal.map_or_else(String::new, |reason| words::gpu_lacks(reason, fit)),
            needed: fit.need.memory.bytes_ceil(),
            free: fit.free.memory.bytes_floor(),
            needed_core: fit.need.core,
            free_core: fit.free.core,
            no_sharer: fit.gpu.is_open() && fit.need.slots > fit.free.slots,
        });
    }
    gpus
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;

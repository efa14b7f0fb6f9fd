//! The texts of refusals for people, made from the amounts of the request and of the node.
//!
//! A refusal has one text in events and explanations. kube-scheduler counts nodes with equal texts, so that the text has amounts
//! of the request alone, which are the same on every node; [`detail`] has those of one node.

use placement::{DeviceFit, Reason};
use proto::memory_text::memory_text;
use proto::resource::{GPU_MEMORY, ISOLATION_PROVIDER, ResourceNames};
use proto::totals::{CPU, MEMORY};

use super::{Asker, Refusal};
use crate::index::{Index, ResourceDemand};
use crate::kube_scheduler::{NodeRefusal, PODS, PodRules, Shortage};

/// The texts under which explanations count a node's refusal: the same as in kube-scheduler's events.
pub(crate) fn reasons(index: &Index, name: &str, refusal: &Refusal, asker: Asker<'_>) -> Vec<String> {
    match (refusal, asker.demand) {
        (Refusal::KubeScheduler(refusal), _) => kube_scheduler_texts(refusal),
        (Refusal::Devices(reason), Ok(demand)) => vec![index.filter().refusal(name, *reason, demand)],
        (Refusal::Devices(_) | Refusal::Request, Err(rule)) => vec![rule.to_owned()],
        // Not reached: only a request that breaks a rule is refused as a request.
        (Refusal::Request, Ok(_)) => Vec::new(),
    }
}

/// The words in which kube-scheduler 1.36 reports its own refusal of a node, one text for each reason.
pub(crate) fn kube_scheduler_texts(refusal: &NodeRefusal) -> Vec<String> {
    let text = match refusal {
        NodeRefusal::NotNamed => "node(s) didn't satisfy plugin(s) [NodeAffinity]",
        NodeRefusal::AffinityConflict => "pod affinity terms conflict",
        NodeRefusal::Unschedulable => "node(s) were unschedulable",
        NodeRefusal::OtherNode => "node(s) didn't match the requested node name",
        NodeRefusal::Taint(_) => "node(s) had untolerated taint(s)",
        NodeRefusal::Affinity => "node(s) didn't match Pod's node affinity/selector",
        NodeRefusal::Insufficient(shortages) => {
            let mut texts = Vec::with_capacity(shortages.len());
            for Shortage { resource, .. } in shortages {
                texts.push(match &**resource {
                    PODS => "Too many pods".to_owned(),
                    resource => format!("Insufficient {resource}"),
                });
            }
            return texts;
        }
    };
    vec![text.to_owned()]
}

/// The amounts of one node by which it refuses a pod; `None` if the text of the refusal says everything. `fits` is the fit of
/// each of its GPUs.
pub(crate) fn detail(
    index: &Index,
    name: &str,
    refusal: &Refusal,
    asker: Asker<'_>,
    fits: &[DeviceFit<'_>],
) -> Option<String> {
    match refusal {
        Refusal::KubeScheduler(refusal) => Some(kube_scheduler_detail(refusal, asker.rules)),
        Refusal::Request => None,
        Refusal::Devices(reason) => {
            let detail = index.filter().detail(name, asker.demand.ok()?, *reason);
            detail.or_else(|| size_of_node(*reason, fits))
        }
    }
}

/// kube-scheduler's refusal of one node with the node's amounts.
pub(crate) fn kube_scheduler_detail(refusal: &NodeRefusal, rules: &PodRules) -> String {
    match refusal {
        NodeRefusal::NotNamed => "the pod's required node affinity names other nodes".to_owned(),
        NodeRefusal::AffinityConflict => {
            "every term of the pod's required node affinity names nodes that exclude each other".to_owned()
        }
        NodeRefusal::Unschedulable => "the node is cordoned".to_owned(),
        NodeRefusal::OtherNode => {
            let node = rules.node_name.as_deref().unwrap_or_default();
            format!("the manifest names node {node}")
        }
        NodeRefusal::Taint(taint) => {
            let value = match taint.value.as_str() {
                "" => String::new(),
                value => format!("={value}"),
            };
            format!(
                "the pod does not tolerate taint {}{value}:{}",
                taint.key, taint.effect
            )
        }
        NodeRefusal::Affinity => format!("the node does not match the pod's {}", selector(rules)),
        NodeRefusal::Insufficient(shortages) => {
            let parts: Vec<String> = shortages.iter().map(shortage).collect();
            parts.join("; ")
        }
    }
}

fn selector(rules: &PodRules) -> String {
    let mut labels = Vec::new();
    for (key, value) in &rules.node_selector {
        labels.push(format!("{key}={value}"));
    }
    let mut terms = Vec::new();
    let affinity = rules.affinity.iter();
    for term in affinity.flat_map(|affinity| &affinity.node_selector_terms) {
        let requirements = term.match_expressions.iter().chain(&term.match_fields);
        let requirements: Vec<String> = requirements.map(ToString::to_string).collect();
        terms.push(requirements.join(" and "));
    }
    let mut parts = Vec::new();
    if !labels.is_empty() {
        parts.push(format!("nodeSelector {}", labels.join(",")));
    }
    if !terms.is_empty() {
        parts.push(format!("required node affinity ({})", terms.join("; or ")));
    }
    parts.join(" and ")
}

/// A resource of which a node has too little, with its amounts, as text.
pub(crate) fn shortage(shortage: &Shortage) -> String {
    let (resource, asked, allocatable) = (&*shortage.resource, shortage.asked, shortage.allocatable);
    if resource == PODS {
        return format!("the node has as many pods as it takes: {allocatable}");
    }
    let (free, asked_of_free) = distinct(resource, shortage.free(), asked);
    let (most, asked_of_all) = distinct(resource, allocatable, asked);
    match allocatable {
        0 => format!("the node offers no {resource}, and {asked_of_all} is asked"),
        _ if shortage.is_lasting() => {
            format!("the node has {most} {resource} in all, and {asked_of_all} is asked")
        }
        _ => format!(
            "its pods leave {free} of {}, and {asked_of_free} is asked",
            amount_of(resource, allocatable)
        ),
    }
}

/// Two different amounts of a resource as texts that differ: in bytes if they are equal when rounded.
fn distinct(resource: &str, one: u64, other: u64) -> (String, String) {
    let texts = (amount(resource, one), amount(resource, other));
    if texts.0 == texts.1 && one != other {
        (format!("{one} bytes"), format!("{other} bytes"))
    } else {
        texts
    }
}

fn is_bytes(resource: &str) -> bool {
    matches!(resource, MEMORY | GPU_MEMORY | "ephemeral-storage") || resource.starts_with("hugepages-")
}

/// An amount of a resource for people: bytes as [`memory_text`], CPU in cores (`2`), or in thousandths of one (`1500m`).
pub(crate) fn amount(resource: &str, n: u64) -> String {
    match resource {
        CPU if n.is_multiple_of(1000) => (n / 1000).to_string(),
        CPU => format!("{n}m"),
        _ if is_bytes(resource) => memory_text(n),
        _ => n.to_string(),
    }
}

/// An amount of a resource with the resource's name.
pub(crate) fn amount_of(resource: &str, n: u64) -> String {
    let of = if is_bytes(resource) { "of " } else { "" };
    format!("{} {of}{resource}", amount(resource, n))
}

/// The text of kube-scheduler's refusal of a node, and the step that lets the pod go there.
pub(crate) fn obstacle(refusal: &NodeRefusal, rules: &PodRules, node: &str) -> String {
    let obstacle = kube_scheduler_detail(refusal, rules);
    let step = match refusal {
        NodeRefusal::Unschedulable => format!("`kubectl uncordon {node}`"),
        NodeRefusal::OtherNode => "remove spec.nodeName".to_owned(),
        NodeRefusal::Taint(taint) => format!(
            "add a toleration to the pod, or `kubectl taint node {node} {}:{}-`",
            taint.key, taint.effect
        ),
        NodeRefusal::NotNamed | NodeRefusal::AffinityConflict => "change it in the pod's manifest".to_owned(),
        NodeRefusal::Affinity => "change it in the pod's manifest, or label the node".to_owned(),
        NodeRefusal::Insufficient(_) => "ask for less, or add a larger node".to_owned(),
    };
    format!("{obstacle} ({step})")
}

/// The step that lets a node take the pod which its devices or its plugin refuse; empty if there is none.
pub(crate) fn step_by_devices(reason: Reason, node: &str, demand: &ResourceDemand<'_>) -> String {
    match reason {
        Reason::NoIsolationProvider => format!(
            "Install the library on {node} and label it: `kubectl label node {node} {ISOLATION_PROVIDER}={} --overwrite`",
            demand.isolation.as_deref().unwrap_or_default()
        ),
        Reason::UnitUnknown => format!(
            "Name the unit of {node}: `kubectl annotate node {node} {}=MiB`, or whichever unit its plugin serves.",
            ResourceNames::default().memory_unit_annotation()
        ),
        Reason::Unlimited | Reason::LimitedByLibrary => {
            "Remove annotation gpushare/enforcement from the pod, or add a node whose driver enforces limits."
                .to_owned()
        }
        Reason::PluginAway | Reason::NoDevice => {
            "See `kubectl gpushare doctor` for the device plugin of the node.".to_owned()
        }
        Reason::Unhealthy => format!("See `kubectl describe device {node}` for the unhealthy GPUs."),
        Reason::Closed => format!("`kubectl gpushare open {node}` opens them after the maintenance."),
        _ => String::new(),
    }
}

/// The reason for which one GPU has no room, without amounts.
pub(crate) fn gpu_reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Memory => "has too little memory free",
        Reason::Core => "has too little core free",
        Reason::Slots => "has no place for one more pod",
        Reason::TooLarge => "is smaller than the request",
        Reason::Unhealthy => "is unhealthy",
        Reason::Closed => "is closed for maintenance",
        Reason::Vendor => "is kept for pods of the vendor's plugin",
        // Every other reason is one of the node.
        _ => "is refused by a rule of the node",
    }
}

/// The amounts that one GPU lacks, or the reason if it lacks none.
pub(crate) fn gpu_lacks(reason: Reason, fit: &DeviceFit<'_>) -> String {
    let (need, free, total) = (&fit.need, &fit.free, &fit.total);
    // The free amounts of such a GPU are zero, whatever it has.
    if [Reason::Unhealthy, Reason::Closed, Reason::Vendor].contains(&reason) {
        return gpu_reason(reason).to_owned();
    }
    let mut parts = Vec::new();
    if need.memory > free.memory {
        let missing = memory_text(need.memory.less(free.memory).bytes_ceil());
        parts.push(if need.memory > total.memory {
            format!(
                "{missing} (has {} in all)",
                memory_text(total.memory.bytes_floor())
            )
        } else {
            missing
        });
    }
    if need.core > free.core {
        parts.push(format!("{} % core", need.core - free.core));
    }
    if need.slots > free.slots {
        parts.push("a place for one more pod".to_owned());
    }
    if parts.is_empty() {
        gpu_reason(reason).to_owned()
    } else {
        format!("lacks {}", parts.join(" and "))
    }
}

/// The GPU that comes nearest, with the amounts that it lacks, and the number of GPUs with room if the pod needs several; `None`
/// if every GPU has room.
pub(crate) fn nearest_gpu(nearest_first: &[DeviceFit<'_>], n_needed: u32) -> Option<String> {
    let mut refusing = nearest_first.iter();
    let (fit, reason) = refusing.find_map(|fit| Some((fit, fit.fit.err()?)))?;
    let lacks = format!("GPU {} {}", fit.gpu.minor, gpu_lacks(reason, fit));
    if n_needed == 1 {
        return Some(lacks);
    }
    let n_fitting = nearest_first.iter().filter(|fit| fit.fit.is_ok()).count();
    Some(format!(
        "the pod needs {n_needed} GPUs, and {n_fitting} of the node's {} have room; the nearest without room: {lacks}",
        nearest_first.len()
    ))
}

/// The number and size of the GPUs of a node whose GPUs are too small, unhealthy or closed; `None` for any other reason.
fn size_of_node(reason: Reason, fits: &[DeviceFit<'_>]) -> Option<String> {
    let n = fits.len();
    Some(match reason {
        Reason::TooLarge => {
            let largest = fits.iter().max_by_key(|fit| fit.total.memory)?;
            let memory = memory_text(largest.total.memory.bytes_floor());
            match n {
                1 => format!("the node has 1 GPU with {memory}"),
                n => format!("the node has {n} GPUs, the largest with {memory}"),
            }
        }
        Reason::Unhealthy => match (fits.iter().filter(|fit| fit.gpu.healthy).count(), n) {
            (0, 1) => "the node's GPU is unhealthy".to_owned(),
            (n_healthy, n) => format!("{n_healthy} of the node's {n} GPUs are healthy"),
        },
        Reason::Closed => match (fits.iter().filter(|fit| fit.gpu.closed).count(), n) {
            (1, 1) => "the node's GPU is closed".to_owned(),
            (n_closed, n) => format!("{n_closed} of the node's {n} GPUs are closed"),
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests;

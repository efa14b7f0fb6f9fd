//! The sentences that an explanation begins with: the reason that decides, and what would help.

use std::collections::BTreeMap;

use placement::{Reason, RequestedGpus, RequestedMemory};
use proto::memory_text::{memory_text, units_text};
use proto::read_api::PodName;
use proto::resource::{FPGA, RDMA, ResourceNames, VENDOR_GPUS, is_gpu_resource};

use super::survey::{LargestGpus, Offer, Refused, Survey};
use crate::kube_scheduler::{NodeRefusal, PodRules};
use crate::verdict::{Asker, Refusal, words};

/// Most names of nodes, or of gates, in one sentence; most sentences on obstacles.
const MAX_NAMES: usize = 3;
const MAX_PODS: usize = 10;
const MAX_VALUES: usize = 5;

/// The sentences about a pod that has no node, the most important first.
pub(super) fn summary(survey: &Survey, asker: Asker<'_>) -> Vec<String> {
    let mut sentences = Vec::new();
    sentences.extend(gates(asker.rules));
    if let Err(rule) = asker.demand {
        // A rule that suggests a correction ends with a question mark.
        let stop = if rule.ends_with('?') { "" } else { "." };
        sentences.push(format!(
            "It fits no node, whatever is free: {rule}{stop} Correct the pod's manifest, or its controller's template, and create the pod again."
        ));
        // A resource that no node offers keeps the corrected pod waiting.
        let unoffered = survey.offers.iter().filter(|offer| offer.most.is_none());
        sentences.extend(sentences_on_missing_resources(unoffered, survey, asker.rules));
        return sentences;
    }
    if survey.refused.is_empty() && survey.fitting.is_empty() {
        let sentence = "The cluster has no node that the scheduler knows: see `kubectl get nodes`.";
        sentences.push(sentence.to_owned());
        return sentences;
    }
    if !survey.fitting.is_empty() {
        sentences.push(fitting_nodes(survey, asker.rules));
        return sentences;
    }
    let n_before = sentences.len();
    sentences.extend(larger_than_any(survey, asker));
    sentences.extend(more_gpus_than_any(survey, asker));
    // No sentence on GPU resources after those on single GPUs: it would name the sum of a node, which no single GPU has.
    let is_too_large = sentences.len() > n_before;
    let is_explained = |resource: &str| is_too_large && is_gpu_resource(resource, &ResourceNames::default());
    let offers = survey.offers.iter();
    let offers = offers.filter(|offer| !is_explained(&offer.resource));
    sentences.extend(sentences_on_missing_resources(offers, survey, asker.rules));
    if sentences.len() > n_before {
        return sentences;
    }
    sentences.extend(nearest_node(survey));
    if sentences.len() > n_before {
        if survey.is_helped_by_ends == Some(false) {
            sentences.push(other_help(survey, asker));
        }
        return sentences;
    }
    sentences.extend(obstacles(survey.refused.iter(), survey, asker.rules));
    sentences
}

/// A sentence that names the pod's scheduling gates: a gate's name says which controller, or which person, removes it.
fn gates(rules: &PodRules) -> Option<String> {
    let (gates, removal) = match rules.gates.len() {
        0 => return None,
        1 => (
            "gate",
            "controller to which the gate belongs has removed the gate",
        ),
        _ => ("gates", "controllers to which the gates belong have removed them"),
    };
    let names = some_names(rules.gates.iter().map(AsRef::as_ref));
    Some(format!(
        "The pod has the scheduling {gates} {names} (spec.schedulingGates). kube-scheduler tries the pod once the {removal}."
    ))
}

fn fitting_nodes(survey: &Survey, rules: &PodRules) -> String {
    let names = some_names(survey.fitting.iter().map(AsRef::as_ref));
    let is_one = survey.fitting.len() == 1;
    let takes = if is_one { "takes" } else { "take" };
    if !rules.gates.is_empty() {
        return format!("After that {names} {takes} it.");
    }
    match &rules.last_attempt {
        Some(_) => format!(
            "{names} {takes} it by its devices, its resources, taints and node affinity. If it goes on waiting, the words of kube-scheduler below say why."
        ),
        None => format!(
            "{names} {takes} it: kube-scheduler has not tried it yet. If that lasts, see `kubectl gpushare doctor`."
        ),
    }
}

/// Sentences on the resources of which no usable node has enough, and on the rules that keep the pod off the nodes that have.
fn sentences_on_missing_resources<'s>(
    offers: impl Iterator<Item = &'s Offer>,
    survey: &Survey,
    rules: &PodRules,
) -> Vec<String> {
    let mut sentences = Vec::new();
    let (mut first_forbidden, mut forbidden_amounts) = (None, Vec::new());
    for offer in offers {
        let Offer {
            resource,
            asked,
            most,
            most_usable,
            ..
        } = offer;
        if most_usable.as_ref().is_some_and(|(most, _)| most >= asked) {
            continue;
        }
        match most {
            None => sentences.push(format!("No node offers {resource}: {}.", step_to_offer(resource))),
            Some((most, node)) if most < asked => sentences.push(format!(
                "No node has {}: the most is {}, on {node}. Ask for less, or add a larger node.",
                words::amount_of(resource, *asked),
                words::amount(resource, *most)
            )),
            Some(_) => {
                first_forbidden.get_or_insert(offer);
                forbidden_amounts.push(words::amount_of(resource, *asked));
            }
        }
    }
    if let Some(first) = first_forbidden {
        sentences.push(format!(
            "kube-scheduler keeps the pod off every node that is large enough for it ({}).",
            forbidden_amounts.join(" and ")
        ));
        let with_resource = survey.refused.iter().filter(|refused| refused.offers(first));
        sentences.extend(obstacles(with_resource, survey, rules));
    }
    sentences
}

fn step_to_offer(resource: &str) -> &'static str {
    if VENDOR_GPUS.contains(&resource) {
        "neither its vendor's plugin nor gpushare serves it there (docs/migrate.md). For a whole GPU of gpushare, replace it by \
         koordinator.sh/gpu.shared: 1 and koordinator.sh/gpu-memory-ratio: 100"
    } else if [RDMA, FPGA].contains(&resource) {
        "the device plugin runs on none, or has found no such device there: see its log, and `kubectl get devices`"
    } else if is_gpu_resource(resource, &ResourceNames::default()) || resource.starts_with("koordinator.sh/")
    {
        "label nodes for the device plugin (`kubectl label node NODE gpushare=true`), and see `kubectl gpushare doctor`"
    } else {
        "no device plugin serves it, or the name is misspelt"
    }
}

/// Sentences on the nearest node: its lack, and the pods whose end makes room. Empty if the pod may not go there.
fn nearest_node(survey: &Survey) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut refused = survey.refused.iter();
    let helped_by_ends = refused.find(|refused| refused.fits_when_empty == Some(true));
    let Some(nearest) = helped_by_ends.or(survey.refused.first()) else {
        return sentences;
    };
    let is_possible = match &nearest.refusal {
        Refusal::KubeScheduler(refusal) => matches!(refusal, NodeRefusal::Insufficient(_)),
        Refusal::Devices(reason) => *reason != Reason::NoDevice,
        Refusal::Request => false,
    };
    if !is_possible {
        return sentences;
    }
    let reasons = nearest.reasons.join(", ");
    let detail = nearest.detail.as_ref().unwrap_or(&reasons);
    sentences.push(format!("Nearest: {}: {detail}.", nearest.name));
    match nearest.would_fit_without.as_slice() {
        [] if helped_by_ends.is_some() => sentences.push(format!(
            "It fits there once enough of the other pods on {} have ended.",
            nearest.name
        )),
        [] => {}
        pods => {
            let end = if pods.len() == 1 { "ends" } else { "end" };
            let (node, pods) = (&nearest.name, pod_names(pods));
            sentences.push(format!("It fits on {node} when {pods} {end}."));
        }
    }
    sentences
}

/// A sentence on the largest GPU, if the pod asks for more of one GPU than any GPU has.
fn larger_than_any(survey: &Survey, asker: Asker<'_>) -> Option<String> {
    let RequestedGpus::Share(share) = asker.demand.ok()?.gpus else {
        return None;
    };
    let unit = asker.demand.ok()?.unit;
    let (bytes, amount, help) = match share.memory {
        RequestedMemory::Bytes(bytes) => {
            let help = "Ask for less, spread the request over more GPUs (koordinator.sh/gpu.shared), or add a node with larger GPUs";
            (bytes, memory_text(bytes), help)
        }
        // A pod that requests units gets them of one GPU.
        RequestedMemory::Units(units) => (
            units.checked_mul(unit?)?,
            units_text(units, unit),
            "Ask for less, or add a node with larger GPUs",
        ),
        RequestedMemory::Ratio(_) => return None,
    };
    let largest = survey.largest.memory;
    let shown = memory_text(largest);
    (largest > 0 && bytes > largest).then(|| format!("No GPU has {amount}: the largest has {shown}. {help}."))
}

/// A sentence on the largest number of healthy GPUs, if the pod asks for shares of more GPUs than any node has.
fn more_gpus_than_any(survey: &Survey, asker: Asker<'_>) -> Option<String> {
    let demand = asker.demand.ok()?;
    let (n_needed, most) = (demand.n_gpus(), survey.largest_usable.n_healthy);
    // If the pod may use no GPU at all, the sentences on obstacles explain more.
    let is_decided = most > 0 && usize::try_from(n_needed).unwrap_or(usize::MAX) > most;
    (matches!(demand.gpus, RequestedGpus::Share(_)) && is_decided).then(|| {
        format!(
            "No node that the pod may use has {n_needed} healthy GPUs: the most is {most}. Ask for fewer (koordinator.sh/gpu.shared), or \
             add a node with more."
        )
    })
}

/// The sentence on the help that the pod needs if no other pod's end makes room for it.
fn other_help(survey: &Survey, asker: Asker<'_>) -> String {
    let Ok(demand) = asker.demand else {
        return String::new();
    };
    let LargestGpus { n_healthy, memory } = survey.largest_usable;
    let n_needed = demand.n_gpus();
    if usize::try_from(n_needed).unwrap_or(usize::MAX) > n_healthy {
        let gpus = if n_needed == 1 { "GPU" } else { "GPUs" };
        return format!(
            "The end of other pods does not help: the pod needs a node with {n_needed} healthy {gpus}, and none that it may use has more than {n_healthy}."
        );
    }
    if let RequestedGpus::Share(share) = demand.gpus
        && let RequestedMemory::Bytes(bytes) = share.memory
        && bytes > memory
    {
        return format!(
            "The end of other pods does not help: the pod needs a GPU with {}, and the largest that it may use has {}.",
            memory_text(bytes),
            memory_text(memory)
        );
    }
    let nearest = survey.refused.first();
    let step = match nearest.map(|refused| (&refused.refusal, &refused.name)) {
        Some((Refusal::Devices(reason), node)) => words::step_by_devices(*reason, node, demand),
        _ => String::new(),
    };
    let sentence = format!("The end of other pods does not help. {step}");
    sentence.trim_end().to_owned()
}

/// Sentences on kube-scheduler's rules, one for all nodes with the same, the fewest rules first; then on the labels of nodes.
fn obstacles<'a>(
    refused: impl Iterator<Item = &'a Refused>,
    survey: &Survey,
    rules: &PodRules,
) -> Vec<String> {
    let mut by_obstacles: Vec<(usize, &Refused)> = Vec::new();
    for refused in refused.filter(|refused| !refused.obstacles.is_empty()) {
        let mut counted = by_obstacles.iter_mut();
        match counted.find(|(_, first)| first.obstacles == refused.obstacles) {
            Some((n, _)) => *n += 1,
            None => by_obstacles.push((1, refused)),
        }
    }
    by_obstacles.sort_by_key(|(n, refused)| (refused.obstacles.len(), std::cmp::Reverse(*n)));
    by_obstacles.truncate(MAX_NAMES);
    let is_by_label = |(_, refused): &(usize, &Refused)| refused.obstacles.contains(&NodeRefusal::Affinity);
    let labels = by_obstacles.iter().any(is_by_label).then_some(&survey.labels);
    let mut sentences = Vec::new();
    for (n, first) in by_obstacles {
        let nodes = match n {
            1 => first.name.to_string(),
            n => format!("{n} nodes, such as {}", first.name),
        };
        let mut texts = Vec::new();
        for obstacle in &first.obstacles {
            texts.push(words::obstacle(obstacle, rules, &first.name));
        }
        sentences.push(format!("{nodes}: {}.", texts.join("; ")));
    }
    for (key, values) in labels.into_iter().flatten() {
        sentences.push(label_values(key, values));
    }
    sentences
}

fn label_values(key: &str, values: &BTreeMap<Box<str>, usize>) -> String {
    if values.is_empty() {
        return format!("No node has label {key}.");
    }
    let mut by_frequency: Vec<(&Box<str>, &usize)> = values.iter().collect();
    by_frequency.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    let n_more = by_frequency.len().saturating_sub(MAX_VALUES);
    let mut parts = Vec::new();
    for (value, n) in by_frequency.into_iter().take(MAX_VALUES) {
        let nodes = if *n == 1 { "node" } else { "nodes" };
        parts.push(format!("{key}={value} ({n} {nodes})"));
    }
    if n_more > 0 {
        parts.push(format!("{n_more} more values"));
    }
    format!("Nodes have {}.", parts.join(", "))
}

/// Names of pods by whose end a node takes the pod. A name that the client may not see is counted.
fn pod_names(pods: &[PodName]) -> String {
    let mut names = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.name.is_empty()) {
        names.push(format!("{}/{}", pod.namespace, pod.name));
    }
    let n_hidden = pods.len() - names.len();
    if names.is_empty() && n_hidden == 1 {
        return "a pod of another namespace".to_owned();
    }
    if names.is_empty() {
        return format!("{n_hidden} pods of other namespaces");
    }
    let n_more = n_hidden + names.len().saturating_sub(MAX_PODS);
    names.truncate(MAX_PODS);
    match (n_more, names.split_last()) {
        (0, Some((last, others))) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        (0, _) => names.join(""),
        _ => format!("{} and {n_more} more", names.join(", ")),
    }
}

/// The first few of many names, and the number of the others.
fn some_names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let n_more = names.len().saturating_sub(MAX_NAMES);
    let first: Vec<&str> = names.take(MAX_NAMES).collect();
    if n_more > 0 {
        format!("{} and {n_more} more", first.join(", "))
    } else {
        first.join(", ")
    }
}

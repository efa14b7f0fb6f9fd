//! The checks of nodes: device plugins, Device objects, injection, drivers and memory units.

use std::collections::{BTreeMap, BTreeSet};

use proto::device::ENFORCEMENT;
use proto::read_api::Finding;
use proto::record::DEVICE_ALLOCATED;
use proto::resource::GPU_MEM;
use scheduler::read_api::node_findings;
use serde_json::Value;

use super::checks::{CheckReport, InstallationFacts};
use crate::fields::{NODE_LABEL, array, has_condition, images, label, name, number, text};

/// Parts of images of other device plugins, and the resource that each serves.
const OTHER_PLUGINS: [(&str, &str); 4] = [
    ("k8s-gpushare-plugin", GPU_MEM),
    ("gpushare-device-plugin:v2-", GPU_MEM),
    ("projecthami/hami", "nvidia.com/gpu"),
    ("volcano-vgpu-device-plugin", "volcano.sh/vgpu-number"),
];

pub(super) fn plugins(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("plugins");
    let (nodes, pods) = match (&facts.nodes, &facts.pods) {
        (Ok(nodes), Ok(pods)) => (nodes, pods),
        (Err(reason), _) | (_, Err(reason)) => {
            report.unknown(reason);
            return report.findings;
        }
    };
    let mut plugin_on: BTreeMap<&str, &Value> = BTreeMap::new();
    for pod in pods {
        let is_plugin = text(pod, "/metadata/namespace") == facts.namespace
            && label(pod, "app.kubernetes.io/name") == "gpushare-device-plugin";
        if is_plugin {
            plugin_on.entry(text(pod, "/spec/nodeName")).or_insert(pod);
        }
    }
    let labelled: Vec<&Value> = nodes
        .iter()
        .filter(|node| label(node, NODE_LABEL) == "true")
        .collect();
    for node in &labelled {
        let object = format!("node {}", name(node));
        match plugin_on.get(name(node)) {
            None => report.error(
                object,
                "it is labelled for sharing, and no pod of the device plugin is on it",
                "see `kubectl describe daemonset gpushare-device-plugin`: taints that it does not tolerate, quota, or the DaemonSet is missing",
            ),
            Some(pod) if !has_condition(pod, "/status/conditions", "Ready") => report.error(
                object,
                format!("the device plugin's pod {} is not ready", name(pod)),
                "see its log: it names the file, socket or library that it lacks",
            ),
            Some(_) => {}
        }
    }
    if labelled.is_empty() {
        report.warn(
            "",
            format!("no node has the label {NODE_LABEL}=true"),
            "kubectl label node NAME gpushare=true",
        );
    }
    report.or_ok(format!(
        "the device plugin is ready on {} labelled nodes",
        labelled.len()
    ))
}

pub(super) fn device_objects(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("device-objects");
    let (Ok(nodes), Ok(devices)) = (&facts.nodes, &facts.devices) else {
        report.unknown("nodes or devices could not be listed");
        return report.findings;
    };
    let device_of: BTreeMap<&str, &Value> = devices.iter().map(|device| (name(device), device)).collect();
    // A node may have shared GPUs once; only those that should now need a Device object.
    for node in nodes.iter().filter(|node| label(node, NODE_LABEL) == "true") {
        match device_of.get(name(node)) {
            None => report.error(
                format!("node {}", name(node)),
                "it has no Device object, so that nothing is scheduled on its GPUs",
                "see the device plugin's log on the node, and its right to write devices",
            ),
            Some(device) if array(device, "/spec/devices").is_empty() => report.error(
                format!("node {}", name(node)),
                "its Device object lists no device",
                "see the device plugin's log: the driver may not be loaded, or --driver-root may be another",
            ),
            Some(_) => {}
        }
    }
    let node_names: BTreeSet<&str> = nodes.iter().map(name).collect();
    for device in device_of.keys().filter(|device| !node_names.contains(*device)) {
        report.warn(format!("device {device}"), "it belongs to no node", "delete it");
    }
    report.or_ok("every labelled node has a Device object")
}

/// The conditions of devices in which the plugin reports that containers cannot get them.
pub(super) fn injection(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("injection");
    let Ok(devices) = &facts.devices else {
        report.unknown("devices could not be listed");
        return report.findings;
    };
    for device in devices {
        for kind in ["Injectable", "Isolated"] {
            let mut refused = array(device, "/spec/devices")
                .iter()
                .flat_map(|entry| array(entry, "/conditions"));
            let refused = refused
                .find(|condition| text(condition, "/type") == kind && text(condition, "/status") == "False");
            if let Some(condition) = refused {
                report.error(
                    format!("node {}", name(device)),
                    format!("{kind} is false: {}", text(condition, "/message")),
                    "turn CDI on in the container runtime, and see docs/nvidia.md for this kind of node",
                );
            }
        }
    }
    report.or_ok("containers can get the devices of every node")
}

pub(super) fn drivers(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("drivers");
    let Ok(devices) = &facts.devices else {
        report.unknown("devices could not be listed");
        return report.findings;
    };
    let has_gpu = |device: &&Value| {
        array(device, "/spec/devices")
            .iter()
            .any(|entry| text(entry, "/type") == "gpu")
    };
    for device in devices.iter().filter(has_gpu) {
        // Only NVIDIA's driver reports a version; a simulated GPU has none.
        let is_nvidia = label(device, proto::device::GPU_VENDOR_LABEL) == "nvidia";
        if is_nvidia && label(device, proto::device::GPU_DRIVER_LABEL).is_empty() {
            report.warn(
                format!("node {}", name(device)),
                "the plugin reports no version of the GPU driver",
                "run nvidia-smi on the node; reload the driver if it fails",
            );
        }
    }
    report.or_ok("the driver of every node answers")
}

/// Memory limits that are to be enforced, or that pods demand, and that no GPU has.
pub(super) fn enforcement(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("enforcement");
    let (Ok(devices), Ok(daemon_sets), Ok(pods)) = (&facts.devices, &facts.daemon_sets, &facts.pods) else {
        report.unknown("devices, daemon sets or pods could not be listed");
        return report.findings;
    };
    let mut is_asked_for = false;
    for daemon_set in daemon_sets {
        let arguments = array(daemon_set, "/spec/template/spec/containers/0/args");
        is_asked_for |= text(daemon_set, "/metadata/namespace") == facts.namespace
            && arguments.iter().any(|argument| argument == "--driver-limits");
    }
    let mut levels = BTreeSet::new();
    for device in devices {
        let mut reason = None;
        for entry in array(device, "/spec/devices") {
            levels.insert(entry_label(entry, ENFORCEMENT));
            let mut conditions = array(entry, "/conditions").iter();
            let limited = conditions.find(|condition| text(condition, "/type") == "Limited");
            if let Some(condition) = limited.filter(|condition| text(condition, "/status") == "False") {
                reason = Some(text(condition, "/message"));
            }
        }
        if let Some(reason) = reason.filter(|_| is_asked_for) {
            report.warn(
                format!("node {}", name(device)),
                format!("the device plugin has --driver-limits, and the driver enforces none: {reason}"),
                "docs/enforcement.md has the driver and the runtime that each level needs",
            );
        }
    }
    for pod in pods {
        let annotations = pod.pointer("/metadata/annotations");
        let demanded = annotations.and_then(|annotations| annotations.get(ENFORCEMENT)?.as_str());
        let waits = text(pod, "/spec/nodeName").is_empty();
        let is_missing = |level: &&str| *level != "any" && !levels.contains(level);
        if let Some(level) = demanded.filter(is_missing)
            && waits
        {
            report.warn(
                format!("pod {}/{}", text(pod, "/metadata/namespace"), name(pod)),
                format!("it demands the enforcement {level:?}, which no GPU has"),
                "turn it on at the device plugin (docs/enforcement.md), or take the annotation off the pod",
            );
        }
    }
    report.or_ok("limits of memory are enforced wherever that is asked for")
}

/// A label of one device in a Device object.
fn entry_label<'a>(entry: &'a Value, key: &str) -> &'a str {
    let labels = entry.get("labels");
    labels
        .and_then(|labels| labels.get(key)?.as_str())
        .unwrap_or_default()
}

pub(super) fn memory_units(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("memory-units");
    let Ok(nodes) = &facts.nodes else {
        report.unknown("nodes could not be listed");
        return report.findings;
    };
    let mut units: BTreeMap<&str, usize> = BTreeMap::new();
    for node in nodes {
        let annotations = node.pointer("/metadata/annotations");
        let unit = annotations.and_then(|annotations| annotations.get(format!("{GPU_MEM}-unit")));
        let serves_units = node
            .pointer("/status/capacity")
            .is_some_and(|capacity| capacity.get(GPU_MEM).is_some());
        // A node of the old plugin states its unit nowhere, and is not one of ours.
        if label(node, NODE_LABEL) != "true" || !serves_units {
            continue;
        }
        match unit.and_then(Value::as_str) {
            Some(unit) => *units.entry(unit).or_default() += 1,
            None => report.warn(
                format!("node {}", name(node)),
                format!("it serves {GPU_MEM} and does not say how much a unit is"),
                "restart its device plugin; the old plugin of another project may serve the resource",
            ),
        }
    }
    // A pod asks for a number of units; the same number would be another amount of memory on each node.
    if units.len() > 1 {
        let units: Vec<&str> = units.into_keys().collect();
        report.warn(
            "",
            format!("nodes count memory in different units: {}", units.join(", ")),
            "set one --memory-unit for all nodes: a pod's number would mean another amount on each",
        );
    }
    report.or_ok("all nodes count memory in one unit")
}

pub(super) fn other_plugins(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("other-plugins");
    let daemon_sets = match &facts.daemon_sets {
        Ok(daemon_sets) => daemon_sets,
        Err(reason) => {
            report.unknown(reason);
            return report.findings;
        }
    };
    for daemon_set in daemon_sets {
        let namespace = text(daemon_set, "/metadata/namespace");
        for image in images(daemon_set, "/spec/template/spec/containers") {
            let other = OTHER_PLUGINS.iter().find(|(part, _)| image.contains(part));
            let Some((_, resource)) = other.filter(|_| namespace != facts.namespace) else {
                continue;
            };
            // A DaemonSet whose selector matches no node disturbs nothing.
            if number(daemon_set, "/status/desiredNumberScheduled") > 0 {
                report.error(
                    format!("daemonset {namespace}/{}", name(daemon_set)),
                    format!("it serves {resource} too ({image}); kubelet keeps the plugin that registered last"),
                    "keep the two on different nodes by their node selectors, and see `kubectl gpushare migrate status`",
                );
            }
        }
    }
    report.or_ok("no other device plugin serves the same resources")
}

pub(super) fn failed_pods(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("failed-pods");
    let Ok(pods) = &facts.pods else {
        report.unknown("pods could not be listed");
        return report.findings;
    };
    let mut by_node: BTreeMap<&str, usize> = BTreeMap::new();
    for pod in pods {
        // kubelet never retries such a pod; its controller makes another, and this one stays behind.
        let is_refused = text(pod, "/status/phase") == "Failed"
            && text(pod, "/status/reason") == "UnexpectedAdmissionError";
        let annotations = pod.pointer("/metadata/annotations");
        let holds_gpus = annotations.is_some_and(|annotations| annotations.get(DEVICE_ALLOCATED).is_some());
        if is_refused && holds_gpus {
            *by_node.entry(text(pod, "/spec/nodeName")).or_default() += 1;
        }
    }
    for (node, n) in by_node {
        report.warn(
            format!("node {node}"),
            format!("kubelet has refused {n} pods with a share of a GPU (UnexpectedAdmissionError)"),
            "see their status.message and the device plugin's log; delete them once the cause is gone",
        );
    }
    report.or_ok("kubelet has refused no pod with a share of a GPU")
}

pub(super) fn nodes(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("nodes");
    match &facts.state {
        Err(reason) => report.unknown(reason),
        Ok(nodes) => {
            for node in nodes {
                report.findings.extend(node_findings(node));
            }
        }
    }
    report.or_ok("every node's report can be read, every GPU is healthy, and none is overcommitted")
}

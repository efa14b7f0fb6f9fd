//! The checks of nodes: device plugins, Device objects, injection, drivers and memory units.

use std::collections::{BTreeMap, BTreeSet};

use proto::device::ENFORCEMENT;
use proto::node::CONDITION_SHARING_READY;
use proto::plugin_reports::{PLUGIN_NAMES, PLUGIN_SELECTOR};
use proto::pod::is_refusal_of_kubelet;
use proto::record::DEVICE_ALLOCATED;
use proto::resource::GPU_MEM;
use scheduler::read_api::node_findings;
use serde_json::Value;

use super::facts::InstallationFacts;
use super::report::{CheckReport, Outcome};
use crate::fields::{
    NODE_LABEL, annotation, array, condition, has_condition, images, label, label_node, name, number, text,
};

/// Parts of the image names of other device plugins, each with the resource that the plugin serves.
const OTHER_PLUGINS: [(&str, &str); 4] = [
    ("k8s-gpushare-plugin", GPU_MEM),
    ("gpushare-device-plugin:v2-", GPU_MEM),
    ("projecthami/hami", "nvidia.com/gpu"),
    ("volcano-vgpu-device-plugin", "volcano.sh/vgpu-number"),
];

/// The nodes that are labelled for sharing. Nodes without the label are not checked: they need not share GPUs (any more).
fn labelled_nodes(facts: &InstallationFacts) -> Result<Vec<&Value>, String> {
    let mut nodes: Vec<&Value> = facts.list("nodes")?.iter().collect();
    nodes.retain(|node| label(node, NODE_LABEL) == "true");
    Ok(nodes)
}

/// The command that shows the log of the device plugin on a node: by the pod's name, or the command that finds the pod.
fn plugin_log(facts: &InstallationFacts, node: &str) -> String {
    let namespace = &facts.namespace;
    let pods = facts.list("pods").unwrap_or_default().iter();
    let mut on_node = pods.filter(|pod| is_plugin(facts, pod) && text(pod, "/spec/nodeName") == node);
    match on_node.next() {
        Some(pod) => format!("`kubectl -n {namespace} logs {}`", name(pod)),
        None => {
            format!(
                "`kubectl -n {namespace} get pods -l '{PLUGIN_SELECTOR}' --field-selector spec.nodeName={node}`"
            )
        }
    }
}

fn is_plugin(facts: &InstallationFacts, pod: &Value) -> bool {
    text(pod, "/metadata/namespace") == facts.namespace
        && PLUGIN_NAMES.contains(&label(pod, "app.kubernetes.io/name"))
}

/// The remedy where no node is labelled: the command for the only node, or for one that the user chooses.
fn label_command(facts: &InstallationFacts) -> String {
    match facts.list("nodes").unwrap_or_default() {
        [node] => format!("`{}`", label_node(name(node))),
        _ => format!(
            "choose nodes with GPUs from `kubectl get nodes`, and label each: `{}`",
            label_node("NODE")
        ),
    }
}

/// Checks that a ready pod of the device plugin is on every labelled node.
pub(super) fn plugins(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let mut plugin_on: BTreeMap<&str, &Value> = BTreeMap::new();
    for pod in facts.list("pods")? {
        if is_plugin(facts, pod) {
            plugin_on.entry(text(pod, "/spec/nodeName")).or_insert(pod);
        }
    }
    let labelled = labelled_nodes(facts)?;
    for node in &labelled {
        let object = format!("node {}", name(node));
        match plugin_on.get(name(node)) {
            None => report.error(
                object,
                "it is labelled for sharing, and no pod of the device plugin is on it",
                format!(
                    "see `kubectl -n {} describe daemonsets`: taints of the node that it does not tolerate, quota, or \
                     the DaemonSet is missing",
                    facts.namespace
                ),
            ),
            Some(pod) if !has_condition(pod, "/status/conditions", "Ready") => report.error(
                object,
                format!(
                    "the device plugin's pod {} is not ready{}",
                    name(pod),
                    reason_without_gpus(node).map(|why| format!(": {why}")).unwrap_or_default()
                ),
                format!(
                    "see `kubectl -n {} logs {}`: it names the file, socket or library that it lacks",
                    facts.namespace,
                    name(pod)
                ),
            ),
            Some(_) => {}
        }
    }
    if labelled.is_empty() {
        report.warn(
            "",
            format!("no node has the label {NODE_LABEL}=true"),
            label_command(facts),
        );
    }
    Ok(format!(
        "the device plugin is ready on {} labelled nodes",
        labelled.len()
    ))
}

/// The reason that a node's plugin gives for finding no GPU that pods can share.
fn reason_without_gpus(node: &Value) -> Option<&str> {
    let found = condition(node, "/status/conditions", CONDITION_SHARING_READY)?;
    (text(found, "/status") == "False").then_some(text(found, "/message"))
}

pub(super) fn device_objects(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let devices = facts.list("devices")?;
    let device_of: BTreeMap<&str, &Value> = devices.iter().map(|device| (name(device), device)).collect();
    for node in labelled_nodes(facts)? {
        match device_of.get(name(node)) {
            None => report.error(
                format!("node {}", name(node)),
                "it has no Device object, so that nothing is scheduled on its GPUs",
                format!(
                    "see the log of the device plugin, which needs the right to write devices: {}",
                    plugin_log(facts, name(node))
                ),
            ),
            Some(device) if array(device, "/spec/devices").is_empty() => report.error(
                format!("node {}", name(node)),
                match reason_without_gpus(node) {
                    Some(why) => format!("its Device object lists no device: {why}"),
                    None => "its Device object lists no device".to_owned(),
                },
                format!(
                    "the driver may not be loaded, or --driver-root may be another; see {}",
                    plugin_log(facts, name(node))
                ),
            ),
            Some(_) => {}
        }
    }
    let node_names: BTreeSet<&str> = facts.list("nodes")?.iter().map(name).collect();
    let device_names: BTreeSet<&str> = device_of.into_keys().collect();
    for device in device_names.difference(&node_names) {
        report.warn(
            format!("device {device}"),
            "it belongs to no node",
            format!("`kubectl delete devices.scheduling.koordinator.sh {device}`"),
        );
    }
    Ok("every labelled node has a Device object".to_owned())
}

/// The remedy where containers that request no GPU see GPUs.
const ISOLATE: &str = "add the component nri (docs/device-plugin.md, The runtime hook)";

/// Checks the conditions by which the plugin reports that containers cannot get devices, or may see them without a request.
pub(super) fn injection(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let mut unknown_isolation = Vec::new();
    for device in facts.list("devices")? {
        if let Some(message) = condition_message(device, "Isolated", "Unknown") {
            unknown_isolation.push((name(device), message));
        }
        for (kind, remedy) in [
            (
                "Injectable",
                "turn CDI on in the container runtime of the node (docs/nvidia.md)",
            ),
            ("Isolated", ISOLATE),
        ] {
            if let Some(message) = condition_message(device, kind, "False") {
                let device = name(device);
                report.error(
                    format!("node {device}"),
                    format!("{kind} is false: {message}"),
                    format!("{remedy}; see `kubectl describe devices.scheduling.koordinator.sh {device}`"),
                );
            }
        }
    }
    // One finding for all nodes, since the plugins of most nodes have the same settings.
    if let Some((node, message)) = unknown_isolation.first() {
        let nodes = match unknown_isolation.len() {
            1 => format!("node {node}"),
            n => format!("{n} nodes, such as {node}"),
        };
        let command = format!("see `kubectl describe devices.scheduling.koordinator.sh {node}`");
        report.warn(
            nodes,
            format!("Isolated is unknown: {message}"),
            format!("{ISOLATE}; {command}"),
        );
    }
    Ok("containers can get the devices of every node".to_owned())
}

/// The message of a Device object's condition `kind`, if it has this `status`: that of the first such device, since the plugin
/// writes the same for all devices of a node.
fn condition_message<'a>(device: &'a Value, kind: &str, status: &str) -> Option<&'a str> {
    let entries = array(device, "/spec/devices").iter();
    let mut conditions = entries.filter_map(|entry| condition(entry, "/conditions", kind));
    let found = conditions.find(|condition| text(condition, "/status") == status)?;
    Some(text(found, "/message"))
}

/// Checks that the plugin reports a driver version for every node with NVIDIA GPUs.
pub(super) fn drivers(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    for device in facts.list("devices")? {
        let mut entries = array(device, "/spec/devices").iter();
        let has_gpu = entries.any(|entry| text(entry, "/type") == "gpu");
        // Only NVIDIA's driver reports a version; a simulated GPU has none.
        let is_nvidia = label(device, proto::device::GPU_VENDOR_LABEL) == "nvidia";
        if has_gpu && is_nvidia && label(device, proto::device::GPU_DRIVER_LABEL).is_empty() {
            report.warn(
                format!("node {}", name(device)),
                "the plugin reports no version of the GPU driver",
                format!(
                    "run `nvidia-smi` on node {}, and reload the driver if it fails; see {}",
                    name(device),
                    plugin_log(facts, name(device))
                ),
            );
        }
    }
    Ok("the driver of every node answers".to_owned())
}

/// Checks that the driver enforces memory limits where the plugin's flag demands it, and that some GPU has each level of
/// enforcement that a waiting pod demands.
pub(super) fn enforcement(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let mut has_flag = false;
    for daemon_set in facts.list("daemonsets")? {
        // The plugin is the first container of its pods.
        let mut arguments = array(daemon_set, "/spec/template/spec/containers/0/args").iter();
        has_flag |= text(daemon_set, "/metadata/namespace") == facts.namespace
            && arguments.any(|argument| argument == "--driver-limits");
    }
    let mut levels = BTreeSet::new();
    for device in facts.list("devices")? {
        for entry in array(device, "/spec/devices") {
            let level = entry.get("labels").and_then(|labels| labels.get(ENFORCEMENT));
            levels.extend(level.and_then(Value::as_str));
        }
        // The plugin reports `Limited` also without the flag, and then a `False` is no fault.
        if has_flag && let Some(reason) = condition_message(device, "Limited", "False") {
            report.warn(
                format!("node {}", name(device)),
                format!("the device plugin has --driver-limits, and the driver enforces none: {reason}"),
                format!(
                    "docs/enforcement.md has the driver and the runtime that each level needs; see {}",
                    plugin_log(facts, name(device))
                ),
            );
        }
    }
    for pod in facts.list("pods")? {
        let level = annotation(pod, ENFORCEMENT);
        let is_missing = !level.is_empty() && level != "any" && !levels.contains(level);
        // A pod that has a node was placed when some GPU had the level.
        if is_missing && text(pod, "/spec/nodeName").is_empty() {
            report.warn(
                format!("pod {}/{}", text(pod, "/metadata/namespace"), name(pod)),
                format!("it demands the enforcement {level:?}, which no GPU has"),
                format!(
                    "turn it on at the device plugin (docs/enforcement.md), or take the annotation off the pod: `kubectl -n {} annotate pod \
                     {} {ENFORCEMENT}-`",
                    text(pod, "/metadata/namespace"),
                    name(pod)
                ),
            );
        }
    }
    Ok("limits of memory are enforced wherever that is asked for".to_owned())
}

pub(super) fn memory_units(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let unit_annotation = format!("{GPU_MEM}-unit");
    let mut units = BTreeSet::new();
    // A node of the old plugin states its unit nowhere, and has another label.
    for node in labelled_nodes(facts)? {
        let capacity = node.pointer("/status/capacity").unwrap_or(&Value::Null);
        if capacity.get(GPU_MEM).is_none() {
            continue;
        }
        let unit = annotation(node, &unit_annotation);
        if unit.is_empty() {
            report.warn(
                format!("node {}", name(node)),
                format!("it serves {GPU_MEM} and does not say how much a unit is"),
                format!(
                    "restart its device plugin: `kubectl -n {} delete pods -l '{PLUGIN_SELECTOR}' --field-selector spec.nodeName={}`; the old plugin of \
                     another project may serve the resource",
                    facts.namespace,
                    name(node)
                ),
            );
        } else {
            units.insert(unit);
        }
    }
    // A pod asks for a number of units; the same number would be another amount of memory on each node.
    if units.len() > 1 {
        let units: Vec<&str> = units.into_iter().collect();
        report.warn(
            "",
            format!("nodes count memory in different units: {}", units.join(", ")),
            format!(
                "set one --memory-unit for all nodes: `kubectl -n {} edit daemonset/gpushare-device-plugin`; a pod's number would mean another \
                 amount on each",
                facts.namespace
            ),
        );
    }
    Ok("all nodes count memory in one unit".to_owned())
}

/// Checks that no `DaemonSet` of another namespace serves a resource that gpushare's plugin may serve.
pub(super) fn other_plugins(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    for daemon_set in facts.list("daemonsets")? {
        let namespace = text(daemon_set, "/metadata/namespace");
        // A DaemonSet whose selector matches no node disturbs nothing.
        if namespace == facts.namespace || number(daemon_set, "/status/desiredNumberScheduled") == 0 {
            continue;
        }
        for image in images(daemon_set) {
            if let Some((_, resource)) = OTHER_PLUGINS.iter().find(|(part, _)| image.contains(part)) {
                report.error(
                    format!("daemonset {namespace}/{}", name(daemon_set)),
                    format!("it serves {resource} too ({image}); kubelet keeps the plugin that registered last"),
                    format!(
                        "keep the two on different nodes by their node selectors, such as with `kubectl -n {namespace} edit daemonset/{}`, and \
                         see `kubectl gpushare migrate status`",
                        name(daemon_set)
                    ),
                );
            }
        }
    }
    Ok("no other device plugin serves the same resources".to_owned())
}

/// Counts, node by node, the pods that kubelet has refused although they have an allocation record.
pub(super) fn failed_pods(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let mut by_node: BTreeMap<&str, (usize, BTreeSet<&str>)> = BTreeMap::new();
    for pod in facts.list("pods")? {
        let reason = text(pod, "/status/reason");
        // kubelet never retries such a pod; its controller makes another, and this one stays behind.
        let is_refused = text(pod, "/status/phase") == "Failed" && is_refusal_of_kubelet(reason);
        if is_refused && !annotation(pod, DEVICE_ALLOCATED).is_empty() {
            let (n, reasons) = by_node.entry(text(pod, "/spec/nodeName")).or_default();
            *n += 1;
            reasons.insert(reason);
        }
    }
    for (node, (n, reasons)) in by_node {
        let reasons: Vec<&str> = reasons.into_iter().collect();
        report.warn(
            format!("node {node}"),
            format!(
                "kubelet has refused {n} of the pods with an allocation record ({})",
                reasons.join(", ")
            ),
            format!(
                "see {} and the messages in `kubectl get pods -A --field-selector spec.nodeName={node},status.phase=Failed -o yaml`; delete \
                 the pods once the cause is gone",
                plugin_log(facts, node)
            ),
        );
    }
    Ok("kubelet has refused no pod with an allocation record".to_owned())
}

/// Adds the findings that the scheduler's library makes from each node's report.
pub(super) fn nodes(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    for node in facts.state.as_ref().map_err(String::clone)? {
        report.findings.extend(node_findings(node));
    }
    Ok("every node's report can be read, every GPU is healthy, and none is overcommitted".to_owned())
}

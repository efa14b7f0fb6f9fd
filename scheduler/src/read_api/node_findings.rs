//! The findings of `doctor` about one node.

use std::collections::BTreeSet;

use proto::plugin_reports::PLUGIN_SELECTOR;
use proto::read_api::{Finding, Holder, Node, Severity};

/// The commands that delete these pods, at most three; without names, the command that shows the pods of the cluster.
fn delete_commands(holders: &[Holder]) -> String {
    let mut commands = Vec::new();
    for holder in holders.iter().filter(|holder| !holder.name.is_empty()).take(3) {
        let Holder { namespace, name, .. } = holder;
        commands.push(format!("`kubectl -n {namespace} delete pod {name}`"));
    }
    if commands.is_empty() {
        return "`kubectl gpushare top pods -A` shows the pods".to_owned();
    }
    commands.join(" or ")
}

/// The arguments by which kubectl finds the device plugin's pod on a node, in any namespace.
fn plugin_pods(node: &Node) -> String {
    let name = &node.name;
    format!("pods -A -l '{PLUGIN_SELECTOR}' --field-selector spec.nodeName={name}")
}

/// The findings about one node of the state.
pub fn node_findings(node: &Node) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |check: &str, severity, message: String, remedy: String| {
        findings.push(Finding {
            check: check.to_owned(),
            severity,
            object: format!("node {}", node.name),
            message,
            remedy,
        });
    };
    let plugin_pods = plugin_pods(node);
    for problem in &node.problems {
        let remedy = format!(
            "correct the Device object or the node's annotations, or have the device plugin write them again: `kubectl delete {plugin_pods}`"
        );
        add("node-report", Severity::Error, problem.clone(), remedy);
    }
    if let Some(problem) = &node.plugin {
        let remedy =
            format!("`kubectl get {plugin_pods}` names the device plugin's pod: see its events and its log");
        add("plugin-serves", Severity::Error, problem.clone(), remedy);
    }
    // A pod whose GPU is not known may be counted on each GPU of the node, and gets one finding.
    let mut with_finding = BTreeSet::new();
    for gpu in &node.gpus {
        if !gpu.healthy {
            let (minor, uuid, name) = (gpu.minor, &gpu.uuid, &node.name);
            let message = format!("GPU {minor} ({uuid}) is unhealthy and takes no new pods");
            let remedy = format!(
                "see `kubectl describe devices.scheduling.koordinator.sh {name}` and the node's kernel log (XID); reset or replace the GPU"
            );
            add("gpu-health", Severity::Warning, message, remedy);
        }
        // The scheduler never overcommits a GPU: a record was edited, or the GPU reports less memory than before.
        if gpu.memory.allocated > gpu.memory.total {
            let message = format!("pods hold more memory of GPU {} than it has", gpu.minor);
            let remedy = format!("delete one of its pods: {}", delete_commands(&gpu.holders));
            add("gpu-overcommitted", Severity::Error, message, remedy);
        }
        for holder in &gpu.holders {
            if let Some(problem) = &holder.problem
                && with_finding.insert(&holder.uid)
            {
                let message = format!("pod {}: {problem}", holder.display_name());
                let commands = delete_commands(std::slice::from_ref(holder));
                let remedy = format!("delete the pod to reschedule it: {commands}");
                add("pod-record", Severity::Warning, message, remedy);
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use proto::read_api::Gpu;

    use super::*;

    #[test]
    fn a_viewer_without_the_right_to_list_pods_gets_no_names() {
        let holder = Holder {
            namespace: "team".to_owned(),
            name: "secret".to_owned(),
            uid: "u-1".to_owned(),
            problem: Some("its record cannot be read".to_owned()),
            ..Holder::default()
        };
        let mut node = Node {
            gpus: vec![Gpu {
                holders: vec![holder],
                ..Gpu::default()
            }],
            ..Node::default()
        };
        let text = |node: &Node| format!("{:?}", node_findings(node));
        assert!(text(&node).contains("pod team/secret: its record cannot be read"));
        node.hide_names(|_| false);
        assert!(text(&node).contains("pod u-1: its record cannot be read"));
        assert!(!text(&node).contains("team") && !text(&node).contains("secret"));
    }
}

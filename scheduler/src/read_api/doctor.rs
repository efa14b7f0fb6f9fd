//! The findings of one replica about itself and about the nodes that it sees.

use proto::read_api::{Finding, Node, Replica, Severity};

use super::names::{Names, Viewer};
use super::snapshot::{RenderedNode, Snapshot};

/// Seconds without a filter request after which waiting pods show that kube-scheduler does not ask.
const SILENCE: u64 = 600;

/// All findings that a viewer may see.
pub(super) fn findings(replica: &Replica, snapshot: &Snapshot, viewer: &Viewer) -> Vec<Finding> {
    let mut findings = vec![sync(replica), filter_requests(replica, snapshot.pending.total)];
    for node in snapshot.nodes.values() {
        if viewer.names.are_all() {
            findings.extend_from_slice(&node.findings);
        } else if !node.findings.is_empty() {
            findings.extend(findings_of_seen_names(node, &viewer.names));
        }
    }
    findings
}

fn findings_of_seen_names(rendered: &RenderedNode, names: &Names) -> Vec<Finding> {
    let node: Node = serde_json::from_slice(&rendered.json_for(names)).unwrap_or_default();
    node_findings(&node)
}

fn sync(replica: &Replica) -> Finding {
    let (severity, message) = match &replica.not_ready {
        None => (Severity::Ok, "every watch has listed its objects".to_owned()),
        Some(reason) => (Severity::Error, reason.clone()),
    };
    Finding {
        check: "scheduler-sync".to_owned(),
        severity,
        message,
        remedy: match severity {
            Severity::Ok => String::new(),
            _ => "look for refused requests in the scheduler's log; its ClusterRole has to list nodes, pods and devices".to_owned(),
        },
        ..Finding::default()
    }
}

/// kube-scheduler asks the leader alone, and only about pods that request resources which its configuration names.
fn filter_requests(replica: &Replica, n_pending: usize) -> Finding {
    let remedy = "check the extender in kube-scheduler's configuration: urlPrefix, managedResources, certificates; and that \
                  the pods' schedulerName is that of a kube-scheduler with the extender";
    let (severity, message) = match replica.last_filter_seconds {
        _ if !replica.leading => (
            Severity::Ok,
            "this replica does not lead, so that kube-scheduler does not ask it".to_owned(),
        ),
        None if n_pending > 0 => (
            Severity::Error,
            format!("kube-scheduler has sent no filter request since the start, and {n_pending} pods wait"),
        ),
        None => (
            Severity::Unknown,
            "kube-scheduler has sent no filter request since the start; no pod waits".to_owned(),
        ),
        Some(seconds) if n_pending > 0 && seconds > SILENCE => (
            Severity::Error,
            format!("the last filter request came {seconds} s ago, and {n_pending} pods wait"),
        ),
        Some(seconds) => (
            Severity::Ok,
            format!(
                "{} filter requests, the last {seconds} s ago",
                replica.filter_requests
            ),
        ),
    };
    Finding {
        check: "extender-asked".to_owned(),
        severity,
        message,
        remedy: match severity {
            Severity::Ok => String::new(),
            _ => remedy.to_owned(),
        },
        ..Finding::default()
    }
}

/// The findings about one node.
pub fn node_findings(node: &Node) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |check: &str, severity, message: String, remedy: &str| {
        findings.push(Finding {
            check: check.to_owned(),
            severity,
            object: format!("node {}", node.name),
            message,
            remedy: remedy.to_owned(),
        });
    };
    for problem in &node.problems {
        add(
            "node-report",
            Severity::Error,
            problem.clone(),
            "correct the Device object or the node's annotations; the device plugin of the node writes them again when it restarts",
        );
    }
    if let Some(problem) = &node.plugin {
        add(
            "plugin-serves",
            Severity::Error,
            problem.clone(),
            "look at the device plugin's pod on the node and its log",
        );
    }
    for gpu in &node.gpus {
        if !gpu.healthy {
            add(
                "gpu-health",
                Severity::Warning,
                format!(
                    "GPU {} ({}) is unhealthy and takes no new pods",
                    gpu.minor, gpu.uuid
                ),
                "see the Device object's health and the node's kernel log (XID); reset or replace the GPU",
            );
        }
        if gpu.memory.allocated > gpu.memory.total {
            add(
                "gpu-overcommitted",
                Severity::Error,
                format!("pods hold more memory of GPU {} than it has", gpu.minor),
                "delete one of its pods, or the records that do not belong to it",
            );
        }
        for holder in &gpu.holders {
            if let Some(problem) = &holder.problem {
                add(
                    "pod-record",
                    Severity::Warning,
                    format!("pod {}: {problem}", holder.display_name()),
                    "delete the pod to have it placed with a new record",
                );
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Gpu, Holder};

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

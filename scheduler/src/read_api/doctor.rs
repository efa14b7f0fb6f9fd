//! The findings of one replica about itself and about the nodes that it sees.

use std::time::Duration;

use proto::read_api::{Finding, Node, Replica, Severity};

use super::names::{SeenNames, Viewer};
use super::snapshot::{RenderedNode, StateSnapshot};

/// Seconds without a filter request after which waiting pods show that kube-scheduler does not ask.
const SILENCE: u64 = 600;
/// Seconds.
const DAY: i64 = 24 * 60 * 60;
/// Seconds before the end of a certificate from which on it is a finding: the scheduler renews its own 30 days before.
const ENDS_SOON: i64 = 14 * DAY;

/// All findings that a viewer may see.
pub(super) fn findings(replica: &Replica, snapshot: &StateSnapshot, viewer: &Viewer) -> Vec<Finding> {
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

fn findings_of_seen_names(rendered: &RenderedNode, names: &SeenNames) -> Vec<Finding> {
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

/// The ends of the certificates that this replica serves with and trusts, in unix seconds.
pub(super) fn certificates(ends: &[(&str, i64)], now: Duration) -> Finding {
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let (mut severity, mut ending) = (Severity::Ok, Vec::new());
    for (name, end) in ends {
        let left = end - now;
        if left <= 0 {
            severity = Severity::Error;
            ending.push(format!("{name} has ended"));
        } else if left < ENDS_SOON {
            severity = severity.max(Severity::Warning);
            ending.push(format!("{name} ends in {} days", left / DAY));
        }
    }
    let message = match (ends.is_empty(), ending.is_empty()) {
        (true, _) => "the scheduler serves without TLS".to_owned(),
        (_, true) => "no certificate ends within two weeks".to_owned(),
        _ => format!("certificates: {}", ending.join(", ")),
    };
    Finding {
        check: "certificates".to_owned(),
        severity,
        message,
        remedy: match severity {
            Severity::Ok => String::new(),
            _ => "authority and server are the scheduler's own: its log says why it could not renew them; the others come from files: renew them".to_owned(),
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
                "{} filter requests, the last {seconds} s ago, from {}",
                replica.filter_requests,
                clients(replica)
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

/// The clients of filter, for people.
fn clients(replica: &Replica) -> String {
    let mut names = Vec::new();
    for client in &replica.filter_clients {
        let requests = if client.requests == 1 {
            "request"
        } else {
            "requests"
        };
        let agent = match client.user_agent.as_str() {
            "" => "no user agent",
            agent => agent,
        };
        names.push(format!(
            "{} ({agent}, {} {requests})",
            client.name, client.requests
        ));
    }
    names.join(" and ")
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
    fn certificates_that_end_soon() {
        let now = Duration::from_secs(1_800_000_000);
        let in_days = |days: i64| 1_800_000_000 + days * DAY;
        let found = |ends: &[(&str, i64)]| {
            let finding = certificates(ends, now);
            (finding.severity, finding.message)
        };
        assert_eq!(found(&[("server", in_days(15))]).0, Severity::Ok);
        let soon = [("server", in_days(60)), ("extender", in_days(13))];
        assert_eq!(
            found(&soon),
            (
                Severity::Warning,
                "certificates: extender ends in 13 days".to_owned()
            )
        );
        let ended = [("server", in_days(-1)), ("extender", in_days(13))];
        assert_eq!(found(&ended).0, Severity::Error);
        assert_eq!(found(&[]).1, "the scheduler serves without TLS");
    }

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

//! `GET doctor`: the findings of one replica about itself, and about the nodes that its watches show.

use std::collections::BTreeSet;
use std::time::Duration;

use proto::read_api::{Finding, Holder, Node, Replica, Severity};

use super::names::Viewer;
use super::snapshot::StateSnapshot;

/// Seconds without a filter request after which pods that wait are a sign that kube-scheduler does not ask. kube-scheduler tries
/// each pending pod again after at most five minutes.
const SILENCE: u64 = 600;
/// Seconds of a day.
const DAY: i64 = 24 * 60 * 60;
/// Seconds before the end of a certificate from which on the end is a finding. The scheduler renews its own 30 days before, so that
/// renewal has failed for two weeks by then.
const ENDS_SOON: i64 = 14 * DAY;

/// All findings, without the names of pods that the viewer may not see.
pub(super) fn findings(replica: &Replica, snapshot: &StateSnapshot, viewer: &Viewer) -> Vec<Finding> {
    let mut findings = vec![
        check_sync(replica),
        check_filter_requests(replica, snapshot.pending.total),
    ];
    for node in snapshot.nodes.values() {
        // Findings are made once for each change of a node, with all names, and again for a viewer who may not see all.
        if viewer.names.are_all() {
            findings.extend_from_slice(&node.findings);
        } else if !node.findings.is_empty() {
            let seen: Node = serde_json::from_slice(&node.json_for(&viewer.names)).unwrap_or_default();
            findings.extend(node_findings(&seen));
        }
    }
    findings
}

/// A finding about this replica. The remedy is left out where all is well: it would be read as a fault.
fn finding_of_replica(check: &str, severity: Severity, message: String, remedy: &str) -> Finding {
    let remedy = if severity == Severity::Ok { "" } else { remedy };
    Finding {
        check: check.to_owned(),
        severity,
        object: String::new(),
        message,
        remedy: remedy.to_owned(),
    }
}

/// The finding on the watches: an error until each has listed its objects.
fn check_sync(replica: &Replica) -> Finding {
    let (severity, message) = match &replica.not_ready {
        None => (Severity::Ok, "every watch has listed its objects".to_owned()),
        Some(reason) => (Severity::Error, reason.clone()),
    };
    let remedy = "look for refused requests in the scheduler's log; its ClusterRole has to list nodes, pods and devices";
    finding_of_replica("scheduler-sync", severity, message, remedy)
}

/// Checks the certificates that this replica serves with and trusts, by name and end in unix seconds.
pub(super) fn check_certificates(ends: &[(&str, i64)], now: Duration) -> Finding {
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let (mut severity, mut ending) = (Severity::Ok, Vec::new());
    for (name, end) in ends {
        let left = end - now;
        // An end is an error, which a certificate that ends soon must not lower to a warning.
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
    let remedy = "authority and server are the scheduler's own: its log says why it could not renew them; the others come from files: renew them";
    finding_of_replica("certificates", severity, message, remedy)
}

/// Checks that kube-scheduler asks this replica. It asks the leader alone, and only about pods that request resources which its
/// configuration names.
fn check_filter_requests(replica: &Replica, n_pending: usize) -> Finding {
    let (severity, message) = match replica.last_filter_seconds {
        _ if !replica.leading => (
            Severity::Ok,
            "this replica does not lead, so that kube-scheduler does not ask it".to_owned(),
        ),
        None if n_pending > 0 => (
            Severity::Error,
            format!("kube-scheduler has sent no filter request since the start, and {n_pending} pods wait"),
        ),
        // Without a pod to place kube-scheduler has nothing to ask, however it is configured.
        None => (
            Severity::Unknown,
            "kube-scheduler has sent no filter request since the start; no pod waits".to_owned(),
        ),
        Some(seconds) if n_pending > 0 && seconds > SILENCE => (
            Severity::Error,
            format!("the last filter request came {seconds} s ago, and {n_pending} pods wait"),
        ),
        Some(seconds) => {
            let (n, clients) = (replica.filter_requests, describe_clients(replica));
            let message = format!("{n} filter requests, the last {seconds} s ago, from {clients}");
            (Severity::Ok, message)
        }
    };
    let remedy = "check the extender in kube-scheduler's configuration: urlPrefix, managedResources, certificates; and that \
                  the pods' schedulerName is that of a kube-scheduler with the extender";
    finding_of_replica("extender-asked", severity, message, remedy)
}

/// The clients that have sent filter requests, in words.
fn describe_clients(replica: &Replica) -> String {
    let mut names = Vec::new();
    for client in &replica.filter_clients {
        let (name, requests) = (&client.name, client.requests);
        let plural = if requests == 1 { "" } else { "s" };
        let agent = match client.user_agent.as_str() {
            "" => "no user agent",
            agent => agent,
        };
        names.push(format!("{name} ({agent}, {requests} request{plural})"));
    }
    names.join(" and ")
}

/// The commands that delete these pods, at most three; without names, the command that shows the pods of the cluster.
fn delete_commands(holders: &[Holder]) -> String {
    let mut commands = Vec::new();
    for holder in holders.iter().filter(|holder| !holder.name.is_empty()).take(3) {
        commands.push(format!(
            "`kubectl -n {} delete pod {}`",
            holder.namespace, holder.name
        ));
    }
    if commands.is_empty() {
        return "`kubectl gpushare top pods -A` shows the pods".to_owned();
    }
    commands.join(" or ")
}

/// The arguments by which kubectl finds the device plugin's pod on a node, in any namespace.
fn plugin_pods(node: &Node) -> String {
    format!(
        "pods -A -l app.kubernetes.io/name=gpushare-device-plugin --field-selector spec.nodeName={}",
        node.name
    )
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
    for problem in &node.problems {
        add(
            "node-report",
            Severity::Error,
            problem.clone(),
            format!(
                "correct the Device object or the node's annotations, or have the device plugin write them again: `kubectl delete {}`",
                plugin_pods(node)
            ),
        );
    }
    if let Some(problem) = &node.plugin {
        add(
            "plugin-serves",
            Severity::Error,
            problem.clone(),
            format!(
                "`kubectl get {}` names the device plugin's pod: see its events and its log",
                plugin_pods(node)
            ),
        );
    }
    // A pod whose GPU is not known may be counted on each GPU of the node.
    let mut with_finding = BTreeSet::new();
    for gpu in &node.gpus {
        if !gpu.healthy {
            add(
                "gpu-health",
                Severity::Warning,
                format!(
                    "GPU {} ({}) is unhealthy and takes no new pods",
                    gpu.minor, gpu.uuid
                ),
                format!(
                    "see `kubectl describe devices.scheduling.koordinator.sh {}` and the node's kernel log (XID); reset or replace the GPU",
                    node.name
                ),
            );
        }
        // The scheduler never places so: a record was edited, or the GPU reports less memory than before.
        if gpu.memory.allocated > gpu.memory.total {
            add(
                "gpu-overcommitted",
                Severity::Error,
                format!("pods hold more memory of GPU {} than it has", gpu.minor),
                format!("delete one of its pods: {}", delete_commands(&gpu.holders)),
            );
        }
        for holder in &gpu.holders {
            if let Some(problem) = &holder.problem
                && with_finding.insert(&holder.uid)
            {
                add(
                    "pod-record",
                    Severity::Warning,
                    format!("pod {}: {problem}", holder.display_name()),
                    format!(
                        "delete the pod to reschedule it: {}",
                        delete_commands(std::slice::from_ref(holder))
                    ),
                );
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
    fn certificates_that_end_soon() {
        let now = Duration::from_secs(1_800_000_000);
        let in_days = |days: i64| 1_800_000_000 + days * DAY;
        let found = |ends: &[(&str, i64)]| {
            let finding = check_certificates(ends, now);
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

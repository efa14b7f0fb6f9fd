//! `GET doctor`: the findings of one replica about itself, and about the nodes that its watches show.

use std::time::Duration;

use proto::read_api::{Finding, Node, Replica, Severity};

use super::names::Viewer;
use super::node_findings::node_findings;
use super::snapshot::StateSnapshot;

/// Seconds without a filter request after which pods that wait are an error: kube-scheduler tries each again after at most
/// five minutes.
const MAX_SILENCE: u64 = 600;
const DAY: i64 = 24 * 60 * 60;
/// Seconds before the end of a certificate from which on the end is a finding. The scheduler renews its own 30 days before, so
/// that renewal has failed for two weeks by then.
const ENDS_SOON: i64 = 14 * DAY;

/// All findings, without the names of pods that the viewer may not see.
pub(super) fn findings(replica: &Replica, snapshot: &StateSnapshot, viewer: &Viewer) -> Vec<Finding> {
    let asked = check_filter_requests(replica, snapshot.pending.total);
    let mut findings = vec![check_sync(replica), asked];
    for node in snapshot.nodes.values() {
        // A snapshot has the findings with the names of all pods; for a viewer who may not see all, they are made again.
        if viewer.names.are_all() {
            findings.extend_from_slice(&node.findings);
        } else if !node.findings.is_empty() {
            let seen: Node = serde_json::from_slice(&node.json_for(&viewer.names)).unwrap_or_default();
            findings.extend(node_findings(&seen));
        }
    }
    findings
}

/// A finding about this replica. A finding that all is well has no remedy, which users would take for a fault.
fn finding_of_replica(check: &str, severity: Severity, message: String, remedy: &str) -> Finding {
    let remedy = if severity == Severity::Ok { "" } else { remedy };
    Finding {
        check: check.to_owned(),
        severity,
        message,
        remedy: remedy.to_owned(),
        ..Finding::default()
    }
}

fn check_sync(replica: &Replica) -> Finding {
    let (severity, message) = match &replica.not_ready {
        None => (Severity::Ok, "every watch has listed its objects".to_owned()),
        Some(reason) => (Severity::Error, reason.clone()),
    };
    let remedy = "look for refused requests in the scheduler's log; its ClusterRole has to list nodes, pods and devices";
    finding_of_replica("scheduler-sync", severity, message, remedy)
}

/// The finding on the certificates that this replica serves with and trusts; `ends` has their names and ends in unix seconds.
pub(super) fn check_certificates(ends: &[(&str, i64)], now: Duration) -> Finding {
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let (mut severity, mut ending) = (Severity::Ok, Vec::new());
    for (name, end) in ends {
        let left = end - now;
        // A certificate that has ended is an error, which another that ends soon must not lower to a warning.
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

/// The finding on kube-scheduler's filter requests. It sends them to the leader alone, and only about pods that request resources
/// which its configuration names.
fn check_filter_requests(replica: &Replica, n_pending: usize) -> Finding {
    let (severity, message) = match replica.last_filter_seconds {
        _ if !replica.leading => {
            let message = "this replica does not lead, so that kube-scheduler does not ask it";
            (Severity::Ok, message.to_owned())
        }
        None if n_pending > 0 => (
            Severity::Error,
            format!("kube-scheduler has sent no filter request since the start, and {n_pending} pods wait"),
        ),
        // Without a pod to place kube-scheduler has nothing to ask, however it is configured.
        None => {
            let message = "kube-scheduler has sent no filter request since the start; no pod waits";
            (Severity::Unknown, message.to_owned())
        }
        Some(seconds) if n_pending > 0 && seconds > MAX_SILENCE => (
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

#[cfg(test)]
mod tests {
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
}

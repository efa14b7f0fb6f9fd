//! `doctor`: checks the installation, from outside by the objects of the API server and from inside by each replica's read API.
//!
//! This file collects facts, and `checks` compares them with a sound installation. If the user lacks a right, the findings of the
//! checks that need it are [`Severity::Unknown`], and all others are made.

mod checks;
mod facts;
mod node_checks;
mod report;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use proto::read_api::{Diagnosis, Finding, Severity};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult, code_of_answer};
use crate::format::count;
use crate::offline;
use crate::output::{Colour, Screen};
use crate::read_api::{ReadApiClient, SCHEDULER, is_ready};
pub(crate) use facts::AskedReplica;
use facts::InstallationFacts;

/// The kinds whose objects are listed in the whole cluster, each after the path of its API group.
const CLUSTER_LISTS: [(&str, &str); 10] = [
    ("/api/v1", "nodes"),
    ("/api/v1", "pods"),
    ("/apis/scheduling.koordinator.sh/v1alpha1", "devices"),
    ("/apis/apps/v1", "daemonsets"),
    ("/apis/rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    (ADMISSION, "validatingadmissionpolicies"),
    (ADMISSION, "validatingadmissionpolicybindings"),
    (ADMISSION, "mutatingwebhookconfigurations"),
    (ADMISSION, "validatingwebhookconfigurations"),
];
/// The kinds whose objects are listed in the namespace of the installation.
const NAMESPACE_LISTS: [(&str, &str); 3] = [
    ("/apis/apps/v1", "deployments"),
    ("/api/v1", "services"),
    ("/apis/coordination.k8s.io/v1", "leases"),
];
const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";

/// Checks the installation; the answer, in the exit code, is no if a finding is a warning or an error.
pub(crate) async fn run(connection: &ClusterConnection, screen: &Screen) -> CommandResult {
    let facts = collect(connection).await?;
    let mut findings = checks::findings(&facts);
    // The most severe first; findings of one severity stay in the order of the checks.
    findings.sort_by_key(|finding| Reverse(finding.severity));
    let mut problems = Vec::new();
    // A check that was not made, as the user lacks a right, is no fault of the installation.
    for finding in &findings {
        if finding.severity >= Severity::Warning {
            problems.push(finding.check.clone());
        }
    }
    let is_sound = problems.is_empty();
    screen.show(&findings, problems, |is_wide| render(&findings, screen, is_wide))?;
    Ok(code_of_answer(is_sound))
}

/// Reads the facts of the installation that the checks need.
async fn collect(connection: &ClusterConnection) -> Result<InstallationFacts, CommandFailure> {
    let namespace = &connection.args.gpushare_namespace;
    // The first request shows whether there is an API server at all.
    let version = connection
        .get("read the version of the API server", "/version")
        .await?;
    let mut objects = BTreeMap::new();
    let of_cluster = CLUSTER_LISTS.map(|(group, kind)| (kind, format!("{group}/{kind}")));
    let of_namespace =
        NAMESPACE_LISTS.map(|(group, kind)| (kind, format!("{group}/namespaces/{namespace}/{kind}")));
    for (kind, path) in of_cluster.into_iter().chain(of_namespace) {
        let listed = connection.list_json(&path).await;
        objects.insert(kind, listed.map_err(|failure| failure.to_string()));
    }
    Ok(InstallationFacts {
        namespace: namespace.clone(),
        version: version.unwrap_or_default(),
        objects,
        replicas: replicas(connection).await,
        state: nodes_of_state(connection).await,
    })
}

/// Asks every ready replica of the scheduler for its findings, or the one at `--read-api` alone; an error with `--offline`.
pub(crate) async fn replicas(connection: &ClusterConnection) -> Result<Vec<AskedReplica>, String> {
    if connection.args.offline {
        return Err("with --offline no replica is asked".to_owned());
    }
    if let Some(address) = &connection.args.read_api {
        let replica = diagnose(address.clone(), ReadApiClient::connect(connection).await).await;
        return Ok(vec![replica]);
    }
    let namespace = &connection.args.gpushare_namespace;
    let pods = connection.list::<Pod>(Some(namespace), Some(SCHEDULER)).await;
    let pods = pods.map_err(|failure| failure.to_string())?;
    let mut replicas = Vec::new();
    // All of them, since each process alone knows if it leads, and the objects that its own watches have shown.
    for pod in pods.into_iter().filter(is_ready) {
        let name = pod.metadata.name.unwrap_or_default();
        let connected = ReadApiClient::forward(connection, &name).await;
        replicas.push(diagnose(name, connected).await);
    }
    Ok(replicas)
}

async fn diagnose(pod: String, connected: Result<ReadApiClient, CommandFailure>) -> AskedReplica {
    let diagnosis = match connected {
        Ok(mut api) => api.get::<Diagnosis>("doctor").await,
        Err(failure) => Err(failure),
    };
    AskedReplica {
        pod,
        diagnosis: diagnosis.map_err(|failure| failure.to_string()),
    }
}

/// The nodes as the scheduler's library understands the objects, which needs no running scheduler.
async fn nodes_of_state(connection: &ClusterConnection) -> Result<Vec<proto::read_api::Node>, String> {
    let index = offline::index(connection)
        .await
        .map_err(|failure| failure.to_string())?;
    Ok(scheduler::read_api::state_of(index).await.nodes)
}

fn render(findings: &[Finding], screen: &Screen, is_wide: bool) -> String {
    let mut lines = String::new();
    let (mut n_ok, mut n_unknown, mut n_warnings, mut n_errors) = (0_u64, 0_u64, 0_u64, 0_u64);
    for finding in findings {
        let (mark, colour, n) = match finding.severity {
            Severity::Ok => ("ok     ", Colour::Green, &mut n_ok),
            Severity::Unknown => ("unknown", Colour::Grey, &mut n_unknown),
            Severity::Warning => ("warning", Colour::Yellow, &mut n_warnings),
            Severity::Error => ("error  ", Colour::Red, &mut n_errors),
        };
        *n += 1;
        let object = if finding.object.is_empty() {
            String::new()
        } else {
            format!("{}: ", finding.object)
        };
        let line = format!(
            "{}  {}: {object}{}\n",
            screen.paint(colour, mark),
            finding.check,
            finding.message
        );
        lines += &screen.wrap(9, &line);
        // Users would take a remedy beside a check without a fault for a fault.
        if !finding.remedy.is_empty() && (is_wide || finding.severity != Severity::Ok) {
            lines += &screen.wrap(9, &format!("         {}\n", finding.remedy));
        }
    }
    let parts = [
        count(n_errors, "error"),
        count(n_warnings, "warning"),
        format!("{n_unknown} not checked"),
        format!("{n_ok} ok"),
    ];
    lines + &parts.join(", ") + "\n"
}

#[cfg(test)]
mod tests;

//! The checks of the installation: pure functions of the facts that were collected.

use std::collections::{BTreeMap, BTreeSet};

use proto::read_api::{Diagnosis, Finding, Node, Severity};
use serde_json::Value;

use super::node_checks;
use crate::fields::{array, has_condition, images, is_named, name, number, text};

/// The objects of one list, or the reason that they could not be listed.
pub(super) type Objects = Result<Vec<Value>, String>;

/// The names of the admission policies of the installation.
pub(super) const POLICIES: [&str; 8] = [
    "gpushare-device-plugin-pods",
    "gpushare-device-plugin-nodes",
    "gpushare-device-plugin-devices",
    "gpushare-device-plugin-events",
    "gpushare-records",
    "gpushare-scheduler-pods",
    "gpushare-scheduler-bindings",
    "gpushare-scheduler-leaders",
];
/// The oldest version of the API server that serves everything the installation uses.
const OLDEST: (u32, u32) = (1, 33);
/// One ready replica of the scheduler.
#[derive(Clone, Debug)]
pub(super) struct AskedReplica {
    pub(super) pod: String,
    pub(super) diagnosis: Result<Diagnosis, String>,
}

/// Everything that the checks look at.
#[derive(Clone, Debug)]
pub(super) struct InstallationFacts {
    pub(super) namespace: String,
    pub(super) version: Value,
    pub(super) nodes: Objects,
    pub(super) pods: Objects,
    pub(super) devices: Objects,
    pub(super) daemon_sets: Objects,
    pub(super) deployments: Objects,
    pub(super) services: Objects,
    pub(super) leases: Objects,
    pub(super) cluster_roles: Objects,
    pub(super) definitions: Objects,
    pub(super) policies: Objects,
    pub(super) policy_bindings: Objects,
    pub(super) mutating: Objects,
    pub(super) validating: Objects,
    pub(super) replicas: Result<Vec<AskedReplica>, String>,
    pub(super) state: Result<Vec<Node>, String>,
}

/// The findings of one check.
pub(super) struct CheckReport {
    check: &'static str,
    pub(super) findings: Vec<Finding>,
}

impl CheckReport {
    pub(super) fn new(check: &'static str) -> Self {
        Self {
            check,
            findings: Vec::new(),
        }
    }

    pub(super) fn add(
        &mut self,
        severity: Severity,
        object: impl Into<String>,
        message: impl Into<String>,
        remedy: &str,
    ) {
        self.findings.push(Finding {
            check: self.check.to_owned(),
            severity,
            object: object.into(),
            message: message.into(),
            remedy: remedy.to_owned(),
        });
    }

    pub(super) fn error(&mut self, object: impl Into<String>, message: impl Into<String>, remedy: &str) {
        self.add(Severity::Error, object, message, remedy);
    }

    pub(super) fn warn(&mut self, object: impl Into<String>, message: impl Into<String>, remedy: &str) {
        self.add(Severity::Warning, object, message, remedy);
    }

    pub(super) fn unknown(&mut self, reason: &str) {
        self.add(Severity::Unknown, "", reason, "");
    }

    /// The findings, or one that all is well.
    pub(super) fn or_ok(mut self, message: impl Into<String>) -> Vec<Finding> {
        if self.findings.is_empty() {
            self.add(Severity::Ok, "", message, "");
        }
        self.findings
    }
}

/// All findings.
pub(super) fn findings(facts: &InstallationFacts) -> Vec<Finding> {
    let checks = [
        api_version,
        definitions,
        scheduler_pods,
        read_api,
        leader,
        versions,
        rights,
        policies,
        webhooks,
        node_checks::plugins,
        node_checks::device_objects,
        node_checks::injection,
        node_checks::drivers,
        node_checks::enforcement,
        node_checks::memory_units,
        node_checks::other_plugins,
        node_checks::failed_pods,
        node_checks::nodes,
        replicas,
    ];
    checks.into_iter().flat_map(|check| check(facts)).collect()
}

fn api_version(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("api-version");
    let digits = |pointer: &str| -> u32 {
        let digits: String = text(&facts.version, pointer)
            .chars()
            // Providers add a sign to the minor version, such as 33+.
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().unwrap_or(0)
    };
    let version = (digits("/major"), digits("/minor"));
    if version < OLDEST {
        report.error(
            "",
            format!(
                "the API server has version {}.{}; gpushare needs {}.{}",
                version.0, version.1, OLDEST.0, OLDEST.1
            ),
            "upgrade the cluster",
        );
    }
    report.or_ok(format!(
        "the API server has version {}",
        text(&facts.version, "/gitVersion")
    ))
}

fn definitions(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("definitions");
    match &facts.definitions {
        Err(reason) => report.unknown(reason),
        Ok(definitions) => {
            for wanted in [
                "devices.scheduling.koordinator.sh",
                "schedulerleaders.gpushare.io",
            ] {
                match definitions.iter().find(|definition| name(definition) == wanted) {
                    None => report.error(
                        wanted,
                        "the CustomResourceDefinition does not exist",
                        "install deploy/base again: kubectl apply -k",
                    ),
                    // Without the condition the API server serves no object of the kind.
                    Some(definition) if !has_condition(definition, "/status/conditions", "Established") => {
                        report.error(
                            wanted,
                            "the CustomResourceDefinition is not established",
                            "see its status: another definition may use its names",
                        );
                    }
                    Some(_) => {}
                }
            }
        }
    }
    report.or_ok("both CustomResourceDefinitions are established")
}

fn scheduler_pods(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("scheduler-pods");
    let deployments = match &facts.deployments {
        Ok(deployments) => deployments,
        Err(reason) => {
            report.unknown(reason);
            return report.findings;
        }
    };
    let Some(scheduler) = deployments
        .iter()
        .find(|deployment| name(deployment) == "gpushare-scheduler")
    else {
        report.error(
            format!("namespace {}", facts.namespace),
            "there is no Deployment gpushare-scheduler",
            "install gpushare, or name its namespace with --gpushare-namespace",
        );
        return report.findings;
    };
    let (wanted, ready) = (
        number(scheduler, "/spec/replicas"),
        number(scheduler, "/status/readyReplicas"),
    );
    let remedy =
        "see `kubectl describe pod` and `kubectl logs` of its pods; /readyz says what a replica waits for";
    // Scaled down for a maintenance and forgotten: no replica is missing, and none is there.
    if wanted == 0 {
        report.error(
            "deployment gpushare-scheduler",
            "it is scaled to 0 replicas",
            "kubectl scale it to 2",
        );
    } else if ready == 0 {
        report.error(
            "deployment gpushare-scheduler",
            format!("none of {wanted} replicas is ready"),
            remedy,
        );
    } else if ready < wanted {
        report.warn(
            "deployment gpushare-scheduler",
            format!("{ready} of {wanted} replicas are ready"),
            remedy,
        );
    }
    report.or_ok(format!("{ready} of {wanted} replicas are ready"))
}

fn read_api(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("read-api");
    match &facts.replicas {
        Err(reason) => report.unknown(reason),
        Ok(replicas) if replicas.is_empty() => report.unknown("no replica is ready"),
        Ok(replicas) => {
            for replica in replicas {
                if let Err(reason) = &replica.diagnosis {
                    report.warn(
                        format!("pod {}", replica.pod),
                        reason,
                        "give yourself the rights to get and create pods/portforward, and the scheduler --read-listen=127.0.0.1:12346",
                    );
                }
            }
        }
    }
    report.or_ok("every ready replica answers")
}

fn leader(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("leader");
    let Ok(replicas) = &facts.replicas else {
        report.unknown("no replica could be asked");
        return report.findings;
    };
    let answers = || {
        replicas
            .iter()
            .filter_map(|replica| replica.diagnosis.as_ref().ok())
    };
    let n_leading = answers().filter(|diagnosis| diagnosis.replica.leading).count();
    match (answers().count(), n_leading) {
        (0, _) => report.unknown("no replica could be asked"),
        // A replica that could not be asked may be the leader.
        (n, 0) if n == replicas.len() => report.error(
            "",
            "no replica leads, so that no pod with a share of a GPU is bound",
            "see the Lease in the namespace: its holder, its age, and the right of the scheduler's ServiceAccount to update it",
        ),
        // Two leaders would decide on the same room without knowing of each other.
        (_, 2..) => report.error("", format!("{n_leading} replicas lead"), "give all replicas --leader-elect and one Lease"),
        _ => {}
    }
    if let Ok(leases) = &facts.leases
        // One replica alone needs no election, and has no Lease.
        && answers().count() > 1
        && !leases.iter().any(|lease| name(lease).starts_with("gpushare-"))
    {
        report.error(
            "",
            "there is no Lease of the scheduler",
            "give the scheduler --leader-elect, and its Role the right to create Leases",
        );
    }
    report.or_ok("one replica leads")
}

fn versions(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("versions");
    let own = env!("CARGO_PKG_VERSION");
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for replica in facts.replicas.iter().flatten() {
        if let Ok(diagnosis) = &replica.diagnosis {
            found
                .entry(diagnosis.replica.version.clone())
                .or_default()
                .push(replica.pod.clone());
        }
    }
    if found.len() > 1 {
        let all: Vec<String> = found
            .iter()
            .map(|(version, pods)| format!("{version} ({})", pods.join(", ")))
            .collect();
        report.warn(
            "",
            format!("replicas have different versions: {}", all.join(", ")),
            "wait for the rollout, or see why it stands",
        );
    // During a rollout the replicas differ anyway, and the command cannot match both.
    } else if let Some(version) = found.keys().find(|version| *version != own) {
        report.warn(
            "",
            format!("the scheduler has version {version} and this command {own}"),
            "install the command of the scheduler's version",
        );
    }
    // The tags of both images are those of one release.
    let tag = |image: &String| image.rsplit_once(':').map(|(_, tag)| tag.to_owned());
    let tags = |objects: &Objects, wanted: &str| -> BTreeSet<String> {
        let objects = objects.iter().flatten().filter(|object| {
            name(object) == wanted && text(object, "/metadata/namespace") == facts.namespace
        });
        let images = objects.flat_map(|object| images(object, "/spec/template/spec/containers"));
        images
            .filter(|image| image.contains("gpushare"))
            .filter_map(|image| tag(&image))
            .collect()
    };
    let scheduler = tags(&facts.deployments, "gpushare-scheduler");
    let plugin = tags(&facts.daemon_sets, "gpushare-device-plugin");
    // Images by digest alone have no tag to compare.
    if !scheduler.is_empty() && !plugin.is_empty() && scheduler != plugin {
        report.warn(
            "",
            format!("the scheduler's image has the tag {scheduler:?} and the device plugin's {plugin:?}"),
            "upgrade both to one release",
        );
    }
    report.or_ok("scheduler, device plugin and this command have one version")
}

fn rights(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("rights");
    match &facts.cluster_roles {
        Err(reason) => report.unknown(reason),
        Ok(bindings) => {
            for account in ["gpushare-scheduler", "gpushare-device-plugin"] {
                let is_subject = |subject: &Value| {
                    text(subject, "/name") == account && text(subject, "/namespace") == facts.namespace
                };
                if !bindings
                    .iter()
                    .any(|binding| array(binding, "/subjects").iter().any(is_subject))
                {
                    report.error(
                        format!("service account {account}"),
                        "no ClusterRoleBinding gives it any right",
                        "install deploy/base again: kubectl apply -k",
                    );
                }
            }
        }
    }
    report.or_ok("both service accounts have a ClusterRoleBinding")
}

fn policies(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("policies");
    match (&facts.policies, &facts.policy_bindings) {
        (Ok(policies), Ok(bindings)) => {
            let is_bound = |name: &str| {
                bindings
                    .iter()
                    .any(|binding| text(binding, "/spec/policyName") == name)
            };
            let mut idle: Vec<&str> = POLICIES.to_vec();
            // A policy without a binding is never evaluated, and looks installed.
            idle.retain(|wanted| !is_named(wanted, policies) || !is_bound(wanted));
            if !idle.is_empty() {
                report.warn(
                    "",
                    format!("policies that do not exist, or have no binding: {}", idle.join(", ")),
                    "install deploy/base again; without the policies, daemons and users may write what is not theirs",
                );
            }
        }
        (Err(reason), _) | (_, Err(reason)) => report.unknown(reason),
    }
    report.or_ok("every admission policy is bound")
}

fn webhooks(facts: &InstallationFacts) -> Vec<Finding> {
    let mut report = CheckReport::new("webhooks");
    let (mutating, validating) = match (&facts.mutating, &facts.validating) {
        (Ok(mutating), Ok(validating)) => (mutating, validating),
        (Err(reason), _) | (_, Err(reason)) => {
            report.unknown(reason);
            return report.findings;
        }
    };
    let has_ready = facts
        .deployments
        .iter()
        .flatten()
        .any(|deployment| number(deployment, "/status/readyReplicas") > 0);
    let is_ours = |webhook: &&Value| text(webhook, "/clientConfig/service/namespace") == facts.namespace;
    let ours = |configurations: &[Value]| -> Vec<Value> {
        let webhooks = configurations.iter().flat_map(|found| array(found, "/webhooks"));
        webhooks.filter(is_ours).cloned().collect()
    };
    let (mutating, validating) = (ours(mutating), ours(validating));
    for webhook in mutating.iter().chain(&validating) {
        let object = format!("webhook {}", text(webhook, "/name"));
        if text(webhook, "/clientConfig/caBundle").is_empty() {
            report.error(
                object.as_str(),
                "its caBundle is empty, so that the API server cannot call it",
                "see the scheduler's log: it writes the bundle once it has certificates, and needs the right to patch the configuration",
            );
        }
        let service = text(webhook, "/clientConfig/service/name");
        if facts
            .services
            .as_ref()
            .is_ok_and(|services| !is_named(service, services))
        {
            report.error(
                object.as_str(),
                format!("its Service {service} does not exist, so that the API server cannot call it"),
                "install the component webhooks again",
            );
        }
        // With Ignore the API server admits pods when nothing answers, and the filter applies the rules.
        if text(webhook, "/failurePolicy") == "Fail" && !has_ready {
            report.error(
                object,
                "it refuses all pods that it is asked about, as no replica is ready",
                "make the scheduler ready, or delete the configuration meanwhile",
            );
        }
    }
    // Other webhooks of the cluster say nothing about ours.
    if mutating.is_empty() != validating.is_empty() {
        report.warn(
            "",
            "only one of the two webhook configurations exists",
            "install the component webhooks again",
        );
    }
    report.or_ok(match mutating.len() + validating.len() {
        0 => "no webhooks are installed; the filter applies their rules".to_owned(),
        n => format!("{n} webhooks have a caBundle"),
    })
}

/// The findings of the replicas about themselves. Those about nodes are the same as from outside, but for the plugins that are
/// away, which only the leader's watches show.
fn replicas(facts: &InstallationFacts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for replica in facts.replicas.iter().flatten() {
        let Ok(diagnosis) = &replica.diagnosis else {
            continue;
        };
        for finding in &diagnosis.findings {
            // Every replica would repeat the same findings about the same nodes.
            let is_of_node = !finding.object.is_empty();
            if is_of_node && (finding.check != "plugin-serves" || !diagnosis.replica.leading) {
                continue;
            }
            let mut finding = finding.clone();
            if !is_of_node {
                finding.object = format!("pod {}", replica.pod);
            }
            findings.push(finding);
        }
    }
    findings
}

//! The checks of the installation: pure functions of the facts that were collected.

use std::collections::{BTreeMap, BTreeSet};

use proto::read_api::{Finding, PORT, Severity};
use serde_json::Value;

use super::facts::InstallationFacts;
use super::node_checks;
use super::report::{CheckReport, Outcome};
use crate::fields::{array, has_condition, image_tag, images, name, named, number, text};
use crate::read_api::SCHEDULER;

pub(super) const POLICIES: [&str; 9] = [
    "gpushare-device-plugin-pods",
    "gpushare-device-plugin-nodes",
    "gpushare-device-plugin-devices",
    "gpushare-device-plugin-events",
    "gpushare-records",
    "gpushare-scheduler-pods",
    "gpushare-scheduler-bindings",
    "gpushare-scheduler-leaders",
    "gpushare-scheduler-secrets",
];
/// The name of the admission policy of an installation with webhooks.
pub(super) const WEBHOOK_POLICY: &str = "gpushare-scheduler-webhooks";
/// Major and minor number of the oldest version of the API server that serves everything the installation uses.
const OLDEST_API_SERVER: (u32, u32) = (1, 33);

/// The commands that install the release of the checkout over the installation.
const INSTALL: &str = "`helm upgrade gpushare deploy/helm/gpushare --reuse-values`, or `deploy/install.sh FOLDER` with the folder of your \
                       installation";
/// The remedy for missing parts of the webhooks.
const REINSTALL_WEBHOOKS: &str = "install the webhooks again: `helm upgrade gpushare deploy/helm/gpushare --reuse-values --set \
                              components.webhooks=true`, or `deploy/install.sh FOLDER` with a folder that has the component webhooks";

/// A remedy: the command that edits the scheduler's Deployment, and the change to make there.
fn edit_scheduler(facts: &InstallationFacts, change: &str) -> String {
    format!(
        "`kubectl -n {} edit deployment/gpushare-scheduler`: {change}",
        facts.namespace
    )
}

/// A check: adds the faults that it finds to the report; the sentence that it returns is shown only if there are none.
type Check = fn(&InstallationFacts, &mut CheckReport) -> Outcome;

/// All checks but those that replicas make themselves, by name, in the order in which findings of one severity are shown.
const CHECKS: [(&str, Check); 18] = [
    ("api-version", api_version),
    ("definitions", definitions),
    ("scheduler-pods", scheduler_pods),
    ("read-api", read_api),
    ("leader", leader),
    ("versions", versions),
    ("rights", rights),
    ("policies", policies),
    ("webhooks", webhooks),
    ("plugins", node_checks::plugins),
    ("device-objects", node_checks::device_objects),
    ("injection", node_checks::injection),
    ("drivers", node_checks::drivers),
    ("enforcement", node_checks::enforcement),
    ("memory-units", node_checks::memory_units),
    ("other-plugins", node_checks::other_plugins),
    ("failed-pods", node_checks::failed_pods),
    ("nodes", node_checks::nodes),
];

pub(super) fn findings(facts: &InstallationFacts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, check) in CHECKS {
        let mut report = CheckReport {
            check: name,
            findings: Vec::new(),
        };
        match check(facts, &mut report) {
            // A check without a fault is listed too, so that a user sees that it was made.
            Ok(message) if report.findings.is_empty() => report.add(Severity::Ok, "", message, ""),
            Ok(_) => {}
            Err(reason) => report.add(Severity::Unknown, "", reason, ""),
        }
        findings.extend(report.findings);
    }
    findings.extend(findings_of_replicas(facts));
    findings
}

/// Checks that the API server is new enough for everything that the installation uses.
fn api_version(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let major = leading_number(text(&facts.version, "/major"));
    let minor = leading_number(text(&facts.version, "/minor"));
    if (major, minor) == (0, 0) {
        return Err("the API server reports no version".to_owned());
    }
    let (oldest_major, oldest_minor) = OLDEST_API_SERVER;
    if (major, minor) < OLDEST_API_SERVER {
        let message = format!(
            "the API server has version {major}.{minor}; gpushare needs {oldest_major}.{oldest_minor}"
        );
        report.error(
            "",
            message,
            "upgrade the cluster; `kubectl version` shows its version",
        );
    }
    Ok(format!(
        "the API server has version {}",
        text(&facts.version, "/gitVersion")
    ))
}

/// The number at the beginning of a text; 0 if there is none. Providers add a sign to the minor version, such as `33+`.
fn leading_number(text: &str) -> u32 {
    let n_digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, _) = text.split_at(n_digits);
    digits.parse().unwrap_or(0)
}

fn definitions(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let definitions = facts.list("customresourcedefinitions")?;
    for wanted in [
        "devices.scheduling.koordinator.sh",
        "schedulerleaders.gpushare.io",
    ] {
        match named(wanted, definitions) {
            None => report.error(
                wanted,
                "the CustomResourceDefinition does not exist",
                format!("install again: {INSTALL}"),
            ),
            // Without the condition the API server serves no object of the kind.
            Some(definition) if !has_condition(definition, "/status/conditions", "Established") => {
                report.error(
                    wanted,
                    "the CustomResourceDefinition is not established",
                    format!("see `kubectl describe customresourcedefinition {wanted}`: another definition may use its names"),
                );
            }
            Some(_) => {}
        }
    }
    Ok("both CustomResourceDefinitions are established".to_owned())
}

fn scheduler_pods(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let deployments = facts.list("deployments")?;
    let Some(scheduler) = named("gpushare-scheduler", deployments) else {
        report.error(
            format!("namespace {}", facts.namespace),
            "there is no Deployment gpushare-scheduler",
            "install gpushare: `helm install gpushare deploy/helm/gpushare`; or name its namespace with --gpushare-namespace: `kubectl get deployments -A` shows it",
        );
        return Ok(String::new());
    };
    let object = "deployment gpushare-scheduler";
    let wanted = number(scheduler, "/spec/replicas");
    let ready = number(scheduler, "/status/readyReplicas");
    let namespace = &facts.namespace;
    let remedy = format!(
        "see `kubectl -n {namespace} describe pods -l {SCHEDULER}` and `kubectl -n {namespace} logs -l {SCHEDULER}`"
    );
    // Scaled down, as for maintenance, and forgotten: by the numbers no replica is missing, but none runs.
    if wanted == 0 {
        report.error(
            object,
            "it is scaled to 0 replicas",
            format!("`kubectl -n {namespace} scale deployment/gpushare-scheduler --replicas=2`"),
        );
    } else if ready == 0 {
        report.error(object, format!("none of {wanted} replicas is ready"), remedy);
    } else if ready < wanted {
        report.warn(object, format!("{ready} of {wanted} replicas are ready"), remedy);
    }
    Ok(format!("{ready} of {wanted} replicas are ready"))
}

fn read_api(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let replicas = facts.replicas()?;
    if replicas.is_empty() {
        return Err("no replica is ready".to_owned());
    }
    for replica in replicas {
        if let Err(reason) = &replica.diagnosis {
            report.warn(
                format!("pod {}", replica.pod),
                reason,
                format!(
                    "try `kubectl -n {} port-forward pod/{} {PORT}`: it needs the rights to get and create pods/portforward, and the \
                     scheduler the flag --read-listen=127.0.0.1:{PORT}",
                    facts.namespace, replica.pod
                ),
            );
        }
    }
    Ok("every ready replica answers".to_owned())
}

fn leader(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let n_answers = facts.diagnoses().count();
    if n_answers == 0 {
        return Err("no replica could be asked".to_owned());
    }
    let n_leading = facts
        .diagnoses()
        .filter(|(_, diagnosis)| diagnosis.replica.leading)
        .count();
    match n_leading {
        // A replica that could not be asked may be the leader.
        0 if n_answers == facts.replicas()?.len() => report.error(
            "",
            "no replica leads, so that no pod with a share of a GPU is bound",
            format!(
                "see `kubectl -n {} get leases -o yaml`: the holder, its age, and the right of the scheduler's ServiceAccount to update it",
                facts.namespace
            ),
        ),
        0 | 1 => {}
        // Two leaders would decide on the same room without knowing of each other.
        _ => report.error(
            "",
            format!("{n_leading} replicas lead"),
            edit_scheduler(facts, "give all replicas --leader-elect and one Lease"),
        ),
    }
    // One replica alone needs no election, and has no Lease.
    if n_answers > 1
        && let Ok(leases) = facts.list("leases")
        && !leases.iter().any(|lease| name(lease).starts_with("gpushare-"))
    {
        report.error(
            "",
            "there is no Lease of the scheduler",
            edit_scheduler(
                facts,
                "give the scheduler --leader-elect, and its Role the right to create Leases",
            ),
        );
    }
    Ok("one replica leads".to_owned())
}

fn versions(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let own = env!("CARGO_PKG_VERSION");
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (pod, diagnosis) in facts.diagnoses() {
        found.entry(&diagnosis.replica.version).or_default().push(pod);
    }
    if found.len() > 1 {
        let shown = |(version, pods): (&&str, &Vec<&str>)| format!("{version} ({})", pods.join(", "));
        let all: Vec<String> = found.iter().map(shown).collect();
        report.warn(
            "",
            format!("replicas have different versions: {}", all.join(", ")),
            format!(
                "wait for `kubectl -n {} rollout status deployment/gpushare-scheduler`",
                facts.namespace
            ),
        );
    // During a rollout the replicas differ anyway, and the command cannot match both.
    } else if let Some(version) = found.keys().find(|version| **version != own) {
        report.warn(
            "",
            format!("the scheduler has version {version} and this command {own}"),
            "build it from the release of the scheduler: `cargo build --release -p cli`",
        );
    }
    // The tags of both images are those of one release.
    let scheduler = image_tags(facts, "deployments", "gpushare-scheduler");
    let plugin = image_tags(facts, "daemonsets", "gpushare-device-plugin");
    if found.is_empty() && (scheduler.is_empty() || plugin.is_empty()) {
        return Err("no replica could be asked, and the images have no tags".to_owned());
    }
    // Images by digest alone have no tag to compare.
    if !scheduler.is_empty() && !plugin.is_empty() && scheduler != plugin {
        report.warn(
            "",
            format!("the scheduler's image has the tag {scheduler:?} and the device plugin's {plugin:?}"),
            format!("upgrade both to one release: {INSTALL}"),
        );
    }
    Ok("scheduler, device plugin and this command have one version".to_owned())
}

/// The tags of the project's images in one workload of the installation; none if the workload could not be listed.
fn image_tags<'a>(facts: &'a InstallationFacts, kind: &str, workload: &str) -> BTreeSet<&'a str> {
    let mut tags = BTreeSet::new();
    for object in facts.list(kind).unwrap_or_default() {
        if name(object) != workload || text(object, "/metadata/namespace") != facts.namespace {
            continue;
        }
        for image in images(object) {
            if image.contains("gpushare") {
                tags.extend(image_tag(image));
            }
        }
    }
    tags
}

fn rights(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let bindings = facts.list("clusterrolebindings")?;
    let mut subjects = BTreeSet::new();
    for subject in bindings.iter().flat_map(|binding| array(binding, "/subjects")) {
        subjects.insert((text(subject, "/namespace"), text(subject, "/name")));
    }
    for account in ["gpushare-scheduler", "gpushare-device-plugin"] {
        if !subjects.contains(&(facts.namespace.as_str(), account)) {
            report.error(
                format!("service account {account}"),
                "no ClusterRoleBinding gives it any right",
                format!("install again: {INSTALL}"),
            );
        }
    }
    Ok("both service accounts have a ClusterRoleBinding".to_owned())
}

fn policies(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let policies = facts.list("validatingadmissionpolicies")?;
    let bindings = facts.list("validatingadmissionpolicybindings")?;
    let bound: BTreeSet<&str> = bindings
        .iter()
        .map(|binding| text(binding, "/spec/policyName"))
        .collect();
    let mut ineffective = POLICIES.to_vec();
    let mut webhooks = Vec::new();
    for kind in ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"] {
        // A user who may not list webhooks is not shown their policy as missing.
        webhooks.extend(own_webhooks(facts, kind).unwrap_or_default());
    }
    if !webhooks.is_empty() {
        ineffective.push(WEBHOOK_POLICY);
    }
    // A policy without a binding exists, but the API server never evaluates it.
    ineffective.retain(|wanted| named(wanted, policies).is_none() || !bound.contains(wanted));
    if !ineffective.is_empty() {
        report.warn(
            "",
            format!(
                "policies that do not exist, or have no binding: {}",
                ineffective.join(", ")
            ),
            format!("install again: {INSTALL}; without the policies, daemons and users may write what is not theirs"),
        );
    }
    Ok("every admission policy is bound".to_owned())
}

/// Checks that the API server can call the installation's webhooks, if there are any.
fn webhooks(facts: &InstallationFacts, report: &mut CheckReport) -> Outcome {
    let mutating = own_webhooks(facts, "mutatingwebhookconfigurations")?;
    let validating = own_webhooks(facts, "validatingwebhookconfigurations")?;
    let deployments = facts.list("deployments").unwrap_or_default();
    let has_ready = deployments
        .iter()
        .any(|deployment| number(deployment, "/status/readyReplicas") > 0);
    for webhook in mutating.iter().chain(&validating) {
        let object = format!("webhook {}", text(webhook, "/name"));
        if text(webhook, "/clientConfig/caBundle").is_empty() {
            report.error(
                object.as_str(),
                "its caBundle is empty, so that the API server cannot call it",
                format!(
                    "see `kubectl -n {} logs -l {SCHEDULER}`: the scheduler writes the bundle once it has certificates, and needs the right \
                     to patch the configuration",
                    facts.namespace
                ),
            );
        }
        let service = text(webhook, "/clientConfig/service/name");
        // A list that the user may not read says nothing about the Service.
        if let Ok(services) = facts.list("services")
            && named(service, services).is_none()
        {
            report.error(
                object.as_str(),
                format!("its Service {service} does not exist, so that the API server cannot call it"),
                REINSTALL_WEBHOOKS,
            );
        }
        // With `Ignore` the API server admits pods without an answer, and the scheduler's filter applies the same rules.
        if text(webhook, "/failurePolicy") == "Fail" && !has_ready {
            report.error(
                object,
                "it refuses all pods that it is asked about, as no replica is ready",
                format!(
                    "see `kubectl -n {} describe pods -l {SCHEDULER}` for why none is ready",
                    facts.namespace
                ),
            );
        }
    }
    if mutating.is_empty() != validating.is_empty() {
        report.warn(
            "",
            "only one of the two webhook configurations exists",
            REINSTALL_WEBHOOKS,
        );
    }
    Ok(match mutating.len() + validating.len() {
        0 => "no webhooks are installed; the filter applies their rules".to_owned(),
        n => format!("{n} webhooks have a caBundle"),
    })
}

/// The webhooks of one kind of configuration that call a Service of the installation.
fn own_webhooks<'a>(facts: &'a InstallationFacts, kind: &str) -> Result<Vec<&'a Value>, String> {
    let mut own = Vec::new();
    for configuration in facts.list(kind)? {
        for webhook in array(configuration, "/webhooks") {
            if text(webhook, "/clientConfig/service/namespace") == facts.namespace {
                own.push(webhook);
            }
        }
    }
    Ok(own)
}

/// The findings of the replicas about themselves. Their findings about nodes are left out, since the check `nodes` makes the
/// same, except for plugins that are away, which only the leader's watches show.
fn findings_of_replicas(facts: &InstallationFacts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (pod, diagnosis) in facts.diagnoses() {
        for finding in &diagnosis.findings {
            let is_of_node = !finding.object.is_empty();
            if is_of_node && (finding.check != "plugin-serves" || !diagnosis.replica.leading) {
                continue;
            }
            let mut finding = finding.clone();
            if !is_of_node {
                finding.object = format!("pod {pod}");
                // Added here, since a replica may not know the name of its own pod.
                if !finding.remedy.is_empty() {
                    let log = format!("`kubectl -n {} logs {pod}` is its log", facts.namespace);
                    finding.remedy = format!("{}; {log}", finding.remedy);
                }
            }
            findings.push(finding);
        }
    }
    findings
}

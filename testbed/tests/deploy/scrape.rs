//! `deploy/monitoring/scrape-config.yaml` and the `PodMonitor` of `docs/monitoring.md` select the ports that serve metrics.
//!
//! Applies the rules as Prometheus does to each container port of each pod that `deploy/` declares.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Value, json};

use super::render::render_with;
use super::{flag, items, pod, read, repository, texts, workloads};

const LABEL_PREFIX: &str = "__meta_kubernetes_pod_label_";

/// A container port of a pod, with the labels that Prometheus' service discovery gives it.
struct Target {
    workload: String,
    container: String,
    /// The port of the flag `--health-listen` of the container, which serves metrics.
    metrics_port: Option<u64>,
    port: u64,
    labels: BTreeMap<String, String>,
}

fn targets(objects: &[Value]) -> Vec<Target> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut targets = Vec::new();
    for workload in workloads(objects) {
        let metadata = &workload["metadata"];
        let mut labels = BTreeMap::from([(
            "__meta_kubernetes_namespace".to_owned(),
            text(&metadata["namespace"]),
        )]);
        for (name, value) in workload["spec"]["template"]["metadata"]["labels"]
            .as_object()
            .unwrap()
        {
            let name = name.replace(['.', '/', '-'], "_");
            labels.insert(format!("{LABEL_PREFIX}{name}"), text(value));
        }
        for container in items(&pod(workload)["containers"]) {
            let listen = flag(container, "--health-listen");
            for port in items(&container["ports"]) {
                labels.insert(
                    "__meta_kubernetes_pod_container_port_name".to_owned(),
                    text(&port["name"]),
                );
                targets.push(Target {
                    workload: text(&metadata["name"]),
                    container: text(&container["name"]),
                    metrics_port: listen.map(|address| address.rsplit(':').next().unwrap().parse().unwrap()),
                    port: port["containerPort"].as_u64().unwrap(),
                    labels: labels.clone(),
                });
            }
        }
    }
    targets
}

/// Returns true if the job's rules keep the target: Prometheus anchors the regular expression, and joins labels with a semicolon.
fn keeps(job: &Value, target: &Target) -> bool {
    let discovered = texts(&job["kubernetes_sd_configs"][0]["namespaces"]["names"]);
    assert_eq!(job["kubernetes_sd_configs"][0]["role"], "pod");
    let namespace = &target.labels["__meta_kubernetes_namespace"];
    let rules = job["relabel_configs"].as_array().unwrap();
    let mut keeping = rules.iter().filter(|rule| rule["action"] == "keep");
    discovered.contains(&namespace.as_str())
        && keeping.all(|rule| {
            let sources = texts(&rule["source_labels"]);
            let values: Vec<&str> = sources
                .iter()
                .map(|label| target.labels.get(*label).map_or("", String::as_str))
                .collect();
            let regex = Regex::new(&format!("^(?:{})$", rule["regex"].as_str().unwrap())).unwrap();
            regex.is_match(&values.join(";"))
        })
}

fn attachments() -> [Vec<Value>; 2] {
    ["base", "attach/second-scheduler"].map(|folder| render_with(folder, &["components/whole-gpus"]))
}

#[test]
fn prometheus_scrapes_one_port_of_each_daemon() {
    let configuration: Value = serde_yaml_ng::from_str(&read("monitoring/scrape-config.yaml")).unwrap();
    let jobs = configuration["scrape_configs"].as_array().unwrap();
    for objects in attachments() {
        let mut scraped: Vec<(String, String)> = Vec::new();
        for target in targets(&objects) {
            let found = jobs.iter().filter(|job| keeps(job, &target));
            let found: Vec<&str> = found.map(|job| job["job_name"].as_str().unwrap()).collect();
            let serves_metrics = target.metrics_port == Some(target.port);
            let place = format!("{} / {}: {}", target.workload, target.container, target.port);
            assert_eq!(found.len(), usize::from(serves_metrics), "{place}: {found:?}");
            scraped.extend(
                found
                    .iter()
                    .map(|job| (target.workload.clone(), (*job).to_owned())),
            );
        }
        scraped.sort_unstable();
        let plugin = "gpushare-device-plugin";
        let expected = [
            (plugin, plugin),
            ("gpushare-device-plugin-whole-gpus", plugin),
            ("gpushare-scheduler", "gpushare-scheduler"),
        ];
        assert_eq!(
            scraped,
            expected.map(|(workload, job)| (workload.to_owned(), job.to_owned()))
        );
    }
}

#[test]
fn the_pod_monitor_selects_the_same_ports() {
    let document = std::fs::read_to_string(repository().join("docs/monitoring.md")).unwrap();
    let (_, block) = document.split_once("```yaml\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let monitor: Value = serde_yaml_ng::from_str(block).unwrap();
    assert_eq!(monitor["kind"], "PodMonitor");
    // The chart's has in addition only lines with values.
    let template = read("helm/gpushare/templates/gpushare-podmonitor.yaml");
    let fixed: Vec<&str> = template.lines().filter(|line| !line.contains("{{")).collect();
    let fixed: Value = serde_yaml_ng::from_str(&fixed.join("\n")).unwrap();
    assert_eq!(fixed["spec"], monitor["spec"]);
    let (selected, endpoint) = (
        &monitor["spec"]["selector"]["matchLabels"],
        &monitor["spec"]["podMetricsEndpoints"][0],
    );
    assert_eq!(*selected, json!({"app.kubernetes.io/part-of": "gpushare"}));
    let part_of = format!("{LABEL_PREFIX}app_kubernetes_io_part_of");
    for target in attachments().iter().flat_map(|objects| targets(objects)) {
        assert_eq!(
            target.labels["__meta_kubernetes_namespace"],
            monitor["metadata"]["namespace"]
        );
        assert_eq!(target.labels[&part_of], "gpushare");
        let is_scraped = target.labels["__meta_kubernetes_pod_container_port_name"] == endpoint["port"];
        assert_eq!(
            is_scraped,
            target.metrics_port == Some(target.port),
            "{}: {}",
            target.workload,
            target.port
        );
    }
}

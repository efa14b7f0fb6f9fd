//! `deploy/monitoring/scrape-config.yaml` and the `PodMonitor` of `docs/monitoring.md` select the ports that serve metrics.
//!
//! Applies the rules as Prometheus does to each container port of each pod that `deploy/` declares.

use std::collections::BTreeMap;

use regex::Regex;
use serde_json::{Value, json};

use crate::render::render_with;
use crate::{all, read, repository, texts};

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
    let mut targets = Vec::new();
    for workload in [all(objects, "Deployment"), all(objects, "DaemonSet")].concat() {
        let template = &workload["spec"]["template"];
        let mut labels = BTreeMap::from([(
            "__meta_kubernetes_namespace".to_owned(),
            workload["metadata"]["namespace"].as_str().unwrap().to_owned(),
        )]);
        for (name, value) in template["metadata"]["labels"].as_object().unwrap() {
            let name = name.replace(['.', '/', '-'], "_");
            labels.insert(
                format!("{LABEL_PREFIX}{name}"),
                value.as_str().unwrap().to_owned(),
            );
        }
        for container in template["spec"]["containers"].as_array().unwrap() {
            let listen = texts(&container["args"])
                .into_iter()
                .find_map(|flag| flag.strip_prefix("--health-listen="));
            for port in container["ports"].as_array().into_iter().flatten() {
                let mut labels = labels.clone();
                let name = "__meta_kubernetes_pod_container_port_name".to_owned();
                labels.insert(name, port["name"].as_str().unwrap_or_default().to_owned());
                targets.push(Target {
                    workload: workload["metadata"]["name"].as_str().unwrap().to_owned(),
                    container: container["name"].as_str().unwrap().to_owned(),
                    metrics_port: listen.map(|address| address.rsplit(':').next().unwrap().parse().unwrap()),
                    port: port["containerPort"].as_u64().unwrap(),
                    labels,
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
    let block = document
        .split("```yaml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
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

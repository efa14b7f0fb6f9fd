//! The device plugin of a GPU's node, as an ordinary client of the API server sees it: its metrics and its log.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, LogParams};

use super::trial::Trial;
use crate::scenario::breaking::{NAME_LABEL, PLUGIN, is_named};
use kit::cluster::SimulatedNode;
use kit::pod_fields::node_of;

/// The port of the metrics in `deploy/base`.
const METRICS_PORT: u16 = 8081;

/// The beginnings of the plugin's series that are read.
const BUILD_INFO: &str = "gpushare_device_plugin_build_info{";
const USED: &str = "gpushare_device_plugin_container_memory_used_bytes{";
const OF_CONTAINERS: &str = "gpushare_device_plugin_container_memory_";
const UNATTRIBUTED: &str = "gpushare_device_plugin_unattributed_memory_used_bytes{";

/// The text of the plugin's log line about an error that an application has caused.
const FAULT: &str = "an application has caused an error on a device";

/// The metrics of the plugin on the GPU's node.
///
/// # Errors
/// The API server cannot reach them.
pub(super) async fn metrics(trial: &Trial) -> Result<PluginMetrics> {
    if let Some(node) = simulated_node(trial)? {
        return Ok(PluginMetrics(node.plugin_metrics().await?));
    }
    let plugin = pod(trial)?;
    let (namespace, name) = (plugin.namespace().unwrap_or_default(), plugin.name_any());
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{METRICS_PORT}/proxy/metrics");
    let request = http::Request::get(path).body(Vec::new())?;
    let answer = trial.world.client().request_text(request).await;
    let failure = || {
        format!(
            "the API server does not reach port {METRICS_PORT} of {namespace}/{name}, as where a NetworkPolicy keeps it out"
        )
    };
    Ok(PluginMetrics(answer.with_context(failure)?))
}

/// The plugin's log since a moment; on the testbed, the whole log.
pub(super) async fn log(trial: &Trial, moment: Instant) -> Result<String> {
    if let Some(node) = simulated_node(trial)? {
        let plugin = node.plugin().context("the node has no plugin")?;
        // A GPU of the testbed has one fault at most, so no earlier line is mistaken for it.
        return kit::files::read(plugin.log());
    }
    let plugin = pod(trial)?;
    let (namespace, name) = (plugin.namespace().unwrap_or_default(), plugin.name_any());
    let pods: Api<Pod> = Api::namespaced(trial.world.client(), &namespace);
    let seconds = i64::try_from(moment.elapsed().as_secs()).unwrap_or(i64::MAX);
    let params = LogParams {
        container: Some(PLUGIN.to_owned()),
        since_seconds: Some(seconds.saturating_add(1)),
        ..LogParams::default()
    };
    let answer = pods.logs(&name, &params).await;
    answer.with_context(|| format!("cannot read the log of {namespace}/{name}"))
}

/// The image of the first container of the plugin's pod.
pub(super) fn image(trial: &Trial) -> Option<String> {
    let pod = pod(trial).ok()?;
    pod.spec?.containers.into_iter().next()?.image
}

/// The testbed's node; none on a cluster that is not the testbed's.
fn simulated_node(trial: &Trial) -> Result<Option<&SimulatedNode>> {
    let Some(cluster) = &trial.world.cluster else {
        return Ok(None);
    };
    let mut nodes = cluster.nodes();
    let node = nodes.find(|node| node.name() == trial.gpu.node);
    node.context("the node is gone").map(Some)
}

/// The pod of the plugin.
fn pod(trial: &Trial) -> Result<Pod> {
    let node = &trial.gpu.node;
    let mut pods = trial.world.observer.now().pods.into_values();
    let found = pods.find(|pod| is_named(pod, PLUGIN) && node_of(pod) == Some(node));
    found.with_context(|| format!("no pod on {node} has the label {NAME_LABEL}={PLUGIN}"))
}

/// The metrics of a plugin in Prometheus' text format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PluginMetrics(pub(super) String);

impl PluginMetrics {
    /// The plugin's version, by its build information.
    pub(super) fn version(&self) -> Option<&str> {
        let (_, rest) = self.series(BUILD_INFO).next()?.split_once("version=\"")?;
        rest.split('"').next()
    }

    /// True if the plugin measures the memory of all processes on its GPUs.
    pub(super) fn has_processes(&self) -> bool {
        self.series(UNATTRIBUTED).next().is_some()
    }

    /// The series that begin so.
    fn series(&self, prefix: &str) -> impl Iterator<Item = &str> {
        self.0.lines().filter(move |line| line.starts_with(prefix))
    }

    /// The bytes of a GPU that a pod's containers use, if they have been measured.
    pub(super) fn used(&self, (namespace, pod): (&str, &str), gpu: &str) -> Option<u64> {
        let labels = [("namespace", namespace), ("pod", pod), ("device", gpu)];
        self.sum(USED, &labels)
    }

    /// The bytes of a GPU that processes outside of containers with a request use, if they have been measured.
    pub(super) fn unattributed(&self, gpu: &str) -> Option<u64> {
        self.sum(UNATTRIBUTED, &[("device", gpu)])
    }

    /// The series about containers of a namespace.
    pub(super) fn of_namespace(&self, namespace: &str) -> Vec<&str> {
        let label = format!("namespace=\"{namespace}\"");
        let series = self.series(OF_CONTAINERS);
        series.filter(|line| line.contains(&label)).collect()
    }

    /// The sum of the series with these labels; `None` if there is no such series.
    fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> Option<u64> {
        let mut series: Vec<&str> = self.series(metric).collect();
        for (name, value) in labels {
            let label = format!("{name}=\"{value}\"");
            series.retain(|line| line.contains(&label));
        }
        let values = series
            .iter()
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        values.reduce(u64::saturating_add)
    }
}

/// The XIDs of a GPU that a plugin's log names as caused by applications, in both formats of the log.
pub(super) fn application_xids(log: &str, gpu: &str) -> BTreeSet<u64> {
    let lines = log
        .lines()
        .filter(|line| line.contains(FAULT) && line.contains(gpu));
    lines.filter_map(xid).collect()
}

fn xid(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once("xid\":").or(line.split_once("xid="))?;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const METRICS: &str = r#"# HELP gpushare_device_plugin_container_memory_used_bytes GPU memory in use.
gpushare_device_plugin_build_info{version="0.1.0",revision="x"} 1
gpushare_device_plugin_container_memory_used_bytes{namespace="e2e",pod="a",container="main",device="GPU-1"} 8275361792
gpushare_device_plugin_container_memory_used_bytes{namespace="e2e",pod="a",container="side",device="GPU-1"} 8
gpushare_device_plugin_container_memory_used_bytes{namespace="e2e",pod="a",container="main",device="GPU-2"} 5
gpushare_device_plugin_container_memory_used_bytes{namespace="other",pod="a",container="main",device="GPU-1"} 7
gpushare_device_plugin_container_memory_given_bytes{namespace="e2e",pod="a",container="main",device="GPU-1"} 8589934592
gpushare_device_plugin_unattributed_memory_used_bytes{device="GPU-1"} 0
"#;

    #[test]
    fn the_metrics_of_a_plugin_are_read_by_pod_and_gpu() {
        let metrics = PluginMetrics(METRICS.to_owned());
        assert_eq!(metrics.version(), Some("0.1.0"));
        assert!(metrics.has_processes());
        assert_eq!(metrics.used(("e2e", "a"), "GPU-1"), Some(8_275_361_800));
        assert_eq!(metrics.used(("e2e", "b"), "GPU-1"), None);
        assert_eq!(metrics.unattributed("GPU-1"), Some(0));
        assert_eq!(metrics.unattributed("GPU-2"), None);
        assert_eq!(
            (
                metrics.of_namespace("e2e").len(),
                metrics.of_namespace("e2").len()
            ),
            (4, 0)
        );
        assert!(!PluginMetrics::default().has_processes());
    }

    #[rstest]
    #[case::json(r#"{"level":"WARN","message":"an application has caused an error on a device","device":"GPU-1","xid":31,"target":"x"}"#, &[31])]
    #[case::text("WARN device_plugin: an application has caused an error on a device device=GPU-1 xid=13", &[13])]
    #[case::of_another_gpu("an application has caused an error on a device device=GPU-2 xid=13", &[])]
    #[case::of_the_device("the driver reported critical error XID 79 device=GPU-1 xid=79", &[])]
    fn the_log_names_the_xids_of_applications(#[case] line: &str, #[case] expected: &[u64]) {
        let log = format!("before\n{line}\n{line}\n");
        assert_eq!(
            application_xids(&log, "GPU-1"),
            expected.iter().copied().collect()
        );
    }
}

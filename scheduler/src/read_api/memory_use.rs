//! The memory that is in use on GPUs, as the device plugins measure it for their metrics.
//!
//! A request with `?use=true` makes the replica read the metrics of the plugins, a limited number at one time. The client waits
//! only for a moment: requests to slower plugins go on, and the next client gets their answers, which are kept for some seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use proto::memory_overrun::is_over_share;
use proto::read_api::Node;
use rustc_hash::FxHashMap;
use tokio::net::TcpStream;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::index::{Index, Shared};

/// The time for which a plugin that measures is not asked again. Plugins measure every 15 s.
const ANSWER_TTL: Duration = Duration::from_secs(10);
/// The time for which a plugin that does not measure, or does not answer, is not asked again.
const FAILURE_TTL: Duration = Duration::from_secs(60);
/// The longest time that a client of the read API waits for the answers of plugins.
const CLIENT_WAIT: Duration = Duration::from_millis(800);
const PLUGIN_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_CONNECTIONS: usize = 64;
/// Largest answer of a plugin, in bytes: a node with a thousand containers has less.
const MAX_ANSWER: usize = 1 << 20;

/// The plugin's metric of the memory of one GPU that one container uses, up to the labels.
const USED_BY_CONTAINER: &str = "gpushare_device_plugin_container_memory_used_bytes{";
/// The plugin's metric of the memory of one GPU that one container was given, up to the labels of [`USED_BY_CONTAINER`].
const GIVEN_TO_CONTAINER: &str = "gpushare_device_plugin_container_memory_given_bytes{";
/// The plugin's metric of the memory of one GPU that processes outside of containers use, up to the labels.
const USED_BY_OTHERS: &str = "gpushare_device_plugin_unattributed_memory_used_bytes{";

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnknownUse {
    #[error("no running pod of the device plugin serves metrics there")]
    NoPlugin,
    #[error("the device plugin does not measure memory (--measure-memory)")]
    NotMeasured,
    #[error("the device plugin has not answered in time")]
    NoAnswer,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeMemoryUse {
    /// The bytes in use by all processes, by UUID of the GPU, without GPUs whose processes the plugin does not measure.
    gpus: BTreeMap<String, u64>,
    /// The use of pods, by UUID of the GPU, namespace and name of the pod.
    pods: BTreeMap<(String, String, String), PodUse>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PodUse {
    bytes: u64,
    is_over_share: bool,
}

/// The answer of one node's plugin, or the reason that there is none.
pub(super) type Measured = Result<Arc<NodeMemoryUse>, UnknownUse>;

#[derive(Debug)]
struct PluginAnswer {
    /// UID of the plugin's pod: another pod may have other flags.
    pod: Box<str>,
    at: Instant,
    measured: Measured,
}

#[derive(Clone, Debug)]
struct PluginTarget {
    node: Arc<str>,
    pod: Box<str>,
    address: SocketAddr,
}

/// The last answers of all plugins, by node.
#[derive(Debug, Default)]
pub(super) struct PluginMeasurements {
    answers: Mutex<FxHashMap<Arc<str>, PluginAnswer>>,
    /// Held while plugins are asked, so that two clients do not ask the same plugin twice.
    asking: AsyncMutex<()>,
}

impl PluginMeasurements {
    /// The memory in use on these nodes, by answers of the plugins for which it waits for at most [`CLIENT_WAIT`].
    pub(super) async fn measure(
        self: &Arc<Self>,
        index: &Shared<Index>,
        nodes: Vec<Arc<str>>,
    ) -> FxHashMap<Arc<str>, Measured> {
        let mut targets = Vec::with_capacity(nodes.len());
        {
            let index = index.read();
            for node in &nodes {
                if let Some((pod, address)) = index.plugin_metrics(node) {
                    let (node, pod) = (Arc::clone(node), pod.into());
                    targets.push(PluginTarget { node, pod, address });
                }
            }
        }
        // In a task of its own, which goes on when this client has waited long enough.
        let asked = tokio::spawn(Arc::clone(self).ask_all(targets.clone()));
        // An answer that comes later is kept for the next client.
        let _ = timeout(CLIENT_WAIT, asked).await;
        let mut measured = FxHashMap::default();
        for node in nodes {
            measured.insert(node, Err(UnknownUse::NoPlugin));
        }
        let answers = self.answers.lock();
        for target in targets {
            let measurement = match answers.get(&target.node) {
                // The answer of the plugin's previous pod may be that of another version, or of other flags.
                Some(answer) if answer.pod == target.pod => answer.measured.clone(),
                _ => Err(UnknownUse::NoAnswer),
            };
            measured.insert(target.node, measurement);
        }
        measured
    }

    async fn ask_all(self: Arc<Self>, targets: Vec<PluginTarget>) {
        let _one_at_a_time = self.asking.lock().await;
        let mut asked = JoinSet::new();
        for target in self.outdated(targets) {
            if asked.len() >= MAX_CONNECTIONS {
                self.store(asked.join_next().await);
            }
            asked.spawn(async move {
                let measured = match timeout(PLUGIN_TIMEOUT, read_metrics(target.address)).await {
                    Ok(Some(text)) => parse(&text).map(Arc::new).ok_or(UnknownUse::NotMeasured),
                    Ok(None) | Err(_) => Err(UnknownUse::NoAnswer),
                };
                (target, measured)
            });
        }
        while !asked.is_empty() {
            self.store(asked.join_next().await);
        }
    }

    /// The plugins without a fresh answer. Those that failed before come last, because they take the longest.
    fn outdated(&self, mut targets: Vec<PluginTarget>) -> Vec<PluginTarget> {
        let mut answers = self.answers.lock();
        // Answers of nodes that are gone are removed once they are old. A failure is kept for longer than it is valid: the
        // plugin is asked last then.
        answers.retain(|_, answer| {
            let n_ttls: u32 = if answer.measured.is_ok() { 1 } else { 2 };
            answer.at.elapsed() < n_ttls * FAILURE_TTL
        });
        targets.retain(|target| match answers.get(&target.node) {
            Some(answer) => answer.pod != target.pod || answer.at.elapsed() >= ttl(&answer.measured),
            None => true,
        });
        targets.sort_by_key(|target| {
            let answer = answers.get(&target.node);
            answer.is_some_and(|answer| answer.measured.is_err())
        });
        targets
    }

    fn store(&self, asked: Option<Result<(PluginTarget, Measured), tokio::task::JoinError>>) {
        let Some(Ok((target, measured))) = asked else {
            return;
        };
        let answer = PluginAnswer {
            pod: target.pod,
            at: Instant::now(),
            measured,
        };
        self.answers.lock().insert(target.node, answer);
    }
}

/// The time for which a plugin with this answer is not asked again.
fn ttl(measured: &Measured) -> Duration {
    if measured.is_ok() { ANSWER_TTL } else { FAILURE_TTL }
}

/// Reads the metrics at an address; `None` if they cannot be read.
async fn read_metrics(address: SocketAddr) -> Option<String> {
    let stream = TcpStream::connect(address).await.ok()?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.ok()?;
    // The connection ends when the sender is dropped.
    tokio::spawn(connection);
    let request = Request::get("/metrics").header(header::HOST, address.to_string());
    let request = request.body(Empty::<Bytes>::new()).ok()?;
    let response = sender.send_request(request).await.ok()?;
    if response.status() != StatusCode::OK {
        return None;
    }
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    String::from_utf8(body.ok()?.to_bytes().to_vec()).ok()
}

/// The memory in use by the text of a plugin's metrics; `None` if the plugin does not measure.
fn parse(text: &str) -> Option<NodeMemoryUse> {
    let mut parsed = NodeMemoryUse::default();
    let mut measured_gpus = BTreeSet::new();
    // The bytes of one container on one GPU, by the labels that name both.
    let (mut measured, mut given) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines() {
        given.extend(line.strip_prefix(GIVEN_TO_CONTAINER).and_then(labels_and_value));
        let of_container = line.strip_prefix(USED_BY_CONTAINER);
        // The other metrics of the plugin are passed over, and so is a line that does not parse.
        let series = of_container.or_else(|| line.strip_prefix(USED_BY_OTHERS));
        let Some((labels, bytes)) = series.and_then(labels_and_value) else {
            continue;
        };
        let gpu = label(labels, "device").unwrap_or_default();
        let of_gpu = parsed.gpus.entry(gpu.to_owned()).or_default();
        *of_gpu = of_gpu.saturating_add(bytes);
        if of_container.is_some() {
            measured.insert(labels, bytes);
        } else {
            measured_gpus.insert(gpu.to_owned());
        }
    }
    for (labels, bytes) in &measured {
        let pod =
            ["device", "namespace", "pod"].map(|name| label(labels, name).unwrap_or_default().to_owned());
        let of_pod = parsed.pods.entry(pod.into()).or_default();
        of_pod.bytes = of_pod.bytes.saturating_add(*bytes);
        let share = given.get(labels);
        of_pod.is_over_share |= share.is_some_and(|share| is_over_share(*bytes, *share));
    }
    // A plugin that measures processes (`--measure-memory`) reports those outside of containers for every GPU, be it as 0. Others
    // know only the use of containers that the driver limits, which is not all that is in use.
    parsed.gpus.retain(|gpu, _| measured_gpus.contains(gpu));
    // A pod with a container that was not measured is left out: the sum of the others would pass for the use of the whole pod.
    for labels in given.keys().filter(|labels| !measured.contains_key(*labels)) {
        let unmeasured = ["namespace", "pod"].map(|name| label(labels, name).unwrap_or_default());
        let pods = &mut parsed.pods;
        pods.retain(|(_, namespace, pod), _| [namespace.as_str(), pod.as_str()] != unmeasured);
    }
    (!parsed.gpus.is_empty() || !parsed.pods.is_empty()).then_some(parsed)
}

/// The labels and the value in a line of metrics, whose text begins behind the opening brace.
fn labels_and_value(series: &str) -> Option<(&str, u64)> {
    let (labels, value) = series.rsplit_once("} ")?;
    Some((labels, value.trim().parse().ok()?))
}

/// The value of a label. Names of objects and UUIDs have no characters that need an escape.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = labels.split("\",");
    let value = pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix("=\""))?;
    Some(value.trim_end_matches('"'))
}

impl NodeMemoryUse {
    /// The bytes in use on all GPUs of the node; `None` if the plugin does not measure processes.
    pub(super) fn total(&self) -> Option<u64> {
        (!self.gpus.is_empty()).then(|| self.gpus.values().sum())
    }

    pub(super) fn add_to(&self, node: &mut Node) {
        for gpu in &mut node.gpus {
            gpu.used = self.gpus.get(&gpu.uuid).copied();
            for holder in &mut gpu.holders {
                let pod = (gpu.uuid.clone(), holder.namespace.clone(), holder.name.clone());
                // A pod without a series may use memory that the plugin has not measured yet, so it gets no number, not even 0.
                (holder.used, holder.over_share) = match self.pods.get(&pod) {
                    Some(of_pod) => (Some(of_pod.bytes), of_pod.is_over_share),
                    None => (None, false),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Gpu, Holder};
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    const METRICS: &str = "# TYPE gpushare_device_plugin_container_memory_used_bytes gauge\n\
        gpushare_device_plugin_container_memory_used_bytes{namespace=\"a\",pod=\"p\",container=\"c\",device=\"GPU-1\"} 100\n\
        gpushare_device_plugin_container_memory_used_bytes{namespace=\"a\",pod=\"p\",container=\"d\",device=\"GPU-1\"} 20\n\
        gpushare_device_plugin_container_memory_given_bytes{namespace=\"a\",pod=\"p\",container=\"d\",device=\"GPU-1\"} 500\n\
        gpushare_device_plugin_unattributed_memory_used_bytes{device=\"GPU-1\"} 3\n\
        gpushare_device_plugin_unattributed_memory_used_bytes{device=\"GPU-2\"} 0\n# EOF\n";

    #[test]
    fn use_of_gpus_and_pods() {
        let gpu = |uuid: &str| Gpu {
            uuid: uuid.to_owned(),
            holders: ["p", "q"]
                .map(|name| Holder {
                    namespace: "a".to_owned(),
                    name: name.to_owned(),
                    ..Holder::default()
                })
                .into(),
            ..Gpu::default()
        };
        let mut node = Node {
            gpus: vec![gpu("GPU-1"), gpu("GPU-2"), gpu("GPU-3")],
            ..Node::default()
        };
        parse(METRICS).unwrap().add_to(&mut node);
        assert_eq!(parse(METRICS).unwrap().total(), Some(123));
        let mut used = Vec::new();
        for gpu in &node.gpus {
            used.push((gpu.used, gpu.holders[0].used, gpu.holders[1].used));
        }
        assert_eq!(
            used,
            [
                (Some(123), Some(120), None),
                (Some(0), None, None),
                (None, None, None)
            ]
        );
    }

    /// A pod is over its share if one of its containers is, by more than the tolerance.
    #[test]
    fn use_of_more_than_a_share() {
        let over = |metrics: &str| {
            let mut node = Node {
                gpus: vec![Gpu {
                    uuid: "GPU-1".to_owned(),
                    holders: vec![Holder {
                        namespace: "a".to_owned(),
                        name: "p".to_owned(),
                        ..Holder::default()
                    }],
                    ..Gpu::default()
                }],
                ..Node::default()
            };
            parse(metrics).unwrap().add_to(&mut node);
            node.gpus[0].holders[0].over_share
        };
        assert!(
            !over(METRICS),
            "20 of 500, and no share of the other container is known"
        );
        assert!(!over(&METRICS.replace("} 20", "} 525")));
        assert!(over(&METRICS.replace("} 20", "} 526")));
        let unmeasured = METRICS.replace(
            "memory_used_bytes{namespace=\"a\",pod=\"p\",container=\"d\"",
            "other{x=\"y\"",
        );
        assert!(!over(&unmeasured));
    }

    /// Without `--measure-memory` a plugin shows the use of containers that the driver limits.
    #[test]
    fn use_of_limited_containers_alone() {
        let limited: String = METRICS
            .split_inclusive('\n')
            .filter(|line| !line.contains("unattributed"))
            .collect();
        let holder = |name: &str| Holder {
            namespace: "a".to_owned(),
            name: name.to_owned(),
            ..Holder::default()
        };
        let gpu = Gpu {
            uuid: "GPU-1".to_owned(),
            holders: vec![holder("p"), holder("q")],
            ..Gpu::default()
        };
        let mut node = Node {
            gpus: vec![gpu],
            ..Node::default()
        };
        let parsed = parse(&limited).unwrap();
        parsed.add_to(&mut node);
        let gpu = &node.gpus[0];
        assert_eq!(
            (parsed.total(), gpu.used, gpu.holders[0].used, gpu.holders[1].used),
            (None, None, Some(120), None)
        );
        let given = "gpushare_device_plugin_container_memory_given_bytes{namespace=\"a\",pod=\"p\",container=\"e\",device=\"GPU-1\"} 5";
        let partly = format!("{given}\n{limited}");
        assert_eq!(parse(&partly), None, "a part of a pod's use is not its use");
    }

    #[test]
    fn text_without_the_use() {
        for text in [
            "",
            "# EOF\n",
            "gpushare_device_plugin_registered{resource=\"x\"} 1\n",
            "{}} {",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let broken = METRICS.replace("} 20", "} much");
        assert_eq!(parse(&broken).unwrap().gpus["GPU-1"], 103);
    }

    /// A plugin that answers each request with this many bytes of comment and then its metrics, or never.
    async fn plugin(padding: Option<usize>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                if let Some(padding) = padding {
                    let body = format!("#{}\n{METRICS}", "x".repeat(padding));
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                    let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
                }
                kept.push(stream);
            }
        });
        address
    }

    fn target(node: &str, address: SocketAddr) -> PluginTarget {
        PluginTarget {
            node: node.into(),
            pod: "p".into(),
            address,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_failed_is_asked_last() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let (failed, new) = (target("failed", address), target("new", address));
        let measurements = PluginMeasurements::default();
        measurements.store(Some(Ok((failed.clone(), Err(UnknownUse::NoAnswer)))));
        tokio::time::advance(FAILURE_TTL).await;
        let asked = measurements.outdated(vec![failed, new]);
        let order: Vec<&str> = asked.iter().map(|target| &*target.node).collect();
        assert_eq!(order, ["new", "failed"]);
    }

    #[tokio::test]
    async fn a_plugin_that_hangs_holds_up_no_other() {
        let plugins = [
            target("hangs", plugin(None).await),
            target("answers", plugin(Some(0)).await),
            target("babbles", plugin(Some(MAX_ANSWER)).await),
        ];
        let measurements = Arc::new(PluginMeasurements::default());
        let asking = tokio::spawn(Arc::clone(&measurements).ask_all(plugins.to_vec()));
        while measurements.answers.lock().len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(!asking.is_finished(), "the plugin that hangs is still asked");
        let of = |node: &str| {
            let answers = measurements.answers.lock();
            answers
                .get(node)
                .map(|answer| answer.measured.as_ref().err().copied())
        };
        assert_eq!(
            [of("answers"), of("babbles"), of("hangs")],
            [Some(None), Some(Some(UnknownUse::NoAnswer)), None]
        );
        asking.abort();
        // A fresh answer is not asked for again; another pod of the plugin may know more.
        let mut successor = target("babbles", plugins[2].address);
        successor.pod = "q".into();
        let left = measurements.outdated(vec![plugins[1].clone(), plugins[2].clone(), successor]);
        assert_eq!((left.len(), &*left[0].pod), (1, "q"));
    }
}

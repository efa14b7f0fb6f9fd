//! The clusters of the testbed that scenarios run on. Scenarios of one stage run one after the other, stages side by side.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use super::{claims, migration, nonsense, other_types, runtime_hook, topology, vendors};
use kit::cluster::{ClusterSpec, NodeSetup, RuntimeSpec, WebhookSpec};

/// The longest wait of the scheduling loop between two attempts, shorter than the default of ten seconds.
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// The lifetime of certificates on the stage `webhooks`: the shortest that the scheduler accepts.
const LIFETIME: &str = "10s";

/// The testbed clusters that scenarios run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScenarioStage {
    /// As `deploy/base` makes it.
    Plain,
    /// As `deploy/base` makes it, for scenarios that break things.
    Faults,
    /// As `deploy/base` makes it, for a device plugin whose kubelet restarts and whose API server refuses requests.
    Plugins,
    /// As `deploy/base` makes it, for a device plugin that is without API server, kubelet or disk, or is flooded.
    PluginAlone,
    /// As `deploy/base` makes it, for pods that wait for room.
    Waiting,
    /// As `deploy/base` makes it, for pods of high priority that make room by evictions.
    MakingRoom,
    /// With webhooks, and the extender over TLS; certificates change all the time.
    Webhooks,
    /// With webhooks, and the extender over TLS, for several replicas of the scheduler.
    Replicas,
    /// For scenarios that replace the scheduler, for a while, by a second kube-scheduler with two pods, or add 500 nodes.
    Second,
    /// Nodes of many kinds, each for one scenario or two.
    Mixed,
    /// Machines whose GPUs and adapters are at known PCIe switches and NUMA nodes.
    Topology,
}

impl ScenarioStage {
    /// Its name.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// The specification of the cluster, with the manifests of a `deploy/` directory.
    pub fn spec(self, deploy: PathBuf) -> ClusterSpec {
        let nodes = match self {
            Self::Mixed => mixed_nodes(),
            Self::Topology => topology::machines::nodes(),
            _ => usual_nodes(),
        };
        // Certificates that live for seconds are renewed all the time, so every scenario on this stage meets
        // renewals. Replicas share one Secret and must not depend on that.
        let webhooks = match self {
            Self::Webhooks => Some(WebhookSpec { lifetime: LIFETIME }),
            Self::Replicas => Some(WebhookSpec { lifetime: "90d" }),
            _ => None,
        };
        let npu = (self == Self::Mixed).then_some(other_types::NPU);
        ClusterSpec {
            deploy,
            webhooks,
            managed: npu.into_iter().collect(),
            max_backoff: Some(MAX_BACKOFF),
            ..ClusterSpec::of(nodes)
        }
    }
}

/// Two nodes with three and two GPUs, for scenarios without special needs.
fn usual_nodes() -> Vec<NodeSetup> {
    vec![
        NodeSetup::new("n1", &[16384, 16384, 24576]),
        NodeSetup::new("n2", &[16384, 16384]),
    ]
}

/// One node for each scenario with a node of its own: vendors' plugins, claims, other types, no plugin.
fn mixed_nodes() -> Vec<NodeSetup> {
    let three = |name: &str| NodeSetup::new(name, &[16384; 3]);
    let with = |node: NodeSetup, args: [&str; 2]| NodeSetup {
        plugin_args: args.map(str::to_owned).to_vec(),
        ..node
    };
    let bare = |node: NodeSetup| NodeSetup {
        has_plugin: false,
        ..node
    };
    vec![
        with(three(vendors::OURS), ["--vendor-resource", "nvidia.com/gpu=ours"]),
        three(vendors::THEIRS),
        three(claims::CLAIMED),
        with(three(vendors::DIVIDED), ["--shared-devices", "0,1"]),
        NodeSetup {
            runtime: RuntimeSpec::Plugins,
            ..three(runtime_hook::HOOKED)
        },
        bare(three(migration::MOVING)),
        bare(NodeSetup::new(migration::KOORDINATOR, &[16384; 2])),
        NodeSetup::new(nonsense::EDITED, &[16384; 2]),
        bare(NodeSetup::new(other_types::NPU_NODE, &[])),
        NodeSetup {
            others: other_types::others(),
            ..NodeSetup::new(other_types::THREE_TYPES, &[16384])
        },
    ]
}

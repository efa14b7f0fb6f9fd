//! Flags of filter: the policies of nodes and devices, the nodes in an answer, and the report of nodes without room.

use std::collections::BTreeMap;
use std::num::NonZeroU8;
use std::str::FromStr;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use placement::{DevicePolicy, NodePolicy, ResourceName, ResourceWeights};
use proto::request::hints::DemandedEnforcement;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use super::resource_name;

/// Most nodes in an answer: kube-scheduler takes scores from 0 to 10 from an extender, which put 11 nodes into a strict order.
const MAX_ANSWER_NODES: u8 = 11;

/// The default weights: those of Koordinator's scheduler.
const DEFAULT_WEIGHTS: &str = "koordinator.sh/gpu-memory-ratio=1,koordinator.sh/gpu-memory=1,koordinator.sh/rdma=1,koordinator.sh/fpga=1";

/// The flags of the policies.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct PolicyArgs {
    /// Policy that scores the nodes that fit.
    #[arg(long, env = "GPUSHARE_NODE_POLICY", default_value = "fill",
          value_parser = PossibleValuesParser::new(node_policies()).try_map(|name| name.parse::<NodePolicy>()))]
    pub(super) node_policy: NodePolicy,
    /// Policy that chooses among the fitting devices of a node.
    #[arg(long, env = "GPUSHARE_DEVICE_POLICY", default_value = "fill",
          value_parser = PossibleValuesParser::new(device_policies()).try_map(|name| name.parse::<DevicePolicy>()))]
    pub(super) device_policy: DevicePolicy,
    /// Enforcement of memory limits on the GPUs of pods that share them, unless a pod says which it demands (annotation
    /// gpushare/enforcement).
    #[arg(long, env = "GPUSHARE_ENFORCEMENT", value_enum, default_value = "any")]
    enforcement: EnforcementName,
    /// Weight of each resource in the policies least-allocated and most-allocated; others weigh nothing. For those who had
    /// weights of their own in the `scoringStrategy` of Koordinator.
    #[arg(long, env = "GPUSHARE_SCORE_WEIGHTS", default_value = DEFAULT_WEIGHTS, value_parser = weight, value_delimiter = ',', value_name = "RESOURCE=WEIGHT")]
    pub(super) score_weights: Vec<(String, u32)>,
}

/// The values of --enforcement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EnforcementName {
    /// Any enforcement, also none.
    Any,
    /// Enforcement by the GPU driver.
    Driver,
}

/// The values of --node-policy, as `--help` describes them.
fn node_policies() -> [PossibleValue; 5] {
    [
        ("fill", "Keep most room for future pods"),
        ("binpack", "Least free GPU memory first"),
        ("spread", "Most free GPU memory first"),
        ("least-allocated", "As LeastAllocated of Koordinator"),
        ("most-allocated", "As MostAllocated of Koordinator"),
    ]
    .map(|(name, help)| PossibleValue::new(name).help(help))
}

/// The values of --device-policy, as `--help` describes them.
fn device_policies() -> [PossibleValue; 6] {
    [
        ("fill", "Keep most room for future pods"),
        ("binpack", "Least room left first"),
        ("spread", "Most room left first"),
        ("in-order", "Lowest minor number first"),
        ("least-allocated", "As LeastAllocated of Koordinator"),
        ("most-allocated", "As MostAllocated of Koordinator"),
    ]
    .map(|(name, help)| PossibleValue::new(name).help(help))
}

impl PolicyArgs {
    /// The enforcement of memory limits that pods without an annotation of their own demand, by the flag.
    pub(super) fn enforcement(&self) -> DemandedEnforcement {
        match self.enforcement {
            EnforcementName::Any => DemandedEnforcement::Any,
            EnforcementName::Driver => DemandedEnforcement::Driver,
        }
    }
}

/// The weights of resources by their names. If a resource is named twice, the last weight counts.
pub fn weights(named: impl IntoIterator<Item = (String, u32)>) -> ResourceWeights {
    // In the engine, the GPU resources are amounts of one device, and all other resources are those of other device types.
    let mut weights: BTreeMap<String, u32> = named.into_iter().collect();
    let mut remove = |name: &str| weights.remove(name).unwrap_or(0);
    let (memory_ratio, memory, core) = (remove(GPU_MEMORY_RATIO), remove(GPU_MEMORY), remove(GPU_CORE));
    let others = weights
        .into_iter()
        .map(|(name, weight)| (ResourceName::from(name), weight))
        .collect();
    ResourceWeights {
        memory_ratio,
        memory,
        core,
        others,
    }
}

/// Parses a resource and its weight, such as `koordinator.sh/rdma=1`.
fn weight(text: &str) -> Result<(String, u32), String> {
    let parts = text.rsplit_once('=');
    let (name, weight) = parts.ok_or("write a resource, = and a weight, such as koordinator.sh/rdma=1")?;
    match weight.parse() {
        Ok(weight) if weight <= 100 => Ok((resource_name(name)?, weight)),
        _ => Err("a weight is a whole number up to 100".to_owned()),
    }
}

/// The number of fitting nodes in an answer about a pod that has no preferences of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerNodes {
    /// This many nodes, the best first.
    Best(NonZeroU8),
    /// All fitting nodes.
    All,
}

impl Default for AnswerNodes {
    fn default() -> Self {
        Self::Best(NonZeroU8::MIN)
    }
}

impl AnswerNodes {
    /// The largest number of nodes in an answer; `None` for all.
    pub fn most(self) -> Option<usize> {
        match self {
            Self::Best(n) => Some(n.get().into()),
            Self::All => None,
        }
    }
}

impl FromStr for AnswerNodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<NonZeroU8>() {
            Ok(n) if n.get() <= MAX_ANSWER_NODES => Ok(Self::Best(n)),
            _ if text == "all" => Ok(Self::All),
            _ => Err(format!("must be from 1 to {MAX_ANSWER_NODES}, or all")),
        }
    }
}

/// The form in which filter reports nodes whose devices have no room, while evicting pods might make some.
///
/// Up to 1.37 kube-scheduler looks for victims on a node that is reported resolvable, finds none if the node's sums of requests
/// have room, and treats that as an error. Later versions ask the extender about such nodes, without victims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MisfitNodes {
    /// As nodes on which evictions make no room.
    #[default]
    Unresolvable,
    /// As nodes on which evictions may make room.
    Resolvable,
}

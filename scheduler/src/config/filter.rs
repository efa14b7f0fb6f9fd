//! Flags of filter: the order of nodes and devices, the number of nodes in an answer, and the report of nodes without room.

use std::collections::BTreeMap;
use std::num::NonZeroU8;
use std::str::FromStr;

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use placement::{DevicePolicy, NodePolicy, Policies, ResourceName, ResourceWeights};
use proto::request::hints::DemandedEnforcement;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use super::resource_name;

/// Most nodes that scores from 0 to 10 can put in a strict order.
const MOST: u8 = 11;

/// The default weights: those of Koordinator's scheduler.
const WEIGHTS: &str = "koordinator.sh/gpu-memory-ratio=1,koordinator.sh/gpu-memory=1,koordinator.sh/rdma=1,koordinator.sh/fpga=1";

/// Preferences among nodes and devices.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct PolicyArgs {
    /// Policy that scores the nodes that fit.
    #[arg(long, env = "GPUSHARE_NODE_POLICY", default_value = "fill",
          value_parser = PossibleValuesParser::new(node_policies()).try_map(|name| name.parse::<NodePolicy>()))]
    node_policy: NodePolicy,
    /// Policy that chooses among the fitting devices of a node.
    #[arg(long, env = "GPUSHARE_DEVICE_POLICY", default_value = "fill",
          value_parser = PossibleValuesParser::new(device_policies()).try_map(|name| name.parse::<DevicePolicy>()))]
    device_policy: DevicePolicy,
    /// Enforcement of memory limits on the GPUs of pods that share them, unless a pod says which it demands (annotation
    /// gpushare/enforcement).
    #[arg(long, env = "GPUSHARE_ENFORCEMENT", value_enum, default_value = "any")]
    enforcement: EnforcementName,
    /// Weight of each resource in the policies least-allocated and most-allocated; others weigh nothing.
    #[arg(long, env = "GPUSHARE_SCORE_WEIGHTS", default_value = WEIGHTS, value_parser = weight, value_delimiter = ',', value_name = "RESOURCE=WEIGHT")]
    score_weights: Vec<(String, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EnforcementName {
    /// Any, also none.
    Any,
    /// By the GPU driver.
    Driver,
}

/// The policies for nodes, as `--help` describes them.
fn node_policies() -> [PossibleValue; 5] {
    [
        (
            "fill",
            "The one of which the pods to come still fill most, by what pods have asked for so far",
        ),
        ("binpack", "The one whose GPU memory is fullest"),
        ("spread", "The one whose GPU memory is emptiest"),
        (
            "least-allocated",
            "The one with most left of weighted resources, scored as Koordinator does",
        ),
        (
            "most-allocated",
            "The one with most used of weighted resources, scored as Koordinator does",
        ),
    ]
    .map(|(name, help)| PossibleValue::new(name).help(help))
}

/// The policies for the devices of a node.
fn device_policies() -> [PossibleValue; 6] {
    [
        (
            "fill",
            "The one without which the pods to come still fill most of the node",
        ),
        ("binpack", "The one with least room left"),
        ("spread", "The one with most room left"),
        ("in-order", "The one with the lowest minor"),
        (
            "least-allocated",
            "The one with most left of weighted resources, scored as Koordinator does",
        ),
        (
            "most-allocated",
            "The one with most used of weighted resources, scored as Koordinator does",
        ),
    ]
    .map(|(name, help)| PossibleValue::new(name).help(help))
}

impl PolicyArgs {
    pub(super) fn enforcement(&self) -> DemandedEnforcement {
        match self.enforcement {
            EnforcementName::Any => DemandedEnforcement::Any,
            EnforcementName::Driver => DemandedEnforcement::Driver,
        }
    }

    pub(super) fn policies(&self) -> Policies {
        Policies {
            node: self.node_policy,
            device: self.device_policy,
        }
    }

    pub(super) fn weights(&self) -> ResourceWeights {
        weights(self.score_weights.iter().cloned())
    }
}

/// The weights of resources by their names; of a resource that is named twice, the last counts.
pub fn weights(named: impl IntoIterator<Item = (String, u32)>) -> ResourceWeights {
    let mut weights: BTreeMap<String, u32> = named.into_iter().collect();
    let mut take = |name: &str| weights.remove(name).unwrap_or(0);
    let (memory_ratio, memory, core) = (take(GPU_MEMORY_RATIO), take(GPU_MEMORY), take(GPU_CORE));
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

/// A resource and its weight, such as `koordinator.sh/rdma=1`.
fn weight(text: &str) -> Result<(String, u32), String> {
    let (name, weight) = text
        .rsplit_once('=')
        .ok_or("write a resource, = and a weight, such as koordinator.sh/rdma=1")?;
    let weight = weight
        .parse()
        .ok()
        .filter(|weight| *weight <= 100)
        .ok_or("a weight is a whole number up to 100")?;
    Ok((resource_name(name)?, weight))
}

/// The number of fitting nodes in an answer about a pod that has no preferences of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerNodes {
    /// The best ones.
    Best(NonZeroU8),
    /// All.
    All,
}

impl Default for AnswerNodes {
    fn default() -> Self {
        Self::Best(NonZeroU8::MIN)
    }
}

impl AnswerNodes {
    /// The greatest number, if there is one.
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
        let n: Option<NonZeroU8> = text.parse().ok();
        match n.filter(|n| n.get() <= MOST) {
            Some(n) => Ok(Self::Best(n)),
            None if text == "all" => Ok(Self::All),
            None => Err(format!("must be from 1 to {MOST}, or all")),
        }
    }
}

/// The form in which filter reports nodes whose devices have no room for a pod, while evicting pods might make some.
///
/// Until 1.36 kube-scheduler looks for victims on a node that is reported resolvable, finds none where the node's sums have
/// room, and takes that for an error. Later versions ask the extender about such nodes, with no victims named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MisfitNodes {
    /// As nodes that eviction cannot help.
    #[default]
    Unresolvable,
    /// As nodes that eviction may help.
    Resolvable,
}

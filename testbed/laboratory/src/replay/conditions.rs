//! The conditions under which a policy works: the nodes that kube-scheduler shows it, and the decisions that kube-scheduler
//! makes.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;
use clap::{Args, ValueEnum};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::world::ReplayInput;
use kit::command::value_name;
use kit::kube_scheduler::{SchedulerConfiguration, Ties};

/// The configuration that the documentation recommends.
const CONFIGURATION: &str = include_str!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/attach/kube-scheduler/kube-scheduler-config.yaml"
));

/// The sets of conditions that have a name; docs/replay.md explains them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NamedConditions {
    /// As in the paper: every pod goes through the extender, all nodes are looked at, ties go by an order fixed for the run.
    #[value(name = "P")]
    P,
    /// All pods go through the extender (no managedResources); kube-scheduler looks at a sample of nodes, ties go by chance.
    #[value(name = "A")]
    A,
    /// As attached by default: pods without GPUs are placed by kube-scheduler's own scores; samples and ties as in A.
    #[value(name = "S")]
    S,
}

/// `percentageOfNodesToScore`; 0 for kube-scheduler's adaptive default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleSize(usize);

/// The choice among nodes with equal scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TieRule {
    /// A random one of the best nodes.
    Random,
    /// The first of the best nodes in an order that is drawn once per run.
    Fixed,
}

/// The placement of pods that ask for no device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlainPods {
    /// The extender sees them too.
    Extender,
    /// kube-scheduler alone, by its default scores.
    KubeScheduler,
}

/// The conditions of a run: everything that it depends on besides pods, policy and seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunConditions {
    /// The name in the results.
    pub label: String,
    /// The number of nodes that kube-scheduler looks at for a pod.
    pub sampling: SampleSize,
    /// The choice among nodes of equal score.
    pub ties: TieRule,
    /// The placement of pods that ask for no device.
    pub plain_pods: PlainPods,
}

/// Settings that replace those of a named condition.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Overrides {
    /// Nodes that kube-scheduler looks at, in place of those of P, A or S (--condition): stock, all, or a percentage.
    #[arg(long, value_name = "NODES")]
    pub sampling: Option<SampleSize>,
    /// Choice among nodes of equal score, in place of that of P, A or S (--condition).
    #[arg(long, value_enum)]
    pub ties: Option<TieRule>,
    /// Placement of pods without GPUs, in place of that of P, A or S (--condition).
    #[arg(long, value_enum)]
    pub cpu_pods: Option<PlainPods>,
}

impl RunConditions {
    /// Named conditions, with replaced settings.
    pub fn of(named: NamedConditions, overrides: Overrides) -> Self {
        let (label, sampling, ties, plain_pods) = match named {
            NamedConditions::P => ("P", SampleSize(100), TieRule::Fixed, PlainPods::Extender),
            NamedConditions::A => ("A", SampleSize(0), TieRule::Random, PlainPods::Extender),
            NamedConditions::S => ("S", SampleSize(0), TieRule::Random, PlainPods::KubeScheduler),
        };
        let mut label = label.to_owned();
        let mut note = |text: String| label.extend([" ", &text]);
        if let Some(sampling) = overrides.sampling {
            note(format!("nodes={sampling}"));
        }
        if let Some(ties) = overrides.ties {
            note(format!("ties={}", value_name(&ties)));
        }
        if let Some(plain_pods) = overrides.cpu_pods {
            note(format!("cpu-pods={}", value_name(&plain_pods)));
        }
        Self {
            label,
            sampling: overrides.sampling.unwrap_or(sampling),
            ties: overrides.ties.unwrap_or(ties),
            plain_pods: overrides.cpu_pods.unwrap_or(plain_pods),
        }
    }

    /// kube-scheduler's configuration under these conditions. A reference policy stands in for the extender's verbs.
    pub fn configuration(&self, is_reference: bool) -> Result<SchedulerConfiguration> {
        let mut configuration: SchedulerConfiguration = CONFIGURATION.parse()?;
        configuration.percentage_of_nodes_to_score = self.sampling.0;
        for extender in &mut configuration.extenders {
            // kube-scheduler asks an extender without managed resources about every pod.
            if self.plain_pods == PlainPods::Extender {
                extender.managed_resources.clear();
            }
            if is_reference {
                extender.filter_verb.clear();
                extender.prioritize_verb.clear();
            }
        }
        Ok(configuration)
    }

    /// kube-scheduler's choice among nodes of equal score in a run: random by `seed`, or in an order that `dice` draws once.
    pub fn ties(&self, world: &ReplayInput, seed: u64, dice: &mut StdRng) -> Ties {
        match self.ties {
            TieRule::Random => Ties::random(seed),
            TieRule::Fixed => {
                let mut ranks: Vec<usize> = (0..world.nodes.len()).collect();
                ranks.shuffle(dice);
                let names = world.nodes.iter().map(|node| node.name.to_string());
                Ties::Ranked(names.zip(ranks).collect())
            }
        }
    }
}

impl fmt::Display for SampleSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("stock"),
            100 => f.write_str("all"),
            percent => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for SampleSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = || {
            text.strip_suffix('%')?
                .parse()
                .ok()
                .filter(|percent| (1..=100).contains(percent))
        };
        match text {
            "stock" => Ok(Self(0)),
            "all" => Ok(Self(100)),
            _ => percent()
                .map(Self)
                .ok_or_else(|| "write stock, all, or a percentage of nodes from 1% to 100%".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_of_a_condition_names_its_overrides() {
        let overrides = Overrides {
            sampling: "5%".parse().ok(),
            ties: Some(TieRule::Fixed),
            cpu_pods: Some(PlainPods::Extender),
        };
        let conditions = RunConditions::of(NamedConditions::S, overrides);
        assert_eq!(conditions.label, "S nodes=5% ties=fixed cpu-pods=extender");
        assert_eq!(
            (conditions.sampling, conditions.ties, conditions.plain_pods),
            (SampleSize(5), TieRule::Fixed, PlainPods::Extender)
        );
        assert_eq!(
            RunConditions::of(NamedConditions::P, Overrides::default()).label,
            "P"
        );
        assert!(
            "0%".parse::<SampleSize>().is_err()
                && "101%".parse::<SampleSize>().is_err()
                && "some".parse::<SampleSize>().is_err()
        );
    }
}

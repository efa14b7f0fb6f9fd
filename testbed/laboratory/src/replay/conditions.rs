//! The conditions under which a policy works: the nodes that kube-scheduler shows it, and the decisions that kube-scheduler
//! makes.

use anyhow::Result;
use clap::{Args, ValueEnum};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::world::ReplayInput;
use kit::command::value_name;
use kit::kube_scheduler::{SchedulerConfiguration, Ties};

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
    pub label: String,
    /// `percentageOfNodesToScore`; 0 for kube-scheduler's adaptive default.
    pub sampling: usize,
    pub ties: TieRule,
    pub plain_pods: PlainPods,
}

/// Settings that replace those of a named condition.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Overrides {
    /// Nodes that kube-scheduler looks at, in place of those of P, A or S (--condition): stock, all, or a percentage.
    #[arg(long, value_name = "NODES", value_parser = sampling)]
    pub sampling: Option<usize>,
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
            NamedConditions::P => ("P", 100, TieRule::Fixed, PlainPods::Extender),
            NamedConditions::A => ("A", 0, TieRule::Random, PlainPods::Extender),
            NamedConditions::S => ("S", 0, TieRule::Random, PlainPods::KubeScheduler),
        };
        let mut conditions = Self {
            label: label.to_owned(),
            sampling,
            ties,
            plain_pods,
        };
        if let Some(sampling) = overrides.sampling {
            conditions.sampling = sampling;
            let nodes = match sampling {
                0 => "stock".to_owned(),
                100 => "all".to_owned(),
                percent => format!("{percent}%"),
            };
            conditions.label = format!("{label} nodes={nodes}");
        }
        if let Some(ties) = overrides.ties {
            conditions.ties = ties;
            conditions.label.extend([" ties=", &value_name(&ties)]);
        }
        if let Some(plain_pods) = overrides.cpu_pods {
            conditions.plain_pods = plain_pods;
            conditions.label.extend([" cpu-pods=", &value_name(&plain_pods)]);
        }
        conditions
    }

    /// kube-scheduler's configuration under these conditions. A reference policy stands in for the extender's verbs.
    pub fn configuration(&self, is_reference: bool) -> Result<SchedulerConfiguration> {
        let mut configuration: SchedulerConfiguration = CONFIGURATION.parse()?;
        configuration.percentage_of_nodes_to_score = self.sampling;
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

/// Parses the number of nodes that kube-scheduler looks at.
fn sampling(text: &str) -> Result<usize, String> {
    let percent = match text {
        "stock" => Some(0),
        "all" => Some(100),
        _ => {
            let percent = text.strip_suffix('%').and_then(|percent| percent.parse().ok());
            percent.filter(|percent| (1..=100).contains(percent))
        }
    };
    percent.ok_or_else(|| "write stock, all, or a percentage of nodes from 1% to 100%".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_of_a_condition_names_its_overrides() {
        let overrides = Overrides {
            sampling: sampling("5%").ok(),
            ties: Some(TieRule::Fixed),
            cpu_pods: Some(PlainPods::Extender),
        };
        let conditions = RunConditions::of(NamedConditions::S, overrides);
        assert_eq!(conditions.label, "S nodes=5% ties=fixed cpu-pods=extender");
        assert_eq!(
            (conditions.sampling, conditions.ties, conditions.plain_pods),
            (5, TieRule::Fixed, PlainPods::Extender)
        );
        assert_eq!(
            RunConditions::of(NamedConditions::P, Overrides::default()).label,
            "P"
        );
        assert!(sampling("0%").is_err() && sampling("101%").is_err() && sampling("some").is_err());
    }
}

//! The conditions under which a policy works: the nodes that kube-scheduler shows it, and the decisions that kube-scheduler
//! makes.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;

use super::kube::{SampleSize, Ties};
use kit::command::value_name;

/// The conditions that have a name.
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
    /// The number of nodes that are looked at.
    pub sampling: SampleSize,
    /// The choice among equal nodes.
    pub ties: Ties,
    /// The placement of pods that ask for no device.
    pub plain_pods: PlainPods,
}

/// Settings that replace those of a named condition.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// The number of nodes that are looked at.
    pub sampling: Option<SampleSize>,
    /// The choice among equal nodes.
    pub ties: Option<Ties>,
    /// The placement of pods that ask for no device.
    pub plain_pods: Option<PlainPods>,
}

impl RunConditions {
    /// Named conditions, with replaced settings.
    pub fn of(named: NamedConditions, overrides: Overrides) -> Self {
        let (label, sampling, ties, plain_pods) = match named {
            NamedConditions::P => ("P", SampleSize::Percent(100), Ties::Fixed, PlainPods::Extender),
            NamedConditions::A => ("A", SampleSize::Stock, Ties::Random, PlainPods::Extender),
            NamedConditions::S => ("S", SampleSize::Stock, Ties::Random, PlainPods::KubeScheduler),
        };
        let mut label = label.to_owned();
        let mut note = |text: String| label.extend([" ", &text]);
        if let Some(sampling) = overrides.sampling {
            note(format!("nodes={sampling}"));
        }
        if let Some(ties) = overrides.ties {
            note(format!("ties={}", value_name(&ties)));
        }
        if let Some(plain_pods) = overrides.plain_pods {
            note(format!("cpu-pods={}", value_name(&plain_pods)));
        }
        Self {
            label,
            sampling: overrides.sampling.unwrap_or(sampling),
            ties: overrides.ties.unwrap_or(ties),
            plain_pods: overrides.plain_pods.unwrap_or(plain_pods),
        }
    }
}

impl fmt::Display for SampleSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stock => f.write_str("stock"),
            Self::Percent(100) => f.write_str("all"),
            Self::Percent(percent) => write!(f, "{percent}%"),
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
            "stock" => Ok(Self::Stock),
            "all" => Ok(Self::Percent(100)),
            _ => percent()
                .map(Self::Percent)
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
            ties: Some(Ties::Fixed),
            plain_pods: Some(PlainPods::Extender),
        };
        let conditions = RunConditions::of(NamedConditions::S, overrides);
        assert_eq!(conditions.label, "S nodes=5% ties=fixed cpu-pods=extender");
        assert_eq!(
            (conditions.sampling, conditions.ties, conditions.plain_pods),
            (SampleSize::Percent(5), Ties::Fixed, PlainPods::Extender)
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

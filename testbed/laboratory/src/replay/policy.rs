//! The policies to compare: the engine's own by their names, and reference policies from elsewhere.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use kit::command::value_name;
use placement::{DevicePolicy, NodePolicy, Policies};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    Engine(Policies),
    Reference(Reference),
}

impl Default for Policy {
    fn default() -> Self {
        Self::Engine(Policies::default())
    }
}

/// A policy from elsewhere. Unless it says otherwise, a pod gets the tightest devices with room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Reference {
    /// kube-scheduler's default scores choose the node.
    KubeDefault,
    /// Fragmentation gradient descent: the node and device whose choice makes fragmentation grow least, by whole scores 0 to 100.
    Fgd,
    /// The node with least CPU and GPU left.
    BestFit,
    /// The node with least GPU left.
    Fullest,
    /// Any node and device with room.
    Random,
}

impl FromStr for Policy {
    type Err = String;

    /// Parses the name of a reference, or of an engine's policy: NODE or NODE/DEVICE. NODE alone implies the device policy.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(reference) = Reference::from_str(text, false) {
            return Ok(Self::Reference(reference));
        }
        let (node, device) = text
            .split_once('/')
            .map_or((text, None), |(node, device)| (node, Some(device)));
        let references: Vec<String> = Reference::value_variants().iter().map(value_name).collect();
        let node_policy: NodePolicy = node
            .parse()
            .map_err(|error| format!("{error}; or, to compare with, one of {}", references.join(", ")))?;
        let device_policy = match device {
            Some(device) => device
                .parse()
                .map_err(|error: placement::PolicyError| error.to_string())?,
            None => node.parse::<DevicePolicy>().unwrap_or_default(),
        };
        Ok(Self::Engine(Policies {
            node: node_policy,
            device: device_policy,
        }))
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(Policies { node, device }) => {
                let (node, device) = (node.to_string(), device.to_string());
                let implied = node.parse::<DevicePolicy>().unwrap_or_default().to_string();
                if device == implied {
                    f.write_str(&node)
                } else {
                    write!(f, "{node}/{device}")
                }
            }
            Self::Reference(reference) => f.write_str(&value_name(reference)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::ours("binpack", "binpack")]
    #[case::same_device("spread/spread", "spread")]
    #[case::other_device("spread/binpack", "spread/binpack")]
    #[case::reference("kube-default", "kube-default")]
    fn names_of_policies_are_read_and_shown(#[case] text: &str, #[case] shown: &str) {
        assert_eq!(text.parse::<Policy>().unwrap().to_string(), shown);
    }

    #[test]
    fn the_error_of_an_unknown_policy_lists_all_names() {
        let error = "nonsense".parse::<Policy>().unwrap_err();
        assert!(
            error.contains("binpack") && error.contains("kube-default"),
            "{error}"
        );
    }
}

//! Which of several fitting devices, and of several fitting nodes, is preferred.

use std::fmt;
use std::str::FromStr;

/// Preference among the devices of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DevicePolicy {
    /// The fitting device that will have the least room left.
    #[default]
    Binpack,
    /// The fitting device that will have the most room left.
    Spread,
}

/// Preference among nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NodePolicy {
    /// The fullest node.
    #[default]
    Binpack,
    /// The emptiest node.
    Spread,
}

/// Preferences among nodes and among the devices of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Policies {
    /// Among nodes.
    pub node: NodePolicy,
    /// Among the devices of a node.
    pub device: DevicePolicy,
}

/// A text that names no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no policy: choose binpack or spread")]
pub struct PolicyError {
    text: String,
}

macro_rules! named {
    ($policy:ident) => {
        impl FromStr for $policy {
            type Err = PolicyError;

            fn from_str(text: &str) -> Result<Self, PolicyError> {
                match text {
                    "binpack" => Ok(Self::Binpack),
                    "spread" => Ok(Self::Spread),
                    _ => Err(PolicyError { text: text.chars().take(64).collect() }),
                }
            }
        }

        impl fmt::Display for $policy {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    Self::Binpack => "binpack",
                    Self::Spread => "spread",
                })
            }
        }
    };
}

named!(DevicePolicy);
named!(NodePolicy);

//! Which of several fitting devices, and of several fitting nodes, is preferred.

use std::fmt;
use std::str::FromStr;

/// Preference among the devices of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DevicePolicy {
    /// The fitting device without which typical pods still fill most of the node.
    #[default]
    Fill,
    /// The fitting device that will have the least room left.
    Binpack,
    /// The fitting device that will have the most room left.
    Spread,
    /// The fitting device with the lowest minor.
    InOrder,
    /// The fitting device that scores best for what is free of it, by weighted resources.
    LeastAllocated,
    /// The fitting device that scores best for what is used of it, by weighted resources.
    MostAllocated,
}

/// Preference among nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NodePolicy {
    /// The node of which typical pods still fill most, with the least left on it.
    #[default]
    Fill,
    /// The fullest node.
    Binpack,
    /// The emptiest node.
    Spread,
    /// The node that scores best for what is free, by weighted resources.
    LeastAllocated,
    /// The node that scores best for what is used, by weighted resources.
    MostAllocated,
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
#[error("{text:?} is no policy: choose one of {choice}")]
pub struct PolicyError {
    text: String,
    choice: String,
}

macro_rules! named {
    ($policy:ident { $($variant:ident = $name:literal),+ }) => {
        impl FromStr for $policy {
            type Err = PolicyError;

            fn from_str(text: &str) -> Result<Self, PolicyError> {
                match text {
                    $($name => Ok(Self::$variant),)+
                    _ => Err(PolicyError { text: text.chars().take(64).collect(), choice: [$($name),+].join(", ") }),
                }
            }
        }

        impl fmt::Display for $policy {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $name,)+
                })
            }
        }
    };
}

named!(DevicePolicy {
    Fill = "fill",
    Binpack = "binpack",
    Spread = "spread",
    InOrder = "in-order",
    LeastAllocated = "least-allocated",
    MostAllocated = "most-allocated"
});
named!(NodePolicy {
    Fill = "fill",
    Binpack = "binpack",
    Spread = "spread",
    LeastAllocated = "least-allocated",
    MostAllocated = "most-allocated"
});

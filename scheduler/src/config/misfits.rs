//! The form in which filter reports nodes to kube-scheduler whose devices have no room for a pod.

use clap::ValueEnum;

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

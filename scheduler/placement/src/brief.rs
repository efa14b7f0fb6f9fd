//! What many questions want to know of every node first, side by side, so that few of them read the nodes themselves.

use crate::state::StateId;

/// What is quickly told of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Brief {
    /// That of the node, or of the next one in its place if it is gone.
    pub(crate) generation: u32,
    /// Whether the place has a node.
    pub(crate) is_there: bool,
    /// Whether somebody is expected to take something of the node.
    pub(crate) has_hints: bool,
    /// Whether some request without wishes may break a rule although there is room.
    pub(crate) has_rules: bool,
    /// What is taken of it, with no hint counted; `None` where nodes are not worth comparing.
    pub(crate) state: Option<StateId>,
}

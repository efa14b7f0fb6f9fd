//! Builders and recorded machines, for the tests of several modules.

pub(crate) mod api_server;
pub(crate) mod builders;
pub(crate) mod node_trees;
pub(crate) mod recorded;

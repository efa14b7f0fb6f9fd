//! Attacks by clients of the network, which have no credential.

pub(super) mod http2;
pub(super) mod network;
mod target;

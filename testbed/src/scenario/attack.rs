//! Attacks: by clients of the network, which have no credential, and by a tenant, who may create pods.

mod http2;
pub(super) mod network;
mod target;
pub(super) mod tenant;

//! The pods of this node as the API server shows them, and kubelet's word on their devices: its checkpoint and its list.

pub mod api_request;
pub mod eviction;
pub mod kubelet_checkpoint;
pub mod kubelet_pod_resources;
pub mod pods;
pub(crate) mod unix_channel;

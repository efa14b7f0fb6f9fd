//! The [pods] of this node as the API server shows them, and the devices that kubelet allocated to them, by its
//! [checkpoint](kubelet_checkpoint) and its [pod-resources API](kubelet_pod_resources).

pub mod api_request;
pub mod eviction;
pub mod kubelet_checkpoint;
pub mod kubelet_pod_resources;
pub mod pods;
pub(crate) mod unix_channel;

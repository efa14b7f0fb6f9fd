//! Mode `envvar`, for nodes whose runtime injects GPUs by the vendor's variable (`NVIDIA_VISIBLE_DEVICES`), and no CDI devices.
//!
//! The variable is part of the answer to Allocate and stands as long as the container lives. So the pod of a call has to be
//! matched before the answer ([`answer`]). Before the container starts ([`check`]), its environment must not contradict the pod's
//! record (`environment`), and where kubelet admitted equal pods in another order, the pods swap their records ([`partners`]).

pub(crate) mod answer;
pub(crate) mod check;
mod environment;
pub(crate) mod partners;

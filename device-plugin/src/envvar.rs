//! Mode `envvar`, for nodes whose container runtime injects GPUs by the vendor's variable and takes no CDI devices.
//!
//! The variable is part of the answer to Allocate and stands as long as the container lives. So the pod of a call has to be
//! matched before the answer ([`answer`]), the container's environment must not contradict the pod's record ([`environment`]),
//! and where kubelet admitted equal pods in another order, the pods swap their records ([`partners`], [`swap`]). Mode `cdi` needs
//! none of this: only Allocate, the check before a start and the wiring of the process refer to this folder.

pub mod answer;
pub mod environment;
pub mod partners;
pub mod swap;

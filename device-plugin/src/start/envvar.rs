//! Mode `envvar`, for nodes whose container runtime injects GPUs by the vendor's variable and takes no CDI devices.
//!
//! The variable is part of the answer to Allocate and stands as long as the container lives. So the pod of a call has to be
//! matched before the answer ([`answer`]), and before the container starts ([`check`]) its environment must not contradict the
//! pod's allocation record (`environment`), and where kubelet admitted equal pods in another order, the pods swap their records
//! ([`partners`]).
//!
//! A container in mode `cdi` needs none of this. Two places branch on the mode: Allocate, and the
//! check before a start.

pub mod answer;
pub mod check;
mod environment;
pub mod partners;

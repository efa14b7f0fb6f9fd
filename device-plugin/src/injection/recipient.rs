//! The container that an answer to Allocate or a CDI spec is made for.

use proto::request::ContainerRequest;

use crate::enforcement::Enforcements;
use crate::pods::{NodePod, Placement};

/// The container that gets devices.
#[derive(Clone, Copy, Debug)]
pub struct Recipient<'a> {
    /// The pod.
    pub pod: &'a NodePod,
    /// The container.
    pub container: &'a ContainerRequest,
    /// The record whose devices it gets.
    pub placement: Option<&'a Placement>,
    /// The enforcement levels of this node's GPUs.
    pub enforcements: &'a Enforcements,
}

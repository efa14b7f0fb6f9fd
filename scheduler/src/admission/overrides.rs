//! The policy against pods that share devices and decide for themselves which they see.

use proto::resource::ResourceNames;

use super::Refusal;
use super::sights::{Container, Sights, VISIBLE_DEVICES, Variable};

/// Variables that CUDA's multi-process service reads its limits from.
const MPS_PREFIX: &str = "CUDA_MPS_";

/// Refuses a pod that shares devices and has a container that chooses what it sees. Names the container and what it sets.
///
/// Containers that ask for nothing count too: they run beside those that do, on the same node.
pub(super) fn judge(pod: &Sights, names: &ResourceNames) -> Result<(), Refusal> {
    pod.containers()
        .try_for_each(|container| judge_container(container, !container.asks(names).is_empty()))
}

/// The same for the ephemeral containers that a change brings.
pub(super) fn judge_added(old: &Sights, new: &Sights) -> Result<(), Refusal> {
    new.added(old)
        .try_for_each(|container| judge_container(container, false))
}

fn judge_container(container: &Container, asks: bool) -> Result<(), Refusal> {
    let refuse = |what: String| {
        Err(Refusal::Forbidden(format!(
            "container {:?} {what}, which is not allowed in a pod that shares devices",
            container.name
        )))
    };
    if container.is_privileged() {
        return refuse("is privileged and would see every device of the node".to_owned());
    }
    // A container that asks for no device may say that it wants none.
    let shows = |variable: &Variable| variable.name == VISIBLE_DEVICES && (!variable.says_none() || asks);
    let variable = container
        .variables()
        .find(|variable| variable.name.starts_with(MPS_PREFIX) || shows(variable));
    variable.map_or(Ok(()), |variable| refuse(format!("sets {}", variable.name)))
}

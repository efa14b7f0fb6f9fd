//! kubelet's own check that a pod's requests fit the rest of the node, after devices were allocated.
//!
//! As in kubelet, extended resources that the node does not list are not checked. Pure.

use crate::kube_scheduler::ResourceAmounts;

/// The first resource that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
)]
pub(crate) struct Shortage {
    pub(crate) resource: String,
    requested: i128,
    used: i128,
    capacity: i128,
}

/// Checks that a pod with `requests` fits `allocatable` beside pods with the requests `others`.
pub(crate) fn fit<'a>(
    requests: &ResourceAmounts,
    others: impl IntoIterator<Item = &'a ResourceAmounts>,
    allocatable: &ResourceAmounts,
) -> Result<(), Shortage> {
    let mut used = ResourceAmounts::default();
    for other in others {
        used.add(other);
    }
    for (name, requested) in requests.iter() {
        let is_unknown = is_extended(name) && !allocatable.has(name);
        let (used, capacity) = (used.get(name), allocatable.get(name));
        if requested > 0 && !is_unknown && requested > capacity - used {
            // kubelet shows CPU in thousandths.
            let unit = if name == "cpu" { 1 } else { 1000 };
            return Err(Shortage {
                resource: name.to_owned(),
                requested: requested / unit,
                used: used / unit,
                capacity: capacity / unit,
            });
        }
    }
    Ok(())
}

/// True if a name is an extended resource: qualified, and not one of Kubernetes' own (`IsExtendedResourceName`).
pub(crate) fn is_extended(name: &str) -> bool {
    // `requests.nvidia.com/gpu` and the like are names in ResourceQuotas.
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

//! kubelet's own check that a pod's requests fit the rest of the node, after devices were allocated.
//!
//! As in kubelet, extended resources that the node does not list are not checked. Pure.

use crate::kube_scheduler::ResourceAmounts;

/// Checks that a pod with `requests` fits `allocatable` beside pods with the requests `others`.
///
/// # Errors
/// Reason and message of the refusal, for the first resource that does not fit.
pub(crate) fn fit<'a>(
    requests: &ResourceAmounts,
    others: impl IntoIterator<Item = &'a ResourceAmounts>,
    allocatable: &ResourceAmounts,
) -> Result<(), (String, String)> {
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
            let [requested, used, capacity] = [requested, used, capacity].map(|amount| amount / unit);
            let message = format!(
                "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
            );
            return Err((format!("OutOf{name}"), message));
        }
    }
    Ok(())
}

/// True if a name is an extended resource: qualified, and not one of Kubernetes' own (`IsExtendedResourceName`).
pub(crate) fn is_extended(name: &str) -> bool {
    // `requests.nvidia.com/gpu` and the like are names in ResourceQuotas.
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

//! kubelet's own check that a pod's requests fit the rest of the node, after devices were allocated.
//!
//! As in kubelet, extended resources that the node does not list are not checked. Pure.

use std::collections::BTreeMap;

use proto::quantity::Quantity;

/// Amounts by resource name: cpu in thousandths, everything else in whole units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WholeAmounts(BTreeMap<String, i64>);

impl WholeAmounts {
    /// Reads quantities; those that do not parse count as nothing.
    pub(crate) fn read<'a>(quantities: impl IntoIterator<Item = (&'a String, &'a String)>) -> Self {
        let mut amounts = BTreeMap::new();
        for (name, text) in quantities {
            amounts.extend(amount(name, text).map(|amount| (name.clone(), amount)));
        }
        Self(amounts)
    }

    /// Takes over every amount of `other`.
    pub(crate) fn replace(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Makes every amount at least that of `other`.
    pub(crate) fn raise_all(&mut self, other: &Self) {
        for (name, floor) in &other.0 {
            self.raise(name, *floor);
        }
    }

    /// Makes the amount of one resource at least `floor`.
    pub(crate) fn raise(&mut self, name: &str, floor: i64) {
        let held = self.0.entry(name.to_owned()).or_default();
        *held = (*held).max(floor);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let sum = self.0.entry(name.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }

    fn get(&self, name: &str) -> i64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

/// The first resource that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
)]
pub(crate) struct Shortage {
    pub(crate) resource: String,
    requested: i64,
    used: i64,
    capacity: i64,
}

/// Checks that a pod with `requests` fits `allocatable` beside pods with the requests `others`.
pub(crate) fn fit<'a>(
    requests: &WholeAmounts,
    others: impl IntoIterator<Item = &'a WholeAmounts>,
    allocatable: &WholeAmounts,
) -> Result<(), Shortage> {
    let mut used = WholeAmounts::default();
    let mut n_pods = 0;
    for other in others {
        used.add(other);
        n_pods += 1;
    }
    let room = |resource: &str, requested: i64, used: i64| {
        let capacity = allocatable.get(resource);
        if requested <= capacity.saturating_sub(used) {
            return Ok(());
        }
        Err(Shortage {
            resource: resource.to_owned(),
            requested,
            used,
            capacity,
        })
    };
    room("pods", 1, n_pods)?;
    for (name, &requested) in &requests.0 {
        let unknown = is_extended(name) && !allocatable.0.contains_key(name);
        if requested > 0 && !unknown {
            room(name, requested, used.get(name))?;
        }
    }
    Ok(())
}

/// True if a name is an extended resource: qualified, and not one of Kubernetes' own.
pub(crate) fn is_extended(name: &str) -> bool {
    let Some((domain, _)) = name.split_once('/') else {
        return false;
    };
    let is_own = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    // `requests.nvidia.com/gpu` and the like are names in ResourceQuotas.
    !is_own && !name.starts_with("requests.")
}

/// An amount in whole units, CPU in thousandths; `None` if it does not parse or fit.
fn amount(name: &str, text: &str) -> Option<i64> {
    let quantity: Quantity = text.parse().ok()?;
    if name != "cpu" {
        return quantity.integer();
    }
    if let Some(cores) = quantity.integer() {
        return cores.checked_mul(1000);
    }
    // kubelet rounds CPU up to thousandths; a quantity that is finer does not display as such and counts as one.
    let shown = quantity.to_string();
    let thousandths = shown
        .strip_suffix('m')
        .and_then(|thousandths| thousandths.parse().ok());
    Some(thousandths.unwrap_or(1))
}

#[cfg(test)]
mod tests;

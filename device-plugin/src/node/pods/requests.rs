//! A pod's requests for the resources that this plugin writes into node status, and that no device plugin serves.

use std::fmt;

use proto::pod::{Container, PodSpec};
use proto::resource::{GPU, GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO};

/// The resources that this plugin writes into node status, in the order of [`Requests`].
pub const IN_NODE_STATUS: [&str; 5] = [GPU_COUNT, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO];

/// The amount of a whole device in the resources that count percent.
pub(crate) const WHOLE_DEVICE_PERCENT: u64 = 100;

/// Amounts of the resources in [`IN_NODE_STATUS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    amounts: [u64; IN_NODE_STATUS.len()],
}

impl Requests {
    /// The requests of a pod as kube-scheduler counts them: of containers that run together the sum, where an init container runs
    /// beside the sidecars before it; of containers that run one after the other the largest.
    pub(crate) fn from_spec(spec: &PodSpec) -> Self {
        let (mut sidecars, mut init_peak) = (Self::default(), Self::default());
        for container in &spec.init_containers {
            let own = Self::of_container(container);
            let together = sidecars.combine(own, u64::saturating_add);
            init_peak = init_peak.combine(together, u64::max);
            if container.is_sidecar() {
                sidecars = together;
            }
        }
        let apps = spec.containers.iter().map(Self::of_container);
        let running = apps.fold(sidecars, |sum, own| sum.combine(own, u64::saturating_add));
        running.combine(init_peak, u64::max)
    }

    fn of_container(container: &Container) -> Self {
        let resources = &container.resources;
        Self {
            amounts: IN_NODE_STATUS.map(|name| {
                // The API server copies the limit of an extended resource into a missing request.
                let text = resources.requests.get(name).or(resources.limits.get(name));
                text.and_then(|text| text.quantity().ok()?.unsigned())
                    .unwrap_or(0)
            }),
        }
    }

    pub(crate) fn from_fn(amount: impl Fn(&str) -> u64) -> Self {
        Self {
            amounts: IN_NODE_STATUS.map(amount),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    #[must_use]
    pub(crate) fn max(self, other: Self) -> Self {
        self.combine(other, u64::max)
    }

    #[must_use]
    pub(crate) fn plus(self, other: Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    /// The amount of a resource of [`IN_NODE_STATUS`]; none if it is zero.
    pub(crate) fn get(&self, wanted: &str) -> Option<u64> {
        let mut found = 0;
        // Without an early end: LLVM before 23 writes the exits of an unrolled loop in the order of its own addresses, and two
        // builds would differ (llvm/llvm-project#188821).
        for (name, amount) in self.iter() {
            if name == wanted {
                found = amount;
            }
        }
        (found > 0).then_some(found)
    }

    /// Each resource of the node status with its amount, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        IN_NODE_STATUS.into_iter().zip(self.amounts)
    }

    fn combine(mut self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        for (own, other) in self.amounts.iter_mut().zip(other.amounts) {
            *own = combine(*own, other);
        }
        self
    }
}

#[cfg(test)]
impl Requests {
    /// The amounts of one whole device with this memory, in bytes.
    pub(crate) fn of_device(memory_bytes: u64) -> Self {
        Self::from_fn(|name| match name {
            GPU_COUNT => 1,
            GPU_MEMORY => memory_bytes,
            _ => WHOLE_DEVICE_PERCENT,
        })
    }
}

/// `name=amount` for each that is not zero, separated by blanks.
impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut named = Vec::new();
        for (name, amount) in self.iter() {
            if amount > 0 {
                named.push(format!("{name}={amount}"));
            }
        }
        f.write_str(&named.join(" "))
    }
}

//! What a pod's containers come to together, as Kubernetes counts: init containers run one after another, sidecars stay.

use crate::pod::{Container, PodSpec};

/// Amounts that can be added, and of which the larger can be taken, resource by resource.
pub(crate) trait Summed: Default {
    /// The sum.
    fn plus(&self, other: &Self) -> Self;
    /// Of each resource, whichever is more.
    fn most(&self, other: &Self) -> Self;
}

/// Sums over containers.
#[derive(Default)]
pub(crate) struct Totals<T> {
    running: T,
    sidecars: T,
    init_peak: T,
}

impl<T: Summed> Totals<T> {
    /// The sums over all containers of a pod, init containers first.
    ///
    /// # Errors
    /// The first of `amounts`.
    pub(crate) fn of<E>(spec: &PodSpec, amounts: impl Fn(&Container) -> Result<T, E>) -> Result<Self, E> {
        let mut totals = Self::default();
        for container in &spec.init_containers {
            let amounts = amounts(container)?;
            if container.is_sidecar() {
                totals.sidecars = totals.sidecars.plus(&amounts);
                totals.running = totals.running.plus(&amounts);
            } else {
                totals.init_peak = totals.init_peak.most(&totals.sidecars.plus(&amounts));
            }
        }
        for container in &spec.containers {
            totals.running = totals.running.plus(&amounts(container)?);
        }
        Ok(totals)
    }

    /// The most that is asked for at any one time.
    pub(crate) fn peak(&self) -> T {
        self.running.most(&self.init_peak)
    }
}

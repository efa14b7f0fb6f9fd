//! Pods that run beside GPUs and hold none: they too take CPU and memory that GPUs will need.
//!
//! Counted as they come and go, so that nobody has to look at all pods to know what is usual.

use crate::fleet::Fleet;
use crate::host::{HostAmounts, HostUse};
use crate::request::GpuAsk;
use crate::workload::{Spec, Workload};

/// Who uses nodes without holding devices.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// By the node's place in the fleet.
    places: Vec<Place>,
    /// Those on nodes with GPUs.
    workload: Workload,
}

/// One node, as far as it counts here.
#[derive(Debug, Default)]
struct Place {
    has_gpus: bool,
    /// How many pods use so much of it.
    counts: Vec<(HostAmounts, u32)>,
}

impl Beside {
    /// What is usual beside GPUs.
    pub(crate) fn workload(&self) -> &Workload {
        &self.workload
    }

    /// A pod without devices uses something of a node.
    pub(crate) fn come(&mut self, used: HostUse) {
        if used.is_tied {
            return;
        }
        let Some(place) = self.place(used.index) else {
            return;
        };
        match place
            .counts
            .iter_mut()
            .find(|(amounts, _)| *amounts == used.amounts)
        {
            Some((_, count)) => *count += 1,
            None => place.counts.push((used.amounts, 1)),
        }
        if place.has_gpus {
            self.workload.add(spec(used.amounts));
        }
    }

    /// It does no more, or holds devices now.
    pub(crate) fn go(&mut self, used: HostUse) {
        if used.is_tied {
            return;
        }
        let Some(place) = self.place(used.index) else {
            return;
        };
        let Some(at) = place
            .counts
            .iter()
            .position(|(amounts, _)| *amounts == used.amounts)
        else {
            return;
        };
        if let Some((_, count)) = place.counts.get_mut(at).filter(|(_, count)| *count > 1) {
            *count -= 1;
        } else {
            place.counts.swap_remove(at);
        }
        if place.has_gpus {
            self.workload.remove(&spec(used.amounts));
        }
    }

    /// A node has GPUs now, or none.
    fn set_gpus(&mut self, index: u32, has_gpus: bool) {
        let Some(place) = self.place(index) else { return };
        if std::mem::replace(&mut place.has_gpus, has_gpus) == has_gpus {
            return;
        }
        let pods: Vec<Spec> = place
            .counts
            .iter()
            .flat_map(|(amounts, count)| std::iter::repeat_n(spec(*amounts), *count as usize))
            .collect();
        for pod in pods {
            if has_gpus {
                self.workload.add(pod);
            } else {
                self.workload.remove(&pod);
            }
        }
    }

    /// Where a node is counted; there is always such a place.
    fn place(&mut self, index: u32) -> Option<&mut Place> {
        let at = index as usize;
        if self.places.len() <= at {
            self.places.resize_with(at + 1, Place::default);
        }
        self.places.get_mut(at)
    }
}

impl Fleet {
    /// Takes note of whether a node has GPUs.
    pub(crate) fn note_gpus(&mut self, index: u32) {
        let has_gpus = self.at(index).is_some_and(|node| !node.rows.is_empty());
        self.beside.set_gpus(index, has_gpus);
    }
}

fn spec(host: HostAmounts) -> Spec {
    Spec {
        gpus: GpuAsk::Nothing,
        host,
    }
}

//! Room that opens, and that part of it which opens without an event that kube-scheduler sees.
//!
//! kube-scheduler tries a refused pod again when it sees an event, and otherwise after five minutes. It sees that pods on nodes
//! end and that nodes change. It does not see that a hint ends, that a decision turns out not to have been written, that a
//! Device object changes, nor that a watch of this process has caught up.

use super::Index;

/// Number of times that room has opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    /// By whatever cause.
    pub all: u64,
    /// Without an event that kube-scheduler sees.
    pub silent: u64,
}

impl Openings {
    /// Returns true if room had opened fewer times by either count.
    pub fn is_before(self, later: Self) -> bool {
        self.all < later.all || self.silent < later.silent
    }
}

impl Index {
    /// The number of times that room has opened so far.
    pub fn openings(&self) -> Openings {
        Openings {
            all: self.fleet.n_openings(),
            silent: self.n_silent_openings,
        }
    }

    /// Counts an opening of room without an event that kube-scheduler sees.
    pub(super) fn note_silent_opening(&mut self) {
        self.fleet.note_opening();
        self.n_silent_openings += 1;
    }

    /// Counts one opening as silent if room has opened since it had opened `n_before` times.
    pub(super) fn note_silent_since(&mut self, n_before: u64) {
        self.n_silent_openings += u64::from(self.fleet.n_openings() != n_before);
    }

    /// Ends the hint of a pod that takes its devices on a node, or that has gone: room of the hint elsewhere opens.
    pub(super) fn end_hint(&mut self, uid: &str, bound_to: Option<&str>) {
        if self
            .hints
            .remove(uid)
            .is_some_and(|node| bound_to != Some(&*node))
        {
            self.note_silent_opening();
        }
    }
}

#[cfg(test)]
mod tests;

//! Openings: changes by which a refused pod may fit. Of some of them kube-scheduler sees no event.
//!
//! kube-scheduler tries a refused pod again when it sees an event, and otherwise after five minutes. It sees that pods on nodes
//! end and that nodes change. It does not see that a hint ends, that a binding turns out not to have been written, that a
//! Device object changes, nor that a watch of this process has caught up.

/// Number of times that room has opened: changes so far by which a refused pod may fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    /// With or without an event that kube-scheduler sees.
    pub all: u64,
    /// Without an event that kube-scheduler sees.
    pub silent: u64,
}

impl Openings {
    /// Returns true if room has opened between this count and `later`.
    pub fn is_before(self, later: Self) -> bool {
        self.all < later.all || self.silent < later.silent
    }
}

#[cfg(test)]
mod tests;

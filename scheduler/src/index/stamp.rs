//! Assume times: unix nanoseconds that only grow, so that they order binds.

/// Nanoseconds that a record may be ahead of this clock and still be believed.
const DAY: u64 = 24 * 3600 * 1_000_000_000;

/// Issues assume times; reads no clock itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stamps {
    issued: u64,
    seen: u64,
}

impl Stamps {
    /// Notes the assume time in the record of a pod, which an earlier scheduler may have issued.
    pub fn note_recorded(&mut self, nanos: u64) {
        self.seen = self.seen.max(nanos);
    }

    /// An assume time for `now`, later than all earlier ones.
    ///
    /// A record from the far future does not count: it comes from a wrong clock.
    pub fn next(&mut self, now: u64) -> u64 {
        let after_seen = if self.seen < now.saturating_add(DAY) {
            self.seen.saturating_add(1)
        } else {
            0
        };
        // Equal times would leave the order of two binds on a node open, and kubelet's Allocate matches pods by it.
        self.issued = now.max(after_seen).max(self.issued.saturating_add(1));
        self.issued
    }
}

#[cfg(test)]
mod tests {
    use super::{DAY, Stamps};

    #[test]
    fn assume_times_grow_while_the_clock_stands_still_or_goes_back() {
        let mut stamps = Stamps::default();
        assert_eq!(
            [stamps.next(100), stamps.next(100), stamps.next(50)],
            [100, 101, 102]
        );
    }

    #[test]
    fn assume_times_begin_above_those_of_records() {
        let mut stamps = Stamps::default();
        stamps.note_recorded(500);
        assert_eq!(stamps.next(100), 501);
    }

    #[test]
    fn records_from_the_far_future_do_not_count() {
        let mut stamps = Stamps::default();
        stamps.note_recorded(u64::MAX);
        assert_eq!([stamps.next(100), stamps.next(100)], [100, 101]);
        let mut stamps = Stamps::default();
        stamps.note_recorded(100 + DAY - 1);
        assert_eq!(stamps.next(100), 100 + DAY);
    }
}

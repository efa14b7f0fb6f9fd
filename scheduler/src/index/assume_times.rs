//! Assume times: the unix nanoseconds at which binds assume pods. They only grow, so that they order binds.

/// A record with an assume time this far ahead of the clock comes from a wrong clock. In nanoseconds.
const DAY: u64 = 24 * 3600 * 1_000_000_000;

/// Issues assume times; reads no clock itself.
#[derive(Debug, Default)]
pub(super) struct AssumeTimes {
    issued: u64,
    /// The latest one in a record that a watch has shown.
    recorded: u64,
}

impl AssumeTimes {
    /// Notes the assume time in the record of a pod, which an earlier scheduler may have issued.
    pub(super) fn note_recorded(&mut self, nanos: u64) {
        self.recorded = self.recorded.max(nanos);
    }

    /// An assume time for `now`, later than all earlier ones.
    pub(super) fn next(&mut self, now: u64) -> u64 {
        let is_plausible = self.recorded < now.saturating_add(DAY);
        let after_recorded = if is_plausible {
            self.recorded.saturating_add(1)
        } else {
            0
        };
        // Equal times would leave the order of two binds on a node open, and kubelet's Allocate matches pods by it.
        self.issued = now.max(after_recorded).max(self.issued.saturating_add(1));
        self.issued
    }
}

#[cfg(test)]
mod tests {
    use super::{AssumeTimes, DAY};

    #[test]
    fn assume_times_grow_while_the_clock_stands_still_or_goes_back() {
        let mut times = AssumeTimes::default();
        assert_eq!(
            [times.next(100), times.next(100), times.next(50)],
            [100, 101, 102]
        );
    }

    #[test]
    fn assume_times_begin_above_those_of_records() {
        let mut times = AssumeTimes::default();
        times.note_recorded(500);
        assert_eq!(times.next(100), 501);
    }

    #[test]
    fn records_from_the_far_future_do_not_count() {
        let mut times = AssumeTimes::default();
        times.note_recorded(u64::MAX);
        assert_eq!([times.next(100), times.next(100)], [100, 101]);
        let mut times = AssumeTimes::default();
        times.note_recorded(100 + DAY - 1);
        assert_eq!(times.next(100), 100 + DAY);
    }
}

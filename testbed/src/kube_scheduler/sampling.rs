//! The nodes that a cycle looks at: it starts where the cycle before ended, and stops once it has found enough that fit.

/// Among fewer nodes all are looked at, and no fewer are looked for.
const LEAST: usize = 100;
/// The least percentage that the stock setting comes to.
const LEAST_PERCENT: usize = 5;

/// The start of each search, and the number of nodes that ends it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sampling {
    /// `percentageOfNodesToScore`; 0 for the stock setting.
    pub(super) percent: usize,
    start: usize,
}

impl Sampling {
    pub(super) fn of(percent: usize) -> Self {
        Self { percent, start: 0 }
    }

    /// The number of nodes that fit for which a cycle looks among `n_nodes`.
    pub(super) fn n_to_find(self, n_nodes: usize) -> usize {
        if n_nodes < LEAST {
            return n_nodes;
        }
        let percent = match self.percent {
            0 => 50_usize.saturating_sub(n_nodes / 125).max(LEAST_PERCENT),
            percent => percent,
        };
        (n_nodes * percent / 100).max(LEAST)
    }

    /// The places of all nodes in the order in which they are looked at.
    pub(super) fn order(self, n_nodes: usize) -> impl Iterator<Item = usize> {
        let start = self.start.min(n_nodes);
        (start..n_nodes).chain(0..start)
    }

    /// Records that a cycle looked at `n_seen` nodes; the next search begins behind them.
    pub(super) fn seen(&mut self, n_seen: usize, n_nodes: usize) {
        self.start = (self.start + n_seen) % n_nodes.max(1);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::few(0, 99, 99)]
    #[case::stock(0, 500, 230)]
    #[case::many(0, 15_000, 750)]
    #[case::no_fewer_than(10, 500, 100)]
    #[case::all(100, 500, 500)]
    fn as_many_as_kube_scheduler(#[case] percent: usize, #[case] n_nodes: usize, #[case] expected: usize) {
        assert_eq!(Sampling::of(percent).n_to_find(n_nodes), expected);
    }

    #[test]
    fn a_search_begins_where_the_last_one_ended() {
        let mut sampling = Sampling::default();
        sampling.seen(3, 5);
        assert_eq!(sampling.order(5).collect::<Vec<_>>(), [3, 4, 0, 1, 2]);
        sampling.seen(3, 5);
        assert_eq!(sampling.order(5).next(), Some(1));
        assert_eq!(sampling.order(0).count(), 0, "the nodes have gone");
    }
}

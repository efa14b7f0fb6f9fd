//! The order in which kube-scheduler names nodes to an extender.
//!
//! kube-scheduler has its nodes in a list that it goes through round and round. Since 1.35 a watch fills it by way of a hash map
//! (client-go's `WatchListClient`), so it is in no order of the API server's, and stays as it is until kube-scheduler ends.
//!
//! All orders name the same nodes but one: where kube-scheduler looks at nodes on several processors at
//! once, it stops as soon as it has enough, in the middle of several pieces of its list.

use std::ops::Range;

use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// The number of nodes that kube-scheduler looks at together by default.
const WORKERS: usize = 16;

/// The order of names in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    /// As kube-scheduler has its nodes in its list; its order where it has one processor.
    Listed,
    /// As kube-scheduler's sixteen workers find them on sixteen processors.
    ///
    /// The list, from where the last request ended, is cut into pieces: as many nodes as the square root of their number,
    /// but no more than a sixteenth of it and one. Each worker goes through one piece and then takes the next free
    /// one; a node that passes is entered behind those that others have passed. A fixed seed decides which worker goes on
    /// after each node.
    Interleaved,
    /// Those of `listed` in no order at all, which kube-scheduler never does.
    Shuffled,
}

/// Orders of one request after the other.
#[derive(Debug)]
pub(super) struct Orders {
    order: Order,
    /// Every node once.
    list: Vec<usize>,
    random: StdRng,
    /// The place in its list at which kube-scheduler looks next.
    start: usize,
}

impl Orders {
    /// Orders of requests about `n` nodes; the same for equal arguments.
    pub(super) fn new(order: Order, n_nodes: usize) -> Self {
        let (mut random, mut list) = (StdRng::seed_from_u64(42), (0..n_nodes).collect::<Vec<_>>());
        list.shuffle(&mut random);
        Self {
            order,
            list,
            random,
            start: 0,
        }
    }

    /// The nodes in the next request, all different if there are as many.
    pub(super) fn next(&mut self, n_names: usize) -> Vec<usize> {
        self.places(n_names)
            .into_iter()
            .filter_map(|place| self.list.get(place).copied())
            .collect()
    }

    /// Their places in the list.
    fn places(&mut self, n_names: usize) -> Vec<usize> {
        let n_nodes = self.list.len();
        let n_names = n_names.min(n_nodes);
        let mut places: Vec<usize> = match self.order {
            Order::Listed | Order::Shuffled => (0..n_names).collect(),
            Order::Interleaved => interleaved(&mut self.random, n_nodes, n_names),
        };
        if self.order == Order::Shuffled {
            places.shuffle(&mut self.random);
        }
        for place in &mut places {
            *place = (*place + self.start) % n_nodes;
        }
        self.start = (self.start + n_names) % n_nodes.max(1);
        places
    }
}

fn interleaved(random: &mut StdRng, n_nodes: usize, n_names: usize) -> Vec<usize> {
    let piece = n_nodes.isqrt().clamp(1, n_nodes / WORKERS + 1);
    let mut pieces = (0..n_nodes)
        .step_by(piece)
        .map(|begin| begin..n_nodes.min(begin + piece));
    let mut workers: Vec<Range<usize>> = pieces.by_ref().take(WORKERS).collect();
    let mut places = Vec::with_capacity(n_names);
    while places.len() < n_names && !workers.is_empty() {
        let at = random.random_range(0..workers.len());
        let Some(worker) = workers.get_mut(at) else { break };
        places.extend(worker.next());
        if worker.start == worker.end {
            match pieces.next() {
                Some(piece) => *worker = piece,
                None => drop(workers.swap_remove(at)),
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn a_list_goes_round() {
        let mut orders = Orders::new(Order::Listed, 5);
        assert_eq!(
            [orders.places(3), orders.places(3), orders.places(9)],
            [vec![0, 1, 2], vec![3, 4, 0], vec![1, 2, 3, 4, 0]]
        );
    }

    #[test]
    fn the_list_is_in_another_order_than_the_nodes_and_stays_so() {
        let mut orders = Orders::new(Order::Listed, 100);
        let [once, again] = [(); 2].map(|()| orders.next(100));
        assert_eq!(once, again);
        assert!(!once.is_sorted(), "{once:?}");
    }

    #[rstest]
    #[case::part(5000, 500)]
    #[case::all(5000, 5000)]
    #[case::few(20, 20)]
    #[case::one(1, 1)]
    fn no_node_is_named_twice_and_a_seed_says_it_all(#[case] n_nodes: usize, #[case] n_names: usize) {
        for order in [Order::Listed, Order::Interleaved, Order::Shuffled] {
            let [mut orders, mut again] = [(); 2].map(|()| Orders::new(order, n_nodes));
            for _ in 0..3 {
                let places = orders.next(n_names);
                assert_eq!(places, again.next(n_names));
                let mut distinct = places.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert_eq!((distinct.len(), places.len()), (n_names, n_names), "{order:?}");
                assert!(distinct.iter().all(|place| *place < n_nodes), "{order:?}");
            }
        }
    }

    /// 5,000 nodes are cut into pieces of 70; sixteen workers have found 500 before any of them is far into its second.
    #[test]
    fn pieces_are_gone_through_in_order_beside_each_other() {
        let places = Orders::new(Order::Interleaved, 5000).places(500);
        let pieces: Vec<Vec<usize>> = (0..5000)
            .step_by(70)
            .map(|begin| {
                places
                    .iter()
                    .copied()
                    .filter(|place| (begin..begin + 70).contains(place))
                    .collect()
            })
            .collect();
        for (nth, piece) in pieces.iter().enumerate() {
            assert!(
                piece.iter().copied().eq((nth * 70..).take(piece.len())),
                "{piece:?}"
            );
            assert_eq!(piece.len() > 10, nth < 16, "{nth}: {piece:?}");
        }
        let n_neighbours = places.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(
            (10..60).contains(&n_neighbours),
            "about one in sixteen: {n_neighbours}"
        );
    }
}

//! Which pods can exchange their records in the same write as two that must: such as kubelet has admitted in another order
//! too, and that have not started. One write names all exchanges of the node, so it may as well settle what is known.

use crate::pods::PodUid;

/// A pod and what is known of it; equal numbers are equal devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// The pod.
    pub(super) pod: PodUid,
    /// What it sees.
    pub(super) sees: usize,
    /// What its record names.
    pub(super) recorded: usize,
}

impl Seat {
    fn is_wrong(&self) -> bool {
        self.sees != self.recorded
    }
}

/// Exchanges of two records each. Each makes a pod right, none that is right takes part, and nobody twice: what is meant for
/// a pod's further calls follows one exchange at a time.
pub(super) fn among(mut seats: Vec<Seat>) -> Vec<(PodUid, PodUid)> {
    seats.retain(Seat::is_wrong);
    let mut exchanges = Vec::new();
    let mut alone = Vec::new();
    // First those that are both right afterwards.
    while let Some(one) = seats.pop() {
        match seats
            .iter()
            .position(|other| other.recorded == one.sees && other.sees == one.recorded)
        {
            Some(at) => exchanges.push((one.pod, seats.swap_remove(at).pod)),
            None => alone.push(one),
        }
    }
    let mut passed_over = Vec::new();
    while let Some(one) = alone.pop() {
        let others = [&mut alone, &mut passed_over];
        let partner = others.into_iter().find_map(|others| {
            let at = others
                .iter()
                .position(|other: &Seat| other.recorded == one.sees)?;
            Some(others.swap_remove(at))
        });
        match partner {
            Some(other) => exchanges.push((one.pod, other.pod)),
            None => passed_over.push(one),
        }
    }
    exchanges
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn seats(pairs: &[(usize, usize)]) -> Vec<Seat> {
        let seat = |(at, &(sees, recorded)): (usize, &(usize, usize))| Seat {
            pod: PodUid::from(&*at.to_string()),
            sees,
            recorded,
        };
        pairs.iter().enumerate().map(seat).collect()
    }

    #[test]
    fn pairs_are_settled_at_once_and_rings_by_and_by() {
        assert_eq!(among(seats(&[(1, 0), (0, 1), (3, 2), (2, 3)])).len(), 2);
        assert_eq!(among(seats(&[(1, 0), (2, 1), (0, 2)])).len(), 1);
        assert_eq!(
            among(seats(&[(1, 0), (2, 1)])).len(),
            1,
            "whoever has what it sees need not be right afterwards"
        );
    }

    proptest! {
        #[test]
        fn each_exchange_makes_one_right_and_none_wrong(pairs in prop::collection::vec((0..4_usize, 0..4_usize), 0..12)) {
            let before: BTreeMap<PodUid, Seat> = seats(&pairs).into_iter().map(|seat| (seat.pod.clone(), seat)).collect();
            let mut rest = before.clone();
            for (one, other) in among(seats(&pairs)) {
                // Taken out, so that nobody takes part twice.
                let (one, other) = (rest.remove(&one).unwrap(), rest.remove(&other).unwrap());
                prop_assert!(one.is_wrong() && other.is_wrong());
                prop_assert!(one.sees == other.recorded);
            }
            let open: Vec<&Seat> = rest.values().filter(|seat| seat.is_wrong()).collect();
            prop_assert!(!open.iter().any(|one| open.iter().any(|other| other.recorded == one.sees)), "no pair is left");
        }
    }
}

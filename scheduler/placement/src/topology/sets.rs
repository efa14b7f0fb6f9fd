//! Sets of at most 64 candidates, as bits.

/// Most members that a set can have.
pub(crate) const MAX_MEMBERS: usize = 64;

/// A set of candidates of one pool, by their places in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Set(u64);

impl Set {
    pub(crate) const EMPTY: Self = Self(0);

    pub(crate) fn with(self, at: usize) -> Self {
        Self(
            self.0
                | u32::try_from(at)
                    .ok()
                    .and_then(|at| 1_u64.checked_shl(at))
                    .unwrap_or(0),
        )
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn is_within(self, other: Self) -> bool {
        self.without(other).is_empty()
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The members, lowest first.
    pub(crate) fn members(self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.0), |rest| Some(rest & rest.wrapping_sub(1)))
            .take_while(|rest| *rest != 0)
            .map(|rest| rest.trailing_zeros() as usize)
    }

    /// Larger for the one of two sets of one size that has the lower members, compared from the lowest on.
    pub(crate) fn lowness(self) -> u64 {
        self.0.reverse_bits()
    }

    /// Visits every subset of so many members.
    pub(crate) fn subsets(self, n: usize, visit: &mut impl FnMut(Self)) {
        fn extend(chosen: Set, rest: Set, n: usize, visit: &mut impl FnMut(Set)) {
            if n == 0 {
                return visit(chosen);
            }
            let mut rest = rest;
            while rest.len() >= n {
                let lowest = Set(rest.0 & rest.0.wrapping_neg());
                rest = rest.without(lowest);
                extend(chosen.or(lowest), rest, n - 1, visit);
            }
        }
        extend(Self::EMPTY, self, n, visit);
    }

    /// How many subsets of so many members there are, at most what the type holds.
    pub(crate) fn n_subsets(self, n: usize) -> u64 {
        let all = self.len();
        if n > all {
            return 0;
        }
        let product =
            |product: u64, at: usize| product.saturating_mul(all.saturating_sub(at) as u64) / (at as u64 + 1);
        (0..n.min(all - n)).fold(1, product)
    }
}

#[cfg(test)]
mod tests {
    use super::Set;

    fn set(members: &[usize]) -> Set {
        members.iter().fold(Set::EMPTY, |set, at| set.with(*at))
    }

    #[test]
    fn members_come_lowest_first() {
        assert_eq!(set(&[63, 0, 5]).members().collect::<Vec<_>>(), [0, 5, 63]);
        assert_eq!(set(&[64]), Set::EMPTY, "a set has no room for more");
    }

    #[test]
    fn the_set_with_the_lowest_members_is_the_lowest() {
        assert!(set(&[0, 7]).lowness() > set(&[1, 2]).lowness());
        assert!(set(&[0, 1]).lowness() > set(&[0, 2]).lowness());
    }

    #[test]
    fn every_subset_is_visited_once() {
        let all = set(&[1, 3, 4, 9, 60]);
        let mut seen = Vec::new();
        all.subsets(3, &mut |subset| seen.push(subset));
        assert_eq!((seen.len(), all.n_subsets(3)), (10, 10));
        let is_new = |(at, one): (usize, &Set)| {
            one.len() == 3 && one.is_within(all) && !seen.iter().take(at).any(|other| other == one)
        };
        assert!(seen.iter().enumerate().all(is_new));
        assert_eq!(set(&(0..16).collect::<Vec<_>>()).n_subsets(8), 12_870);
        assert_eq!(all.n_subsets(6), 0);
    }
}

//! Candidates: the devices of one type on one node that a request may take, and sets of them.

use crate::data::ident::DeviceType;
use crate::state::hardware::Location;

/// Most members that a set can have.
pub(crate) const MAX_MEMBERS: usize = 64;

/// A device that a request may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Its index in the inventory, which orders devices by minor.
    pub(crate) device: usize,
    pub(crate) location: Location,
    /// Its place in the order of preference: 0 for the best; devices that are equal have the same place.
    pub(crate) preference: u32,
}

/// All devices of one type that a request may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pool {
    pub(crate) kind: DeviceType,
    /// Number of devices that the request takes.
    pub(crate) n_requested: usize,
    /// The candidates, by rising minor. Sets of candidates name them by their indices here.
    pub(crate) candidates: Vec<Candidate>,
}

impl Pool {
    /// A pool of devices: of each its index in the inventory, its location, and a key that is smaller if it is preferred. Of more
    /// than [`MAX_MEMBERS`] devices only the preferred ones are candidates, as many as are requested at least.
    pub(crate) fn new<K: Ord>(kind: DeviceType, n_requested: usize, keyed: &[(usize, Location, K)]) -> Self {
        let mut order: Vec<&K> = keyed.iter().map(|(.., key)| key).collect();
        // Equal keys share a place, so that locations decide between devices that the policy does not distinguish.
        order.sort_unstable();
        order.dedup();
        let mut candidates = Vec::with_capacity(keyed.len());
        for (device, location, key) in keyed {
            let preference = order.partition_point(|other| *other < key);
            candidates.push(Candidate {
                device: *device,
                location: *location,
                preference: u32::try_from(preference).unwrap_or(u32::MAX),
            });
        }
        candidates.sort_by_key(|candidate| (candidate.preference, candidate.device));
        // A set has one bit for each candidate.
        candidates.truncate(MAX_MEMBERS.max(n_requested));
        // By minor again, since sets of lower minors are to have the lower bits.
        candidates.sort_by_key(|candidate| candidate.device);
        Self {
            kind,
            n_requested,
            candidates,
        }
    }

    /// The set of all candidates that meet a condition.
    pub(crate) fn select(&self, is_meant: impl Fn(&Candidate) -> bool) -> CandidateSet {
        let mut set = CandidateSet::EMPTY;
        for (at, candidate) in self.candidates.iter().enumerate() {
            if is_meant(candidate) {
                set = set.with(at);
            }
        }
        set
    }

    /// The set of all candidates, the first [`MAX_MEMBERS`] of them at most.
    pub(crate) fn all(&self) -> CandidateSet {
        self.select(|_| true)
    }

    /// Members of a set, in the order of preference.
    pub(crate) fn by_preference(&self, set: CandidateSet) -> Vec<usize> {
        let mut members: Vec<usize> = set.members().collect();
        members.sort_by_key(|at| (self.preference(*at), *at));
        members
    }

    /// The candidate at an index of this pool; for any other index, which no set of this pool has, a default that is not used.
    fn candidate(&self, at: usize) -> Candidate {
        self.candidates.get(at).copied().unwrap_or_default()
    }

    /// The [preference](Candidate::preference) for the candidate at an index of this pool.
    pub(crate) fn preference(&self, at: usize) -> u32 {
        self.candidate(at).preference
    }

    /// Sum of the members' places in the order of preference: of two sets, the one with the smaller sum has the better devices.
    pub(crate) fn preference_sum(&self, set: CandidateSet) -> u32 {
        let mut sum: u32 = 0;
        for at in set.members() {
            sum = sum.saturating_add(self.preference(at));
        }
        sum
    }

    /// The location of the candidate at an index of this pool.
    pub(crate) fn location(&self, at: usize) -> Location {
        self.candidate(at).location
    }

    /// Indices in the inventory of the members of a set.
    pub(crate) fn devices(&self, set: CandidateSet) -> Vec<usize> {
        set.members().map(|at| self.candidate(at).device).collect()
    }

    /// Indices in the inventory of as many candidates as the request takes, chosen by preference alone, not by location.
    pub(crate) fn preferred(&self) -> Vec<usize> {
        let mut order: Vec<&Candidate> = self.candidates.iter().collect();
        order.sort_by_key(|candidate| (candidate.preference, candidate.device));
        order.truncate(self.n_requested);
        let mut devices: Vec<usize> = order.into_iter().map(|candidate| candidate.device).collect();
        // By minor, as a search returns devices too.
        devices.sort_unstable();
        devices
    }
}

/// A set of candidates of one pool, as one bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CandidateSet(u64);

impl CandidateSet {
    pub(crate) const EMPTY: Self = Self(0);

    /// The set with one more member, if its index is below [`MAX_MEMBERS`].
    pub(crate) fn with(self, at: usize) -> Self {
        let bit = u32::try_from(at).ok().and_then(|at| 1_u64.checked_shl(at));
        Self(self.0 | bit.unwrap_or(0))
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

    /// Returns true if all members are members of the other set too.
    pub(crate) fn is_within(self, other: Self) -> bool {
        self.without(other).is_empty()
    }

    pub(crate) fn contains(self, at: usize) -> bool {
        !self.and(Self::EMPTY.with(at)).is_empty()
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The members, lowest first.
    pub(crate) fn members(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let lowest = (rest != 0).then_some(rest.trailing_zeros() as usize);
            // Clears the lowest bit, so that there is one step for each member and not for each bit.
            rest &= rest.wrapping_sub(1);
            lowest
        })
    }

    /// A number that is larger for the one of two sets of one size that has the lower members, compared from the lowest on.
    pub(crate) fn lowness(self) -> u64 {
        // The lowest member decides first, so its bit has to weigh most.
        self.0.reverse_bits()
    }

    /// Every subset of `n` members.
    pub(crate) fn subsets(self, n: usize) -> Vec<Self> {
        // No later member is below an earlier one, or each subset would come up once for every order of its members.
        let mut subsets = vec![(Self::EMPTY, self)];
        // One member more at a time, and not by recursion, which would allocate for every beginning of a subset.
        for n_missing in (1..=n).rev() {
            let mut larger = Vec::new();
            for (chosen, mut rest) in subsets {
                while rest.len() >= n_missing {
                    let lowest = Self(rest.0 & rest.0.wrapping_neg());
                    rest = rest.without(lowest);
                    larger.push((chosen.or(lowest), rest));
                }
            }
            subsets = larger;
        }
        subsets.into_iter().map(|(chosen, _)| chosen).collect()
    }

    /// Number of subsets of `n` members; a number beyond every limit here if 64 bits do not hold it.
    pub(crate) fn n_subsets(self, n: usize) -> u64 {
        let all = self.len();
        if n > all {
            return 0;
        }
        // After each step the product is a binomial coefficient, so that every division is exact.
        let mut product: u64 = 1;
        for at in 0..n.min(all - n) {
            product = product.saturating_mul(all.saturating_sub(at) as u64) / (at as u64 + 1);
        }
        product
    }
}

#[cfg(test)]
mod tests {
    use super::CandidateSet;

    fn set(members: &[usize]) -> CandidateSet {
        members.iter().fold(CandidateSet::EMPTY, |set, at| set.with(*at))
    }

    #[test]
    fn members_of_a_set_come_lowest_first() {
        assert_eq!(set(&[63, 0, 5]).members().collect::<Vec<_>>(), [0, 5, 63]);
        assert_eq!(set(&[64]), CandidateSet::EMPTY, "a set has no room for more");
    }

    #[test]
    fn sets_are_ordered_by_their_lowest_members() {
        assert!(set(&[0, 7]).lowness() > set(&[1, 2]).lowness());
        assert!(set(&[0, 1]).lowness() > set(&[0, 2]).lowness());
    }

    #[test]
    fn every_subset_is_visited_once() {
        let all = set(&[1, 3, 4, 9, 60]);
        let seen = all.subsets(3);
        assert_eq!((seen.len(), all.n_subsets(3)), (10, 10));
        let is_new = |(at, one): (usize, &CandidateSet)| {
            one.len() == 3 && one.is_within(all) && !seen.iter().take(at).any(|other| other == one)
        };
        assert!(seen.iter().enumerate().all(is_new));
        assert_eq!(set(&(0..16).collect::<Vec<_>>()).n_subsets(8), 12_870);
        assert_eq!(all.n_subsets(6), 0);
    }
}

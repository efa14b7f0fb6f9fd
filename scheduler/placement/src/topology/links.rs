//! How many links there are between candidates.

use crate::gpu::Gpu;
use crate::topology::pool::Pool;
use crate::topology::sets::Set;
use crate::traits::LinkGroup;

/// Links between every two candidates of a pool.
#[derive(Debug)]
pub(crate) struct Links {
    n: usize,
    between: Vec<u32>,
}

impl Links {
    /// `None` if there are none.
    pub(crate) fn of(groups: &[LinkGroup], gpus: &[Gpu], pool: &Pool) -> Option<Self> {
        if groups.is_empty() {
            return None;
        }
        let n = pool.candidates.len();
        let mut links = Self {
            n,
            between: vec![0; n * n],
        };
        for group in groups {
            let is_in = |at: usize| gpus.get(at).is_some_and(|gpu| group.minors.contains(&gpu.minor));
            let members = pool.those(|candidate| is_in(candidate.at));
            for one in members.members() {
                for other in members.members().filter(|other| *other != one) {
                    if let Some(between) = links.between.get_mut(one * n + other) {
                        *between = between.saturating_add(group.n_links);
                    }
                }
            }
        }
        Some(links)
    }

    fn between(&self, one: usize, other: usize) -> u32 {
        self.between.get(one * self.n + other).copied().unwrap_or(0)
    }

    /// Links of all pairs of a set.
    fn pairs(&self, set: Set) -> impl Iterator<Item = u32> + '_ {
        set.members().flat_map(move |one| {
            set.members()
                .take_while(move |other| *other < one)
                .map(move |other| self.between(one, other))
        })
    }

    /// The fewest links between any two members, and those of all together; nothing for less than two.
    pub(crate) fn among(&self, set: Set) -> (u32, u32) {
        let (fewest, sum) = self.pairs(set).fold((u32::MAX, 0_u32), |(fewest, sum), links| {
            (fewest.min(links), sum.saturating_add(links))
        });
        if set.len() < 2 { (0, 0) } else { (fewest, sum) }
    }

    /// Whether all sets of members are linked alike.
    pub(crate) fn are_equal(&self, set: Set) -> bool {
        let mut pairs = self.pairs(set);
        pairs.next().is_none_or(|first| pairs.all(|links| links == first))
    }
}

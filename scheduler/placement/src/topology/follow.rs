//! Which devices come along with the leading ones.
//!
//! On every switch of a leading device the preferred device of each type is taken, asked for or not, as far as there is
//! one; but no more GPUs come along than are asked for: they are what is paid for. If more are asked for, the nearest are taken first (same switch, same NUMA node, anywhere), of equally near ones
//! the preferred, of these the lowest minors.

use std::cmp::Reverse;

use crate::shape::Spot;
use crate::topology::pool::Pool;
use crate::topology::problem::{Follower, Problem};
use crate::topology::rank::Distance;
use crate::topology::sets::Set;
use crate::wishes::Kind;

/// How good the devices of one type are that come along; decides between choices whose leading devices are the same.
pub(crate) type Company = (Vec<Distance>, u32, Reverse<u64>);

impl Problem<'_> {
    /// The devices of each type that come along.
    pub(crate) fn follow(&self, chosen: Set) -> Vec<(Set, Company)> {
        let lead: Vec<Spot> = chosen.members().map(|at| self.lead.spot(at)).collect();
        self.followers
            .iter()
            .map(|follower| follower.follow(&lead))
            .collect()
    }
}

impl Follower<'_> {
    /// Whether more devices may come along than are asked for.
    pub(crate) fn may_be_more(&self) -> bool {
        self.pool.kind != Kind::Gpu
    }

    /// The devices that come along with leading ones that sit there.
    pub(crate) fn follow(&self, lead: &[Spot]) -> (Set, Company) {
        let Self { pool, allowed } = *self;
        let distance = |at: usize| distance(pool, at, lead);
        let mut order = pool.by_preference(allowed);
        order.sort_by_key(|at| distance(*at));
        let mut switches = Vec::new();
        let mut taken = Set::EMPTY;
        for at in order.iter().filter(|at| distance(**at) == Distance::Switch) {
            let Spot { switch, .. } = pool.spot(*at);
            if !switches.contains(&switch) && (self.may_be_more() || taken.len() < pool.n) {
                switches.push(switch);
                taken = taken.with(*at);
            }
        }
        for at in order {
            if taken.len() < pool.n {
                taken = taken.with(at);
            }
        }
        let mut distances: Vec<Distance> = taken.members().map(distance).collect();
        distances.sort_unstable_by_key(|distance| Reverse(*distance));
        (taken, (distances, pool.levels(taken), Reverse(taken.lowness())))
    }
}

fn distance(pool: &Pool, at: usize, lead: &[Spot]) -> Distance {
    let spot = pool.spot(at);
    match () {
        () if lead.iter().any(|other| other.switch == spot.switch) => Distance::Switch,
        () if lead.iter().any(|other| other.numa == spot.numa) => Distance::Numa,
        () => Distance::Machine,
    }
}

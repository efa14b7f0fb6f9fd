//! The `PodGroup`s whose members kube-scheduler filters, and the end of the room that is kept for these members together:
//! kube-scheduler 1.36 filters all members in one cycle, before it binds any of them.
//!
//! A cycle that comes to nothing leaves no trace in the API after the first one: kube-scheduler writes no condition whose text
//! stays the same. So a group is remembered by the most members that found room in such a cycle, which shows when a member that
//! had failed before is filtered once more and none was bound. A later cycle that finds room for no more members will come to
//! nothing too: its room is free as soon as another pod is filtered, since kube-scheduler has one cycle at a time.

use std::time::Instant;

use placement::OwnerId;
use rustc_hash::{FxHashMap, FxHashSet};

/// A `PodGroup` whose members were filtered.
#[derive(Debug, Default)]
struct Gang {
    /// The end of the room of all members, unless another member is filtered before; `None` before the first request.
    end: Option<Instant>,
    /// The members that were filtered since one was filtered for the second time: those of the current cycle.
    filtered: FxHashSet<OwnerId>,
    /// The most members that found room in a cycle that came to nothing.
    n_in_vain: usize,
    /// True from the first bind of a member until another cycle is known to have come to nothing.
    is_bound: bool,
    /// The members that found room and are not bound: room is kept for them, unless it has ended for one alone.
    kept: FxHashSet<OwnerId>,
}

/// The groups whose time is not up since the last filter request for a member, by namespace and name.
#[derive(Debug, Default)]
pub(super) struct Gangs(FxHashMap<Box<str>, Gang>);

impl Gang {
    /// Returns true if the current cycle will come to nothing, by the number of members that have found room in it.
    fn is_in_vain(&self) -> bool {
        !self.is_bound && self.kept.len() <= self.n_in_vain && !self.kept.is_empty()
    }

    fn note_filter(&mut self, owner: OwnerId, is_placed: bool, has_failed: bool) -> bool {
        let was_in_vain = self.is_in_vain();
        let mut is_newly_in_vain = false;
        // A member that was filtered already begins another cycle if it has failed, and else another placement of the same cycle.
        if self.filtered.contains(&owner) {
            if has_failed {
                self.n_in_vain = self.n_in_vain.max(self.kept.len());
                self.is_bound = false;
                is_newly_in_vain = !was_in_vain && self.is_in_vain();
            }
            self.filtered.clear();
        }
        if is_placed {
            self.kept.insert(owner.clone());
        }
        self.filtered.insert(owner);
        is_newly_in_vain
    }
}

impl Gangs {
    /// Notes a filter request for a member. `is_placed` is true if a node has room for it, `has_failed` if an attempt to schedule
    /// it had failed before. The room of all members is kept until `end`. Returns true if the request shows that their room was
    /// kept for a cycle that came to nothing.
    pub(super) fn note_filter(
        &mut self,
        group: &str,
        owner: OwnerId,
        is_placed: bool,
        has_failed: bool,
        end: Instant,
    ) -> bool {
        let gang = self.0.entry(group.into()).or_default();
        gang.end = Some(end);
        gang.note_filter(owner, is_placed, has_failed)
    }

    /// Notes that the next filter request for a member of this group is for another placement of the same cycle.
    pub(super) fn begin_placement(&mut self, group: &str) {
        if let Some(gang) = self.0.get_mut(group) {
            gang.filtered.clear();
        }
    }

    /// Removes a member that is bound or gone. The past cycles of its group then no longer predict the next ones.
    pub(super) fn remove_member(&mut self, uid: &str) {
        for gang in self.0.values_mut() {
            // No short-circuit: the member leaves `kept` in any case.
            if gang.kept.remove(uid) | gang.filtered.contains(uid) {
                (gang.n_in_vain, gang.is_bound) = (0, true);
                gang.filtered.clear();
            }
        }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.0.values().any(|gang| gang.end <= Some(now))
    }

    /// Returns true if the cycle of another group than `filtered_group` will come to nothing, and room is kept for its members.
    pub(super) fn is_in_vain(&self, filtered_group: Option<&str>) -> bool {
        let mut gangs = self.0.iter();
        gangs.any(|(group, gang)| gang.is_in_vain() && Some(&**group) != filtered_group)
    }

    /// Forgets the groups whose time is up; returns the members that room may be kept for.
    pub(super) fn end_expired(&mut self, now: Instant) -> Vec<OwnerId> {
        let ended = self.0.extract_if(|_, gang| gang.end <= Some(now));
        ended.flat_map(|(_, gang)| gang.kept).collect()
    }

    /// Ends the cycles of all groups but `filtered_group`: a pod of that group, or of no group, is filtered now. Returns the
    /// members of the groups whose cycles came to nothing.
    pub(super) fn end_cycles(&mut self, filtered_group: Option<&str>) -> Vec<OwnerId> {
        let mut members = Vec::new();
        for (group, gang) in &mut self.0 {
            if gang.is_in_vain() && Some(&**group) != filtered_group {
                members.extend(gang.kept.drain());
            }
        }
        members
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rstest::rstest;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn owner(uid: &str) -> OwnerId {
        OwnerId::from(uid)
    }

    /// Filters members in turn: `+` for one that finds room, `-` for one that does not; those in capitals have failed before.
    fn filter(gangs: &mut Gangs, members: &str, now: Instant) {
        for word in members.split_whitespace() {
            let (sign, uid) = word.split_at(1);
            let (is_placed, has_failed) = (sign == "+", uid.chars().all(char::is_uppercase));
            let member = owner(&uid.to_lowercase());
            gangs.note_filter("ns/g", member, is_placed, has_failed, now + 30 * SECOND);
        }
    }

    #[rstest]
    #[case::first_cycle("+a +b -c", false)]
    #[case::no_more_than_before("+a +b -c +A +B -C", true)]
    #[case::fewer_than_before("+a +b -c +A -B -C", true)]
    #[case::one_is_filtered_in_between("+a +b -c -C +A +B -C", true)]
    #[case::one_was_filtered_alone("+a +b -c -C -C +A +B +C", false)]
    #[case::more_than_before("+a -b -c +A +B -C", false)]
    #[case::again_no_more_than_the_most("+a -b -c +A +B -C +A +B -C", true)]
    #[case::another_placement_of_the_same_cycle("+a +b -c +a +b -c", false)]
    fn a_cycle_that_places_no_more_members_than_a_failed_one_fails(
        #[case] members: &str,
        #[case] expected: bool,
    ) {
        let mut gangs = Gangs::default();
        filter(&mut gangs, members, Instant::now());
        assert_eq!(gangs.is_in_vain(None), expected);
        assert!(
            !gangs.is_in_vain(Some("ns/g")),
            "among its members the room is kept"
        );
        assert_eq!(!gangs.end_cycles(None).is_empty(), expected);
        assert!(!gangs.is_in_vain(None));
    }

    #[test]
    fn a_bound_member_clears_the_failed_cycles_of_its_group() {
        let (mut gangs, now) = (Gangs::default(), Instant::now());
        filter(&mut gangs, "+a +b -c +A +B +C", now);
        gangs.remove_member("another");
        gangs.remove_member("a");
        assert!(!gangs.is_in_vain(None), "the others are about to be bound");
        filter(&mut gangs, "-D +E", now);
        assert!(!gangs.is_in_vain(None));
        filter(&mut gangs, "-D +E", now);
        assert!(gangs.is_in_vain(None));
    }

    #[test]
    fn each_filter_call_extends_the_pause_of_all_members() {
        let (mut gangs, now) = (Gangs::default(), Instant::now());
        filter(&mut gangs, "+a", now);
        filter(&mut gangs, "-b", now + 20 * SECOND);
        assert!(!gangs.is_due(now + 49 * SECOND) && gangs.end_expired(now + 49 * SECOND).is_empty());
        assert!(gangs.is_due(now + 50 * SECOND));
        assert_eq!(gangs.end_expired(now + 50 * SECOND), [owner("a")]);
        assert!(!gangs.is_due(now + 99 * SECOND), "nothing is left of it");
    }
}

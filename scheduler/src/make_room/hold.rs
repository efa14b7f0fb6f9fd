//! A hold: room that is being made for one pod, and kept on a node to which the pod is nominated, until the pod is bound or time
//! is up.
//!
//! The decision about each next step is a function of the index and the time. [`super`] carries it out.

use std::time::{Duration, Instant};

use placement::{OwnerId, Reason};

use crate::bind::PodId;
use crate::index::{Index, RoomVictim, room_facts};

/// The time within which the watch has to show the node with room once all pods that free it have gone.
const SHOWN_FREE_WITHIN: Duration = Duration::from_secs(10);

/// Room that is being made for one pod on one node.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) pod: PodId,
    pub(crate) node: Box<str>,
    pub(crate) freeing: Vec<OwnerId>,
    /// The pods whose eviction the API server has not accepted yet.
    pub(super) pending: Vec<RoomVictim>,
    /// The time until which the evictions of `pending` are tried again.
    pub(super) retried_until: Instant,
    /// The time at which the hold ends if the pod is not bound.
    pub(super) until: Instant,
    /// The time since which the API server has not answered whether `pending` may be tried.
    pub(super) unanswered_since: Option<Instant>,
    /// The time of the first refusal of the pod; `None` if another replica made the plan.
    pub(super) first_refused: Option<Instant>,
    pub(crate) bound_at: Option<Instant>,
    /// True if the plan was dropped, so that the nomination has to be removed.
    pub(super) is_dropped: bool,
    /// The time since which all pods have gone and the node still has no room.
    pub(super) in_vain_since: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Wait,
    Evict,
    /// No further eviction is tried; the room that is free already stays kept.
    GiveUpEvictions,
    /// The pod is nominated again, since an error of kube-scheduler has removed the nomination.
    Nominate,
    /// The pod is bound or gone, or kube-scheduler has nominated it to another node.
    End,
    /// The nomination is removed, since time is up.
    WithdrawLate,
    /// The nomination is removed, since the pods have gone and the node still has no room.
    WithdrawInVain,
    /// The nomination of a plan that was dropped is removed.
    Withdraw,
}

/// The state of the pod of a hold, as the index shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HoldFacts {
    pub(super) preemptor: PreemptorState,
    /// True if the pod waits, and the node has room for it.
    pub(super) is_free: bool,
    /// True if the node takes few pods or none at present, since its device plugin is away or has just returned.
    pub(super) is_paused: bool,
    /// True if some pod that frees the room has not ended.
    pub(super) is_awaited: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreemptorState {
    /// The pod is bound, deleted or leaving.
    Gone,
    Binding,
    /// The pod waits, and kube-scheduler has nominated it to another node, or evicts pods on the node for a more important one.
    Elsewhere,
    Unnominated,
    Nominated,
}

impl Hold {
    /// The hold of a plan before its first write, or of one that another replica has begun.
    pub(super) const fn new(
        pod: PodId,
        node: Box<str>,
        freeing: Vec<OwnerId>,
        until: Instant,
        first_refused: Option<Instant>,
    ) -> Self {
        Self {
            pod,
            node,
            freeing,
            pending: Vec::new(),
            retried_until: until,
            until,
            unanswered_since: None,
            first_refused,
            bound_at: None,
            is_dropped: false,
            in_vain_since: None,
        }
    }

    pub(super) fn facts(&self, index: &Index) -> HoldFacts {
        let uid = self.pod.uid.as_str();
        let waiting = room_facts::waiting(index, uid);
        let demand = waiting.and_then(|waiting| index.demand(uid, waiting.facts).ok().flatten());
        let fit = demand.map(|demand| index.filter().fit(&self.node, &demand));
        let preemptor = match waiting {
            Some(waiting) if waiting.nominated == Some(&*self.node) => PreemptorState::Nominated,
            Some(waiting) if waiting.nominated.is_some() => PreemptorState::Elsewhere,
            Some(_) => PreemptorState::Unnominated,
            None if self.bound_at.is_none() && index.assumption_state(uid).is_some() => {
                PreemptorState::Binding
            }
            None => PreemptorState::Gone,
        };
        let mut freeing = self.freeing.iter();
        HoldFacts {
            preemptor,
            is_free: matches!(fit, Some(Ok(_))),
            is_paused: matches!(fit, Some(Err(Reason::PluginAway))),
            is_awaited: freeing.any(|pod| index.is_victim_leaving(pod.as_str()).is_some()),
        }
    }

    /// The next step, by the state of the pods. Once the node has room for the pod, no pod has to go for it.
    pub(super) fn step(&mut self, facts: HoldFacts, now: Instant) -> Step {
        match facts.preemptor {
            PreemptorState::Gone | PreemptorState::Elsewhere => return Step::End,
            PreemptorState::Binding => return Step::Wait,
            _ if self.is_dropped => return Step::Withdraw,
            _ if now >= self.until => return Step::WithdrawLate,
            // The nomination is all that is known of another replica's plan.
            PreemptorState::Unnominated if self.first_refused.is_none() => return Step::End,
            PreemptorState::Unnominated | PreemptorState::Nominated => {}
        }
        if facts.is_free {
            self.pending.clear();
            self.freeing.clear();
        }
        if self.is_in_vain(facts, now) {
            Step::WithdrawInVain
        } else if facts.preemptor == PreemptorState::Unnominated {
            Step::Nominate
        } else if self.pending.is_empty() {
            Step::Wait
        } else if now < self.retried_until {
            Step::Evict
        } else {
            Step::GiveUpEvictions
        }
    }

    /// Returns true if all pods have gone for a while, and the node has no room: something else has taken it. As long as the
    /// node's device plugin is away, that cannot be seen.
    fn is_in_vain(&mut self, facts: HoldFacts, now: Instant) -> bool {
        if facts.is_free || facts.is_paused || facts.is_awaited || !self.pending.is_empty() {
            self.in_vain_since = None;
            return false;
        }
        let since = *self.in_vain_since.get_or_insert(now);
        now.saturating_duration_since(since) >= SHOWN_FREE_WITHIN
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const NOMINATED: HoldFacts = HoldFacts {
        preemptor: PreemptorState::Nominated,
        is_free: false,
        is_paused: false,
        is_awaited: true,
    };
    const FREE: HoldFacts = HoldFacts {
        is_free: true,
        is_awaited: false,
        ..NOMINATED
    };
    const LOST: HoldFacts = HoldFacts {
        is_awaited: false,
        ..NOMINATED
    };
    const PAUSED: HoldFacts = HoldFacts {
        is_paused: true,
        ..LOST
    };

    const fn with(preemptor: PreemptorState, facts: HoldFacts) -> HoldFacts {
        HoldFacts { preemptor, ..facts }
    }

    fn pod(name: &str) -> PodId {
        PodId {
            namespace: "d".to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        }
    }

    /// A hold of 300 s, whose evictions are tried for 30 s.
    fn hold(n_pending: usize, is_adopted: bool, began: Instant) -> Hold {
        let victim = RoomVictim {
            pod: pod("v"),
            grace_seconds: 30,
        };
        let (until, first_refused) = (began + Duration::from_secs(300), (!is_adopted).then_some(began));
        let freeing = vec![OwnerId::from("uid-v")];
        Hold {
            pending: vec![victim; n_pending],
            retried_until: began + Duration::from_secs(30),
            ..Hold::new(pod("p"), "n1".into(), freeing, until, first_refused)
        }
    }

    #[rstest]
    #[case::deleted(with(PreemptorState::Gone, NOMINATED), 0, 5, Step::End)]
    #[case::nominated_elsewhere(with(PreemptorState::Elsewhere, NOMINATED), 1, 5, Step::End)]
    #[case::an_error_of_kube_scheduler(with(PreemptorState::Unnominated, NOMINATED), 1, 5, Step::Nominate)]
    #[case::not_nominated_again_when_time_is_up(
        with(PreemptorState::Unnominated, NOMINATED),
        0,
        300,
        Step::WithdrawLate
    )]
    #[case::bound_at_the_last_moment(with(PreemptorState::Gone, NOMINATED), 0, 300, Step::End)]
    #[case::victims_end(NOMINATED, 0, 5, Step::Wait)]
    #[case::a_budget_is_used_up(NOMINATED, 1, 5, Step::Evict)]
    #[case::a_budget_stays_used_up(NOMINATED, 1, 30, Step::GiveUpEvictions)]
    #[case::room_without_the_last_one(FREE, 1, 5, Step::Wait)]
    #[case::its_binding_is_written(with(PreemptorState::Binding, NOMINATED), 0, 300, Step::Wait)]
    #[case::kept_until_the_pod_is_tried(FREE, 0, 299, Step::Wait)]
    #[case::a_victim_does_not_go(NOMINATED, 0, 300, Step::WithdrawLate)]
    #[case::the_pod_is_not_bound(FREE, 0, 300, Step::WithdrawLate)]
    fn steps(#[case] facts: HoldFacts, #[case] n_pending: usize, #[case] after: u64, #[case] expected: Step) {
        let began = Instant::now();
        let step = hold(n_pending, false, began).step(facts, began + Duration::from_secs(after));
        assert_eq!(step, expected);
    }

    /// Between nomination and evictions another replica may have ended: its plan is not known, and nothing more is evicted for
    /// it. The room of the leader's own plan may be lost to a pod that another scheduler places.
    #[rstest]
    #[case::of_another_replica(true, Step::End)]
    #[case::its_own(false, Step::Nominate)]
    fn a_plan_is_dropped_once_its_victims_have_ended_in_vain(
        #[case] is_adopted: bool,
        #[case] unnominated: Step,
    ) {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut hold = hold(0, is_adopted, began);
        assert_eq!(hold.step(NOMINATED, at(20)), Step::Wait);
        assert_eq!(hold.step(LOST, at(21)), Step::Wait);
        assert_eq!(hold.step(FREE, at(22)), Step::Wait);
        assert_eq!(hold.step(LOST, at(25)), Step::Wait);
        assert_eq!(hold.step(PAUSED, at(40)), Step::Wait);
        assert_eq!(hold.step(LOST, at(60)), Step::Wait);
        let lost = with(PreemptorState::Unnominated, LOST);
        assert_eq!(hold.clone().step(lost, at(61)), unnominated);
        assert_eq!(hold.step(LOST, at(70)), Step::WithdrawInVain);
    }
}

//! Hints: room kept on a node for a pod that is not bound yet, because the answer to its filter request named this node, or
//! because kube-scheduler has nominated the pod to it. kube-scheduler binds in the background, and may wait for minutes first.
//!
//! A hint lasts while `status.nominatedNodeName` names its node (kube-scheduler 1.35 and later writes that before it waits, and
//! every version after it has preempted), else until the pod's condition shows a later attempt that failed; at the longest for
//! the time in [`HintTimes`]. The hints of a `PodGroup`'s members end together ([`super::gangs`]). Watches bring no time: that
//! of a hint which they begin or restart runs from the next [`advance`] on.

use std::collections::{BTreeSet, VecDeque};
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use placement::{Hints, NodeId, NodeView, OwnerId, Placement};
use proto::pod::{GroupKind, Pod, PodCondition};
use proto::pod_group::GroupWish;
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::Index;
use super::cluster::Cluster;
use super::gangs::Gangs;
use super::group_rooms::{GroupCycle, GroupRooms, MemberOutcome, MemberStep};
use super::pod_groups::{GroupId, GroupOfPod};
use super::resource_demand::ResourceDemand;
use super::tried_placements::TriedPlacements;

/// The most hints at one time, without those of `PodGroup` members.
const MAX_HINTS: usize = 4096;

/// The longest times that hints last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintTimes {
    /// The time for the hint of a pod that kube-scheduler binds at once. A pod whose hint has expired rests for as long.
    pub plain: Duration,
    /// The time for the hint of a pod whose volumes or claims kube-scheduler may wait for: `VolumeBinding`'s
    /// `bindTimeoutSeconds`.
    pub claims: Duration,
    /// The time for a hint while the pod's `status.nominatedNodeName` names the node.
    pub nominated: Duration,
}

impl HintTimes {
    /// The time `lasts` for every hint, nominated or not.
    pub const fn all(lasts: Duration) -> Self {
        Self {
            plain: lasts,
            claims: lasts,
            nominated: lasts,
        }
    }
}

/// The fields of an unbound pod, in a filter request or as a watch shows it, by which hints begin and end: kube-scheduler's last
/// attempt to schedule the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attempt {
    /// The resource version of the pod.
    version: Option<u64>,
    failure: Option<Failure>,
    nominated: Option<Box<str>>,
    may_wait_for_claims: bool,
    /// Namespace and name of its `PodGroup`.
    group: Option<Box<str>>,
}

/// A failed attempt to schedule a pod, identified by a hash of its reason and message: kube-scheduler does not update the time of
/// the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Failure {
    text_hash: u64,
    is_error: bool,
}

/// The room kept for one pod, and the rules for its end.
#[derive(Clone, Debug, Default)]
struct Hint {
    node: Box<str>,
    /// The `PodGroup` with whose hints it ends; `None` if it ends by itself.
    group: Option<Box<str>>,
    /// The longest time from its begin or restart.
    lasts: Duration,
    /// The end; `None` until the next [`advance`] sets it, and for a hint that ends with its group.
    end: Option<Instant>,
    /// The resource version of the pod at the decision.
    version: Option<u64>,
    failure: Option<Failure>,
    is_nominated: bool,
    /// True if no filter request has asked about the pod: it is missing in a group that has started in part.
    is_unasked: bool,
    /// True if the hint stays when an error of kube-scheduler, such as a filter that timed out, removes the pod's nomination,
    /// since the pod's victims may be being evicted. The first such error sets it to false.
    survives_error: bool,
}

/// A room that the leader makes for a pod by evictions. The pod's hint keeps it from the nomination on: what is free of it at
/// once, and the rest as soon as the evicted pods have ended. Otherwise a pod that a controller creates in place of an evicted one
/// would take it.
#[derive(Debug)]
struct MadeRoom {
    node: Box<str>,
    /// The pods that free it and have not ended.
    freeing: Vec<OwnerId>,
}

/// All hints, ordered by their ends.
#[derive(Debug, Default)]
pub struct HintQueue {
    pub(super) times: HintTimes,
    hints: FxHashMap<OwnerId, Hint>,
    /// The pods of hints with an end, by the end.
    ends: BTreeSet<(Instant, OwnerId)>,
    /// The pods of hints whose time runs from the next [`advance`] on.
    not_begun: Vec<OwnerId>,
    gangs: Gangs,
    pub(super) rooms: GroupRooms,
    /// Room of groups in placements that kube-scheduler has tried before the last one.
    tried: TriedPlacements,
    /// By the pods that they are made for.
    made: FxHashMap<OwnerId, MadeRoom>,
    /// Pods whose hint expired, with the time until which they rest: they get no other hint, so that other pods get the room.
    resting: FxHashMap<OwnerId, Instant>,
    /// The pods of `resting` in the order in which their rests began; an entry that differs from `resting` is outdated.
    rest_queue: VecDeque<(Instant, OwnerId)>,
    /// Unbound pods without a hint and the nodes that they are nominated to, which had no room for them yet.
    nominees: FxHashMap<OwnerId, Box<str>>,
    /// True while a list of pods comes: room seems free that pods hold which are listed later.
    pub(super) is_listing: bool,
    /// [`placement::Fleet::n_openings`] when room was last looked for on the nodes of `nominees`; `u64::MAX` to look again.
    n_openings_tried: u64,
}

impl Attempt {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self {
            version: pod.version(),
            failure: pod.failed_attempt().map(Failure::of),
            nominated: pod.nominated_node().map(Into::into),
            may_wait_for_claims: pod.may_wait_for_claims(),
            group: Self::group_of(pod),
        }
    }

    pub(crate) fn group_of(pod: &Pod) -> Option<Box<str>> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        Some(format!("{namespace}/{}", pod.pod_group()?).into())
    }
}

impl Failure {
    fn of(condition: &PodCondition) -> Self {
        let text = (&condition.reason, &condition.message);
        Self {
            text_hash: FxBuildHasher.hash_one(text),
            is_error: condition.is_error(),
        }
    }
}

impl Hint {
    /// Updates the hint by the state of the pod that a watch shows, and returns true if the hint stays.
    fn update(&mut self, shown: &Attempt, times: HintTimes) -> bool {
        // The watch of this process may be behind the version of the pod that kube-scheduler sent.
        if let (Some(shown), Some(decided)) = (shown.version, self.version)
            && shown <= decided
        {
            return true;
        }
        let has_failed = shown.failure.is_some() && shown.failure != self.failure;
        let is_error = shown.failure.is_some_and(|failure| failure.is_error);
        let is_nominated = shown.nominated.as_ref() == Some(&self.node);
        let stays = match (self.is_nominated, is_nominated) {
            (true, true) => true,
            (false, true) => {
                // kube-scheduler nominates a pod that waits for its binding without a new failure in its condition. A new failure
                // beside the nomination means that it has preempted for the pod.
                self.survives_error |= has_failed;
                // The nomination keeps the room of this member alone, also after the hints of its group have ended.
                self.group = None;
                self.restart(times.nominated);
                true
            }
            (true, false) => {
                // kube-scheduler has given up the node, unless an error of its own removed the nomination.
                let stays = shown.nominated.is_none() && is_error && std::mem::take(&mut self.survives_error);
                self.restart(times.plain);
                stays
            }
            // The next failed attempt to schedule the pod ends the hint. The failure of an unasked pod is of an attempt under
            // an earlier leader.
            (false, false) => !has_failed || self.is_unasked,
        };
        (self.is_nominated, self.failure) = (is_nominated, shown.failure);
        stays
    }

    /// Restarts the time of the hint: it lasts for `lasts` from the next [`advance`] on.
    fn restart(&mut self, lasts: Duration) {
        (self.lasts, self.end) = (lasts, None);
    }
}

impl HintQueue {
    pub(super) fn new(times: HintTimes) -> Self {
        Self {
            times,
            ..Self::default()
        }
    }

    /// Takes out the hint of a pod with its entry in `ends`. The caller has the fleet free the room, or puts the hint back.
    fn take_hint(&mut self, uid: &str) -> Option<Hint> {
        let (owner, hint) = self.hints.remove_entry(uid)?;
        if let Some(end) = hint.end {
            self.ends.remove(&(end, owner));
        }
        Some(hint)
    }

    /// Adds a hint with the entry by which it ends: in `ends`, in `not_begun` while it has no end, or in neither if it ends with
    /// its group.
    fn put_hint(&mut self, owner: OwnerId, hint: Hint) {
        if let Some(end) = hint.end {
            self.ends.insert((end, owner.clone()));
        } else if hint.group.is_none() {
            self.not_begun.push(owner.clone());
        }
        self.hints.insert(owner, hint);
    }

    /// The hint for the answer to a pod's filter request, in place of the hint `before`; `None` while the pod rests.
    fn new_hint(
        &self,
        uid: &str,
        node: &str,
        attempt: &Attempt,
        before: Option<&Hint>,
        now: Instant,
    ) -> Option<Hint> {
        // Without the rest, a pod that kube-scheduler cannot bind would always keep the room from all other pods.
        let before = before.filter(|before| !before.is_unasked);
        if before.is_none() && self.is_resting(uid, now) {
            return None;
        }
        let is_nominated = attempt.nominated.as_deref() == Some(node);
        let lasts = match (is_nominated, attempt.may_wait_for_claims) {
            (true, _) => self.times.nominated,
            (false, true) => self.times.claims,
            (false, false) => self.times.plain,
        };
        // A nomination keeps the room of this member alone, whatever becomes of its group.
        let group = if is_nominated { None } else { attempt.group.clone() };
        let end = match before {
            // The hints of a group's members end together.
            _ if group.is_some() => None,
            // The new hint ends with the earlier one, or a pod that is filtered again and again would never give its room back.
            Some(before) if before.is_nominated == is_nominated && before.end.is_some() => before.end,
            _ => now.checked_add(lasts),
        };
        Some(Hint {
            node: node.into(),
            group,
            lasts,
            end,
            version: attempt.version,
            failure: attempt.failure,
            is_nominated,
            is_unasked: false,
            // A nomination that has survived an error does not survive another.
            survives_error: is_nominated
                && before.is_none_or(|before| before.survives_error || !before.is_nominated),
        })
    }

    /// Returns true if a pod gets no hint for a while, as its last one ended unused.
    pub(crate) fn is_resting(&self, uid: &str, now: Instant) -> bool {
        self.resting.get(uid).is_some_and(|until| *until > now)
    }

    /// Makes a pod rest whose hint expired, see [`Self::resting`], for the time that a plain hint lasts.
    fn begin_rest(&mut self, owner: OwnerId, now: Instant) {
        // Bounded like the hints: a pod whose rest ends early only gets a hint sooner.
        while self.rest_queue.len() >= MAX_HINTS {
            self.end_rest();
        }
        if let Some(until) = now.checked_add(self.times.plain) {
            self.resting.insert(owner.clone(), until);
            self.rest_queue.push_back((until, owner));
        }
    }

    fn end_rest(&mut self) {
        if let Some((until, owner)) = self.rest_queue.pop_front()
            && self.resting.get(&owner) == Some(&until)
        {
            self.resting.remove(&owner);
        }
    }

    fn end_rests(&mut self, now: Instant) -> bool {
        let n_before = self.rest_queue.len();
        while self.rest_queue.front().is_some_and(|(until, _)| *until <= now) {
            self.end_rest();
        }
        self.rest_queue.len() < n_before
    }

    /// Returns true if [`advance`] has something to do.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.not_begun.is_empty()
            || self.ends.first().is_some_and(|(end, _)| *end <= now)
            || self.rest_queue.front().is_some_and(|(until, _)| *until <= now)
            || self.gangs.is_due(now)
            || self.rooms.is_due(now)
            || self.tried.is_due(now)
    }

    /// Sets the ends of the hints that watches have begun or restarted: they last from `now` on.
    fn set_ends(&mut self, now: Instant) {
        for owner in std::mem::take(&mut self.not_begun) {
            // The hint may have ended meanwhile, or have been replaced by one with an end.
            if let Some(hint) = self.hints.get_mut(&owner)
                && hint.end.is_none()
                && let Some(end) = now.checked_add(hint.lasts)
            {
                hint.end = Some(end);
                self.ends.insert((end, owner));
            }
        }
    }

    /// Removes the hint that ends first if it has ended by `now`, or if there are too many hints; returns its pod.
    fn pop_ended(&mut self, now: Instant) -> Option<OwnerId> {
        let (end, _) = self.ends.first()?;
        // Beyond the limit the hint that ends first gives way, so that memory stays bounded.
        if *end > now && self.ends.len() < MAX_HINTS {
            return None;
        }
        let (end, owner) = self.ends.pop_first()?;
        let hint = self.hints.remove(&owner);
        // A hint that ends early because of the limit has not gone unused, so its pod need not rest.
        if end <= now && hint.is_none_or(|hint| !hint.is_unasked) {
            self.begin_rest(owner.clone(), now);
        }
        Some(owner)
    }

    pub(super) fn n_group_rooms(&self) -> usize {
        self.rooms.n_kept() + self.tried.n_rooms()
    }

    /// The wish that counts for a member of a group in the group's current cycle, if there is one.
    pub(crate) fn wish_in_cycle(&self, group: &GroupOfPod, uid: &str) -> Option<GroupWish> {
        let cycle = self.rooms.cycle(&group.id)?;
        (self.step(group, uid) != MemberStep::Choose).then_some(cycle.wish)
    }

    /// The way in which a filter request for a member of a group with a wish is answered.
    pub(crate) fn step(&self, group: &GroupOfPod, uid: &str) -> MemberStep {
        let step = self.rooms.step(group, uid);
        if step == MemberStep::Choose
            && let Some(room) = self.rooms.cycle(&group.id).and_then(GroupCycle::kept)
            // kube-scheduler waits for volumes or claims of a member, after a cycle in which all members found room.
            && room.members.keys().any(|owner| self.is_nominated(owner.as_str()))
        {
            return MemberStep::Join(room.node);
        }
        step
    }

    fn hint_of_nominee(&self, node: Box<str>) -> Hint {
        Hint {
            node,
            lasts: self.times.nominated,
            is_nominated: true,
            survives_error: true,
            ..Hint::default()
        }
    }

    /// Returns true if [`end_gang_cycles`] has room to free: a `PodGroup` other than `filtered_group` has room in a
    /// scheduling cycle that binds no member. The filtered pod may have no group.
    pub(crate) fn has_gang_cycles_in_vain(&self, filtered_group: Option<&str>) -> bool {
        self.gangs.is_in_vain(filtered_group)
    }

    /// Returns true if this pod has a hint.
    pub fn is_hinted(&self, uid: &str) -> bool {
        self.hints.contains_key(uid)
    }

    /// Returns true if this pod has a hint on the node that it is nominated to.
    pub(crate) fn is_nominated(&self, uid: &str) -> bool {
        self.hints.get(uid).is_some_and(|hint| hint.is_nominated)
    }
}

/// Ends the hints whose time is up, those of a group together, and the rests of pods whose hints had expired; then keeps room
/// for the pods that kube-scheduler has nominated.
pub(super) fn advance(index: &mut Index, now: Instant) {
    index.hints.set_ends(now);
    let mut has_opened = false;
    while let Some(owner) = index.hints.pop_ended(now) {
        free(index, owner.as_str());
        has_opened = true;
    }
    index.hints.rooms.end_expired(now);
    has_opened |= index.hints.tried.end_expired(&mut index.cluster, now);
    has_opened |= index.hints.end_rests(now);
    let members = index.hints.gangs.end_expired(now);
    has_opened |= unhint_members(index, members);
    if has_opened {
        index.cluster.note_silent_opening();
    }
    keep_for_nominees(index);
}

/// Keeps room for a pod (a hint) on the node that the answer to its filter request names.
pub(crate) fn hint(
    index: &mut Index,
    node: NodeId,
    demand: &ResourceDemand<'_>,
    attempt: &Attempt,
    now: Instant,
) {
    // Expired hints go first, or the new one would find less room than there is.
    index.tick(now);
    hint_place(index, (node, None), demand, attempt, now);
}

/// [`hint`] for the devices of `placement`, or else those that the engine chooses.
fn hint_place(
    index: &mut Index,
    (node, placement): (NodeId, Option<&Placement>),
    demand: &ResourceDemand<'_>,
    attempt: &Attempt,
    now: Instant,
) {
    // The group is updated first, or its hints could end while this one is made.
    let is_placed = true;
    note_member(index, demand.uid, attempt, is_placed, now);
    let before = index.hints.take_hint(demand.uid);
    index.cluster.fleet.unhint(demand.uid);
    let Some(name) = index.cluster.fleet.view(node).map(|view| view.name().to_owned()) else {
        return;
    };
    let hints = &index.hints;
    let hint = hints.new_hint(demand.uid, &name, attempt, before.as_ref(), now);
    let is_kept = hint.is_some_and(|hint| keep(index, (node, placement), demand, hint));
    // The room of a group opens for all its members at once, when its cycle ends.
    if before.is_some_and(|before| before.group.is_none() && (!is_kept || *before.node != *name)) {
        index.cluster.note_silent_opening();
    }
}

/// Ends a pod's hint: no more room is kept for it.
pub(super) fn unhint(index: &mut Index, uid: &str) {
    index.hints.take_hint(uid);
    free(index, uid);
    index.cluster.note_silent_opening();
}

/// Frees the room of a pod whose hint has ended, and its place in the room of its group.
fn free(index: &mut Index, uid: &str) {
    index.cluster.fleet.unhint(uid);
    let is_bound = false;
    index.hints.rooms.remove_member(&mut index.cluster, uid, is_bound);
}

/// Ends the scheduling cycle of a group with a wish for one domain if a filter request for this member begins another: its
/// room is free to be chosen again. Room on a node that is not asked about stays: kube-scheduler may come back to it.
pub(crate) fn begin_group_cycle(
    index: &mut Index,
    group: &GroupOfPod,
    uid: &str,
    is_asked: impl Fn(&str) -> bool,
    now: Instant,
) {
    if index.hints.step(group, uid) != MemberStep::Choose {
        return;
    }
    let is_node_asked = |cluster: &Cluster, node| {
        let view = cluster.fleet.view(node);
        view.is_none_or(|view| is_asked(view.name()))
    };
    let tried = &mut index.hints.tried;
    let first_end = tried.end_on(&mut index.cluster, &group.id, is_node_asked);
    if let Some(ended) = index.hints.rooms.end_cycle(&mut index.cluster, &group.id) {
        unhint_all(index, ended.members.keys().cloned());
        // A group that is tried again and again does not put off the end.
        let end = first_end.or(now.checked_add(index.hints.times.plain));
        if let Some(end) = end.filter(|_| !is_node_asked(&index.cluster, ended.node)) {
            let open = ended.open.into_iter().map(|(_, placement)| placement);
            let places = open.chain(ended.members.into_values());
            let tried = &mut index.hints.tried;
            tried.keep(&mut index.cluster, &group.id, (ended.node, places), end);
            if first_end.is_none() {
                index.hints.gangs.begin_placement(&group.id.key);
            }
        }
    }
    // The room that was kept for missing members one by one, see `started_groups`, is chosen together with the rest.
    unhint_where(index, &group.id, |hint| hint.is_unasked);
}

/// Notes that a bind puts a member on a node, and so its group into one of the placements that kube-scheduler has tried: room
/// in the others ends. The hints of the members are in the placement tried last; if it is another, they end, and the binds
/// choose devices again.
pub(super) fn choose_placement(index: &mut Index, uid: &str, node: NodeId) {
    let Some(group) = index.cluster.group_members.group_of(uid) else {
        return;
    };
    let tried = &mut index.hints.tried;
    let ended = tried.end_on(&mut index.cluster, &group, |_, tried| tried == node);
    if ended.is_some() {
        index.hints.rooms.end_cycle(&mut index.cluster, &group);
        unhint_where(index, &group, |hint| hint.group.is_some());
        index.cluster.note_silent_opening();
    }
    end_tried(index, &group);
}

/// Ends the room of a group in the placements that were tried before the last one.
fn end_tried(index: &mut Index, group: &GroupId) {
    let ended = index.hints.tried.end_on(&mut index.cluster, group, |_, _| true);
    if ended.is_some() {
        index.cluster.note_silent_opening();
    }
}

fn unhint_where(index: &mut Index, group: &GroupId, is_met: impl Fn(&Hint) -> bool) {
    let mut met = Vec::new();
    for (owner, _) in index.cluster.group_members.of(group) {
        if index.hints.hints.get(owner).is_some_and(&is_met) {
            met.push(owner.clone());
        }
    }
    unhint_all(index, met);
}

fn unhint_all(index: &mut Index, owners: impl IntoIterator<Item = OwnerId>) {
    for owner in owners {
        index.hints.take_hint(owner.as_str());
        index.cluster.fleet.unhint(owner.as_str());
    }
}

/// Keeps a place for a pod that no filter request has asked about.
pub(super) fn keep_place(
    index: &mut Index,
    (node, placement): (NodeId, &Placement),
    demand: &ResourceDemand<'_>,
    now: Instant,
) {
    let Some(name) = index.cluster.fleet.view(node).map(NodeView::name) else {
        return;
    };
    let attempt = Attempt::default();
    if let Some(mut hint) = index.hints.new_hint(demand.uid, name, &attempt, None, now) {
        hint.is_unasked = true;
        keep(index, (node, Some(placement)), demand, hint);
    }
}

/// Keeps the outcome of a filter request for a member of a group with a wish for one domain: room for the group, or none.
pub(crate) fn note_outcome(
    index: &mut Index,
    group: &GroupOfPod,
    outcome: MemberOutcome,
    demand: &ResourceDemand<'_>,
    attempt: &Attempt,
    now: Instant,
) {
    // Expired hints go first, as for `hint`.
    index.tick(now);
    let Some(end) = now.checked_add(index.hints.times.plain) else {
        return;
    };
    match outcome {
        MemberOutcome::Chosen(chosen) => {
            let node = chosen.node;
            let Some(own) = chosen.room.placements.first().cloned() else {
                return;
            };
            let rooms = &mut index.hints.rooms;
            rooms.keep(&mut index.cluster, group, demand, chosen, end);
            hint_place(index, (node, Some(&own)), demand, attempt, now);
        }
        MemberOutcome::Joined(node, placement) => {
            // The hint comes first, so that open places are chosen beside it.
            hint_place(index, (node, Some(&placement)), demand, attempt, now);
            let rooms = &mut index.hints.rooms;
            rooms.join(&mut index.cluster, &group.id, demand, &placement);
        }
        MemberOutcome::Unplaced(refusal) => {
            return index.hints.rooms.note_filtered(group, demand.uid, refusal, end);
        }
    }
    // A member that rests gets no hint, and so has no place in the room of its group.
    if !index.hints.is_hinted(demand.uid) {
        free(index, demand.uid);
    }
}

/// Updates the hint of an unbound pod by the attempt that a watch shows, and remembers a nomination until room is kept.
pub(super) fn update_attempt(index: &mut Index, uid: &str, mut shown: Attempt) {
    // An error of kube-scheduler removes a nomination, and does not end the room that the leader makes for the pod.
    if shown.nominated.is_none() {
        shown.nominated = index.hints.made.get(uid).map(|room| room.node.clone());
    }
    let owner = index.cluster.owner(uid);
    if let Some(mut hint) = index.hints.take_hint(uid) {
        if hint.update(&shown, index.hints.times) {
            return index.hints.put_hint(owner, hint);
        }
        free(index, uid);
        index.cluster.note_silent_opening();
        if let Some(key) = hint.group {
            let kind = GroupKind::Native;
            end_tried(index, &GroupId { kind, key });
        }
    }
    // The devices of an assumption are reserved; a hint beside them would count twice.
    if let Some(node) = shown.nominated
        && index.cluster.assumption(uid).is_none()
    {
        index.hints.nominees.insert(owner, node);
        // Room is looked for at once: the nominee is new, although no room has opened.
        index.hints.n_openings_tried = u64::MAX;
    } else {
        index.hints.nominees.remove(&owner);
    }
}

/// Keeps room for nominated pods on their nodes, as soon as there is any.
pub(super) fn keep_for_nominees(index: &mut Index) {
    let n_openings = index.cluster.fleet.n_openings();
    let hints = &mut index.hints;
    // Without new room every further try would fail like the last one.
    if hints.is_listing || hints.nominees.is_empty() || hints.n_openings_tried == n_openings {
        return;
    }
    hints.n_openings_tried = n_openings;
    // A copy, as a nominee that gets room leaves the map.
    for (owner, name) in hints.nominees.clone() {
        let Some(entry) = index.cluster.pods.get(&owner) else {
            continue;
        };
        if entry.facts.bound.is_some() || index.hints.resting.contains_key(&owner) {
            continue;
        }
        let demand = index.demand(owner.as_str(), &entry.facts);
        if let Ok(Some(demand)) = demand
            && let Some(node) = index.cluster.fleet.node_id(&name)
        {
            let hint = index.hints.hint_of_nominee(name);
            keep(index, (node, None), &demand, hint);
        }
    }
}

/// Begins to keep for a pod the room on a node that these pods will have freed: the part that is free, and the rest as it
/// becomes free.
pub(crate) fn begin_room(index: &mut Index, uid: &str, node: &str, freeing: &[OwnerId]) {
    let room = MadeRoom {
        node: node.into(),
        freeing: freeing.to_vec(),
    };
    index.hints.made.insert(index.cluster.owner(uid), room);
    let Some((id, entry)) = index.cluster.fleet.node_id(node).zip(index.cluster.pods.get(uid)) else {
        return;
    };
    // The devices of an assumption are reserved; a hint beside them would count twice.
    if entry.bound().is_some() {
        return;
    }
    let Ok(Some(demand)) = index.demand(uid, &entry.facts) else {
        return;
    };
    let (policy, but) = (demand.policies.device, (freeing, &[OwnerId::from(uid)][..]));
    let (devices, fleet) = (demand.devices(), &index.cluster.fleet);
    let placement = fleet.choose_devices_among(id, devices, policy, None, but);
    if let Ok(placement) = placement {
        index.hints.take_hint(uid);
        let hint = index.hints.hint_of_nominee(node.into());
        keep(index, (id, Some(&placement)), &demand, hint);
        if freeing.is_empty() {
            // The room is free at once, and kube-scheduler may have been refused it before this process saw that.
            index.cluster.note_silent_opening();
        }
    }
}

/// Keeps the room that is made for a pod again, after its binding has failed.
pub(super) fn resume_room(index: &mut Index, uid: &str) {
    if let Some(MadeRoom { node, freeing }) = index.hints.made.remove(uid) {
        begin_room(index, uid, &node, &freeing);
    }
}

/// Notes that a pod has ended: it may have freed a part of a room that the leader makes.
pub(super) fn note_ended(index: &mut Index, uid: &str) {
    for room in index.hints.made.values_mut() {
        let n_before = room.freeing.len();
        room.freeing.retain(|pod| pod.as_str() != uid);
        if room.freeing.len() < n_before {
            // kube-scheduler may have seen the end before this process, and been refused once more.
            index.cluster.note_silent_opening();
        }
    }
}

/// Ends what [`begin_room`] has begun, even if the pod is nominated to the node still.
pub(crate) fn end_room(index: &mut Index, uid: &str) {
    if let Some(room) = index.hints.made.remove(uid)
        && let Some(hint) = index.hints.hints.get(uid)
        && hint.node == room.node
    {
        unhint(index, uid);
        keep_for_nominees(index);
    }
}

/// Keeps room on the node for the pod of a hint, and returns true if the node has room.
fn keep(
    index: &mut Index,
    (node, placement): (NodeId, Option<&Placement>),
    demand: &ResourceDemand<'_>,
    hint: Hint,
) -> bool {
    let (policy, hints) = (demand.policies.device, Hints::RespectOthers(demand.uid));
    let fleet = &index.cluster.fleet;
    let chosen = match placement {
        Some(placement) => Ok(placement.clone()),
        None => fleet.choose_devices(node, demand.devices(), policy, hints),
    };
    let Ok(placement) = chosen else {
        return false;
    };
    let owner = index.cluster.owner(demand.uid);
    // A pod that takes no device of the node needs no room kept.
    let is_kept = placement != Placement::default() && index.cluster.fleet.hint(&owner, node, &placement);
    if is_kept {
        index.hints.nominees.remove(demand.uid);
        index.hints.put_hint(owner, hint);
    }
    is_kept
}

/// Frees the room kept for `PodGroup`s whose scheduling cycle will bind no member, see [`super::gangs`], except for
/// `filtered_group`, the group of the pod that is filtered now; nominated pods may have the room.
pub(crate) fn end_gang_cycles(index: &mut Index, filtered_group: Option<&str>) {
    let members = index.hints.gangs.end_cycles(filtered_group);
    // The fleet counts no opening for these, so `keep_for_nominees` would skip the room that is free now.
    if unhint_members(index, members) {
        index.hints.n_openings_tried = u64::MAX;
    }
    keep_for_nominees(index);
}

/// Ends the hints of these members of a group, except for those that end by themselves; returns true if there were any.
fn unhint_members(index: &mut Index, members: Vec<OwnerId>) -> bool {
    let n_before = index.hints.hints.len();
    for owner in members {
        if let Some(group) = index.cluster.group_members.group_of(owner.as_str()) {
            end_tried(index, &group);
        }
        // A member that was nominated since has a hint of its own.
        let hint = index.hints.hints.get(&owner);
        if hint.is_some_and(|hint| hint.group.is_some()) {
            index.hints.hints.remove(&owner);
            free(index, owner.as_str());
        }
    }
    index.hints.hints.len() < n_before
}

/// Notes that a member of a `PodGroup` was filtered; `is_placed` if a node has room for it, and otherwise room that is kept
/// for it stays. Does nothing for other pods.
pub(crate) fn note_member(index: &mut Index, uid: &str, attempt: &Attempt, is_placed: bool, now: Instant) {
    let end = now.checked_add(index.hints.times.plain);
    let Some((group, end)) = attempt.group.as_deref().zip(end) else {
        return;
    };
    let (owner, has_failed) = (index.cluster.owner(uid), attempt.failure.is_some());
    let gangs = &mut index.hints.gangs;
    if gangs.note_filter(group, owner, is_placed, has_failed, end) {
        index.cluster.note_silent_opening();
    }
}

/// Ends the hint of a pod that is assumed or bound on the node `bound_to`, or gone: room of a hint on another node opens.
/// Room that is made for the pod lasts until [`end_room`], as the binding may fail.
pub(super) fn end(index: &mut Index, uid: &str, bound_to: Option<&str>) {
    index.hints.nominees.remove(uid);
    index.hints.gangs.remove_member(uid);
    let is_bound = bound_to.is_some();
    index.hints.rooms.remove_member(&mut index.cluster, uid, is_bound);
    // A bind of another leader, which the watch shows.
    if is_bound && let Some(group) = index.cluster.group_members.group_of(uid) {
        end_tried(index, &group);
    }
    // The fleet forgets the hint itself when the pod is bound or gone.
    if let Some(hint) = index.hints.take_hint(uid)
        && bound_to != Some(&*hint.node)
    {
        index.cluster.note_silent_opening();
    }
}

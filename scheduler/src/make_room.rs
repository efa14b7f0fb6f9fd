//! Makes room for pods of high priority that no single GPU takes although GPUs have enough memory in sum: the leader evicts less
//! important pods.
//!
//! kube-scheduler up to 1.37 looks for victims only on nodes that its own filters refuse, and asks `filter` about the others: on
//! those that `filter` refuses for devices the end of pods helps. The leader remembers these nodes (`refused_pods`), and each
//! second searches the pods to evict for one pod (`plan`). It nominates the pod to the node before it evicts, and keeps the room
//! until the pod is bound (`hold`). From 1.38 on kube-scheduler asks `preempt` about such nodes, and this module is off.

mod hold;
mod plan;
pub(crate) mod refused_pods;
mod rooms;
mod words;
mod writes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::events::{EventType, Recorder, Subject};
use kube::Client;
use placement::NodeId;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{info, warn};

use crate::accounting::PodFacts;
use crate::bind::{Binder, PodId};
use crate::extender::pod_memory::PodMemory;
use crate::extender::{Extender, begin_hold, end_hold, is_outranked, promised_to_others};
use crate::index::room_rules::{self, NotPreemptor, check_spec};
use crate::index::view::counted_on;
use crate::index::{
    Index, NodeRoom, Preemptor, Promised, ROOM_MANAGER, ResourceDemand, RoomSearch, RoomVictim, hints,
    room_facts,
};
use crate::kube_scheduler::PodRules;
use crate::leader::{BIND_TIMEOUT, now};
use crate::metrics::RoomMetrics;
pub(crate) use hold::Hold;
use hold::{HoldFacts, PreemptorState, Step};
use plan::Plans;
use refused_pods::{RefusedPod, RefusedPods};
pub(crate) use rooms::Rooms;
use rooms::{RoomEviction, Verdict};
use words::pods_on;
use writes::{RoomWriter, WriteError};

/// Time between two decisions.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time within which the watch has to show a pod that kube-scheduler has asked about, or the pod is forgotten.
const NEW_FOR: Duration = Duration::from_secs(30);

/// The time within which the watch has to show a nomination. If it does not, the decision may have been made on old facts.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);

/// The longest time for which decisions wait for the first list of disruption budgets, which a cluster may withhold.
const BUDGETS_WITHIN: Duration = Duration::from_secs(30);

/// The reason for which a plan is dropped after a request without an answer.
const NO_ANSWER: &str = "the API server does not answer";

const WAITS_FOR_ITS_TURN: &str = "The scheduler decides about room for it by evictions once it has waited for a while (--make-room-after), a pod a \
                                  second.";

const REFUSED: &str =
    "The scheduler makes no room for it: the API server refuses the eviction of a pod that would have to go.";

/// The time for which an eviction that the API server refuses is tried again.
const RETRIED_FOR: Duration = Duration::from_secs(30);

/// Pause between two looks at whether the watch shows a nomination.
const POLL: Duration = Duration::from_millis(50);

/// Settings of this module, by the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomSettings {
    /// True if pods are evicted; otherwise events alone say which could be.
    pub evicts: bool,
    /// Time from the first refusal of a pod to the first eviction for it.
    pub after: Duration,
    /// The most pods that are evicted in an hour.
    pub per_hour: usize,
    /// Only pods below this priority are evicted.
    pub below: i32,
    /// Time for which room is kept, besides the grace period of the pods that are evicted.
    pub hold: Duration,
}

/// The task of the leader that makes room for one pod after the other.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
pub struct RoomMaker {
    extender: Arc<Extender>,
    writer: RoomWriter,
    recorder: Recorder,
    metrics: RoomMetrics,
    settings: RoomSettings,
    began: Instant,
}

#[derive(Clone, Debug)]
struct NextPod {
    pod: PodId,
    facts: PodFacts,
    rules: PodRules,
    first_refused: Instant,
    nodes: Vec<NodeId>,
    /// True if pods that are leaving count as room, so that the pod waits for their end.
    counts_leaving: bool,
    /// The nodes on which the API server refused evictions for it when they were tried last.
    refusing: BTreeSet<Box<str>>,
}

/// The last answer about a waiting pod, or the reason for which no room is made for it, in a sentence for people; `None` if no
/// room is made for any pod, or another replica leads.
pub(crate) fn answer_about(extender: &Extender, uid: &str) -> Option<String> {
    if extender.evicts_for_room.is_none() || extender.leadership().check(now()).is_err() {
        return None;
    }
    let index = extender.index().read();
    let memory = extender.memory();
    let waiting = room_facts::waiting(&index, uid)?;
    let verdict = memory.rooms.verdict(uid).map(str::to_owned);
    if memory.rooms.held.contains_key(uid) {
        return verdict;
    }
    let is_refused = memory.refused.contains(uid);
    let not_refused = (!is_refused).then_some(NotPreemptor::NotRemembered);
    match waiting.not_preemptor().or(not_refused) {
        Some(why) => Some(format!("The scheduler makes no room for it by evictions: {why}.")),
        None => Some(verdict.unwrap_or_else(|| WAITS_FOR_ITS_TURN.to_owned())),
    }
}

/// The state of the pods of this pod's hold; `None` if no room is being made for it. A pod whose nomination kube-scheduler has
/// removed for a more important pod counts as nominated elsewhere.
fn facts_of(memory: &PodMemory, index: &Index, uid: &str) -> Option<HoldFacts> {
    let hold = memory.rooms.held.get(uid)?;
    let mut facts = hold.facts(index);
    if facts.preemptor == PreemptorState::Unnominated && is_outranked(memory, index, hold, now()) {
        facts.preemptor = PreemptorState::Elsewhere;
    }
    Some(facts)
}

impl RoomMaker {
    /// The maker of room for the pods that `extender` refuses.
    pub fn new(
        extender: Arc<Extender>,
        (client, recorder): (Client, Recorder),
        metrics: RoomMetrics,
        settings: RoomSettings,
    ) -> Self {
        let binder = Binder::new(client, BIND_TIMEOUT, extender.leadership().clone());
        Self {
            writer: RoomWriter(binder),
            extender,
            recorder,
            metrics,
            settings,
            began: now(),
        }
    }

    /// Makes room while this replica leads, until the process ends.
    pub async fn run(self) {
        let mut ticks = interval(INTERVAL);
        // After a slow decision the ticks that were missed would follow at once, without a pause.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.tick().await;
        }
    }

    /// Goes on with the rooms that are being made, then decides about one more pod.
    pub async fn tick(&self) {
        if self.extender.leadership().check(now()).is_err() {
            self.forget();
            return;
        }
        if !self.is_ready() {
            return;
        }
        if self.settings.evicts {
            self.adopt();
            self.count_carried_out();
            self.forget_given_up().await;
            self.keep_rooms().await;
        }
        if let Some(preemptor) = self.next_preemptor() {
            self.decide(&preemptor).await;
        }
        let n_pending = self.extender.memory().rooms.held.len();
        self.metrics.set_pending(n_pending);
    }

    /// Returns true if everything has been listed that decisions are made on.
    fn is_ready(&self) -> bool {
        let index = self.extender.index().read();
        let is_past = now().saturating_duration_since(self.began) >= BUDGETS_WITHIN;
        index.ready().is_ok() && (is_past || index.has_listed_budgets())
    }

    /// Forgets all pods and rooms, since another replica leads.
    fn forget(&self) {
        self.extender.memory().refused = RefusedPods::default();
        let held = self.extender.memory().rooms.clear();
        self.metrics.set_pending(0);
        for uid in held {
            self.release(&uid);
        }
    }

    /// Takes over the rooms that an earlier leader has begun to make, as far as its nominations of pods show them.
    fn adopt(&self) {
        let nominees = room_facts::nominees(&self.extender.index().read());
        for nominee in nominees {
            let pod = nominee.pod.clone();
            let is_held = self.extender.memory().rooms.held.contains_key(&*pod.uid);
            // The watch is late to show that this leader has taken the nomination back.
            let is_withdrawn = self.extender.memory().rooms.is_resting(&pod.uid, now());
            if is_held || is_withdrawn {
                continue;
            }
            let (node, freeing) = (nominee.node, nominee.leaving);
            let text = format!("Another replica has begun to make room for it on {node}.");
            let age = jiff::Timestamp::now().as_second() - nominee.nominated_at;
            let age = Duration::from_secs(u64::try_from(age).unwrap_or(0));
            let left = self.hold_time(nominee.grace_seconds).saturating_sub(age);
            if self.hold(Hold::new(nominee.pod, node, freeing, now() + left, None)) {
                info!(
                    pod = pod.name,
                    namespace = pod.namespace,
                    "room that another replica began to make"
                );
                self.keep_verdict(&pod, Verdict::new(None, text));
            }
        }
    }

    /// Begins to keep a room in memory and in the index; returns false if kube-scheduler may be evicting pods for the pod.
    fn hold(&self, hold: Hold) -> bool {
        let (uid, node, freeing) = (hold.pod.uid.clone(), hold.node.clone(), hold.freeing.clone());
        let is_begun = begin_hold(&self.extender, hold, now());
        if is_begun {
            hints::begin_room(&mut self.extender.index().write(), &uid, &node, &freeing);
        }
        is_begun
    }

    /// Ends a room in memory and in the index.
    fn release(&self, uid: &str) {
        end_hold(&self.extender, uid);
        hints::end_room(&mut self.extender.index().write(), uid);
    }

    async fn keep_rooms(&self) {
        let uids: Vec<Box<str>> = self.extender.memory().rooms.held.keys().cloned().collect();
        for uid in uids {
            let Some((step, hold, is_lost)) = self.next_step(&uid) else {
                continue;
            };
            if is_lost {
                let mut index = self.extender.index().write();
                hints::begin_room(&mut index, &uid, &hold.node, &hold.freeing);
            }
            self.take_step(step, &hold).await;
        }
    }

    /// The next step of a hold, and whether the room of its waiting pod has to be kept again.
    fn next_step(&self, uid: &str) -> Option<(Step, Hold, bool)> {
        let index = self.extender.index().read();
        let mut memory = self.extender.memory();
        let facts = facts_of(&memory, &index, uid)?;
        let hold = memory.rooms.held.get_mut(uid)?;
        let was_freeing = !hold.freeing.is_empty();
        let step = hold.step(facts, now());
        let is_kept = matches!(
            step,
            Step::Wait | Step::Evict | Step::GiveUpEvictions | Step::Nominate
        );
        // Hints have a limited number and time, and the node may have room on other devices than those whose pods go.
        let is_lost = !index.hints().is_hinted(uid) || (was_freeing && hold.freeing.is_empty());
        let is_waiting = facts.preemptor != PreemptorState::Binding;
        Some((step, hold.clone(), is_kept && is_waiting && is_lost))
    }

    async fn take_step(&self, step: Step, hold: &Hold) {
        let uid = hold.pod.uid.as_str();
        match step {
            Step::Wait => {}
            Step::End => {
                if let Some((first_refused, bound_at)) = hold.first_refused.zip(hold.bound_at) {
                    self.metrics
                        .observe(bound_at.saturating_duration_since(first_refused));
                }
                if hold.bound_at.is_none() {
                    let why = "kube-scheduler has nominated it to another node, or removed the nomination";
                    self.extender.memory().rooms.reword(uid, Verdict::dropped(why));
                }
                self.release(uid);
            }
            Step::Nominate => {
                // A failure is tried again with the next tick.
                let _ = self.nominate(&hold.pod, Some(&hold.node)).await;
            }
            Step::Evict => self.evict_pending(hold).await,
            Step::GiveUpEvictions => self.give_up_pending(uid),
            Step::WithdrawLate => {
                self.metrics.count("late");
                let text = "Room was made for it, and it was not bound in time (--make-room-hold).";
                self.keep_verdict(&hold.pod, Verdict::new(None, text));
                self.drop_plan(uid).await;
            }
            Step::WithdrawInVain => {
                let mut verdict = Verdict::dropped("pods have ended, and its node has no room for it");
                if hold.first_refused.is_some() {
                    // Something may take each room, so that no further pods are evicted before the time of the plan is up.
                    verdict.rests_until = Some(hold.until);
                    self.metrics.count("late");
                }
                self.keep_verdict(&hold.pod, verdict);
                self.drop_plan(uid).await;
            }
            Step::Withdraw => drop(self.withdraw(hold).await),
        }
    }

    /// Frees the room of a hold, and removes the nomination if it is still the leader's. The hold itself lasts until the watch
    /// shows that.
    async fn withdraw(&self, hold: &Hold) -> Result<(), WriteError> {
        let uid = hold.pod.uid.as_str();
        hints::end_room(&mut self.extender.index().write(), uid);
        match self.nominate(&hold.pod, None).await {
            Ok(()) | Err(WriteError::Gone) => {}
            Err(error) => return Err(error),
        }
        // Until then the next tick tries again, and `adopt` does not take the nomination for an earlier leader's.
        if !room_facts::is_nominee(&self.extender.index().read(), uid) {
            self.release(uid);
        }
        Ok(())
    }

    /// Nominates a pod to a node, or removes its nomination, unless kube-scheduler has written another one.
    async fn nominate(&self, pod: &PodId, node: Option<&str>) -> Result<(), WriteError> {
        let Some(found) = self.writer.read(pod).await? else {
            return Err(WriteError::Gone);
        };
        let is_bound = !found.spec.node_name.as_deref().unwrap_or_default().is_empty();
        let is_ours = found.nominated_at_by(ROOM_MANAGER).is_some();
        // kube-scheduler's nomination wins, and a bound pod needs none.
        let is_free = match node {
            Some(_) => found.nominated_node().is_none(),
            None => is_ours,
        };
        if is_bound || !is_free {
            return Ok(());
        }
        self.writer.nominate(&found, pod, node).await
    }

    /// The next pod to make room for: in turns the most important one, and the one that was looked at longest ago.
    fn next_preemptor(&self) -> Option<NextPod> {
        let index = self.extender.index().read();
        let mut memory = self.extender.memory();
        let now = now();
        memory.refused.retain(|uid, first_refused| {
            // A pod that no watch shows yet may just be new.
            let is_new = now.saturating_duration_since(first_refused) < NEW_FOR;
            room_facts::waiting(&index, uid).is_some() || (is_new && !index.is_shown(uid))
        });
        let PodMemory { refused, rooms, .. } = &mut *memory;
        rooms.retain_verdicts(refused, now, |uid| room_facts::waiting(&index, uid).is_some());
        let is_by_priority = rooms.begin_turn();
        let mut next: Option<(Option<Instant>, &RefusedPod)> = None;
        for refused in memory.refused.by_importance() {
            let uid = refused.id.uid.as_str();
            // Among pods of one priority, and in every other turn among all, the one that was looked at longest ago.
            let looked_at = memory.rooms.time_of_verdict(uid);
            if let Some((at, known)) = next
                && (at <= looked_at || (is_by_priority && known.priority > refused.priority))
            {
                continue;
            }
            let Some(waiting) = room_facts::waiting(&index, uid) else {
                continue;
            };
            let waited = now.saturating_duration_since(refused.first_refused);
            let is_next = waiting.not_preemptor().is_none()
                && waited >= self.settings.after
                && !memory.rooms.held.contains_key(uid)
                && !memory.rooms.has_new_verdict(uid, now);
            if is_next {
                next = Some((looked_at, refused));
            }
        }
        let (_, refused) = next?;
        let waiting = room_facts::waiting(&index, &refused.id.uid)?;
        let refusing = memory.rooms.refusing.get(&*refused.id.uid).cloned();
        Some(NextPod {
            pod: refused.id.clone(),
            facts: waiting.facts.clone(),
            rules: waiting.rules.clone(),
            first_refused: refused.first_refused,
            nodes: memory.refused.nodes_of(&refused.id.uid),
            counts_leaving: true,
            refusing: refusing.unwrap_or_default(),
        })
    }

    /// Searches for room for the pod whose turn it is, and changes nothing; returns the number of nodes that were searched, for
    /// benchmarks.
    pub fn search(&self) -> Option<usize> {
        let preemptor = self.next_preemptor()?;
        let demand = self.demand(&preemptor)?;
        Some(self.plans(&preemptor, &demand).n_searched)
    }

    async fn decide(&self, preemptor: &NextPod) {
        let Some(demand) = self.demand(preemptor) else {
            return self.extender.memory().refused.forget(&preemptor.pod.uid);
        };
        let plans = self.plans(preemptor, &demand);
        let uid = &preemptor.pod.uid;
        let is_free = plans.free.is_some();
        let free_for = self.extender.memory().rooms.free_for(uid, is_free, now());
        let verdict = match &plans.free {
            None => self.carry_out(preemptor, &demand, &plans).await,
            // Nothing was searched, as the pod fits at once.
            Some(node) if plans.n_searched == 0 => {
                let text = format!("It fits on {node}, so that no pod is evicted for it.");
                Verdict::new(None, text)
            }
            Some(node) if free_for < self.settings.hold => Verdict::waits(node),
            Some(node) => {
                // Pods that are leaving may never end: after a while the pod does not wait for them any more.
                let preemptor = NextPod {
                    counts_leaving: false,
                    ..preemptor.clone()
                };
                let plans = self.plans(&preemptor, &demand);
                if plans.best.is_empty() {
                    Verdict::waits(node)
                } else {
                    self.carry_out(&preemptor, &demand, &plans).await
                }
            }
        };
        self.record(&preemptor.pod, verdict);
    }

    /// The demand of a pod; `None` if it asks for no devices.
    fn demand<'a>(&self, preemptor: &'a NextPod) -> Option<ResourceDemand<'a>> {
        let index = self.extender.index().read();
        let demand = index.demand(&preemptor.pod.uid, &preemptor.facts);
        demand.ok().flatten()
    }

    fn plans(&self, next: &NextPod, demand: &ResourceDemand<'_>) -> Plans {
        let promised = promised_to_others(&self.extender, &next.pod.uid, now());
        let preemptor = self.preemptor(next, demand, &promised);
        let index = self.extender.index();
        plan::plans(&preemptor, &next.refusing, index, &next.nodes, now)
    }

    /// The pod as victims are searched for it.
    fn preemptor<'a>(
        &self,
        next: &NextPod,
        demand: &'a ResourceDemand<'a>,
        promised: &'a Promised,
    ) -> Preemptor<'a> {
        let limits = (self.settings.below, next.counts_leaving);
        Preemptor::for_room(&next.rules, limits, demand, promised)
    }

    /// Carries out the best plan whose evictions the API server accepts.
    async fn carry_out(&self, preemptor: &NextPod, demand: &ResourceDemand<'_>, plans: &Plans) -> Verdict {
        let Some(best) = plans.best.first() else {
            return Verdict::no_victims(plans.n_searched);
        };
        if !self.settings.evicts {
            let plan = self.sentence(best);
            let text = format!(
                "The scheduler could make room for it by the eviction of {plan}; --make-room is report."
            );
            return Verdict {
                event: Some(format!("room can be made by the eviction of {plan}")),
                ..Verdict::new(Some("reported"), text)
            };
        }
        let uid = preemptor.pod.uid.as_str();
        if preemptor.refusing.contains(&best.node) {
            // Plans on nodes that have refused come last, so that all have: they are forgotten, and all nodes are tried again.
            self.extender.memory().rooms.refusing.remove(uid);
        }
        for plan in &plans.best {
            let n_victims = plan.victims.len();
            let n_left = self.extender.memory().rooms.n_left(self.settings.per_hour, now());
            if n_victims > n_left {
                let per_hour = self.settings.per_hour;
                let text = format!(
                    "The scheduler makes no room for it now: more than {per_hour} pods would be evicted within an hour (--make-room-per-hour)."
                );
                return Verdict::new(Some("over_budget"), text);
            }
            if let Some(verdict) = self.carry_out_plan(preemptor, demand, plan).await {
                return verdict;
            }
            let refusing = &mut self.extender.memory().rooms.refusing;
            refusing.entry(uid.into()).or_default().insert(plan.node.clone());
        }
        Verdict::new(Some("refused"), REFUSED)
    }

    /// Carries out one plan: checks all evictions, nominates the pod, waits for the watch to show that, and evicts. Returns
    /// `None` if the API server refuses the evictions, so that the next plan may be tried.
    async fn carry_out_plan(
        &self,
        preemptor: &NextPod,
        demand: &ResourceDemand<'_>,
        plan: &NodeRoom,
    ) -> Option<Verdict> {
        for victim in &plan.victims {
            match self.writer.try_eviction(&victim.pod).await {
                Ok(()) => {}
                Err(error @ (WriteError::Refused(_) | WriteError::Gone)) => {
                    let PodId { namespace, name, .. } = &victim.pod;
                    info!(pod = name, namespace, %error, "the eviction of a pod would be refused");
                    return None;
                }
                Err(_) => return Some(Verdict::dropped(NO_ANSWER)),
            }
        }
        let sentence = self.sentence(plan);
        let pod = &preemptor.pod;
        let found = match self.writer.read(pod).await {
            Ok(Some(found)) => found,
            Ok(None) => return Some(Verdict::dropped("the pod is gone")),
            Err(_) => return Some(Verdict::dropped(NO_ANSWER)),
        };
        if room_rules::check(&found, preemptor.nodes.len()).is_err() {
            return Some(Verdict::dropped("the pod needs no room any more"));
        }
        // Before the write: from now on `preempt` names no victims for the pod, and promises its room to no other pod.
        let grace = plan.victims.iter().map(|victim| victim.grace_seconds).max();
        let until = now() + self.hold_time(grace.unwrap_or(0));
        let (freeing, first_refused) = (plan.freeing.clone(), Some(preemptor.first_refused));
        let hold = Hold::new(pod.clone(), plan.node.clone(), freeing, until, first_refused);
        if !self.hold(hold) {
            return Some(Verdict::dropped("kube-scheduler is evicting pods for it"));
        }
        match self.writer.nominate(&found, pod, Some(&plan.node)).await {
            Ok(()) => {}
            Err(WriteError::Unknown(_)) => {
                // It may have been written.
                self.drop_plan(&pod.uid).await;
                return Some(Verdict::withdrawn(NO_ANSWER, now()));
            }
            Err(_) => {
                self.release(&pod.uid);
                return Some(Verdict::dropped("kube-scheduler has changed the pod meanwhile"));
            }
        }
        if let Some(verdict) = self.unconfirmed(preemptor, demand, plan).await {
            self.drop_plan(&pod.uid).await;
            return Some(verdict);
        }
        self.evict_planned(preemptor, plan, &sentence).await
    }

    /// The time for which room is kept that is free once pods with this grace period have ended.
    fn hold_time(&self, grace_seconds: u32) -> Duration {
        self.settings.hold + Duration::from_secs(grace_seconds.into())
    }

    /// Drops the plan of a hold, for which nothing is evicted or whose time is up: removes the pod's nomination.
    async fn drop_plan(&self, uid: &str) {
        let hold = {
            let mut memory = self.extender.memory();
            let Some(hold) = memory.rooms.held.get_mut(uid) else {
                return;
            };
            // If the API server does not answer now, the next tick tries again.
            hold.is_dropped = true;
            hold.clone()
        };
        if let Err(error) = self.withdraw(&hold).await {
            warn!(pod = hold.pod.name, %error, "the nomination of a pod is removed later");
        }
    }

    /// The state of the pod of a hold, if it still has no room; `None` if it has, or if there is no hold.
    fn state_without_room(&self, uid: &str) -> Option<PreemptorState> {
        let index = self.extender.index().read();
        let facts = facts_of(&self.extender.memory(), &index, uid)?;
        (!facts.is_free).then_some(facts.preemptor)
    }

    /// Waits until the watch shows the nomination, and with it all changes before it. Returns the verdict on the pod if the plan
    /// has to be dropped then, and `None` if it may be carried out.
    async fn unconfirmed(
        &self,
        preemptor: &NextPod,
        demand: &ResourceDemand<'_>,
        plan: &NodeRoom,
    ) -> Option<Verdict> {
        let changed = Verdict::dropped("the cluster has changed meanwhile");
        let uid = preemptor.pod.uid.as_str();
        let began = now();
        loop {
            let is_shown = {
                let index = self.extender.index().read();
                let waiting = room_facts::waiting(&index, uid);
                waiting.map(|waiting| waiting.nominated == Some(&*plan.node))
            };
            match is_shown {
                Some(true) => break,
                Some(false) => {}
                None => return Some(changed),
            }
            if now().saturating_duration_since(began) >= SHOWN_WITHIN {
                return Some(Verdict::withdrawn("the watch of pods is late", now()));
            }
            sleep(POLL).await;
        }
        // `preempt` may have named a victim for another pod between the search and the hold.
        let promised = promised_to_others(&self.extender, uid, now());
        let searched = self.preemptor(preemptor, demand, &promised);
        let found = searched.room_on(self.extender.index().read().filter(), &plan.node);
        let is_same = matches!(found, RoomSearch::Evictions(found) if found.victims == plan.victims);
        (!is_same).then_some(changed)
    }

    /// Evicts the victims of a plan by falling importance; `sentence` is the plan in words. Returns `None` if the API server
    /// refuses the first eviction.
    async fn evict_planned(
        &self,
        preemptor: &NextPod,
        NodeRoom { node, victims, .. }: &NodeRoom,
        sentence: &str,
    ) -> Option<Verdict> {
        let (pod, priority) = (&preemptor.pod, preemptor.rules.priority);
        let uid = pod.uid.as_str();
        let (mut evicted, mut pending) = (Vec::new(), Vec::new());
        let mut is_answering = true;
        for victim in victims {
            // The pod may be deleted, or bound, between two evictions.
            match self.state_without_room(uid) {
                Some(PreemptorState::Nominated) if is_answering => {}
                // The pod is nominated again, and then the evictions go on.
                Some(PreemptorState::Nominated | PreemptorState::Unnominated) => {
                    pending.push(victim.clone());
                    continue;
                }
                _ => break,
            }
            match self.evict((pod, priority), victim, node).await {
                Ok(held) => evicted.push(held),
                Err(WriteError::Gone) => {}
                Err(WriteError::Refused(_)) if evicted.is_empty() && pending.is_empty() => {
                    self.drop_plan(uid).await;
                    return None;
                }
                Err(error) => {
                    is_answering = matches!(error, WriteError::Refused(_));
                    pending.push(victim.clone());
                }
            }
        }
        let has_evicted = !evicted.is_empty();
        if !has_evicted && pending.is_empty() {
            self.drop_plan(uid).await;
            return Some(Verdict::dropped("the pod needs no room any more"));
        }
        self.announce(pod, &evicted, node);
        if let Some(hold) = self.extender.memory().rooms.held.get_mut(uid) {
            (hold.pending, hold.retried_until) = (pending, now() + RETRIED_FOR);
        }
        let text = format!("The scheduler makes room for it: it evicts {sentence}.");
        Some(Verdict::new(has_evicted.then_some("evicted"), text))
    }

    /// Records the event of the pod that others were evicted for, by the memory that each of these held of each GPU.
    fn announce(&self, pod: &PodId, evicted: &[BTreeMap<u32, u64>], node: &str) {
        if !evicted.is_empty() {
            self.event(pod, "MakingRoom", format!("evicted {}", pods_on(evicted, node)));
        }
    }

    /// Evicts one pod of a node for another, and counts it; returns the memory that it holds of each GPU.
    async fn evict(
        &self,
        (preemptor, priority): (&PodId, i32),
        victim: &RoomVictim,
        node: &str,
    ) -> Result<BTreeMap<u32, u64>, WriteError> {
        let eviction = RoomEviction {
            victim: victim.pod.clone(),
            preemptor: preemptor.clone(),
            priority,
            node: node.into(),
            held: self.held_by(node, victim),
        };
        match self.writer.evict(&victim.pod).await {
            Ok(()) => {
                self.count_evicted(&eviction);
                Ok(eviction.held)
            }
            Err(error) => {
                if matches!(error, WriteError::Unknown(_)) {
                    let unanswered = &mut self.extender.memory().rooms.unanswered;
                    unanswered.insert(victim.pod.uid.as_str().into(), (eviction, now()));
                }
                Err(error)
            }
        }
    }

    /// Counts an eviction that was carried out, and records the event of the evicted pod.
    fn count_evicted(&self, eviction: &RoomEviction) {
        let RoomEviction { victim, priority, .. } = eviction;
        self.extender.memory().rooms.note_evicted(&victim.uid, now());
        self.metrics.count_victim();
        let PodId { namespace, name, .. } = &eviction.preemptor;
        info!(pod = victim.name, namespace = victim.namespace, for_pod = %format_args!("{namespace}/{name}"), priority, "evicted a pod to make room");
        let text = format!("evicted to make room for the pod {namespace}/{name} of priority {priority}");
        self.event(victim, "EvictedForRoom", text);
    }

    /// Counts the evictions without an answer that have been carried out, as the watch shows.
    fn count_carried_out(&self) {
        let carried_out = {
            let index = self.extender.index().read();
            // The pod is being deleted, or gone.
            let is_going = |uid: &str| index.is_victim_leaving(uid) != Some(false);
            self.extender.memory().rooms.take_carried_out(is_going)
        };
        for eviction in carried_out {
            self.count_evicted(&eviction);
            self.announce(&eviction.preemptor, &[eviction.held], &eviction.node);
            self.count_first_eviction(&eviction.preemptor.uid);
        }
    }

    /// Forgets the evictions without an answer that were certainly not carried out: if such a pod ends, it is for another cause.
    async fn forget_given_up(&self) {
        let given_up = self.extender.memory().rooms.given_up(now());
        for victim in given_up {
            match self.writer.read(&victim).await {
                Ok(Some(found)) if !found.is_deleting() => {
                    self.extender.memory().rooms.unanswered.remove(&*victim.uid);
                }
                Ok(_) => {}
                // Without an answer the next tick tries again.
                Err(_) => return,
            }
        }
    }

    /// Counts a plan whose first eviction was carried out after the decision.
    fn count_first_eviction(&self, uid: &str) {
        if self.extender.memory().rooms.note_first_eviction(uid) {
            self.metrics.count("evicted");
        }
    }

    /// Tries the evictions of a hold again that the API server has not accepted.
    async fn evict_pending(&self, hold: &Hold) {
        let uid = hold.pod.uid.as_str();
        // The watch may be late.
        let found = match self.writer.read(&hold.pod).await {
            Ok(Some(found)) => found,
            Ok(None) => return,
            Err(_) => return self.note_no_answer(uid),
        };
        let is_ours = found.nominated_at_by(ROOM_MANAGER).is_some();
        let is_nominated = is_ours && found.nominated_node() == Some(&*hold.node);
        if !is_nominated || check_spec(&found).is_err() {
            return;
        }
        let (mut evicted, mut left) = (Vec::new(), Vec::new());
        let mut pending = hold.pending.iter();
        for victim in pending.by_ref() {
            match self.evict_again(hold, found.priority(), victim).await {
                Ok(parts) => evicted.push(parts),
                Err(WriteError::Gone) => {}
                Err(WriteError::Refused(_)) => left.push(victim.clone()),
                Err(WriteError::Unknown(_) | WriteError::NotLeading) => {
                    left.push(victim.clone());
                    break;
                }
            }
        }
        left.extend(pending.cloned());
        self.announce(&hold.pod, &evicted, &hold.node);
        if !evicted.is_empty() {
            self.count_first_eviction(uid);
        }
        if let Some(hold) = self.extender.memory().rooms.held.get_mut(uid) {
            (hold.pending, hold.unanswered_since) = (left, None);
        }
    }

    /// Notes that the API server does not answer, and gives up the evictions of a hold after a while.
    fn note_no_answer(&self, uid: &str) {
        let mut memory = self.extender.memory();
        let Some(hold) = memory.rooms.held.get_mut(uid) else {
            return;
        };
        let since = *hold.unanswered_since.get_or_insert(now());
        drop(memory);
        // The watch may have been silent as long, and its facts are old then.
        if now().saturating_duration_since(since) >= SHOWN_WITHIN {
            self.give_up_pending(uid);
        }
    }

    /// Tries the eviction of a pod again, unless it is leaving, or may not be evicted any more; returns as [`Self::evict`].
    async fn evict_again(
        &self,
        hold: &Hold,
        priority: i32,
        victim: &RoomVictim,
    ) -> Result<BTreeMap<u32, u64>, WriteError> {
        // An eviction without an answer may have been carried out.
        let found = self.writer.read(&victim.pod).await?.ok_or(WriteError::Gone)?;
        if found.is_deleting() {
            return Err(WriteError::Gone);
        }
        if !found.may_be_evicted() {
            return Err(WriteError::Refused("the pod must not be evicted".to_owned()));
        }
        self.evict((&hold.pod, priority), victim, &hold.node).await
    }

    /// Gives up the evictions of a hold that the API server has not accepted; room that is free already stays kept.
    fn give_up_pending(&self, uid: &str) {
        if let Some(hold) = self.extender.memory().rooms.held.get_mut(uid) {
            hold.pending.clear();
        }
        self.metrics.count("refused");
    }

    /// The memory of each GPU that a pod holds on a node, by minor number.
    fn held_by(&self, node: &str, victim: &RoomVictim) -> BTreeMap<u32, u64> {
        counted_on(self.extender.index().read().filter(), node, &victim.pod.uid)
    }

    /// A plan in words.
    fn sentence(&self, NodeRoom { node, victims, .. }: &NodeRoom) -> String {
        let held = victims.iter().map(|victim| self.held_by(node, victim));
        pods_on(&held.collect::<Vec<_>>(), node)
    }

    /// Keeps the answer about a pod. Metrics and an event show it if it differs from the last one; each plan counts in metrics.
    fn record(&self, pod: &PodId, verdict: Verdict) {
        let outcome = verdict.outcome;
        let event = verdict.event.clone();
        if self.keep_verdict(pod, verdict) || outcome == Some("evicted") {
            if let Some(outcome) = outcome {
                self.metrics.count(outcome);
            }
            if let Some(text) = event {
                self.event(pod, "RoomPossible", text);
            }
        }
    }

    fn keep_verdict(&self, pod: &PodId, verdict: Verdict) -> bool {
        let rooms = &mut self.extender.memory().rooms;
        rooms.keep_verdict(&pod.uid, verdict, now())
    }

    fn event(&self, pod: &PodId, reason: &'static str, text: String) {
        let subject = Subject {
            kind: "Pod",
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        };
        self.recorder.pod(subject, EventType::Normal, reason, text);
    }
}

//! `plan ... --evict`: makes the moves of a plan one by one, or a few at a time, with the rights of the caller.
//!
//! A move is an eviction by the Eviction API, which obeys disruption budgets; the pod's controller creates the successor, and
//! kube-scheduler places it. So every move is checked and none is assumed: before each eviction, or those in flight together, a
//! new plan is made, and only pods that the confirmed plan shows are evicted. The command waits a while if a new plan takes
//! others or does not reach the goal, and then stops. Goals that empty GPUs close these first, and never open them.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use futures::future::join_all;
use http::header::CONTENT_TYPE;
use http::{Request, StatusCode};
use proto::read_api::{PlanAnswer, PlanRequest, PlannedMove};
use proto::record::GPU_MINORS;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::args::{PlanArgs, PlannedGoal};
use crate::close;
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::{annotation, controller, text as field};
use crate::format::count;
use crate::jobs;
use crate::output::Screen;
use crate::plan::NOT_REACHED;
use crate::pod_path::pod_path;
use crate::read_api::ReadApiClient;
use crate::source::AnswerSource;

/// Longest time for which the command repeats what fails for now: an eviction that a budget refuses, a request without an answer,
/// a new plan that takes other pods than the confirmed ones.
const RETRY_TIME: Duration = Duration::from_secs(120);
/// Pause between two tries of an eviction that a budget refuses, and between two new plans.
const RETRY_PAUSE: Duration = Duration::from_secs(5);
/// Pause between two looks at a pod or its successor, and after a stale plan.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
const PLAN_TIMEOUT: Duration = Duration::from_secs(60);
/// Most plans since the last move whose first pod is evicted already, as the scheduler has not seen its end yet.
const MAX_STALE: usize = 20;

pub(crate) struct Eviction<'a> {
    pub(crate) connection: &'a ClusterConnection,
    pub(crate) screen: &'a Screen,
    pub(crate) source: AnswerSource,
    pub(crate) args: &'a PlanArgs,
    pub(crate) request: PlanRequest,
    pub(crate) planned_at: Instant,
    /// UIDs of the pods of the first plan that must not be evicted, since their end may fail their Jobs.
    pub(crate) of_jobs: BTreeSet<String>,
    /// Becomes true at Ctrl-C.
    pub(crate) interrupted: watch::Receiver<bool>,
}

/// The reason that a move does not end with a successor on a node.
enum Unmoved {
    /// The pod was gone, or was being deleted, before the command evicted it.
    Gone,
    /// A disruption budget refuses the eviction, and may have room once the other moves in flight have ended.
    Later,
    /// The pod must not be evicted, for this reason.
    Left(String),
    /// The command stops with this sentence.
    Stopped(String),
    Failed(CommandFailure),
}

impl From<CommandFailure> for Unmoved {
    fn from(failure: CommandFailure) -> Self {
        Self::Failed(failure)
    }
}

impl Unmoved {
    /// The end of a move whose eviction got no answer, so that the API server may have made it.
    fn in_doubt(one: &PlannedMove, failure: &CommandFailure) -> Self {
        Self::Stopped(format!(
            "pod {} may have been evicted: {failure}",
            one.display_name()
        ))
    }
}

/// The next act of the command, decided by a new plan.
#[derive(Debug, PartialEq, Eq)]
enum Next<'p> {
    /// Evict these pods, as many of them at a time as the user allows.
    Evict(Vec<&'p PlannedMove>),
    /// Look again a little later, as the reason in the sentence may pass.
    Wait(String),
    Reached,
    Stop(String),
}

/// The pods that the user has confirmed, and those of them that were evicted or stay.
#[derive(Debug, Default)]
struct Progress {
    /// UIDs of the pods that the confirmed plan shows as moves, or as waiting for room in a budget on GPUs that are to be empty.
    confirmed: BTreeSet<String>,
    /// UIDs of the pods that must not be evicted: those of Jobs in the first plan, and confirmed ones.
    stay: BTreeSet<String>,
    /// UIDs of the pods that were evicted, or were gone before.
    evicted: BTreeSet<String>,
    /// True if a budget has refused one of the last evictions beside others: the next one is made alone.
    is_crowded: bool,
    n_moved: usize,
    max_moves: usize,
    /// True with `--partial`: moves are made also if they do not reach the goal.
    is_partial: bool,
    /// True if the confirmed moves may fall short of the goal: the confirmed plan did not reach it, or a successor is
    /// elsewhere than planned.
    falls_short: bool,
}

impl Progress {
    /// The next act. A pod that was not confirmed is never evicted.
    fn next<'p>(&self, goal: &PlannedGoal, plan: &'p PlanAnswer) -> Next<'p> {
        let empties = node_and_gpus(goal).is_some();
        // A goal that frees memory ends with the confirmed moves: a pod that waited may have the memory before the next plan.
        if !empties && !self.falls_short && self.confirmed.is_subset(&self.evicted) {
            return Next::Reached;
        }
        let waits_for = plan.left.iter().find(|one| one.temporary);
        let may_move = |one: &&PlannedMove| !self.stay.contains(&one.uid);
        let mut moves = plan.moves.iter().filter(may_move).peekable();
        let Some(next) = moves.peek() else {
            return match waits_for {
                _ if plan.reached && !empties => Next::Reached,
                // A plan counts GPUs as empty on which a budget keeps pods for now. It has room once the last successor is ready.
                Some(one) if self.n_moved < self.max_moves => {
                    Next::Wait(format!("pod {} stays: {}", one.display_name(), one.reason))
                }
                None if plan.reached => Next::Reached,
                _ if self.n_moved >= self.max_moves => Next::Stop("--max-moves allows no more".to_owned()),
                _ => Next::Stop("no further move helps, and the goal is not reached".to_owned()),
            };
        };
        // While a budget has no room for a confirmed pod, the plan avoids that pod, and may take others or not reach the goal. It
        // may even be about other GPUs meanwhile, without that pod among those left.
        if !plan.reached && !self.is_partial {
            return Next::Wait("the goal can no longer be reached".to_owned());
        }
        if !self.confirmed.contains(&next.uid) {
            return Next::Wait(format!(
                "by now pod {} would have to move, which was not shown; run the command again to see the new plan",
                next.display_name()
            ));
        }
        Next::Evict(
            moves
                .take_while(|one| self.confirmed.contains(&one.uid))
                .collect(),
        )
    }
}

/// The node and the GPUs that a goal empties; no GPUs stand for all.
pub(crate) fn node_and_gpus(goal: &PlannedGoal) -> Option<(&str, &[u32])> {
    match goal {
        PlannedGoal::EmptyNode { node } => Some((node, &[])),
        PlannedGoal::EmptyGpus { node, gpus } => Some((node, gpus)),
        PlannedGoal::Free { .. } | PlannedGoal::Join => None,
    }
}

impl Eviction<'_> {
    /// Asks the user, closes the GPUs that the goal empties, and makes the moves.
    pub(crate) async fn run(mut self, plan: PlanAnswer) -> CommandResult {
        let screen = self.screen;
        if matches!(self.source, AnswerSource::Objects(_)) {
            return Err(CommandFailure::Refused(
                "--evict makes a new plan before each move, which only the scheduler can".to_owned(),
            ));
        }
        if let Some(reason) = self.refusal(&plan) {
            screen.complain(&format!("nothing was evicted, since {reason}"));
            return Ok(ExitCode::from(NOT_REACHED));
        }
        let to_close = node_and_gpus(&self.args.goal);
        if plan.moves.is_empty() && to_close.is_none() {
            return Ok(ExitCode::from(if plan.reached { 0 } else { NOT_REACHED }));
        }
        let mut left = plan.left.iter();
        let hides_left = to_close.is_some() && left.any(|one| one.temporary && one.name.is_empty());
        if hides_left || plan.moves.iter().any(|one| one.name.is_empty()) {
            return Err(CommandFailure::Refused(
                "the names of some pods are hidden from you: --evict takes the right to list them".to_owned(),
            ));
        }
        let mut progress = self.progress_of(&plan);
        if !self.args.yes && !self.is_confirmed(progress.confirmed.len())? {
            screen.complain("nothing was evicted");
            return Ok(ExitCode::FAILURE);
        }
        let mut closed = None;
        if let Some((node, gpus)) = to_close {
            // Before the first eviction, so that no successor is placed on the GPUs that are to be empty.
            let closing = close::add(self.connection, node, gpus).await;
            // Without an answer the API server may have written the annotation all the same.
            if let Err(failure) = &closing
                && failure.is_temporary()
            {
                let (which, opening) = (close::which(gpus), close::opening(node, gpus));
                screen.complain(&format!(
                    "{which} of node {node} may be closed: `{opening}` opens them"
                ));
            }
            let gpus = closing?;
            screen.complain(&close::closing(node, &gpus));
            closed = Some((node, gpus));
        }
        // From here on Ctrl-C does not end the process, which has to name the pods that it may have evicted.
        self.interrupted = interrupted();
        let ended = self.make_moves(&mut progress).await;
        if let Some((node, gpus)) = closed {
            let (which, opening) = (close::which(&gpus), close::opening(node, &gpus));
            screen.complain(&format!(
                "{which} of node {node} stay closed: `{opening}` opens them"
            ));
        }
        let moved = count(progress.n_moved as u64, "pod");
        let (text, code) = match &ended {
            Ok(None) if to_close.is_some() => (format!("the goal is reached: {moved} moved"), 0),
            Ok(None) => (
                format!(
                    "no further move is needed: {moved} moved; a pod that waited may have the free memory by now"
                ),
                0,
            ),
            Ok(Some(reason)) => (format!("stopped after {moved}: {reason}"), NOT_REACHED),
            Err(_) => (format!("stopped after {moved} by a failure"), NOT_REACHED),
        };
        screen.complain(&text);
        ended?;
        Ok(ExitCode::from(code))
    }

    /// The reason that the command makes no move of the first plan; `None` if it makes them.
    fn refusal(&self, plan: &PlanAnswer) -> Option<String> {
        if node_and_gpus(&self.args.goal).is_none() && !self.of_jobs.is_empty() {
            let text = "the plan needs the pods of Jobs that are left; with the annotation gpushare/evict: \"false\" on them the next \
                        plan takes others";
            return Some(text.to_owned());
        }
        if plan.reached || self.args.partial {
            return None;
        }
        if plan.moves.is_empty() {
            return Some("no move helps".to_owned());
        }
        let is_full = plan.moves.len() >= self.request.limits.max_moves;
        let more = if is_full {
            ", and a higher --max-moves allows more of them"
        } else {
            ""
        };
        Some(format!(
            "the moves do not reach the goal; --partial makes those that come nearest{more}"
        ))
    }

    /// The progress before the first move of a plan that the user has seen.
    fn progress_of(&self, plan: &PlanAnswer) -> Progress {
        let mut confirmed: BTreeSet<String> = plan.moves.iter().map(|one| one.uid.clone()).collect();
        if node_and_gpus(&self.args.goal).is_some() {
            let waiting = plan.left.iter().filter(|one| one.temporary);
            confirmed.extend(waiting.map(|one| one.uid.clone()));
        }
        Progress {
            confirmed,
            stay: self.of_jobs.clone(),
            max_moves: self.request.limits.max_moves,
            is_partial: self.args.partial,
            falls_short: !plan.reached,
            ..Progress::default()
        }
    }

    fn is_confirmed(&self, n_pods: usize) -> Result<bool, CommandFailure> {
        if !io::stdin().is_terminal() {
            return Err(CommandFailure::Input(
                "--evict asks before it evicts, and standard input is no terminal: add --yes".to_owned(),
            ));
        }
        let pods = count(n_pods as u64, "pod");
        let question = match node_and_gpus(&self.args.goal) {
            Some((node, gpus)) => format!("Close {} of node {node}, and evict {pods}?", close::which(gpus)),
            None => format!("Evict {pods}?"),
        };
        self.screen.complain(&format!("{question} [y/N]"));
        let mut line = String::new();
        io::stdin().read_line(&mut line).map_err(CommandFailure::input)?;
        Ok(["y", "yes"].contains(&line.trim().to_ascii_lowercase().as_str()))
    }

    /// Makes moves by new plans until the goal is reached; returns the reason if it stops before that.
    async fn make_moves(&mut self, progress: &mut Progress) -> Result<Option<String>, CommandFailure> {
        let mut n_stale = 0;
        let mut last_move = Instant::now();
        let min_run_seconds = self.request.limits.min_run_seconds;
        loop {
            // A pod that was too young for the first plan must not move, however long this takes. A second less, for rounding.
            let since = self.planned_at.elapsed().as_secs().saturating_sub(1);
            self.request.limits.min_run_seconds = min_run_seconds.saturating_add(since);
            self.request.limits.max_moves = progress.max_moves.saturating_sub(progress.n_moved);
            let Some(plan) = self.new_plan().await? else {
                return Ok(Some("interrupted".to_owned()));
            };
            let mut moves = match progress.next(&self.args.goal, &plan) {
                Next::Reached => return Ok(None),
                Next::Stop(reason) => return Ok(Some(reason)),
                Next::Wait(reason) if last_move.elapsed() >= RETRY_TIME => return Ok(Some(reason)),
                Next::Wait(_) => {
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
                Next::Evict(moves) => moves,
            };
            // The plan is stale if it moves a pod that is evicted already: the scheduler has not seen the end of the pod yet.
            if let Some(stale) = moves.first()
                && progress.evicted.contains(&stale.uid)
            {
                n_stale += 1;
                if n_stale > MAX_STALE {
                    let name = stale.display_name();
                    let reason = format!("the scheduler still counts pod {name}, which was evicted");
                    return Ok(Some(reason));
                }
                sleep(LOOK_PAUSE).await;
                continue;
            }
            moves.retain(|one| !progress.evicted.contains(&one.uid));
            let n_before = progress.n_moved;
            let stopped = self.make_together(&moves, progress).await?;
            if stopped.is_some() {
                return Ok(stopped);
            }
            if progress.n_moved > n_before {
                (n_stale, last_move) = (0, Instant::now());
            }
        }
    }

    /// Makes the first of these moves, as many as may be in flight together; returns the reasons if the command has to stop.
    async fn make_together(
        &self,
        moves: &[&PlannedMove],
        progress: &mut Progress,
    ) -> Result<Option<String>, CommandFailure> {
        let most = if progress.is_crowded {
            1
        } else {
            self.args.parallel.into()
        };
        // Each move with its controller's UID, or with the reason that there is nothing to evict.
        let mut together: Vec<(&PlannedMove, Result<String, Unmoved>)> = Vec::new();
        let mut controllers = BTreeSet::new();
        // A move is possible only after all those before it in the plan, so none is skipped.
        for one in moves.iter().take(most) {
            let controller = match self.controller_of(one).await {
                // Either of two pods of one controller would be taken for moved with the successor of the other.
                Ok(uid) if !controllers.insert(uid.clone()) => break,
                Err(Unmoved::Failed(failure)) => return Err(failure),
                controller => controller,
            };
            together.push((one, controller));
        }
        let is_alone = together.len() == 1;
        progress.is_crowded = false;
        let made = together
            .into_iter()
            .map(async |(one, controller)| match controller {
                Ok(controller) => (one, self.make_move(one, &controller, is_alone).await),
                Err(unmoved) => (one, Err(unmoved)),
            });
        let (mut reasons, mut failed) = (Vec::new(), None);
        for (one, made) in join_all(made).await {
            let uid = one.uid.clone();
            match made {
                Ok(as_planned) => {
                    progress.falls_short |= !as_planned;
                    progress.n_moved += 1;
                    progress.evicted.insert(uid);
                }
                Err(Unmoved::Gone) => {
                    progress.evicted.insert(uid);
                }
                Err(Unmoved::Later) => progress.is_crowded = true,
                Err(Unmoved::Left(reason)) => {
                    let left = format!("pod {} stays: {reason}", one.display_name());
                    if node_and_gpus(&self.args.goal).is_some() {
                        self.screen.complain(&left);
                        progress.stay.insert(uid);
                    } else {
                        // A plan for free memory needs all its moves.
                        reasons.push(left);
                    }
                }
                Err(Unmoved::Stopped(reason)) => reasons.push(reason),
                Err(Unmoved::Failed(failure)) => failed = Some(failure),
            }
        }
        let stopped = (!reasons.is_empty()).then(|| reasons.join("; "));
        let Some(failure) = failed else { return Ok(stopped) };
        if let Some(stopped) = stopped {
            self.screen.complain(&stopped);
        }
        Err(failure)
    }

    /// A new plan; `None` at Ctrl-C. Asks again while the scheduler restarts, or is busy with the plans of others.
    async fn new_plan(&mut self) -> Result<Option<PlanAnswer>, CommandFailure> {
        let deadline = Instant::now() + RETRY_TIME;
        loop {
            if *self.interrupted.borrow() {
                return Ok(None);
            }
            let answer = tokio::select! {
                answer = timeout(PLAN_TIMEOUT, self.source.plan(&self.request)) => answer,
                // A sender that is gone has seen no Ctrl-C.
                Ok(_) = self.interrupted.wait_for(|is_true| *is_true) => return Ok(None),
            };
            let failure = match answer {
                Ok(Err(failure)) if failure.is_temporary() => failure,
                Ok(answer) => return answer.map(Some),
                Err(_) => CommandFailure::Unreachable(format!("no plan within {PLAN_TIMEOUT:?}")),
            };
            if Instant::now() >= deadline {
                return Err(failure);
            }
            sleep(RETRY_PAUSE).await;
            // The connection may be that to a replica that has ended.
            if let Ok(api) = ReadApiClient::connect(self.connection).await {
                self.source = AnswerSource::Scheduler(api);
            }
        }
    }

    /// The pod of a move in the API; `None` if it is gone, or is being deleted: then its successor may be there already.
    async fn staying(&self, one: &PlannedMove) -> Result<Option<Value>, CommandFailure> {
        let object = self.connection.get("read the pod", &pod_path(one)?).await?;
        Ok(object.filter(|object| is_staying(object, one)))
    }

    async fn controller_of(&self, one: &PlannedMove) -> Result<String, Unmoved> {
        let object = self.staying(one).await?.ok_or(Unmoved::Gone)?;
        // Without a controller no other pod would come in the place of this one.
        let Some(owner) = controller(&object) else {
            let name = one.display_name();
            return Err(Unmoved::Stopped(format!("pod {name} has no controller any more")));
        };
        if field(owner, "/kind") == "Job"
            && let Some(reason) = jobs::obstacle(self.connection, one, owner).await?
        {
            return Err(Unmoved::Left(reason));
        }
        Ok(field(owner, "/uid").to_owned())
    }

    /// Evicts the pod of a move, and waits until it is gone and its successor, another pod of the same `controller` (a UID), has
    /// a node; returns true if that is the planned one, with the planned GPUs. Waits for room in a disruption budget only if no
    /// other move is in flight (`is_alone`).
    async fn make_move(&self, one: &PlannedMove, controller: &str, is_alone: bool) -> Result<bool, Unmoved> {
        let name = one.display_name();
        let before = self.pods_of(one, controller).await?;
        let known: BTreeSet<&str> = before.iter().map(|pod| field(pod, "/metadata/uid")).collect();
        let seen = before
            .iter()
            .find(|pod| is_staying(pod, one))
            .ok_or(Unmoved::Gone)?;
        let mut version = field(seen, "/metadata/resourceVersion").to_owned();
        // A dry run first: it meets missing rights, and budgets without room, before an answer to a real eviction can be lost.
        for is_dry in [true, false] {
            self.evict(one, &mut version, is_dry, is_alone).await?;
        }
        let deadline = Instant::now() + self.args.timeout;
        loop {
            let pods = match self.pods_of(one, controller).await {
                Err(failure)
                    if failure.may_pass() && Instant::now() < deadline && !*self.interrupted.borrow() =>
                {
                    sleep(LOOK_PAUSE).await;
                    continue;
                }
                Err(failure) => {
                    return Err(Unmoved::Stopped(format!(
                        "pod {name} was evicted, and its successor cannot be seen: {failure}"
                    )));
                }
                Ok(pods) => pods,
            };
            let (mut is_gone, mut placed) = (true, None);
            for pod in &pods {
                let uid = field(pod, "/metadata/uid");
                is_gone &= uid != one.uid;
                if placed.is_none() && !known.contains(uid) && !field(pod, "/spec/nodeName").is_empty() {
                    placed = Some(pod);
                }
            }
            if let (true, Some(successor)) = (is_gone, placed) {
                let node = field(successor, "/spec/nodeName");
                let expected = if node == one.to {
                    String::new()
                } else {
                    format!(" (planned: {})", one.to)
                };
                let as_planned = node == one.to && gpus(successor) == one.to_gpus;
                let successor = field(successor, "/metadata/name");
                self.screen.complain(&format!(
                    "{name} left {}; {successor} is on {node}{expected}",
                    one.from
                ));
                return Ok(as_planned);
            }
            let waits_for = if is_gone {
                format!("pod {name} is gone, and no successor has a node")
            } else {
                format!("pod {name} was evicted, and does not go")
            };
            if *self.interrupted.borrow() {
                return Err(Unmoved::Stopped(format!("interrupted: {waits_for} yet")));
            }
            if Instant::now() >= deadline {
                return Err(Unmoved::Stopped(format!(
                    "{waits_for} after {:?}",
                    self.args.timeout
                )));
            }
            sleep(LOOK_PAUSE).await;
        }
    }

    /// Evicts a pod, or tries to by a dry run, again while a budget refuses that. Its resource version is a precondition: without
    /// it the API server accepts an eviction of a pod that is being deleted.
    async fn evict(
        &self,
        one: &PlannedMove,
        version: &mut String,
        is_dry: bool,
        is_alone: bool,
    ) -> Result<(), Unmoved> {
        let name = one.display_name();
        let path = format!("{}/eviction", pod_path(one)?);
        let deadline = Instant::now() + RETRY_TIME;
        // True after a request without an answer, by which the API server may have evicted the pod.
        let mut may_be_evicted = false;
        loop {
            let mut options = json!({"preconditions": {"uid": one.uid, "resourceVersion": version}});
            if is_dry && let Some(options) = options.as_object_mut() {
                options.insert("dryRun".to_owned(), json!(["All"]));
            }
            let eviction = json!({
                "apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": one.name, "namespace": one.namespace},
                "deleteOptions": options,
            });
            let request = Request::post(&path).header(CONTENT_TYPE, "application/json");
            let created = self
                .connection
                .write(&format!("evict pod {name}"), request, &eviction)
                .await;
            let is_over = *self.interrupted.borrow() || Instant::now() >= deadline;
            match created {
                Ok(Some(_)) => return Ok(()),
                // An earlier request, which got no answer, has evicted it.
                Ok(None) if may_be_evicted => return Ok(()),
                Ok(None) => return Err(Unmoved::Gone),
                // The pod has changed, or another one has its name by now.
                Err(CommandFailure::Api { code, .. })
                    if code == StatusCode::CONFLICT && Instant::now() < deadline =>
                {
                    match self.staying(one).await {
                        Ok(None) if may_be_evicted => return Ok(()),
                        Ok(None) => return Err(Unmoved::Gone),
                        Ok(Some(changed)) => {
                            field(&changed, "/metadata/resourceVersion").clone_into(version);
                        }
                        Err(failure) if may_be_evicted => return Err(Unmoved::in_doubt(one, &failure)),
                        Err(failure) => return Err(failure.into()),
                    }
                }
                // The answer of the API server where a disruption budget has no room.
                Err(CommandFailure::Api { code, .. })
                    if code == StatusCode::TOO_MANY_REQUESTS && !is_alone =>
                {
                    return Err(Unmoved::Later);
                }
                Err(CommandFailure::Api { code, reason, .. }) if code == StatusCode::TOO_MANY_REQUESTS => {
                    if is_over {
                        return Err(Unmoved::Stopped(format!(
                            "pod {name} may not be evicted: {reason}"
                        )));
                    }
                    sleep_until(deadline.min(Instant::now() + RETRY_PAUSE)).await;
                }
                Err(failure) => {
                    may_be_evicted |= !is_dry && failure.is_temporary();
                    // The dry run had the right to evict, so a refusal of it now may pass.
                    let may_pass = failure.is_temporary() || (!is_dry && failure.may_pass());
                    if may_pass && !is_over {
                        sleep(LOOK_PAUSE).await;
                    } else if may_be_evicted {
                        return Err(Unmoved::in_doubt(one, &failure));
                    } else {
                        return Err(failure.into());
                    }
                }
            }
        }
    }

    async fn pods_of(&self, one: &PlannedMove, uid: &str) -> Result<Vec<Value>, CommandFailure> {
        let path = format!("/api/v1/namespaces/{}/pods", one.namespace);
        let mut pods = self.connection.list_json(&path).await?;
        pods.retain(|pod| controller(pod).is_some_and(|owner| field(owner, "/uid") == uid));
        Ok(pods)
    }
}

fn is_staying(pod: &Value, one: &PlannedMove) -> bool {
    field(pod, "/metadata/uid") == one.uid && pod.pointer("/metadata/deletionTimestamp").is_none()
}

/// The minor numbers of the GPUs in a pod's record, in rising order.
fn gpus(pod: &Value) -> Vec<u32> {
    let minors = annotation(pod, GPU_MINORS).split(',');
    let mut minors: Vec<u32> = minors.filter_map(|minor| minor.parse().ok()).collect();
    minors.sort_unstable();
    minors
}

/// Becomes true at Ctrl-C.
fn interrupted() -> watch::Receiver<bool> {
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            let _ = sender.send(true);
        }
        // Receivers of a sender that is gone keep the last value.
    });
    receiver
}

#[cfg(test)]
mod tests;

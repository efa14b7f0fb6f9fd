//! `plan ... --evict`: makes the moves of a plan one by one, with the rights of the caller.
//!
//! A move is an eviction by the Eviction API, which obeys disruption budgets; the pod's controller creates the successor, and
//! kube-scheduler places it. So every move is checked and none is assumed: a new plan is made from the cluster as it is before each
//! eviction, which stops the command if the goal can no longer be reached, and ends it if the goal is reached already. Goals that
//! empty GPUs close these first, and never open them.

use std::collections::BTreeSet;
use std::io::{self, BufRead, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use http::StatusCode;
use proto::read_api::{PlanAnswer, PlanRequest, PlannedMove};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::{EvictArgs, PlannedGoal};
use crate::close;
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::text as field;
use crate::format::count;
use crate::output::Screen;
use crate::plan::NOT_REACHED;
use crate::source::AnswerSource;

/// Time for which a budget may refuse an eviction.
const MOST_REFUSED: Duration = Duration::from_secs(120);
/// Pause between two tries of an eviction that a budget refuses.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);
/// Pause between two looks at a pod or its successors.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Most plans in a row whose first pod is gone already: the scheduler has not seen its end yet.
const MAX_STALE: usize = 20;

/// The moves of one goal.
pub(crate) struct Eviction<'a> {
    pub(crate) connection: &'a ClusterConnection,
    pub(crate) screen: &'a Screen,
    pub(crate) source: AnswerSource,
    pub(crate) goal: &'a PlannedGoal,
    pub(crate) request: PlanRequest,
    pub(crate) args: &'a EvictArgs,
}

/// The end of a step that is no failure: the sentence for which the command stops.
enum Step {
    /// The pod has a successor on a node.
    Moved,
    /// The pod was gone before.
    Gone,
    /// The command stops.
    Stopped(String),
}

impl Eviction<'_> {
    /// Asks, closes the GPUs of the goal, and makes the moves.
    pub(crate) async fn run(mut self, plan: PlanAnswer) -> CommandResult {
        if matches!(self.source, AnswerSource::Objects(_)) {
            return Err(CommandFailure::Refused(
                "--evict makes a new plan before each move, which only the scheduler can".to_owned(),
            ));
        }
        if !plan.reached && !self.args.partial {
            let text = "nothing was evicted, since the goal cannot be reached; --partial makes the moves that come nearest";
            self.screen.complain(text);
            return Ok(ExitCode::from(NOT_REACHED));
        }
        if plan.moves.is_empty() {
            return Ok(ExitCode::from(if plan.reached { 0 } else { NOT_REACHED }));
        }
        if plan.moves.iter().any(|one| one.name.is_empty()) {
            return Err(CommandFailure::Refused(
                "the names of some pods are hidden from you: --evict takes the right to list them".to_owned(),
            ));
        }
        if !self.args.yes && !self.is_confirmed(&plan)? {
            self.screen.complain("nothing was evicted");
            return Ok(ExitCode::FAILURE);
        }
        let closed = match self.goal {
            PlannedGoal::EmptyNode { node } => Some((node, &[][..])),
            PlannedGoal::EmptyGpus { node, gpus } => Some((node, gpus.as_slice())),
            PlannedGoal::Free { .. } | PlannedGoal::Join => None,
        };
        if let Some((node, gpus)) = closed {
            close::close(self.connection, self.screen, node, gpus).await?;
        }
        let ended = self.make_moves().await;
        if let Some((node, _)) = closed {
            let text =
                format!("the GPUs of node {node} stay closed: `kubectl gpushare open {node}` opens them");
            self.screen.complain(&text);
        }
        ended
    }

    /// Asks the user on the terminal.
    fn is_confirmed(&self, plan: &PlanAnswer) -> Result<bool, CommandFailure> {
        if !io::stdin().is_terminal() {
            return Err(CommandFailure::Input(
                "--evict asks before it evicts, and standard input is no terminal: add --yes".to_owned(),
            ));
        }
        let pods = count(plan.moves.len() as u64, "pod");
        self.screen.complain(&format!("Evict {pods}? [y/N]"));
        let mut line = String::new();
        io::stdin()
            .lock()
            .read_line(&mut line)
            .map_err(CommandFailure::input)?;
        Ok(["y", "yes"].contains(&line.trim().to_ascii_lowercase().as_str()))
    }

    /// Makes moves, each by a new plan, until the goal is reached or something is not as planned.
    async fn make_moves(&mut self) -> CommandResult {
        let interrupted = interrupted();
        let (mut n_moved, mut n_stale) = (0_usize, 0);
        let (mut evicted, mut last_move) = (BTreeSet::new(), Instant::now());
        let most = self.request.limits.max_moves;
        let stop = loop {
            if *interrupted.borrow() {
                break "interrupted".to_owned();
            }
            self.request.limits.max_moves = most - n_moved;
            let plan = self.source.plan(&self.request).await?;
            let Some(next) = plan.moves.first().cloned() else {
                // A budget has room again once the last successor is ready.
                let waits_for = plan.left.iter().find(|one| one.temporary);
                match waits_for {
                    Some(one) if n_moved < most && last_move.elapsed() >= MOST_REFUSED => {
                        break format!("pod {} stays: {}", one.display_name(), one.reason);
                    }
                    Some(_) if n_moved < most => {
                        sleep(REFUSED_PAUSE).await;
                        continue;
                    }
                    _ if plan.reached => {
                        let moved = count(n_moved as u64, "pod");
                        self.screen
                            .complain(&format!("the goal is reached: {moved} moved"));
                        return Ok(ExitCode::SUCCESS);
                    }
                    _ if n_moved == most => break "--max-moves allows no more".to_owned(),
                    _ => break "no further move helps, and the goal is not reached".to_owned(),
                }
            };
            if !plan.reached && !self.args.partial {
                break "the goal can no longer be reached".to_owned();
            }
            // The scheduler may not have seen the end of the last pod yet.
            if evicted.contains(&next.uid) {
                n_stale += 1;
                if n_stale > MAX_STALE {
                    break format!(
                        "the scheduler still counts pod {}, which was evicted",
                        next.display_name()
                    );
                }
                sleep(LOOK_PAUSE).await;
                continue;
            }
            evicted.insert(next.uid.clone());
            match self.make(&next, &interrupted).await? {
                Step::Moved => (n_moved, n_stale, last_move) = (n_moved + 1, 0, Instant::now()),
                Step::Gone => {}
                Step::Stopped(reason) => break reason,
            }
        };
        let moved = count(n_moved as u64, "pod");
        self.screen.complain(&format!("stopped after {moved}: {stop}"));
        Ok(ExitCode::from(NOT_REACHED))
    }

    /// Evicts a pod, and waits until it is gone and a successor has a node.
    async fn make(
        &self,
        one: &PlannedMove,
        interrupted: &watch::Receiver<bool>,
    ) -> Result<Step, CommandFailure> {
        let (pod, name) = (pod_path(one)?, one.display_name());
        let Some(object) = self.connection.get("read the pod", &pod).await? else {
            return Ok(Step::Gone);
        };
        if field(&object, "/metadata/uid") != one.uid {
            return Ok(Step::Gone);
        }
        let Some(controller) = controller(&object).map(str::to_owned) else {
            return Ok(Step::Stopped(format!("pod {name} has no controller any more")));
        };
        let before = self.pods_of(one, &controller).await?;
        let known: BTreeSet<&str> = before.iter().map(|pod| field(pod, "/metadata/uid")).collect();
        for is_dry in [true, false] {
            if let Some(step) = self.evict(one, &pod, is_dry, interrupted).await? {
                return Ok(step);
            }
        }
        let deadline = Instant::now() + self.args.timeout;
        loop {
            let pods = self.pods_of(one, &controller).await?;
            let is_gone = pods.iter().all(|pod| field(pod, "/metadata/uid") != one.uid);
            let successor = pods.iter().find(|pod| {
                !known.contains(field(pod, "/metadata/uid")) && !field(pod, "/spec/nodeName").is_empty()
            });
            if let (true, Some(successor)) = (is_gone, successor) {
                let node = field(successor, "/spec/nodeName");
                let expected = if node == one.to {
                    String::new()
                } else {
                    format!(" (planned: {})", one.to)
                };
                let successor = field(successor, "/metadata/name");
                self.screen.complain(&format!(
                    "{name} left {}; {successor} is on {node}{expected}",
                    one.from
                ));
                return Ok(Step::Moved);
            }
            let waits_for = if is_gone {
                format!("pod {name} is gone, and no successor has a node")
            } else {
                format!("pod {name} was evicted, and does not go")
            };
            if *interrupted.borrow() {
                return Ok(Step::Stopped(format!("interrupted: {waits_for} yet")));
            }
            if Instant::now() >= deadline {
                return Ok(Step::Stopped(format!(
                    "{waits_for} after {:?}",
                    self.args.timeout
                )));
            }
            sleep(LOOK_PAUSE).await;
        }
    }

    /// Evicts a pod, again and again while a budget refuses that; returns the step if it ends here.
    async fn evict(
        &self,
        one: &PlannedMove,
        pod: &str,
        is_dry: bool,
        interrupted: &watch::Receiver<bool>,
    ) -> Result<Option<Step>, CommandFailure> {
        let name = one.display_name();
        let mut options = json!({"preconditions": {"uid": one.uid}});
        if is_dry && let Some(options) = options.as_object_mut() {
            options.insert("dryRun".to_owned(), json!(["All"]));
        }
        let eviction = json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": one.name, "namespace": one.namespace},
            "deleteOptions": options,
        });
        let path = format!("{pod}/eviction");
        let deadline = Instant::now() + MOST_REFUSED;
        loop {
            match self
                .connection
                .create(&format!("evict pod {name}"), &path, &eviction)
                .await
            {
                Ok(Some(_)) => return Ok(None),
                Ok(None) => return Ok(Some(Step::Gone)),
                // Another pod has the name by now.
                Err(CommandFailure::Api { code, .. }) if code == StatusCode::CONFLICT => {
                    return Ok(Some(Step::Gone));
                }
                Err(CommandFailure::Api { code, reason, .. }) if code == StatusCode::TOO_MANY_REQUESTS => {
                    if *interrupted.borrow() || Instant::now() >= deadline {
                        return Ok(Some(Step::Stopped(format!(
                            "pod {name} may not be evicted: {reason}"
                        ))));
                    }
                    sleep_until(deadline.min(Instant::now() + REFUSED_PAUSE)).await;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The pods of a controller, by its UID.
    async fn pods_of(&self, one: &PlannedMove, uid: &str) -> Result<Vec<Value>, CommandFailure> {
        let path = format!("/api/v1/namespaces/{}/pods", one.namespace);
        let mut pods = self.connection.list_json(&path).await?;
        pods.retain(|pod| controller(pod) == Some(uid));
        Ok(pods)
    }
}

/// The path of the pod of a move; refuses names that would change the path.
fn pod_path(one: &PlannedMove) -> Result<String, CommandFailure> {
    let is_plain = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
    };
    let PlannedMove { namespace, name, .. } = one;
    if is_plain(namespace) && is_plain(name) {
        Ok(format!("/api/v1/namespaces/{namespace}/pods/{name}"))
    } else {
        Err(CommandFailure::Refused(format!(
            "pod {namespace:?}/{name:?} has no valid name"
        )))
    }
}

/// The UID of a pod's controller.
fn controller(pod: &Value) -> Option<&str> {
    let mut owners = pod.pointer("/metadata/ownerReferences")?.as_array()?.iter();
    owners
        .find(|owner| owner.get("controller") == Some(&Value::Bool(true)))?
        .get("uid")?
        .as_str()
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

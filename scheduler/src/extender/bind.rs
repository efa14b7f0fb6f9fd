//! `bind`: chooses the pod's devices, writes one binding, and keeps or releases the devices by its outcome.
//!
//! A bind runs to its end even if kube-scheduler hangs up, since its decision would be left open otherwise.

use std::sync::Arc;
use std::time::Duration;

use daemon::panics::named;
use placement::Reason;
use proto::extender::{ExtenderBindingArgs, ExtenderBindingResult};
use proto::record::DEVICE_ALLOCATED;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

use super::{Extender, RequestError, json, now};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::{BindOutcome, PodBinding, PodId};
use crate::index::{AssumeError, Assumed, AssumptionState, Phase, assumption};
use crate::leader::NotLeading;
use crate::metrics::{Ending, Timer};

/// The first and the longest pause between two reads of a pod whose binding has no known outcome.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The time after which the pod of a written binding is read from the API server if no watch has shown the binding.
const UNSEEN_LIMIT: Duration = Duration::from_secs(300);
/// Time between two searches for such pods. A search begins at once after a complete list of pods that lacks one of them.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The reason that a pod was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The watches have not synced.
    #[error("{0}")]
    NotReady(String),
    /// Another replica leads, or this one does not bind yet.
    #[error(transparent)]
    NotLeading(#[from] NotLeading),
    /// The request names no valid pod, or none that the API server has.
    #[error("{0}")]
    NoPod(String),
    /// The time of the bind was up before anything was written.
    #[error("nothing is written: there is no time left after {0}")]
    Late(&'static str),
    /// No watch has shown the pod, and the API server did not return it.
    #[error("cannot read the pod: {0}")]
    Unreadable(String),
    /// No devices could be chosen.
    #[error(transparent)]
    Undecided(#[from] AssumeError),
    /// The API server refused the binding.
    #[error("the API server refused the binding: {0}")]
    Refused(String),
    /// The API server answered 429.
    #[error(
        "nothing is written: the API server is too busy, see that it serves the scheduler before others (FlowSchema): {0}"
    )]
    Busy(String),
    /// The binding may have been written or not.
    #[error("binding outcome unknown, checking: {0}")]
    Unknown(String),
    /// The task of the bind ended early.
    #[error("the bind broke off: {0}")]
    Interrupted(String),
}

/// The cause of a failed bind: it decides if later filters let the pod avoid the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The node has no room for the pod.
    Node,
    /// Another node would not help.
    Elsewhere,
    /// The API server does not say if another node would help.
    Unclear,
}

impl BindError {
    /// The metrics label of the reason, the outcome that metrics count for the request, and the cause as far as the error shows
    /// it.
    fn outcome(&self) -> (&'static str, Ending, Cause) {
        use Cause::{Elsewhere, Node, Unclear};
        match self {
            Self::NotReady(_) => ("not_ready", Ending::NotReady, Elsewhere),
            Self::NotLeading(NotLeading::Starting) => ("not_leading", Ending::NotReady, Elsewhere),
            Self::NotLeading(_) => ("not_leading", Ending::NotLeading, Elsewhere),
            Self::NoPod(_) => ("no_pod", Ending::Refused, Elsewhere),
            Self::Late(_) => ("late", Ending::Refused, Elsewhere),
            Self::Unreadable(_) => ("unreadable", Ending::Refused, Elsewhere),
            Self::Undecided(error) => match error {
                // Filters do not offer the node while its plugin is away, so the pod need not avoid it for longer.
                AssumeError::NoRoom {
                    reason: Reason::PluginAway,
                    ..
                } => ("plugin_away", Ending::Refused, Elsewhere),
                AssumeError::NoRoom { .. } | AssumeError::Reserve { .. } => {
                    ("no_room", Ending::Refused, Node)
                }
                AssumeError::Invalid(_) => ("invalid", Ending::Refused, Elsewhere),
                AssumeError::BoundElsewhere { .. }
                | AssumeError::AssumedElsewhere { .. }
                | AssumeError::Outlived => ("bound_before", Ending::Refused, Elsewhere),
            },
            // An admission webhook may refuse bindings to this very node.
            Self::Refused(_) => ("api_server", Ending::Refused, Unclear),
            Self::Busy(_) => ("api_server_busy", Ending::Refused, Elsewhere),
            Self::Unknown(_) | Self::Interrupted(_) => ("unknown", Ending::Unknown, Elsewhere),
        }
    }
}

/// Answers a bind request. A pod that cannot be bound is an answer too, or kube-scheduler would drop the reason.
pub(super) async fn answer(
    extender: &Arc<Extender>,
    body: &[u8],
    deadline: Instant,
    timer: &mut Timer<'_>,
) -> Result<Vec<u8>, RequestError> {
    let args = parse(body)?;
    let (uid, node) = (args.pod_uid.clone(), args.node.clone());
    // The names are logged before they are checked, and come from the request.
    let pod_shown = shorten(&format!("{}/{}", args.pod_namespace, args.pod_name));
    let node_shown = shorten(&node);
    // A task of its own: the future of a request is dropped when kube-scheduler hangs up.
    let task = tokio::spawn(named("bind", bind_pod(Arc::clone(extender), args, deadline)));
    let bound = task
        .await
        .unwrap_or_else(|error| Err(BindError::Interrupted(error.to_string())));
    let error = match bound {
        Ok(devices) => {
            let mut memory = extender.memory();
            memory.retries.forget(&uid);
            memory.waiting.forget(&uid);
            memory.rooms.note_bound(&uid, now());
            drop(memory);
            extender.metrics.note_bound(&uid, now());
            info!(pod = pod_shown, node = node_shown, devices, "bound");
            String::new()
        }
        Err(error) => {
            let (label, ending, cause) = error.outcome();
            timer.ending = ending;
            extender.metrics.count_refused_bind(label);
            match cause {
                Cause::Node => extender.memory().avoided_nodes.note_failed(&uid, &node, now()),
                Cause::Elsewhere => extender.memory().avoided_nodes.end_count(&uid),
                Cause::Unclear => {}
            }
            let error = shorten(&format!("{:#}", anyhow::Error::from(error)));
            warn!(pod = pod_shown, node = node_shown, error, "not bound");
            error
        }
    };
    Ok(json(&ExtenderBindingResult { error }))
}

/// Reads a bind request, in which no field may be empty.
fn parse(body: &[u8]) -> Result<ExtenderBindingArgs, RequestError> {
    let args: ExtenderBindingArgs =
        serde_json::from_slice(body).map_err(|error| RequestError::malformed("bind", &error))?;
    for (field, value) in [
        ("PodName", &args.pod_name),
        ("PodNamespace", &args.pod_namespace),
        ("PodUID", &args.pod_uid),
        ("Node", &args.node),
    ] {
        if value.is_empty() {
            return Err(RequestError::malformed("bind", &format!("{field} is empty")));
        }
    }
    Ok(args)
}

/// Binds a pod. Returns the record of its devices and amounts if this bind chose them.
async fn bind_pod(
    extender: Arc<Extender>,
    args: ExtenderBindingArgs,
    deadline: Instant,
) -> Result<Option<String>, BindError> {
    let pod = PodId {
        namespace: args.pod_namespace,
        name: args.pod_name,
        uid: args.pod_uid,
    };
    let node = args.node;
    pod.check().map_err(BindError::NoPod)?;
    extender.index.read().ready().map_err(BindError::NotReady)?;
    extender.check_leading()?;
    // Counted until it is dropped: a replica releases the Lease only when it has no bind under way.
    let _bind = extender.leadership().begin_bind(now())?;
    let _permit = in_time(deadline, "waiting for other binds", extender.binding.acquire()).await?;
    // kube-scheduler repeats a bind that timed out, while the first one may still wait or write.
    let pod_lock = extender.pod_locks.lock(&pod.uid);
    let _pod_lock = in_time(deadline, "waiting for the pod's other bind", pod_lock).await?;
    let facts = in_time(deadline, "reading the pod", find_facts(&extender, &pod)).await??;
    let facts = facts.filter(|facts| extender.index.read().requests_devices(facts));
    let waiting = "waiting for other bindings to be written";
    let Some(facts) = facts else {
        let binding = PodBinding::without_devices(pod, &node);
        // A pod without devices needs no decision, and its order among the bindings of the node does not matter.
        let _permit = in_time(deadline, waiting, extender.bind_limiter.acquire()).await?;
        return bind_result(extender.binder.bind(&binding, deadline).await).and(Ok(None));
    };
    let _permit = in_time(deadline, waiting, extender.bind_limiter.acquire_for(&node)).await?;
    decide_and_write(&extender, pod, &facts, &node, deadline).await
}

/// Waits for one step of a bind as long as there is time to send the binding after it.
async fn in_time<T>(
    deadline: Instant,
    step: &'static str,
    wait: impl Future<Output = T>,
) -> Result<T, BindError> {
    match timeout_at(deadline, wait).await {
        // The wait may end in the last moment; a decision without time for the write would only have to be taken back.
        Ok(waited_for) if Instant::now() < deadline => Ok(waited_for),
        _ => Err(BindError::Late(step)),
    }
}

/// Converts the outcome of a write to the result of the bind: success if the pod is on the node.
fn bind_result(outcome: BindOutcome) -> Result<(), BindError> {
    match outcome {
        BindOutcome::Bound | BindOutcome::OnNode(_) => Ok(()),
        BindOutcome::Refused(message) => Err(BindError::Refused(message)),
        BindOutcome::Busy(message) => Err(BindError::Busy(message)),
        BindOutcome::Unknown(message) => Err(BindError::Unknown(message)),
    }
}

/// The facts of a pod, as the watch, a filter or the API server shows it; `None` if it asks for no devices.
async fn find_facts(extender: &Extender, pod: &PodId) -> Result<Option<PodFacts>, BindError> {
    let PodId { namespace, name, uid } = pod;
    let no_pod = || BindError::NoPod(format!("there is no pod {namespace}/{name} with UID {uid}"));
    // The watch is the best source; it may not have shown a pod that kube-scheduler has just seen.
    let watched = extender.index.read().pod(&pod.uid).cloned();
    if let Some(facts) = watched.or_else(|| extender.memory().facts.get_mut(&pod.uid).cloned()) {
        // The UID decides, but the path of the binding has the names: a mismatch would bind another pod.
        let is_same = *facts.namespace == *pod.namespace && *facts.name == *pod.name;
        return if is_same { Ok(Some(facts)) } else { Err(no_pod()) };
    }
    let found = extender.binder.get(pod).await.map_err(BindError::Unreadable)?;
    let found = found.filter(|found| found.uid() == pod.uid).ok_or_else(no_pod)?;
    Ok(PodFacts::of(&found, extender.index.read().names()))
}

/// Chooses devices, writes the binding, and keeps or releases the devices. While the outcome is unknown they are kept, and a task
/// of [`resolve`] looks the outcome up. Returns the record of the devices, unless the pod was bound before.
async fn decide_and_write(
    extender: &Arc<Extender>,
    pod: PodId,
    facts: &PodFacts,
    node: &str,
    deadline: Instant,
) -> Result<Option<String>, BindError> {
    let unix_nanos =
        u64::try_from(chrono::Utc::now().timestamp_nanos_opt().unwrap_or_default()).unwrap_or_default();
    let assumed = extender
        .index
        .write()
        .assume(&pod, facts, node, unix_nanos, now())?;
    let (binding, assumed_at, repeated) = match assumed {
        Assumed::AlreadyBound => return Ok(None),
        Assumed::Write {
            binding,
            assumed_at,
            repeated,
        } => (binding, assumed_at, repeated),
    };
    let outcome = extender.binder.bind(&binding, deadline).await;
    match &outcome {
        BindOutcome::Bound => extender.index.write().confirm(&pod.uid, assumed_at, now()),
        BindOutcome::OnNode(annotations) => {
            let mut index = extender.index.write();
            assumption::confirm_found(&mut index, &pod.uid, assumed_at, annotations, now());
        }
        BindOutcome::Refused(_) | BindOutcome::Busy(_) if !repeated => {
            extender.index.write().forget(&pod.uid, assumed_at);
        }
        // An earlier write of the same binding may have got through, whatever the outcome of this one is.
        BindOutcome::Refused(_) | BindOutcome::Busy(_) | BindOutcome::Unknown(_) => {
            assumption::mark_unknown(&mut extender.index.write(), &pod.uid, assumed_at, now());
            if extender
                .resolving
                .lock()
                .insert((pod.uid.as_str().into(), assumed_at))
            {
                let resolve = resolve(Arc::clone(extender), pod, assumed_at);
                tokio::spawn(named("outcome of a bind", resolve));
            }
        }
    }
    bind_result(outcome)?;
    Ok(binding.annotations.get(DEVICE_ALLOCATED).cloned())
}

/// The state of a pod's assumption (devices that a bind has chosen in memory), if it is still that with this assume time.
fn state_of(extender: &Extender, pod: &PodId, assumed_at: u64) -> Option<AssumptionState> {
    let state = extender.index.read().assumption_state(&pod.uid);
    state.filter(|state| state.assumed_at == assumed_at)
}

/// Reads a pod again and again until the outcome of its binding is known.
async fn resolve(extender: Arc<Extender>, pod: PodId, assumed_at: u64) {
    let mut pause = FIRST_PAUSE;
    loop {
        // The pause comes first, since a write that got no answer may still be under way for a moment.
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        match state_of(&extender, &pod, assumed_at) {
            Some(state) if state.phase == Phase::Unknown => check_outcome(&extender, &pod, state).await,
            _ if forget_if_resolved(&extender, &pod, assumed_at) => return,
            // A repeated bind writes the binding at this moment.
            _ => {}
        }
    }
}

/// Returns true if the outcome of a binding is known, so that its task has to end; then takes the task out of
/// `Extender::resolving`.
fn forget_if_resolved(extender: &Extender, pod: &PodId, assumed_at: u64) -> bool {
    // A bind first notes that the outcome is unknown, and then inserts its assumption into `resolving`. Under this lock either
    // the task sees that phase, or the bind finds no entry and starts another task.
    let mut resolving = extender.resolving.lock();
    let is_resolved = state_of(extender, pod, assumed_at).is_none_or(|state| state.phase == Phase::Written);
    if is_resolved {
        resolving.remove(&(Box::from(pod.uid.as_str()), assumed_at));
    }
    is_resolved
}

/// Reads the pod from the API server, and confirms the pod's assumption if its binding was written, or takes it back if not.
async fn check_outcome(extender: &Extender, pod: &PodId, state: AssumptionState) {
    let PodId { namespace, name, uid } = pod;
    match extender.binder.find(pod).await {
        Ok(found) => {
            let settled = extender.index.write().settle(uid, state, &found, now());
            debug!(
                namespace,
                pod = name,
                ?found,
                settled,
                "looked for the outcome of a bind"
            );
        }
        Err(error) => warn!(namespace, pod = name, error, "cannot read the outcome of a bind"),
    }
}

/// Looks up pods with a written binding at the API server, until the process ends: those that no watch has shown bound for
/// `UNSEEN_LIMIT`, and those that a complete list of pods lacks.
pub async fn sweep_unseen(extender: Arc<Extender>) {
    let unlisted = Arc::clone(&extender.index.read().unlisted);
    loop {
        // A pod that a list lacks ends the pause at once; otherwise the pause ends with the timeout, which is no error.
        let _ = timeout(SWEEP_INTERVAL, unlisted.notified()).await;
        let overdue = extender.index.read().overdue(now(), UNSEEN_LIMIT);
        for (pod, state) in overdue {
            // Assumptions in another phase have a task that resolves them, or a write under way.
            if state.phase == Phase::Written {
                check_outcome(&extender, &pod, state).await;
            }
        }
    }
}

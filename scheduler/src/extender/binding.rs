//! `bind`: decides the devices, writes one binding, and keeps or takes back the decision by what became of it.
//!
//! Runs to its end even if kube-scheduler hangs up, or a decision would be left open.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use daemon::panics::named;
use placement::Reason;
use proto::extender::{ExtenderBindingArgs, ExtenderBindingResult};
use proto::record::DEVICE_ALLOCATED;
use rustc_hash::FxHashSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::{debug, info, warn};

use super::sending::Leave;
use super::{Extender, RequestFailure, now};
use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::bind::{Order, Outcome, PodId};
use crate::index::{AssumeError, Assumed, Moment, Phase};
use crate::leader::NotLeading;
use crate::metrics::{Ending, Timer};

/// Pauses between looks at a pod whose bind nobody knows the outcome of.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long a decision that was written may go unseen before its pod is looked at.
const UNSEEN: Duration = Duration::from_secs(300);
/// Pause between two looks for such decisions; those that a list should have shown are looked at when it is complete.
const SWEEP: Duration = Duration::from_secs(5);

/// Why a pod was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindFailure {
    /// The state is not complete yet.
    #[error("{0}")]
    NotReady(String),
    /// Another replica decides, or this one not yet.
    #[error(transparent)]
    NotLeading(#[from] NotLeading),
    /// The request names no pod.
    #[error("{0}")]
    NoIdentity(String),
    /// Time was up before anything was written.
    #[error("nothing is written: there is no time left after {0}")]
    Late(&'static str),
    /// There is no such pod.
    #[error("there is no pod {pod} with UID {uid}")]
    NoPod {
        /// Namespace and name.
        pod: String,
        /// UID.
        uid: String,
    },
    /// The pod is not known and cannot be read.
    #[error("cannot read the pod: {0}")]
    Unreadable(String),
    /// Nothing was decided.
    #[error(transparent)]
    Undecided(#[from] AssumeError),
    /// The API server refused.
    #[error("the API server refused the binding: {0}")]
    Refused(String),
    /// The API server had too much to do.
    #[error(
        "nothing is written: the API server is too busy, see that it serves the scheduler before others (FlowSchema): {0}"
    )]
    Busy(String),
    /// Nobody knows.
    #[error("it is not known whether the binding was written, which is being found out: {0}")]
    Unknown(String),
    /// The bind was given up from within.
    #[error("the bind broke off: {0}")]
    Broken(String),
}

/// Request bytes in, answer bytes out: a failure to bind is an answer too.
///
/// # Errors
/// If the bytes are no bind request.
pub async fn answer(
    extender: &Arc<Extender>,
    body: &[u8],
    deadline: Instant,
    timer: &mut Timer<'_>,
) -> Result<Vec<u8>, RequestFailure> {
    let malformed = |reason: String| RequestFailure::malformed("bind", &reason);
    let args: ExtenderBindingArgs =
        serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
    let missing = [
        ("PodName", &args.pod_name),
        ("PodNamespace", &args.pod_namespace),
        ("PodUID", &args.pod_uid),
        ("Node", &args.node),
    ];
    if let Some((field, _)) = missing.iter().find(|(_, value)| value.is_empty()) {
        return Err(malformed(format!("{field} is empty")));
    }
    let shown = (
        shorten(&format!("{}/{}", args.pod_namespace, args.pod_name)),
        shorten(&args.node),
    );
    let (uid, node) = (args.pod_uid.clone(), args.node.clone());
    let bound = tokio::spawn(named("bind", Arc::clone(extender).bind_pod(args, deadline))).await;
    let bound = bound.unwrap_or_else(|error| Err(BindFailure::Broken(error.to_string())));
    let error = match bound {
        Ok(devices) => {
            extender.retries().end(&uid);
            extender.waiting().end(&uid);
            info!(pod = shown.0, node = shown.1, devices, "bound");
            String::new()
        }
        Err(failure) => {
            timer.ending = failure.ending();
            extender.metrics.bind_refused(failure.reason());
            match failure.blame() {
                Blame::Node => extender.attempts().fail(&uid, &node, now()),
                Blame::Elsewhere => extender.attempts().excuse(&uid),
                Blame::Unclear => {}
            }
            let error = shorten(&format!("{:#}", anyhow::Error::from(failure)));
            warn!(pod = shown.0, node = shown.1, error, "not bound");
            error
        }
    };
    serde_json::to_vec(&ExtenderBindingResult { error }).map_err(|error| malformed(error.to_string()))
}

/// The cause of a failed bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blame {
    /// The node, which has no room for the pod.
    Node,
    /// Nothing that another node would change.
    Elsewhere,
    /// The cause of the failure is not known.
    Unclear,
}

impl BindFailure {
    /// In a word, for metrics.
    fn reason(&self) -> &'static str {
        match self {
            Self::NotReady(_) => "not_ready",
            Self::NotLeading(_) => "not_leading",
            Self::NoIdentity(_) | Self::NoPod { .. } => "no_pod",
            Self::Late(_) => "late",
            Self::Unreadable(_) => "unreadable",
            Self::Undecided(AssumeError::NoRoom {
                reason: Reason::PluginAway,
                ..
            }) => "plugin_away",
            Self::Undecided(AssumeError::NoRoom { .. } | AssumeError::Reserve { .. }) => "no_room",
            Self::Undecided(AssumeError::Invalid { .. }) => "invalid",
            Self::Undecided(_) => "bound_before",
            Self::Refused(_) => "api_server",
            Self::Busy(_) => "api_server_busy",
            Self::Unknown(_) | Self::Broken(_) => "unknown",
        }
    }

    /// Whether the pod had better be tried on another node.
    fn blame(&self) -> Blame {
        match self {
            // The filter does not offer the node while its plugin is away, so that the pod need not avoid it for longer.
            Self::Undecided(AssumeError::NoRoom {
                reason: Reason::PluginAway,
                ..
            }) => Blame::Elsewhere,
            Self::Undecided(AssumeError::NoRoom { .. } | AssumeError::Reserve { .. }) => Blame::Node,
            // A webhook may refuse bindings to this very node.
            Self::Refused(_) => Blame::Unclear,
            _ => Blame::Elsewhere,
        }
    }

    fn ending(&self) -> Ending {
        match self {
            Self::NotReady(_) | Self::NotLeading(NotLeading::Starting) => Ending::NotReady,
            Self::NotLeading(_) => Ending::NotLeading,
            Self::Unknown(_) | Self::Broken(_) => Ending::Unknown,
            Self::NoIdentity(_)
            | Self::Late(_)
            | Self::NoPod { .. }
            | Self::Unreadable(_)
            | Self::Undecided(_)
            | Self::Refused(_)
            | Self::Busy(_) => Ending::Refused,
        }
    }
}

impl Extender {
    /// Binds a pod. Returns the record of its devices and amounts, if this bind chose them.
    async fn bind_pod(
        self: Arc<Self>,
        args: ExtenderBindingArgs,
        deadline: Instant,
    ) -> Result<Option<String>, BindFailure> {
        let ExtenderBindingArgs {
            pod_name,
            pod_namespace,
            pod_uid,
            node,
        } = args;
        let pod = PodId {
            namespace: pod_namespace,
            name: pod_name,
            uid: pod_uid,
        };
        pod.check().map_err(BindFailure::NoIdentity)?;
        self.index.read().ready().map_err(BindFailure::NotReady)?;
        let _binding = self.leads().and_then(|()| self.leadership().begin_bind(now()))?;
        let late = |what| move |_| BindFailure::Late(what);
        let _permit = timeout_at(deadline, self.binding.acquire())
            .await
            .map_err(late("waiting for other binds"))?;
        let _turn = timeout_at(deadline, self.turns.take(&pod.uid))
            .await
            .map_err(late("waiting for the pod's other bind"))?;
        let facts = timeout_at(deadline, self.facts(&pod))
            .await
            .map_err(late("reading the pod"))??;
        let Some(facts) = facts.filter(|facts| self.index.read().concerns(facts)) else {
            let order = Order {
                pod,
                node,
                annotations: BTreeMap::new(),
                labels: BTreeMap::new(),
            };
            let _leave = in_time(deadline, self.sending.anywhere()).await?;
            return judge(self.binder.bind(&order, deadline).await).map(|()| None);
        };
        // The API server, and so kubelet, sees the pods of a node in the order in which they were assumed.
        let _leave = in_time(deadline, self.sending.to(&node)).await?;
        self.decide(pod, &facts, &node, deadline).await
    }

    /// Decides, writes, and keeps or takes back the decision.
    async fn decide(
        self: &Arc<Self>,
        pod: PodId,
        facts: &PodFacts,
        node: &str,
        deadline: Instant,
    ) -> Result<Option<String>, BindFailure> {
        let nanos =
            u64::try_from(chrono::Utc::now().timestamp_nanos_opt().unwrap_or_default()).unwrap_or_default();
        let leaders = self.index.read().leaders_of(&pod.uid, facts);
        let assumed = self.index.write().assume(&pod, facts, node, nanos, now())?;
        self.leaders().put(&pod.uid, leaders);
        let Assumed::Write {
            order,
            stamp,
            repeated,
        } = assumed
        else {
            return Ok(None);
        };
        let outcome = self.binder.bind(&order, deadline).await;
        match &outcome {
            Outcome::Bound => self.index.write().confirm(&pod.uid, stamp, now()),
            Outcome::OnNode(annotations) => {
                self.index
                    .write()
                    .confirm_found(&pod.uid, stamp, annotations, now());
            }
            Outcome::Refused(_) | Outcome::Busy(_) if !repeated => self.index.write().forget(&pod.uid, stamp),
            // An earlier write of the same binding may have got through, whatever this one came to.
            Outcome::Refused(_) | Outcome::Busy(_) | Outcome::Unknown(_) => {
                self.index.write().doubt(&pod.uid, stamp, now());
                if self.resolving().insert((pod.uid.as_str().into(), stamp)) {
                    tokio::spawn(named("outcome of a bind", Arc::clone(self).resolve(pod, stamp)));
                }
            }
        }
        judge(outcome).map(|()| order.annotations.get(DEVICE_ALLOCATED).cloned())
    }

    fn resolving(&self) -> MutexGuard<'_, FxHashSet<(Box<str>, u64)>> {
        self.resolving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of the pod; `None` if it asks for nothing of ours.
    async fn facts(&self, pod: &PodId) -> Result<Option<PodFacts>, BindFailure> {
        let no_pod = || BindFailure::NoPod {
            pod: format!("{}/{}", pod.namespace, pod.name),
            uid: pod.uid.clone(),
        };
        let watched = self.index.read().pod(&pod.uid).cloned();
        if let Some(facts) = watched.or_else(|| self.recall(&pod.uid)) {
            let same = *facts.namespace == *pod.namespace && *facts.name == *pod.name;
            return if same { Ok(Some(facts)) } else { Err(no_pod()) };
        }
        let found = self
            .binder
            .get(pod)
            .await
            .map_err(BindFailure::Unreadable)?
            .ok_or_else(no_pod)?;
        if found.uid() != pod.uid {
            return Err(no_pod());
        }
        Ok(PodFacts::of(&found, self.index.read().names()))
    }

    /// Finds out what became of a decision, however long that takes.
    async fn resolve(self: Arc<Self>, pod: PodId, stamp: u64) {
        let mut pause = FIRST_PAUSE;
        loop {
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            let moment = self
                .index
                .read()
                .moment(&pod.uid)
                .filter(|moment| moment.stamp == stamp);
            match moment.filter(|moment| moment.phase == Phase::Doubtful) {
                Some(moment) => self.look(&pod, moment).await,
                None if self.has_ended(&pod, stamp) => return,
                None => {}
            }
        }
    }

    /// Whether a decision is beyond doubt, so that nobody need find out what became of it.
    fn has_ended(&self, pod: &PodId, stamp: u64) -> bool {
        // A bind doubts first and then looks whether anybody finds out, so that one of the two notices.
        let mut resolving = self.resolving();
        let moment = self
            .index
            .read()
            .moment(&pod.uid)
            .filter(|moment| moment.stamp == stamp);
        let ended = moment.is_none_or(|moment| moment.phase == Phase::Written);
        if ended {
            resolving.remove(&(Box::from(pod.uid.as_str()), stamp));
        }
        ended
    }

    /// Looks at a pod and settles its decision by what is found.
    async fn look(&self, pod: &PodId, moment: Moment) {
        match self.binder.find(pod).await {
            Ok(found) => {
                let settled = self.index.write().settle(&pod.uid, moment, &found, now());
                debug!(
                    namespace = pod.namespace,
                    pod = pod.name,
                    ?found,
                    settled,
                    "looked for the outcome of a bind"
                );
            }
            Err(error) => {
                warn!(
                    namespace = pod.namespace,
                    pod = pod.name,
                    error,
                    "cannot find out what became of a bind"
                );
            }
        }
    }

    /// Looks, for ever, at pods whose decisions go unseen for too long, or were left out by a list.
    pub async fn sweep(self: Arc<Self>) {
        let unlisted = self.index.read().unlisted();
        loop {
            let _ = timeout(SWEEP, unlisted.notified()).await;
            let overdue = self.index.read().overdue(now(), UNSEEN);
            // The others have somebody who looks already, or a write under way.
            for (pod, moment) in overdue
                .into_iter()
                .filter(|(_, moment)| moment.phase == Phase::Written)
            {
                self.look(&pod, moment).await;
            }
        }
    }
}

/// Leave to send a binding, while there is time to.
async fn in_time<'a>(
    deadline: Instant,
    leave: impl Future<Output = Leave<'a>>,
) -> Result<Leave<'a>, BindFailure> {
    let leave = timeout_at(deadline, leave)
        .await
        .ok()
        .filter(|_| Instant::now() < deadline);
    leave.ok_or(BindFailure::Late("waiting for other bindings to be written"))
}

fn judge(outcome: Outcome) -> Result<(), BindFailure> {
    match outcome {
        Outcome::Bound | Outcome::OnNode(_) => Ok(()),
        Outcome::Refused(message) => Err(BindFailure::Refused(message)),
        Outcome::Busy(message) => Err(BindFailure::Busy(message)),
        Outcome::Unknown(message) => Err(BindFailure::Unknown(message)),
    }
}

//! `bind`: decides the devices, writes one binding, and keeps or takes back the decision by what became of it.
//!
//! Runs to its end even if kube-scheduler hangs up, or a decision would be left open.

use std::sync::Arc;
use std::time::Duration;

use proto::extender::{ExtenderBindingArgs, ExtenderBindingResult};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::bind::{Order, Outcome, PodId};
use crate::index::{AssumeError, Assumed, Phase};
use crate::metrics::{Ending, Timer};

/// Pauses between looks at a pod whose bind nobody knows the outcome of.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long a decision that was written may go unseen before its pod is looked at.
const UNSEEN: Duration = Duration::from_secs(300);
/// How often decisions are checked for that.
const SWEEP: Duration = Duration::from_secs(30);
/// How long a bind waits for those before it on its node; well below what is left of kube-scheduler's own patience.
const NODE_PATIENCE: Duration = Duration::from_millis(500);

/// Why a pod was not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindFailure {
    /// The state is not complete yet.
    #[error("{0}")]
    NotReady(String),
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
pub async fn answer(extender: &Arc<Extender>, body: &[u8], timer: &mut Timer<'_>) -> Result<Vec<u8>, RequestFailure> {
    let malformed = |reason: String| RequestFailure::Malformed { verb: "bind", reason };
    let args: ExtenderBindingArgs = serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
    let missing = [("PodName", &args.pod_name), ("PodNamespace", &args.pod_namespace), ("PodUID", &args.pod_uid), ("Node", &args.node)];
    if let Some((field, _)) = missing.iter().find(|(_, value)| value.is_empty()) {
        return Err(malformed(format!("{field} is empty")));
    }
    let shown = (format!("{}/{}", args.pod_namespace, args.pod_name), args.node.clone());
    let bound = tokio::spawn(Arc::clone(extender).bind_pod(args)).await;
    let bound = bound.unwrap_or_else(|error| Err(BindFailure::Broken(error.to_string())));
    let error = match bound {
        Ok(()) => {
            info!(pod = shown.0, node = shown.1, "bound");
            String::new()
        }
        Err(failure) => {
            timer.ending = failure.ending();
            let error = format!("{:#}", anyhow::Error::from(failure));
            warn!(pod = shown.0, node = shown.1, error, "not bound");
            error
        }
    };
    serde_json::to_vec(&ExtenderBindingResult { error }).map_err(|error| malformed(error.to_string()))
}

impl BindFailure {
    fn ending(&self) -> Ending {
        match self {
            Self::NotReady(_) => Ending::NotReady,
            Self::Unknown(_) | Self::Broken(_) => Ending::Unknown,
            Self::NoPod { .. } | Self::Unreadable(_) | Self::Undecided(_) | Self::Refused(_) => Ending::Refused,
        }
    }
}

impl Extender {
    async fn bind_pod(self: Arc<Self>, args: ExtenderBindingArgs) -> Result<(), BindFailure> {
        self.index.read().ready().map_err(BindFailure::NotReady)?;
        let ExtenderBindingArgs { pod_name, pod_namespace, pod_uid, node } = args;
        let pod = PodId { namespace: pod_namespace, name: pod_name, uid: pod_uid };
        let _turn = self.turns.take(&pod.uid).await;
        let Some(facts) = self.facts(&pod).await? else {
            let order = Order { pod, node, annotations: std::collections::BTreeMap::new() };
            return judge(self.binder.bind(&order).await);
        };
        // The API server, and so kubelet, sees the pods of a node in the order in which they were assumed. A write that
        // hangs does not hold up those behind it for long.
        let _order = timeout(NODE_PATIENCE, self.node_turns.take(&node)).await.ok();
        let nanos = u64::try_from(chrono::Utc::now().timestamp_nanos_opt().unwrap_or_default()).unwrap_or_default();
        let assumed = self.index.write().assume(&pod, &facts, &node, nanos, now())?;
        let Assumed::Write { order, stamp, repeated } = assumed else { return Ok(()) };
        let outcome = self.binder.bind(&order).await;
        match &outcome {
            Outcome::Bound => self.index.write().confirm(&pod.uid, stamp, now()),
            Outcome::Refused(_) if !repeated => self.index.write().forget(&pod.uid, stamp),
            // An earlier write of the same binding may have got through, whatever this one came to.
            Outcome::Refused(_) | Outcome::Unknown(_) => {
                self.index.write().doubt(&pod.uid, stamp, now());
                tokio::spawn(Arc::clone(&self).resolve(pod, stamp));
            }
        }
        judge(outcome)
    }

    /// What is known of the pod; `None` if it asks for nothing of ours.
    async fn facts(&self, pod: &PodId) -> Result<Option<PodFacts>, BindFailure> {
        let no_pod = || BindFailure::NoPod { pod: format!("{}/{}", pod.namespace, pod.name), uid: pod.uid.clone() };
        let watched = self.index.read().pod(&pod.uid).cloned();
        if let Some(facts) = watched.or_else(|| self.recall(&pod.uid)) {
            let same = *facts.namespace == *pod.namespace && *facts.name == *pod.name;
            return if same { Ok(Some(facts)) } else { Err(no_pod()) };
        }
        let found = self.binder.get(pod).await.map_err(BindFailure::Unreadable)?.ok_or_else(no_pod)?;
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
            let _turn = self.turns.take(&pod.uid).await;
            if self.index.read().phase(&pod.uid, stamp) != Some(Phase::Doubtful) || self.look(&pod, stamp).await {
                return;
            }
        }
    }

    /// Looks at a pod and settles its decision by what is found; whether it now is settled.
    async fn look(&self, pod: &PodId, stamp: u64) -> bool {
        match self.binder.find(pod).await {
            Ok(found) => {
                debug!(namespace = pod.namespace, pod = pod.name, ?found, "looked for the outcome of a bind");
                self.index.write().settle(&pod.uid, stamp, &found, now())
            }
            Err(error) => {
                warn!(namespace = pod.namespace, pod = pod.name, error, "cannot find out what became of a bind");
                false
            }
        }
    }

    /// Looks, for ever, at pods whose decisions go unseen for too long.
    pub async fn sweep(self: Arc<Self>) {
        loop {
            sleep(SWEEP).await;
            let overdue = self.index.read().overdue(now(), UNSEEN);
            for (pod, stamp) in overdue {
                let _turn = self.turns.take(&pod.uid).await;
                self.look(&pod, stamp).await;
            }
        }
    }
}

fn judge(outcome: Outcome) -> Result<(), BindFailure> {
    match outcome {
        Outcome::Bound => Ok(()),
        Outcome::Refused(message) => Err(BindFailure::Refused(message)),
        Outcome::Unknown(message) => Err(BindFailure::Unknown(message)),
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

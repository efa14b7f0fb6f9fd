//! Starts leader election as configured, or the one replica that decides alone.

use std::time::Duration;

use daemon::events::Recorder;
use daemon::panics::named;
use daemon::process::Process;
use kube::Client;
use proto::read_api::PodName;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, LeaderElection, MisfitNodes};
use crate::index::{Index, Shared};
use crate::leader::Leadership;
use crate::leader::elector::{Elector, take_over_alone};
use crate::leader::version_check::watch_version;
use crate::leader::watch_barrier::WatchBarrier;

/// Time for which a replica of several still serves after the signal: the endpoints of its Services change first.
const LINGER: Duration = Duration::from_secs(3);

pub(super) struct OwnReplica {
    pub(super) leadership: Leadership,
    /// The barrier by which a new leader waits until its watch has shown all writes of the previous leader.
    pub(super) barrier: WatchBarrier,
    /// The settings of the election, and this replica's pod; `None` for a replica without others.
    election: Option<(LeaderElection, PodName)>,
}

impl OwnReplica {
    /// This replica before it leads. Without an election it leads alone, and binds once binds of an earlier process have ended.
    pub(super) fn new(config: &Config, namespace: &str) -> Self {
        let election = config.leader.clone().map(|election| {
            let (namespace, name) = (namespace.to_owned(), election.pod.clone());
            (election, PodName { namespace, name })
        });
        let leadership = if election.is_some() {
            Leadership::standby()
        } else {
            Leadership::alone_after_takeover()
        };
        let barrier = WatchBarrier::new(election.as_ref().map(|(_, pod)| pod.clone()));
        Self {
            leadership,
            barrier,
            election,
        }
    }

    /// Begins to take part in the election, or to decide alone. Returns the farewell: the wait after a signal, before the end.
    pub(super) fn begin(
        self,
        (client, recorder): (Client, Recorder),
        index: Shared<Index>,
        misfit_nodes: MisfitNodes,
        process: &mut Process,
    ) -> impl Future<Output = ()> + use<> {
        // Cancelled when the replica has released its Lease and removed its leader label.
        let resigned = CancellationToken::new();
        let Some((election, pod)) = self.election else {
            // Not in `process.tasks`, since the takeover ends soon, and the end of a task there ends the process.
            let takeover = take_over_alone(self.leadership, index, self.barrier);
            tokio::spawn(named("takeover", takeover));
            // The farewell waits for nothing, since no other replica takes over.
            resigned.cancel();
            return farewell(Duration::ZERO, resigned);
        };
        if election.kube_scheduler_lease.is_some() {
            let watch = watch_version(client.clone(), recorder.clone(), pod.clone(), misfit_nodes);
            process.tasks.spawn("version of kube-scheduler", watch);
        }
        let elector = Elector::new(
            (client, recorder),
            (election, pod),
            self.leadership,
            index,
            self.barrier,
        );
        let (signal, has_resigned) = (process.signal.clone(), resigned.clone());
        process.tasks.spawn("election of a leader", async move {
            elector.run(signal.cancelled()).await;
            // If `run` returns without a signal, this task ends, and with it the process, as with any task.
            if signal.is_cancelled() {
                has_resigned.cancel();
                std::future::pending::<()>().await;
            }
        });
        farewell(LINGER, resigned)
    }
}

/// The farewell after SIGTERM: the replica goes on serving until the next leader may decide and clients ask another replica.
async fn farewell(linger: Duration, resigned: CancellationToken) {
    tokio::join!(sleep(linger), resigned.cancelled());
}

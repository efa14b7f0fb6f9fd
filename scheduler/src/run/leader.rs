//! Starts leader election as configured, or the one replica that decides alone.

use std::time::Duration;

use daemon::events::Recorder;
use daemon::panics::named;
use daemon::process::Process;
use kube::Client;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, MisfitNodes};
use crate::index::{Index, Shared};
use crate::leader::elector::{Elector, ElectorSettings, take_over_alone};
use crate::leader::version_check::watch_version;
use crate::leader::watch_barrier::WatchBarrier;
use crate::leader::{Leadership, PodName};

/// Time for which a replica of several still serves after the signal: the endpoints of its Services change first.
const LINGER: Duration = Duration::from_secs(3);

/// This replica, alone or one of several.
pub(super) struct OwnReplica {
    pub(super) leadership: Leadership,
    /// The barrier by which a new leader waits until its watch has shown all writes of the previous leader.
    pub(super) barrier: WatchBarrier,
    /// The settings of the election; `None` for a replica without others.
    settings: Option<ElectorSettings>,
    /// The form in which filter reports nodes without room, which belongs to kube-scheduler's version.
    misfit_nodes: MisfitNodes,
}

impl OwnReplica {
    /// This replica before it leads. Without an election it leads alone, and binds once binds of an earlier process have ended.
    pub(super) fn new(config: &Config, namespace: &str) -> Self {
        let settings = config.leader.clone().map(|election| {
            let pod = PodName {
                namespace: namespace.to_owned(),
                name: election.pod.clone(),
            };
            ElectorSettings { election, pod }
        });
        let leadership = if settings.is_some() {
            Leadership::standby()
        } else {
            Leadership::alone_after_takeover()
        };
        let barrier = WatchBarrier::new(settings.as_ref().map(|settings| settings.pod.clone()));
        Self {
            leadership,
            barrier,
            settings,
            misfit_nodes: config.scheduling.misfit_nodes,
        }
    }

    /// Begins to take part in the election, or to decide alone. Returns the farewell: the wait after a signal, before the end.
    pub(super) fn begin(
        self,
        (client, recorder): (Client, Recorder),
        index: Shared<Index>,
        process: &mut Process,
    ) -> impl Future<Output = ()> + use<> {
        // Cancelled when the replica has released its Lease and removed its leader label.
        let resigned = CancellationToken::new();
        let Some(settings) = self.settings else {
            // Not in `process.tasks`, since the takeover ends soon, and the end of a task there ends the process.
            tokio::spawn(named(
                "takeover",
                take_over_alone(self.leadership, index, self.barrier),
            ));
            // The farewell waits for nothing, since no other replica takes over.
            resigned.cancel();
            return farewell(Duration::ZERO, resigned);
        };
        if settings.election.kube_scheduler_lease.is_some() {
            process.tasks.spawn(
                "version of kube-scheduler",
                watch_version(
                    client.clone(),
                    recorder.clone(),
                    settings.pod.clone(),
                    self.misfit_nodes,
                ),
            );
        }
        let elector = Elector::new((client, recorder), settings, self.leadership, index, self.barrier);
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

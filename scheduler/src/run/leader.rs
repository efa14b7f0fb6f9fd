//! Leadership as configured: elected among replicas, or this replica's alone.

use std::time::Duration;

use daemon::panics::named;
use daemon::supervise::Tasks;
use futures::future::{BoxFuture, FutureExt, Shared as SharedFuture};
use kube::{Api, Client};
use proto::pod::Pod;
use tokio::sync::oneshot;
use tokio::time::sleep;

use crate::config::Config;
use crate::index::{Index, Shared};
use crate::leader::campaign::{Campaign, Settings, succeed_alone};
use crate::leader::kube_scheduler::watch_version;
use crate::leader::sight::Sight;
use crate::leader::{Leadership, PodName};
use crate::watch::events;
use crate::watch::heard::Heard;

/// How long requests are still taken after the signal to stop, where other replicas are: until nobody is sent here any more.
const LINGER: Duration = Duration::from_secs(3);

/// Something that completes once, for many.
pub(super) type Stop = SharedFuture<BoxFuture<'static, ()>>;

/// This replica's part.
pub(super) struct Part {
    pub(super) leadership: Leadership,
    sight: Sight,
    settings: Option<Settings>,
    bind_timeout: Duration,
}

impl Part {
    /// As the flags say.
    pub(super) fn of(config: &Config, namespace: &str) -> Self {
        let bind_timeout = config.scheduling.bind_timeout;
        let settings = config.leader.as_ref().map(|leader| {
            let namespace = leader.namespace.clone().unwrap_or_else(|| namespace.to_owned());
            let pod = PodName {
                namespace: namespace.clone(),
                name: leader.pod.clone(),
            };
            Settings {
                lease: leader.lease.clone(),
                kube_scheduler_lease: leader.kube_scheduler_lease.clone(),
                namespace,
                pod,
                terms: leader.terms,
                bind_timeout,
                fences_bindings: leader.fences_bindings,
            }
        });
        let leadership = if settings.is_some() {
            Leadership::standby()
        } else {
            Leadership::alone_after_another()
        };
        let sight = Sight::new(settings.as_ref().map(|settings| settings.pod.clone()));
        Self {
            leadership,
            sight,
            settings,
            bind_timeout,
        }
    }

    /// The namespace in which a leader is elected, if one is.
    pub(super) fn namespace(&self) -> Option<&str> {
        self.settings.as_ref().map(|settings| settings.namespace.as_str())
    }

    /// Follows pods.
    pub(super) fn watch_pods(&self, client: &Client, index: &Shared<Index>, tasks: &mut Tasks) -> Heard {
        let heard = Heard::new(<Index as crate::watch::Follow<Pod>>::KIND);
        let api: Api<Pod> = Api::all(heard.listen(client));
        let (sight, index) = (self.sight.clone(), index.clone());
        tasks.spawn("watch of pods", async move {
            sight.follow(index, || events(api.clone())).await;
        });
        heard
    }

    /// Begins; what comes back completes when nothing need be served any more.
    pub(super) fn begin(self, client: Client, index: Shared<Index>, stop: Stop, tasks: &mut Tasks) -> Stop {
        let Some(settings) = self.settings else {
            tokio::spawn(named(
                "beginning",
                succeed_alone(self.leadership, index, self.sight, self.bind_timeout),
            ));
            return stop;
        };
        if settings.kube_scheduler_lease.is_some() {
            tasks.spawn(
                "version of kube-scheduler",
                watch_version(client.clone(), settings.pod.clone()),
            );
        }
        let campaign = Campaign::new(client, settings, self.leadership, index, self.sight);
        let (end, has_ended) = oneshot::channel();
        let asked = stop.clone();
        tasks.spawn("election of a leader", async move {
            campaign.run(asked.clone()).await;
            // Its end is right once the process is asked to end, and no reason to hurry then.
            if asked.peek().is_some() {
                let _ = end.send(());
                std::future::pending::<()>().await;
            }
        });
        let ended = async move { drop(tokio::join!(has_ended, stop.then(|()| sleep(LINGER)))) };
        ended.boxed().shared()
    }
}

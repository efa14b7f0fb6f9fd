//! Watches `PodGroup`s: those of Kubernetes in the newest version that the API server serves, and those of coscheduling if their
//! custom resource is installed.
//!
//! A cluster may have neither, or may get one later, or may withhold the right to read them. So discovery looks again every ten
//! minutes, and nothing waits for these watches: groups whose `PodGroup`s are not seen have the size that their pods have, or 1.

use std::time::Duration;

use daemon::api_server::{Connection, one_line};
use daemon::watch::{ObjectWatch, Update};
use kube::api::ListParams;
use kube::runtime::watcher::Event;
use kube::{Api, Client, Error};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use proto::pod_group::{POD_GROUPS, PodGroup, PodGroupApi};
use tokio::time::sleep;
use tracing::{info, warn};

use crate::index::{Index, Shared};
use crate::watch::{ObjectStore, apply_to, watch};

/// The time between two looks for the APIs that are served.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(600);

/// The pause after the first discovery that failed; each further pause is twice as long, up to [`DISCOVERY_INTERVAL`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The states of the watches, for metrics: by API that is served, 1 while the known objects are those of the cluster.
#[derive(Clone, Debug, Default)]
pub(crate) struct WatchStates(Family<[(&'static str, &'static str); 1], Gauge>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discovered {
    /// The API server serves none of the APIs.
    Absent,
    /// The API is served, and the scheduler may not list its objects.
    Forbidden(PodGroupApi),
    /// The API is served.
    Served(PodGroupApi),
}

/// The watch of the `PodGroup`s of one of several APIs, if one is served.
struct PodGroupWatch {
    apis: &'static [PodGroupApi],
    connection: Connection,
    index: Shared<Index>,
    states: WatchStates,
    /// The result of the last discovery that was answered.
    discovered: Discovered,
    watch: Option<(PodGroupApi, ObjectWatch<PodGroup>)>,
}

impl WatchStates {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let states = Self::default();
        let help = "1 while the PodGroups of an API that the API server serves have been seen whole, else 0";
        registry.register("pod_group_watches", help, states.0.clone());
        states
    }

    fn set(&self, api: PodGroupApi, is_synced: bool) {
        let labels = [("api", api.api_version())];
        self.0.get_or_create(&labels).set(is_synced.into());
    }
}

/// Carries the `PodGroup`s of the first of these APIs that the API server serves into the index, until the task is dropped.
pub(crate) async fn follow(
    apis: &'static [PodGroupApi],
    connection: Connection,
    index: Shared<Index>,
    states: WatchStates,
) {
    let mut pauses = connection.contact.backoff((FIRST_PAUSE, DISCOVERY_INTERVAL));
    let mut groups = PodGroupWatch {
        apis,
        connection,
        index,
        states,
        discovered: Discovered::Absent,
        watch: None,
    };
    loop {
        match discover(&groups.connection.client, apis).await {
            Ok(discovered) => {
                pauses.reset();
                groups.turn_to(discovered);
                groups.carry_updates_until(sleep(DISCOVERY_INTERVAL)).await;
            }
            Err(error) => {
                let (error, pause) = (one_line(&error), pauses.next());
                warn!(
                    error,
                    ?pause,
                    "cannot find out whether the API server serves PodGroups, trying again"
                );
                groups.carry_updates_until(pauses.pause()).await;
            }
        }
    }
}

impl PodGroupWatch {
    /// Begins, keeps or ends the watch by the result of a discovery.
    fn turn_to(&mut self, discovered: Discovered) {
        if discovered == self.discovered {
            return;
        }
        self.discovered = discovered;
        self.watch = None;
        for api in self.apis {
            self.states.0.remove(&[("api", api.api_version())]);
        }
        match discovered {
            Discovered::Absent => info!(apis = ?self.apis, "the API server serves no PodGroups any more"),
            Discovered::Forbidden(api) => {
                let api_version = api.api_version();
                warn!(
                    api_version,
                    "the scheduler may not list PodGroups: groups have the size that their pods have, or 1"
                );
                self.states.set(api, false);
            }
            Discovered::Served(api) => {
                self.states.set(api, false);
                // The objects of an older version stay until the list of this one is complete.
                let objects = Api::all_with(self.connection.client.clone(), &api);
                self.watch = Some((api, watch(POD_GROUPS, objects, &self.connection.contact)));
                return;
            }
        }
        // The APIs are versions of one kind, so one store has the objects of all of them.
        if let Some(api) = self.apis.first() {
            let mut index = self.index.write();
            let store = index.pod_groups_mut(*api);
            // An empty list: objects of an API that is gone, or may not be read any more, count no longer.
            store.begin_list();
            store.end_list();
        }
    }

    /// Carries the updates of the watch into the index until a pause ends.
    async fn carry_updates_until(&mut self, pause: impl Future<Output = ()>) {
        tokio::select! {
            () = self.carry_updates() => {}
            () = pause => {}
        }
    }

    /// Carries the updates of the watch into the index; never ends. Dropping the future loses no update.
    async fn carry_updates(&mut self) {
        let Some((api, watch)) = &mut self.watch else {
            // Without a watch, the pause alone ends `carry_updates_until`.
            return std::future::pending().await;
        };
        loop {
            let update = watch.next().await;
            let is_synced = match update {
                Update::Event(Event::InitDone) => {
                    info!(api_version = api.api_version(), "list of PodGroups complete");
                    Some(true)
                }
                Update::Restored => Some(true),
                Update::Event(_) => None,
                Update::Interrupted | Update::UnknownKind => Some(false),
            };
            apply_to(update, self.index.write().pod_groups_mut(*api));
            if let Some(is_synced) = is_synced {
                self.states.set(*api, is_synced);
            }
        }
    }
}

/// Finds the first of these APIs that the API server serves.
async fn discover(client: &Client, apis: &[PodGroupApi]) -> Result<Discovered, Error> {
    for api in apis {
        if !serves(client, *api).await? {
            continue;
        }
        // A watch would try a list that is forbidden again and again, and log each refusal.
        let objects = Api::<PodGroup>::all_with(client.clone(), api);
        return match objects.list(&ListParams::default().limit(1)).await {
            Ok(_) => Ok(Discovered::Served(*api)),
            Err(Error::Api(status)) if status.code == 403 => Ok(Discovered::Forbidden(*api)),
            Err(error) => Err(error),
        };
    }
    Ok(Discovered::Absent)
}

async fn serves(client: &Client, api: PodGroupApi) -> Result<bool, Error> {
    match client.list_api_group_resources(api.api_version()).await {
        Ok(list) => Ok(list.resources.iter().any(|resource| resource.name == POD_GROUPS)),
        Err(Error::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;

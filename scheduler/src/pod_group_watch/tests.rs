//! Discovery and watches, against an API server that serves some of the APIs and allows to list their objects, or not.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Request, Response};
use kube::client::Body;
use placement::Policies;
use prometheus_client::encoding::text::encode;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;

/// The settings of the API server, and the requests that it got.
#[derive(Default)]
struct State {
    served: Vec<PodGroupApi>,
    /// True if the versions that are served have other resources.
    has_others_alone: bool,
    is_forbidden: bool,
    is_down: bool,
    min_count: u32,
    requests: Vec<String>,
}

/// An API server whose `PodGroup`s are one, `d/g`; clones share it.
#[derive(Clone, Default)]
struct ApiServer {
    state: Arc<Mutex<State>>,
    /// Breaks the watches.
    breaks: Arc<Notify>,
}

impl ApiServer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn client(&self) -> Client {
        let server = self.clone();
        Client::new(
            tower::service_fn(move |request| server.clone().answer(request)),
            "default",
        )
    }

    async fn answer(self, request: Request<Body>) -> io::Result<Response<Body>> {
        let uri = request.uri().clone();
        if self.state().is_down {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        if uri.query().is_some_and(|query| query.contains("watch=true")) {
            // No object changes any more.
            self.breaks.notified().await;
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut state = self.state();
        state.requests.push(uri.path().to_owned());
        let (status, body) = state.answer(uri.path());
        Ok(Response::builder()
            .status(status)
            .body(Body::from(body.into_bytes()))
            .unwrap())
    }
}

impl State {
    fn answer(&self, path: &str) -> (u16, String) {
        let is_served = |api: &&PodGroupApi| path.starts_with(&format!("/apis/{}", api.api_version()));
        let Some(api) = self.served.iter().find(is_served) else {
            // Not a Status object, as kube-apiserver answers for an unknown path.
            return (404, "404 page not found\n".to_owned());
        };
        if !path.ends_with("/podgroups") {
            let resource = |name: &str| json!({"name": name, "singularName": "", "namespaced": true, "kind": "K", "verbs": ["list"]});
            let mut resources = vec![resource("workloads")];
            if !self.has_others_alone {
                resources.extend([resource("podgroups"), resource("podgroups/status")]);
            }
            let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api.api_version(),
                "resources": resources});
            return (200, list.to_string());
        }
        if self.is_forbidden {
            let message =
                "podgroups.scheduling.k8s.io is forbidden: User \"u\" cannot list resource \"podgroups\"";
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden",
                "message": message, "code": 403});
            return (403, status.to_string());
        }
        let spec =
            json!({"schedulingPolicy": {"gang": {"minCount": self.min_count}}, "minMember": self.min_count});
        let group =
            json!({"metadata": {"name": "g", "namespace": "d", "resourceVersion": "1"}, "spec": spec});
        let list = json!({"kind": "PodGroupList", "apiVersion": api.api_version(), "metadata": {"resourceVersion": "1"},
            "items": [group]});
        (200, list.to_string())
    }
}

/// The watch of the `PodGroup`s of some APIs as a task, and its effects.
struct World {
    server: ApiServer,
    index: Shared<Index>,
    registry: Registry,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn start(apis: &'static [PodGroupApi], state: State) -> World {
    let server = ApiServer {
        state: Arc::new(Mutex::new(state)),
        ..ApiServer::default()
    };
    let index = Shared::new(Index::new(
        ResourceNames::default(),
        Policies::default(),
        Duration::ZERO,
    ));
    let mut registry = Registry::default();
    let states = WatchStates::register(&mut registry);
    let task = tokio::spawn(follow(apis, server.client().into(), index.clone(), states));
    World {
        server,
        index,
        registry,
        task,
    }
}

impl World {
    /// The size of the group of a pod that names `g`.
    fn size(&self, of_pod: &Value) -> u32 {
        let pod = serde_json::from_value(of_pod.clone()).unwrap();
        self.index.read().group_of(&pod).unwrap().min_count
    }

    /// The states of the watches as metrics show them.
    fn metrics(&self) -> Vec<String> {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        let values = text.lines().filter(|line| !line.starts_with('#'));
        values.map(str::to_owned).collect()
    }

    /// The paths of the requests since the last call.
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.server.state().requests)
    }
}

fn native() -> Value {
    json!({"metadata": {"namespace": "d"}, "spec": {"schedulingGroup": {"podGroupName": "g"}}})
}

fn coscheduling() -> Value {
    json!({"metadata": {"namespace": "d", "labels": {"scheduling.x-k8s.io/pod-group": "g"}}})
}

/// Long enough for all requests that need no pause, and short before any pause ends.
async fn settle() {
    sleep(Duration::from_millis(100)).await;
}

#[rstest]
#[case::all(&[PodGroupApi::V1Alpha2, PodGroupApi::V1Alpha3, PodGroupApi::V1Beta1], "v1beta1")]
#[case::beta(&[PodGroupApi::V1Beta1], "v1beta1")]
#[case::both_alphas(&[PodGroupApi::V1Alpha2, PodGroupApi::V1Alpha3], "v1alpha3")]
#[case::alpha(&[PodGroupApi::V1Alpha2, PodGroupApi::Coscheduling], "v1alpha2")]
#[tokio::test(start_paused = true)]
async fn the_newest_version_that_is_served_is_watched(
    #[case] served: &[PodGroupApi],
    #[case] expected: &str,
) {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: served.to_vec(),
            min_count: 4,
            ..State::default()
        },
    );
    settle().await;
    assert_eq!(world.size(&native()), 4);
    assert_eq!(world.size(&coscheduling()), 1);
    let metric = format!("pod_group_watches{{api=\"scheduling.k8s.io/{expected}\"}} 1");
    assert_eq!(world.metrics(), [metric]);
}

#[tokio::test(start_paused = true)]
async fn coscheduling_s_groups_are_watched_apart() {
    let world = start(
        &[PodGroupApi::Coscheduling],
        State {
            served: vec![PodGroupApi::V1Beta1, PodGroupApi::Coscheduling],
            min_count: 4,
            ..State::default()
        },
    );
    settle().await;
    assert_eq!((world.size(&native()), world.size(&coscheduling())), (1, 4));
    assert_eq!(
        world.metrics(),
        ["pod_group_watches{api=\"scheduling.x-k8s.io/v1alpha1\"} 1"]
    );
}

#[tokio::test(start_paused = true)]
async fn a_version_without_pod_groups_does_not_count() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Alpha2],
            has_others_alone: true,
            ..State::default()
        },
    );
    settle().await;
    assert_eq!(world.requests().len(), 3, "no list of objects");
    assert_eq!(world.metrics(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_shows_in_metrics_and_forgets_no_group() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Beta1],
            min_count: 4,
            ..State::default()
        },
    );
    let metric = |value| {
        [format!(
            "pod_group_watches{{api=\"scheduling.k8s.io/v1beta1\"}} {value}"
        )]
    };
    settle().await;
    assert_eq!(world.metrics(), metric(1));
    world.server.state().is_down = true;
    world.server.breaks.notify_waiters();
    settle().await;
    assert_eq!(world.metrics(), metric(0));
    assert_eq!(world.size(&native()), 4);
    world.server.state().is_down = false;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(world.metrics(), metric(1));
}

/// Neither an error nor a request for objects that do not exist.
#[tokio::test(start_paused = true)]
async fn an_api_that_is_not_served_is_looked_for_every_ten_minutes() {
    let world = start(&PodGroupApi::NATIVE, State::default());
    settle().await;
    let discovery =
        ["v1beta1", "v1alpha3", "v1alpha2"].map(|version| format!("/apis/scheduling.k8s.io/{version}"));
    assert_eq!(world.requests(), discovery);
    assert_eq!((world.size(&native()), world.metrics()), (1, vec![]));
    sleep(Duration::from_secs(590)).await;
    assert!(world.requests().is_empty());
    sleep(Duration::from_secs(10)).await;
    assert_eq!(world.requests(), discovery);
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_turns_the_watch_to_the_new_version_and_a_rollback_empties_the_store() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Alpha2],
            min_count: 4,
            ..State::default()
        },
    );
    settle().await;
    assert_eq!(world.size(&native()), 4);
    *world.server.state() = State {
        served: vec![PodGroupApi::V1Alpha2, PodGroupApi::V1Beta1],
        min_count: 5,
        ..State::default()
    };
    sleep(DISCOVERY_INTERVAL).await;
    assert_eq!(world.size(&native()), 5);
    assert_eq!(
        world.metrics(),
        ["pod_group_watches{api=\"scheduling.k8s.io/v1beta1\"} 1"]
    );
    world.server.state().served.clear();
    sleep(DISCOVERY_INTERVAL).await;
    assert_eq!((world.size(&native()), world.metrics()), (1, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_goes_on_is_not_begun_again() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Beta1],
            ..State::default()
        },
    );
    settle().await;
    let begin = world.requests();
    let path = "/apis/scheduling.k8s.io/v1beta1";
    // The discovery, its list, and the list of the watch.
    let objects = format!("{path}/podgroups");
    assert_eq!(begin, [path, &objects, &objects]);
    sleep(DISCOVERY_INTERVAL).await;
    assert_eq!(world.requests(), [path, &objects]);
}

/// A request for the objects in ten minutes, and not in every few seconds.
#[tokio::test(start_paused = true)]
async fn without_the_right_to_list_groups_have_no_size_until_it_is_granted() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Beta1],
            is_forbidden: true,
            min_count: 4,
            ..State::default()
        },
    );
    let unsynced = ["pod_group_watches{api=\"scheduling.k8s.io/v1beta1\"} 0"];
    settle().await;
    assert_eq!(world.size(&native()), 1);
    assert_eq!(world.metrics(), unsynced);
    sleep(Duration::from_secs(590)).await;
    assert_eq!(world.requests().len(), 2, "the discovery and its list");
    world.server.state().is_forbidden = false;
    sleep(Duration::from_secs(10)).await;
    assert_eq!(world.size(&native()), 4);
    world.server.state().is_forbidden = true;
    sleep(DISCOVERY_INTERVAL).await;
    assert_eq!(world.size(&native()), 1);
    assert_eq!(world.metrics(), unsynced);
}

#[tokio::test(start_paused = true)]
async fn a_discovery_without_an_answer_is_repeated_soon() {
    let world = start(
        &PodGroupApi::NATIVE,
        State {
            served: vec![PodGroupApi::V1Beta1],
            is_down: true,
            min_count: 4,
            ..State::default()
        },
    );
    settle().await;
    assert_eq!(world.metrics(), [""; 0]);
    world.server.state().is_down = false;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(world.size(&native()), 4);
    // A later discovery that fails changes nothing.
    world.server.state().is_down = true;
    sleep(DISCOVERY_INTERVAL).await;
    assert_eq!(world.size(&native()), 4);
}

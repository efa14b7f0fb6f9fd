//! The read API: it shows the state that filters answer from, follows its changes, and agrees with filter and bind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, BodyDataStream};
use futures::StreamExt;
use http::{Request, StatusCode, header};
use proptest::prelude::*;
use proto::pod::Pod;
use proto::read_api::{Explanation, FitAnswer, State};
use rstest::rstest;
use scheduler::bind::PodId;
use scheduler::config::Serving;
use scheduler::index::{Assumed, Index, Shared};
use scheduler::offline;
use scheduler::read_api::{ReadApi, explain, fit, router, state_of};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::api::Fault;
use crate::model_based::{N_NODES, Run, node_name, steps};
use crate::objects::{device, node, on, pod, shared, units};
use crate::world::World;

pub(crate) fn api_of(world: &World, demands_credentials: bool) -> Router {
    let api = ReadApi::new(Arc::clone(&world.extender), None, CancellationToken::new());
    router(&Arc::new(api), "", demands_credentials)
}

pub(crate) async fn read(world: &World, router: &Router, path: &str) -> Value {
    let (status, text) = world.send_to(router, "GET", path, Body::empty()).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A node with a bound pod, and a pod that waits.
async fn small_world() -> World {
    let world = World::new().with_node("n1", &[10_000, 10_000]);
    world.place(&shared("a", 1, 6000), "n1").await;
    world.with_pod(&shared("b", 2, 18_000))
}

/// The plugin is upgraded on a node that is full, and keeps the driver's memory from pods from then on: 450 MiB of a GPU of 16
/// GiB.
#[tokio::test]
async fn a_node_that_was_full_before_the_drivers_memory_was_kept_is_full() {
    let world = World::new();
    world.apply_node(&node("n1", "GiB"));
    world.apply_device(&device("n1", &[16 << 10]));
    for name in ["a", "b"] {
        world.place(&units(name, 8), "n1").await;
    }
    let mut upgraded = device("n1", &[(16 << 10) - 450]);
    upgraded["spec"]["devices"][0]["labels"]["gpushare/reserved-memory"] = json!((450_u64 << 20).to_string());
    world.apply_device(&upgraded);
    let api = api_of(&world, false);
    let full = 16_u64 << 30;
    let state = read(&world, &api, "/v1/state").await;
    let memory = json!({"total": full, "allocated": full});
    assert_eq!(state["nodes"][0]["gpus"][0]["memory"], memory);
    let shown = &world.inspect(Some("n1")).await["nodes"][0]["devs"][0];
    assert_eq!((&shown["usedGPU"], &shown["totalGPU"]), (&json!(16), &json!(16)));
    let diagnosis = read(&world, &api, "/v1/doctor").await.to_string();
    assert!(
        !diagnosis.contains("gpu-overcommitted") && !diagnosis.contains("pod-record"),
        "{diagnosis}"
    );
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    for name in ["total", "allocated"] {
        let mut lines = metrics.lines();
        let line =
            lines.find(|line| line.starts_with(&format!("gpushare_scheduler_gpu_memory_{name}_bytes{{")));
        assert!(
            line.is_some_and(|line| line.ends_with(&format!(" {full}.0"))),
            "{line:?}"
        );
    }
    assert!(world.fitting(&units("c", 1), &["n1"]).await.is_empty());
    world.check();
    // 7.56 GiB are left for pods once one of the two has ended.
    world.delete_pod(&units("b", 8));
    let shown = &world.inspect(Some("n1")).await["nodes"][0]["devs"][0];
    assert_eq!(shown["totalBytes"], json!(full - (450 << 20)));
    assert!(world.fitting(&units("c", 8), &["n1"]).await.is_empty());
    assert_eq!(world.fitting(&units("c", 7), &["n1"]).await, ["n1"]);
    world.check();
}

#[tokio::test]
async fn the_state_has_gpus_their_holders_and_pods_that_wait() {
    let world = small_world().await;
    let state: State =
        serde_json::from_value(read(&world, &api_of(&world, false), "/v1/state").await).unwrap();
    assert_eq!(
        (state.nodes.len(), state.totals.gpus, state.pending_total),
        (1, 2, 1)
    );
    let gpus = &state.nodes[0].gpus;
    let held: Vec<u64> = gpus.iter().map(|gpu| gpu.memory.allocated >> 20).collect();
    assert_eq!(held.iter().sum::<u64>(), 6000);
    let holder = gpus.iter().flat_map(|gpu| &gpu.holders).next().unwrap();
    assert_eq!((holder.name.as_str(), holder.asked.as_str()), ("a", "5.9 GiB"));
    assert_eq!(state.pending[0].name, "b");
}

#[tokio::test]
async fn a_pod_whose_binding_is_under_way_does_not_wait() {
    let pod = shared("a", 1, 6000);
    let world = World::new().with_node("n1", &[10_000]).with_pod(&pod);
    let router = api_of(&world, false);
    assert_eq!(read(&world, &router, "/v1/state").await["pendingTotal"], 1);
    assert_eq!(world.bind(&pod, "n1").await, "");
    // The router's snapshot may be a second old.
    let state = read(&world, &api_of(&world, false), "/v1/state").await;
    assert_eq!(
        (&state["pendingTotal"], &state["pending"]),
        (&json!(0), &json!([]))
    );
}

#[tokio::test]
async fn a_known_revision_is_not_sent_again() {
    let world = small_world().await;
    let router = api_of(&world, false);
    let get = |tag: &str| {
        let request = Request::get("/v1/state").header(header::IF_NONE_MATCH, tag);
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let first = get("\"other\"").await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let tag = first.headers()[header::ETAG].to_str().unwrap().to_owned();
    assert_eq!(get(&tag).await.unwrap().status(), StatusCode::NOT_MODIFIED);
}

/// A page of another site reaches the loopback address of the person who looks at it, but not the read API.
#[rstest]
#[case::name("GET", "/v1/state", &[("host", "localhost:12346")], 200)]
#[case::ipv4("GET", "/v1/state", &[("host", "127.0.0.1")], 200)]
#[case::ipv6("GET", "/v1/state", &[("host", "[::1]")], 200)]
#[case::ipv6_with_port("GET", "/v1/state", &[("host", "[::1]:12346")], 200)]
#[case::own_page("GET", "/v1/state", &[("host", "[::1]:1"), ("origin", "http://[::1]:1")], 200)]
#[case::rebound_name("GET", "/v1/state", &[("host", "evil.example:12346")], 421)]
#[case::name_like_ours("GET", "/v1/state", &[("host", "localhost.evil.example")], 421)]
#[case::foreign_url("GET", "http://evil.example/v1/state", &[("host", "localhost")], 421)]
#[case::two_hosts("GET", "/v1/state", &[("host", "localhost"), ("host", "evil.example")], 400)]
#[case::other_site("GET", "/v1/state", &[("host", "localhost"), ("origin", "https://evil.example")], 403)]
#[case::hidden_origin("GET", "/v1/state", &[("host", "localhost"), ("origin", "null")], 403)]
#[case::form("POST", "/v1/fit", &[("host", "localhost"), ("content-type", "text/plain")], 415)]
#[case::no_type("POST", "/v1/fit", &[("host", "localhost")], 415)]
#[case::command("POST", "/v1/fit", &[("host", "localhost"), ("content-type", "application/json")], 200)]
#[tokio::test]
async fn pages_of_other_sites_are_refused(
    #[case] method: &str,
    #[case] uri: &str,
    #[case] headers: &[(&str, &str)],
    #[case] status: u16,
) {
    let world = small_world().await;
    let mut request = Request::builder().method(method).uri(uri);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = json!({"pod": units("p", 1), "replicas": 1}).to_string();
    let reply = api_of(&world, false)
        .oneshot(request.body(Body::from(body)).unwrap())
        .await
        .unwrap();
    assert_eq!(reply.status(), status);
}

#[tokio::test]
async fn requests_that_cannot_be_answered() {
    let world = small_world().await;
    let local = api_of(&world, false);
    let missing = world
        .send_to(&local, "GET", "/v1/pods/default/nobody/explain", Body::empty())
        .await;
    assert_eq!(
        missing,
        (
            StatusCode::NOT_FOUND,
            "there is no pod \"default/nobody\" that asks for devices\n".to_owned()
        )
    );
    let (status, text) = world.send_to(&local, "POST", "/v1/fit", "{").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
    let too_many = json!({"pod": units("p", 1), "replicas": 10_001}).to_string();
    let (status, text) = world.send_to(&local, "POST", "/v1/fit", too_many).await;
    assert_eq!(
        (status, text.contains("10000")),
        (StatusCode::BAD_REQUEST, true),
        "{text}"
    );
    let guarded = api_of(&world, true);
    let (status, _) = world.send_to(&guarded, "GET", "/v1/state", Body::empty()).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    let unsynced = World::unsynced(&Serving::default());
    let (status, text) = unsynced
        .send_to(&api_of(&unsynced, false), "GET", "/v1/state", Body::empty())
        .await;
    assert_eq!(
        (status, text.starts_with("not ready")),
        (StatusCode::SERVICE_UNAVAILABLE, true),
        "{text}"
    );
}

#[tokio::test]
async fn the_nearest_miss_says_what_lacks_and_who_would_have_to_go() {
    let world = small_world().await;
    let explained = read(&world, &api_of(&world, false), "/v1/pods/default/b/explain").await;
    let explained: Explanation = serde_json::from_value(explained).unwrap();
    assert_eq!((explained.nodes, explained.fitting), (1, 0));
    let nearest = &explained.verdicts[0];
    assert_eq!(nearest.would_fit_without[0].name, "a");
    let lacking = nearest.gpus.iter().find(|gpu| !gpu.fits).unwrap();
    assert_eq!((lacking.needed >> 20, lacking.free >> 20), (9000, 4000));
}

/// The first event of a client that resumes, and its ID.
async fn batch(stream: &mut BodyDataStream) -> String {
    let piece = stream.next().await.unwrap().unwrap();
    String::from_utf8(piece.to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_client_resumes_where_it_broke_off() {
    let world = small_world().await;
    let router = api_of(&world, false);
    let revision = read(&world, &router, "/v1/state").await["revision"]
        .as_str()
        .unwrap()
        .to_owned();
    world.place(&shared("c", 1, 1000), "n1").await;
    tokio::time::advance(Duration::from_secs(2)).await;
    let follow = |id: &str| {
        let request = Request::get("/v1/changes").header("last-event-id", id);
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let mut stream = follow(&revision).await.unwrap().into_body().into_data_stream();
    let text = batch(&mut stream).await;
    assert!(
        text.starts_with("event: node\ndata: {\"name\":\"n1\"") && text.contains("\"name\":\"c\""),
        "{text}"
    );
    assert!(
        text.contains("\nid: ") && !text.contains(&format!("id: {revision}\n")),
        "{text}"
    );
    let mut stream = follow("other-7").await.unwrap().into_body().into_data_stream();
    assert!(batch(&mut stream).await.starts_with("event: reset\n"));
}

/// The token of a stream ends while the stream is open; the API server had been away before.
#[tokio::test(start_paused = true)]
async fn a_stream_ends_soon_after_its_token() {
    let world = small_world().await;
    let path = "/gpushare-scheduler/inspect";
    world.api.add_user("of-reader", "reader", Some(path));
    world.api.add_user("renewed", "reader", Some(path));
    let router = api_of(&world, true);
    let follow = |token: &str| {
        let request = Request::get("/v1/changes").header("authorization", format!("Bearer {token}"));
        router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let mut stream = follow("of-reader").await.unwrap().into_body().into_data_stream();
    assert!(batch(&mut stream).await.contains("event: reset\n"));
    let n_reviews = world.api.reviews().len();
    world.api.fail_posts([Fault::Status(500)]);
    for _ in 0..8 {
        assert_eq!(batch(&mut stream).await, ":\n\n", "15 seconds without a change");
    }
    assert!(
        world.api.reviews().len() > n_reviews,
        "the token is reviewed again"
    );
    world.api.remove_token("of-reader");
    let since = tokio::time::Instant::now();
    while let Some(piece) = stream.next().await {
        assert_eq!(piece.unwrap(), ":\n\n");
    }
    assert!(
        since.elapsed() <= Duration::from_secs(71),
        "{:?}",
        since.elapsed()
    );
    assert_eq!(
        follow("of-reader").await.unwrap().status(),
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(follow("renewed").await.unwrap().status(), StatusCode::OK);
}

fn paused() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
}

/// The nodes and pods of a state, without its revision and time.
fn content(state: State) -> State {
    State {
        revision: String::new(),
        time: String::new(),
        replica: proto::read_api::Replica::default(),
        ..state
    }
}

/// Applies a batch of events to the nodes that a client knows.
fn follow(nodes: &mut BTreeMap<String, Value>, text: &str) {
    for event in text.split("\n\n") {
        let line = |prefix: &str| event.lines().find_map(|line| line.strip_prefix(prefix));
        let (Some(kind), Some(data)) = (line("event: "), line("data: ")) else {
            continue;
        };
        let data: Value = serde_json::from_str(data).unwrap();
        let name = data["name"].as_str().unwrap_or_default().to_owned();
        match kind {
            "node" => drop(nodes.insert(name, data)),
            "removed" => drop(nodes.remove(&name)),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn renewals_and_events_show_what_a_new_snapshot_shows(steps in steps()) {
        paused().block_on(async {
            let world = World::new();
            let router = api_of(&world, false);
            let mut run = Run::new();
            *world.index.write() = Run::new().index;
            let mut known = BTreeMap::new();
            let request = Request::get("/v1/changes").body(Body::empty()).unwrap();
            let reply = router.clone().oneshot(request).await.unwrap();
            let mut events = reply.into_body().into_data_stream();
            batch(&mut events).await;
            for step in &steps {
                // Between two steps the index is the world's, since renewals go on in tasks of their own.
                std::mem::swap(&mut *world.index.write(), &mut run.index);
                run.step(step);
                std::mem::swap(&mut *world.index.write(), &mut run.index);
                tokio::time::advance(Duration::from_secs(1)).await;
                let renewed: State = serde_json::from_value(read(&world, &router, "/v1/state").await).unwrap();
                let renewed = content(renewed);
                // A step that changes nothing sends nothing, but for a comment now and then.
                while let Ok(text) = tokio::time::timeout(Duration::from_secs(2), batch(&mut events)).await {
                    follow(&mut known, &text);
                }
                prop_assert_eq!(&renewed, &content(state_of(world.index.clone()).await));
                let nodes: BTreeMap<String, Value> =
                    renewed.nodes.iter().map(|node| (node.name.clone(), json!(node))).collect();
                prop_assert_eq!(&known, &nodes);
            }
            Ok(())
        })?;
    }

    #[test]
    fn explanations_agree_with_filter(steps in steps()) {
        paused().block_on(async {
            let world = World::with_answer_nodes("all");
            let mut run = Run::new();
            for step in &steps {
                run.step(step);
            }
            *world.index.write() = run.index;
            let names: Vec<String> = (0..N_NODES).map(node_name).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            for pod in run.pods.values() {
                let name = pod["metadata"]["name"].as_str().unwrap();
                let Some(explained) = explain(&world.index, "default", name, true) else { continue };
                if explained.node.is_some() || pod["status"]["phase"] != "Pending" {
                    continue;
                }
                // Without the check of `World::filter`: other schedulers and new units of nodes may have oversubscribed devices.
                let request = json!({"Pod": pod, "NodeNames": names}).to_string();
                let (_, answer) = world.send("POST", "/gpushare-scheduler/filter", request).await;
                let answer: Value = serde_json::from_str(&answer).unwrap();
                world.index.write().unhint(pod["metadata"]["uid"].as_str().unwrap());
                if explained.invalid.is_some() {
                    prop_assert_eq!(answer["NodeNames"].as_array().map_or(0, Vec::len), 0);
                    continue;
                }
                for verdict in &explained.verdicts {
                    let node = verdict.node.as_str();
                    let fits = answer["NodeNames"].as_array().unwrap().contains(&json!(node));
                    let mut reasons = answer["FailedAndUnresolvableNodes"].clone();
                    if reasons[node].is_null() {
                        reasons = answer["FailedNodes"].clone();
                    }
                    prop_assert_eq!(verdict.fits, fits, "{} {}", name, answer);
                    // Filter names no refused nodes as long as another one fits.
                    if explained.fitting == 0 {
                        prop_assert_eq!(verdict.reason.as_str(), reasons[node].as_str().unwrap_or_default());
                    }
                }
            }
            Ok(())
        })?;
    }

    /// Equal pods fit as often as binds find room for them.
    #[test]
    fn fit_counts_what_binds_place(steps in steps(), form in 0..4_usize) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
        }
        let limits = [
            json!({"aliyun.com/gpu-mem": "90"}),
            json!({"aliyun.com/gpu-mem": "400"}),
            json!({"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory": "600Mi"}),
            json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": "33", "koordinator.sh/gpu-core": "40"}),
        ];
        let asked: Pod = serde_json::from_value(pod("probe", &limits[form])).unwrap();
        let index = Shared::new(run.index);
        let request = proto::read_api::FitRequest { pod: asked.clone(), replicas: 1000, ..Default::default() };
        let answer: FitAnswer = fit(&index, &request).unwrap();
        let placed = answer.placements.iter().map(|placement| placement.pods).sum::<u32>();
        prop_assert_eq!(answer.fitting, placed);
        prop_assert_eq!(answer.fitting, bind_all(&mut index.write(), &asked));
    }
}

/// Binds as many equal pods as there is room for, and returns their number.
fn bind_all(index: &mut Index, pod: &Pod) -> u32 {
    let mut n_bound = 0;
    let facts = scheduler::accounting::PodFacts::of(pod, index.names()).unwrap();
    for node in (0..N_NODES).map(node_name) {
        loop {
            // Room that is kept for others is not counted.
            let uid = format!("probe-{n_bound}");
            let demand = index.demand(&uid, &facts).unwrap().unwrap();
            if index.filter().fit(&node, &demand).is_err() {
                break;
            }
            let id = PodId {
                namespace: "default".to_owned(),
                name: uid.clone(),
                uid,
            };
            match index.assume(&id, &facts, &node, 1, Instant::now()) {
                Ok(Assumed::Write { .. }) => n_bound += 1,
                _ => break,
            }
        }
    }
    n_bound
}

#[test]
fn added_nodes_are_empty_copies() {
    let objects = [node("n1", "MiB")].into_iter();
    let devices = [device("n1", &[1000, 1000])].into_iter();
    let pods = [on(units("full", 900), "n1")].into_iter();
    let index = Shared::new(offline::index(objects, devices, pods));
    let asked: Pod = serde_json::from_value(units("probe", 900)).unwrap();
    let mut request = proto::read_api::FitRequest {
        pod: asked,
        replicas: 10,
        ..Default::default()
    };
    let without = fit(&index, &request).unwrap();
    request.add_nodes.push(proto::read_api::AddedNodes {
        like: "n1".to_owned(),
        count: 2,
    });
    let with = fit(&index, &request).unwrap();
    assert_eq!(with.fitting, without.fitting + 4);
    assert!(with.placements.iter().any(|placement| placement.node == "n1+2"));
    assert!(!with.blocked.is_empty());
}

//! The routes besides the verbs: inspect, probes, version, metrics.

use std::time::Duration;

use daemon::watch::WatchLag;
use http::StatusCode;
use insta::assert_snapshot;
use prometheus_client::registry::Registry;
use proto::node::Node;
use scheduler::config::Serving;
use scheduler::metrics::register_watches;
use serde_json::{Value, json};

use crate::objects::{annotated, on, units};
use crate::requests::filter_figure;
use crate::world::World;

#[tokio::test]
async fn inspect_keeps_the_json_of_the_old_extender() {
    let world = filter_figure().await;
    let all = world.inspect(None).await;
    let names: Vec<&Value> = all["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| &node["name"])
        .collect();
    assert_eq!(names, ["n1", "n2", "n3"]);
    let (_, text) = world.send("GET", "/gpushare-scheduler/inspect/n3", "").await;
    assert_snapshot!(text, @r#"{"nodes":[{"name":"n3","totalGPU":32552,"usedGPU":24414,"devs":[{"id":0,"totalGPU":16276,"usedGPU":16276,"pods":[{"name":"e","namespace":"default","usedGPU":16276,"uid":"uid-e","usedBytes":17066622976,"assumed":false}],"uuid":"GPU-n3-0","healthy":true,"totalBytes":17066622976,"usedBytes":17066622976,"totalCore":100,"usedCore":0,"totalSlots":100,"usedSlots":0},{"id":1,"totalGPU":16276,"usedGPU":8138,"pods":[{"name":"f","namespace":"default","usedGPU":8138,"uid":"uid-f","usedBytes":8533311488,"assumed":false}],"uuid":"GPU-n3-1","healthy":true,"totalBytes":17066622976,"usedBytes":8533311488,"totalCore":100,"usedCore":0,"totalSlots":100,"usedSlots":0}],"unit":"MiB","unitBytes":1048576}]}"#);
}

#[tokio::test]
async fn verbs_are_refused_until_all_lists_are_complete() {
    let world = World::unsynced(&Serving::default());
    let body = json!({"Pod": units("p", 1), "NodeNames": ["n1"]}).to_string();
    world.list::<Node>(&[]);
    for verb in ["filter", "prioritize"] {
        let (status, text) = world
            .send("POST", &format!("/gpushare-scheduler/{verb}"), body.clone())
            .await;
        assert_eq!(
            (status, text.as_str()),
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "not ready: waiting for the list of devices, pods\n"
            )
        );
    }
    let (status, text) = world.send("GET", "/readyz", "").await;
    assert_eq!(
        (status, text.as_str()),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "not ready: waiting for the list of devices, pods\n"
        )
    );
    assert_eq!(
        world.bind(&units("p", 1), "n1").await,
        "not ready: waiting for the list of devices, pods"
    );
    assert_eq!(world.send("GET", "/healthz", "").await.0, StatusCode::OK);
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains(r#"gpushare_scheduler_synced{kind="pods"} 0"#)
            && !metrics.contains("gpushare_scheduler_nodes")
            && !metrics.contains("gpushare_scheduler_pending_pods"),
        "sums of a part of the cluster: {metrics}"
    );
    world.list::<scheduler::index::RawDevice>(&[]);
    world.list::<proto::pod::Pod>(&[]);
    assert_eq!(world.send("GET", "/readyz", "").await.0, StatusCode::OK);
}

#[tokio::test]
async fn other_methods_and_paths_are_refused() {
    let world = World::new();
    assert_eq!(
        world.send("GET", "/gpushare-scheduler/filter", "").await.0,
        StatusCode::METHOD_NOT_ALLOWED
    );
    assert_eq!(world.send("GET", "/nothing", "").await.0, StatusCode::NOT_FOUND);
    for path in ["/version", "/gpushare-scheduler/version"] {
        assert_eq!(
            world.send("GET", path, "").await.1,
            format!("{}\n", env!("CARGO_PKG_VERSION"))
        );
    }
}

#[tokio::test]
async fn metrics_count_requests_and_their_outcomes() {
    let world = World::new().with_node("n1", &[100]);
    world.place(&units("p", 60), "n1").await;
    world.apply_pod(&annotated(on(units("q", 1), "n1"), "ALIYUN_COM_GPU_MEM_IDX", "x"));
    world.filter(&units("r", 50), &["n1"]).await;
    let (_, text) = world.send("GET", "/metrics", "").await;
    let mut lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains("_seconds") && !line.starts_with('#'))
        .collect();
    lines.sort_unstable();
    assert_snapshot!(lines.join("\n"), @r#"
    gpushare_scheduler_assumed_pods 0
    gpushare_scheduler_build_info{version="0.1.0"} 1
    gpushare_scheduler_closed_gpus 0
    gpushare_scheduler_conservative_pods 1
    gpushare_scheduler_contradicting_pods 0
    gpushare_scheduler_failing_nodes 0
    gpushare_scheduler_fragmentation_ratio 0.0
    gpushare_scheduler_gpu_core_allocated_ratio{node="n1",minor="0",uuid="GPU-n1-0"} 0.0
    gpushare_scheduler_gpu_core_total_ratio{node="n1",minor="0",uuid="GPU-n1-0"} 1.0
    gpushare_scheduler_gpu_healthy{node="n1",minor="0",uuid="GPU-n1-0"} 1.0
    gpushare_scheduler_gpu_memory_allocated_bytes{node="n1",minor="0",uuid="GPU-n1-0"} 63963136.0
    gpushare_scheduler_gpu_memory_stranded_bytes{node="n1",minor="0",uuid="GPU-n1-0"} 0.0
    gpushare_scheduler_gpu_memory_total_bytes{node="n1",minor="0",uuid="GPU-n1-0"} 104857600.0
    gpushare_scheduler_gpu_nodes 1
    gpushare_scheduler_gpu_pods{node="n1",minor="0",uuid="GPU-n1-0"} 2.0
    gpushare_scheduler_gpu_sharers_allocated{node="n1",minor="0",uuid="GPU-n1-0"} 0.0
    gpushare_scheduler_gpu_sharers_capacity{node="n1",minor="0",uuid="GPU-n1-0"} 100.0
    gpushare_scheduler_group_rooms 0
    gpushare_scheduler_hints 0
    gpushare_scheduler_namespace_gpu_core_allocated_ratio{namespace="default"} 0.0
    gpushare_scheduler_namespace_gpu_memory_allocated_bytes{namespace="default"} 63963136.0
    gpushare_scheduler_namespace_gpu_parts{namespace="default"} 2.0
    gpushare_scheduler_nodes 1
    gpushare_scheduler_pending_pods 0
    gpushare_scheduler_plugin_away_nodes 0
    gpushare_scheduler_pods 2
    gpushare_scheduler_refusals_thought_over_total{outcome="refused"} 1
    gpushare_scheduler_refused_nodes_total{reason="memory"} 1
    gpushare_scheduler_requests_total{verb="bind",outcome="ok"} 1
    gpushare_scheduler_requests_total{verb="filter",outcome="ok"} 1
    gpushare_scheduler_room_announced_total 0
    gpushare_scheduler_synced{kind="devices"} 1
    gpushare_scheduler_synced{kind="nodes"} 1
    gpushare_scheduler_synced{kind="pods"} 1
    gpushare_scheduler_unplaced_pods{reason="fits"} 0
    gpushare_scheduler_unplaced_pods{reason="memory"} 1
    "#);
    assert!(
        text.contains(r#"gpushare_scheduler_request_seconds_count{verb="filter"} 1"#),
        "{text}"
    );
}

#[tokio::test]
async fn the_health_address_serves_probes_and_metrics_only() {
    let world = World::new();
    let status = async |method: &str, path: &str| world.send_to(&world.health, method, path, "").await.0;
    for path in ["/healthz", "/readyz", "/metrics", "/version"] {
        assert_eq!(status("GET", path).await, StatusCode::OK, "{path}");
    }
    for verb in ["filter", "prioritize", "bind"] {
        assert_eq!(
            status("POST", &format!("/gpushare-scheduler/{verb}")).await,
            StatusCode::NOT_FOUND,
            "{verb}"
        );
    }
    assert_eq!(
        status("GET", "/gpushare-scheduler/inspect").await,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test(start_paused = true)]
async fn metrics_show_the_watch_lag_of_each_kind() {
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    register_watches(&mut registry, vec![WatchLag::new("nodes"), WatchLag::new("pods")]);
    tokio::time::sleep(Duration::from_millis(12_500)).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert_snapshot!(text, @r#"
    # HELP gpushare_scheduler_watch_age_seconds Time since the API server last sent an object, an event or a bookmark of a kind
    # TYPE gpushare_scheduler_watch_age_seconds gauge
    # UNIT gpushare_scheduler_watch_age_seconds seconds
    gpushare_scheduler_watch_age_seconds{kind="nodes"} 12.5
    gpushare_scheduler_watch_age_seconds{kind="pods"} 12.5
    # EOF
    "#);
}

//! A replica that does not lead: it answers reads, decides nothing, and has clients connect to the leader.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use rstest::rstest;
use scheduler::config::Serving;
use scheduler::leader::Leadership;
use serde_json::json;

use crate::objects::{annotated, device, node, placed_by_old_extender, units};
use crate::world::World;

#[tokio::test(start_paused = true)]
async fn a_standby_replica_serves_no_verb_and_no_view() {
    let leadership = Leadership::standby();
    let pod = units("p", 1);
    let world = World::with_leadership(&Serving::default(), leadership.clone());
    world.list::<proto::node::Node>(&[node("n1", "MiB")]);
    world.list::<scheduler::index::RawDevice>(&[device("n1", &[16_276])]);
    world.list::<proto::pod::Pod>(std::slice::from_ref(&pod));
    let world = world.with_pod(&pod);
    let mut hangups = leadership.connection_resets();
    let filtered = world.filter(&pod, &["n1"]).await;
    assert_eq!(
        filtered["Error"],
        "not the leader: another replica of gpushare-scheduler decides; ask again"
    );
    assert_eq!(filtered["NodeNames"], json!(null));
    assert!(
        hangups.has_changed().unwrap(),
        "the client connects to the leader next time"
    );
    hangups.mark_unchanged();
    assert!(world.bind(&pod, "n1").await.starts_with("not the leader: "));
    assert!(hangups.has_changed().unwrap());
    let (status, text) = world
        .send(
            "POST",
            "/gpushare-scheduler/prioritize",
            json!({"Pod": pod, "NodeNames": ["n1"]}).to_string(),
        )
        .await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(world.api.bindings().is_empty());
    assert_eq!(world.inspect(None).await["nodes"][0]["name"], "n1");
    let (_, metrics) = world.send("GET", "/metrics", String::new()).await;
    assert!(
        metrics.contains("requests_total{verb=\"filter\",outcome=\"not_leading\"} 1"),
        "{metrics}"
    );
    assert!(
        metrics.contains("gpushare_scheduler_pending_pods") && !metrics.contains("unplaced"),
        "kube-scheduler asks the leader alone: {metrics}"
    );
}

/// The clock may have been set back, or be another machine's. kubelet's plugins order pods by these times.
#[rstest]
#[case::of_a_gpushare_pod("ALIYUN_COM_GPU_MEM_ASSUME_TIME")]
#[case::of_any_pod("scheduling.koordinator.sh/bind-timestamp")]
#[tokio::test(start_paused = true)]
async fn a_leader_whose_clock_is_behind_continues_from_the_assume_times_of_its_predecessor(
    #[case] key: &str,
) {
    let world = World::new().with_node("n1", &[16_276]);
    let ahead = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(3600);
    let mut first = placed_by_old_extender(units("first", 1), "n1", 0, 1, 16_276);
    first["metadata"]["annotations"]
        .as_object_mut()
        .unwrap()
        .remove("ALIYUN_COM_GPU_MEM_ASSUME_TIME");
    let world = world.with_pod(&annotated(first, key, &ahead.as_nanos().to_string()));
    let mut last = u64::try_from(ahead.as_nanos()).unwrap();
    for name in ["second", "third"] {
        let pod = units(name, 1);
        world.api.put(&pod);
        world.apply_pod(&pod);
        assert_eq!(world.bind(&pod, "n1").await, "");
        let stamp: u64 = world.api.pod(&pod)["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_ASSUME_TIME"]
            .as_str()
            .unwrap()
            .parse()
            .unwrap();
        assert!(stamp > last, "{name}: {stamp} after {last}");
        last = stamp;
    }
}

/// An earlier process in the pod may have set the label.
#[tokio::test(start_paused = true)]
async fn a_standby_replica_with_a_stale_leader_label_is_not_ready() {
    let world = World::with_leadership(&Serving::default(), Leadership::standby());
    world.list::<proto::node::Node>(&[]);
    world.list::<scheduler::index::RawDevice>(&[]);
    world.list::<proto::pod::Pod>(&[]);
    let (status, text) = world.send("GET", "/readyz", String::new()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(text.contains("gpushare/leader"), "{text}");
}

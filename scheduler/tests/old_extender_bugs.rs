//! Every bug found in the old extender's source (E1-E17), shown not to be here.

use std::time::Duration;

use proto::node::Node;
use proto::pod::Pod;
use scheduler::metrics::AllocationSnapshot;
use scheduler::watch::ObjectStore;
use serde_json::json;

use crate::api::Fault;
use crate::objects::{device, node, old_node, on, phase, placed_by_old_extender, pod, shared, units};
use crate::world::World;

/// Unsigned underflow made a GPU that holds more than it has look infinitely free.
#[tokio::test]
async fn e1_an_oversubscribed_gpu_has_nothing_free() {
    let world = World::new().with_node("n1", &[100]);
    for name in ["a", "b"] {
        // Foreign records that together exceed every device, which the engine's check would report.
        let overfull = placed_by_old_extender(units(name, 80), "n1", 0, 80, 100);
        world
            .index
            .write()
            .apply(serde_json::from_value::<Pod>(overfull).unwrap());
    }
    let index = world.index.read();
    assert_eq!(index.fleet().check().len(), 1);
    let node = index.fleet().view(index.fleet().node_id("n1").unwrap()).unwrap();
    assert_eq!(node.gpus()[0].free.memory.bytes_floor(), 0);
    let facts =
        scheduler::accounting::PodFacts::of(&serde_json::from_value(units("new", 1)).unwrap(), index.names())
            .unwrap();
    let ask = index.demand("new", &facts).unwrap().unwrap();
    assert_eq!(index.filter().fit("n1", &ask), Err(placement::Reason::Memory));
}

/// Totals were read once: a changed unit or a swapped GPU needed a restart.
#[tokio::test]
async fn e2_a_changed_unit_and_changed_gpus_count_at_once() {
    let world = World::new().with_node("n1", &[16 * 1024]);
    world.apply_node(&node("n1", "GiB"));
    let pod = units("a", 16);
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"]);
    world.delete_pod(&pod);
    assert_eq!(
        world.fitting(&units("b", 3000), &["n1"]).await,
        Vec::<String>::new()
    );
    world.apply_node(&node("n1", "MiB"));
    assert_eq!(world.fitting(&units("b", 3000), &["n1"]).await, ["n1"]);
    world.apply_device(&device("n1", &[1024]));
    assert_eq!(
        world.fitting(&units("b", 3000), &["n1"]).await,
        Vec::<String>::new()
    );
    world.apply_node(&old_node("old", 2, 30));
    assert_eq!(world.fitting(&units("c", 15), &["old"]).await, ["old"]);
    world.apply_node(&old_node("old", 1, 10));
    assert_eq!(
        world.fitting(&units("c", 15), &["old"]).await,
        Vec::<String>::new()
    );
}

/// Pods keep what they were given when the unit changes under them.
#[tokio::test]
async fn e2_pods_of_the_old_unit_keep_their_bytes() {
    let world = World::new().with_node("n1", &[16 * 1024]);
    world.apply_node(&node("n1", "GiB"));
    world.place(&units("ours", 4), "n1").await;
    world.apply_pod(&placed_by_old_extender(units("theirs", 4), "n1", 0, 4, 16));
    world.apply_node(&node("n1", "MiB"));
    assert_eq!(world.used("n1").await, [8 * 1024]);
}

/// While kubelet waits for the plugin to register again it shows no units; the devices were stuck at zero after that.
#[tokio::test]
async fn e3_a_node_seen_without_units_recovers() {
    let world = World::new();
    world.apply_node(&old_node("n1", 2, 0));
    let pod = units("p", 15);
    assert_eq!(world.fitting(&pod, &["n1"]).await, Vec::<String>::new());
    world.apply_node(&old_node("n1", 2, 30));
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"]);
    world.place(&pod, "n1").await;
    world.apply_node(&old_node("n1", 2, 0));
    world.apply_node(&old_node("n1", 2, 30));
    assert_eq!(world.used("n1").await, [15, 0]);
}

/// A deletion could overtake its own record and leak the memory for good.
#[tokio::test]
async fn e4_deleted_pods_leave_nothing_behind() {
    let world = World::new().with_node("n1", &[100]);
    for round in 0..50 {
        let pod = units(&format!("p{round}"), 100);
        world.place(&pod, "n1").await;
        match round % 3 {
            0 => world.delete_pod(&world.api.pod(&pod)),
            1 => world.apply_pod(&phase(world.api.pod(&pod), "Succeeded")),
            _ => world.list::<Pod>(&[]),
        }
        assert_eq!(world.used("n1").await, [0]);
    }
}

/// A pod that is being deleted still runs, and its memory was given away.
#[tokio::test]
async fn e5_a_deleting_pod_holds_its_memory_until_it_has_ended() {
    let world = World::new().with_node("n1", &[100]);
    let pod = units("p", 100);
    world.place(&pod, "n1").await;
    let mut deleting = world.api.pod(&pod);
    deleting["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    world.apply_pod(&deleting);
    assert_eq!(world.fitting(&units("q", 1), &["n1"]).await, Vec::<String>::new());
    world.delete_pod(&deleting);
    assert_eq!(world.fitting(&units("q", 1), &["n1"]).await, ["n1"]);
}

/// A pod whose node was gone kept the extender from starting.
#[tokio::test]
async fn e6_a_pod_of_a_node_that_is_gone_is_no_obstacle() {
    let world = World::new();
    world.list::<Pod>(&[placed_by_old_extender(units("p", 60), "gone", 0, 60, 100)]);
    assert_eq!(world.send("GET", "/readyz", "").await.0, 200);
    let world = world.with_node("gone", &[100]);
    assert_eq!(
        world.used("gone").await,
        [60],
        "and counts should its node come back"
    );
}

/// A malformed list of sick GPUs disabled GPU 0. Here health is in the Device object, and malformed parts are reported.
#[tokio::test]
async fn e7_a_malformed_device_does_not_hurt_the_others() {
    let world = World::new();
    let mut report = device("n1", &[100, 100, 100]);
    report["spec"]["devices"][1]["health"] = "".into();
    report["spec"]["devices"][2]["health"] = false.into();
    world.apply_node(&node("n1", "MiB"));
    world.apply_device(&report);
    assert_eq!(world.fitting(&units("p", 100), &["n1"]).await, ["n1"]);
    assert_eq!(
        world.fitting(&shared("q", 2, 100), &["n1"]).await,
        Vec::<String>::new()
    );
    let shown = world.inspect(Some("n1")).await;
    assert!(
        shown["nodes"][0]["problems"][0]
            .as_str()
            .unwrap()
            .starts_with("Device object: spec.devices[1]: "),
        "{shown}"
    );
}

/// HTTP 500 hid the reason from the user.
#[tokio::test(start_paused = true)]
async fn e8_a_failed_bind_is_answered_with_200_and_the_reason() {
    let pod = units("p", 10);
    let world = World::new().with_node("n1", &[100]).with_pod(&pod);
    world.api.fail_posts([Fault::Status(403)]);
    let error = world.bind(&pod, "n1").await;
    assert_eq!(
        error,
        "the API server refused the binding: 403 Forbidden: made to fail"
    );
}

/// Annotations and binding were two writes without a guard: a retry rewrote a bound pod, a successor got foreign ones.
#[tokio::test(start_paused = true)]
async fn e9_one_guarded_write_and_a_repeat_changes_nothing() {
    let pod = units("p", 10);
    let world = World::new().with_node("n1", &[100, 100]).with_pod(&pod);
    world.api.fail_posts([Fault::HangAfterwards]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    let bound = world.api.pod(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.api.pod(&pod), bound);
    assert!(
        world
            .api
            .bindings()
            .iter()
            .all(|binding| binding["metadata"]["uid"] == "uid-p")
    );
}

/// Nothing kept the room between a filter and its late bind.
#[tokio::test]
async fn e10_room_is_kept_from_the_only_answer_to_the_bind() {
    let world = World::new().with_node("n1", &[100]);
    let (first, second) = (units("first", 100), units("second", 100));
    assert_eq!(world.fitting(&first, &["n1"]).await, ["n1"]);
    assert_eq!(world.fitting(&second, &["n1"]).await, Vec::<String>::new());
    world.place(&first, "n1").await;
    assert_eq!(world.fitting(&second, &["n1"]).await, Vec::<String>::new());
}

/// Two replicas booked twice. Replicas elect one of them; a successor that overlaps counts what its predecessor wrote as soon as
/// the watch shows it, and never a room that it has seen taken.
#[tokio::test]
async fn e11_a_second_scheduler_sees_what_the_first_wrote() {
    let first = World::new().with_node("n1", &[100]);
    let pod = units("p", 100);
    first.place(&pod, "n1").await;
    let second = World::new().with_node("n1", &[100]);
    second.apply_pod(&first.api.pod(&pod));
    assert_eq!(second.used("n1").await, [100]);
    assert_eq!(
        second.fitting(&units("q", 1), &["n1"]).await,
        Vec::<String>::new()
    );
}

/// `/inspect` of an unknown node, of a node with no GPU, or of one that lost some, ended the process.
#[tokio::test]
async fn e12_inspect_shows_unknown_empty_and_shrunken_nodes() {
    let world = World::new().with_node("n1", &[100, 100]);
    world.place(&shared("p", 2, 100), "n1").await;
    let unknown = world.inspect(Some("nobody")).await;
    assert_eq!(
        unknown,
        json!({"nodes": [], "error": "there is no node \"nobody\""})
    );
    world.apply_device(&device("n1", &[100]));
    // The pod's own 50, and 50 of the GPU that is gone: this node's plugin does not say which GPU the container has instead.
    assert_eq!(world.used("n1").await, [100]);
    world.apply_node(&old_node("none", 0, 0));
    assert_eq!(world.inspect(Some("none")).await["nodes"][0]["totalGPU"], 0);
    assert_eq!(
        world.fitting(&units("q", 1), &["none"]).await,
        Vec::<String>::new()
    );
}

/// All GPUs of a node were taken for equal.
#[tokio::test]
async fn e13_gpus_of_unequal_size() {
    let world = World::new().with_node("n1", &[45_000, 15_000]);
    world.place(&units("a", 30_000), "n1").await;
    assert_eq!(world.used("n1").await, [30_000, 0]);
    assert_eq!(
        world.fitting(&units("b", 15_001), &["n1"]).await,
        Vec::<String>::new()
    );
    assert_eq!(world.fitting(&units("c", 15_000), &["n1"]).await, ["n1"]);
}

/// Nodes stayed in memory after deletion, and pods of a deleted node could not be removed.
#[tokio::test]
async fn e14_nodes_and_pods_are_deleted_in_any_order() {
    let world = World::new().with_node("n1", &[100]);
    let pod = units("p", 60);
    world.place(&pod, "n1").await;
    world.delete_node(&node("n1", "MiB"));
    let answer = world.filter(&units("q", 1), &["n1"]).await;
    assert!(answer["FailedNodes"]["n1"].is_string(), "{answer}");
    world.delete_pod(&world.api.pod(&pod));
    world.list::<scheduler::index::RawDevice>(&[]);
    let snapshot = world.index.read().snapshot();
    let gpus = AllocationSnapshot::of(&world.index.read()).gpus;
    assert_eq!((snapshot.n_nodes, snapshot.n_pods, gpus.len()), (0, 0, 0));
    assert_eq!(world.index.read().fleet().nodes().count(), 0);
    world.list::<Node>(&[]);
}

/// Every client could bind. Real TLS connections are tested by `served::verbs_demand_a_client_certificate_and_probes_do_not`.
/// Here only the demand for a certificate is tested.
#[tokio::test]
async fn e15_bind_needs_a_client_certificate() {
    let mut serving = scheduler::config::Serving::default();
    let none = std::path::PathBuf::new;
    serving.tls = Some(scheduler::config::TlsFiles {
        cert: none(),
        key: none(),
        client_ca: Some(none()),
    });
    let world = World::unsynced(&serving);
    for verb in ["filter", "prioritize", "bind"] {
        assert_eq!(
            world
                .send("POST", &format!("/gpushare-scheduler/{verb}"), "{}")
                .await
                .0,
            403
        );
    }
}

/// One GPU per pod only, and init containers and sidecars were not counted.
#[tokio::test]
async fn e16_init_containers_and_sidecars_get_several_gpus() {
    let world = World::new().with_node("n1", &[100, 100]);
    world.place(&shared("two", 2, 120), "n1").await;
    assert_eq!(world.used("n1").await, [60, 60]);
    let limits = |units: u64| json!({"resources": {"limits": {"aliyun.com/gpu-mem": units.to_string()}}});
    let mut pod = pod("mixed", &json!({"aliyun.com/gpu-mem": "5"}));
    let (mut init, mut sidecar) = (limits(30), limits(10));
    init["name"] = "init".into();
    sidecar["name"] = "sidecar".into();
    sidecar["restartPolicy"] = "Always".into();
    pod["spec"]["initContainers"] = json!([sidecar, init]);
    world.place(&pod, "n1").await;
    assert_eq!(
        world.used("n1").await,
        [100, 60],
        "30 beside the sidecar's 10 is the peak"
    );
}

/// kube-scheduler evicted pods by the sums of a node, on whichever GPUs they were, and the node had no room on one GPU
/// afterwards: it evicted more, and more. It asks which pods must go, and the pod fits once they are gone.
#[tokio::test]
async fn e17_victims_make_room_on_one_gpu() {
    let mut world = World::new().with_node("n1", &[100, 100]);
    for (name, gpu, held) in [("a", 0, 50), ("b", 0, 50), ("c", 1, 50), ("d", 1, 50)] {
        world = world.with_pod(&placed_by_old_extender(units(name, held), "n1", gpu, held, 100));
    }
    let mut new = units("new", 80);
    new["spec"]["priority"] = 1.into();
    let answer = world.filter(&new, &["n1", "unknown"]).await;
    // Not resolvable: kube-scheduler 1.36 would look for victims by sums that have room, and fail when it finds none.
    assert_eq!(
        answer["FailedNodes"]
            .as_object()
            .unwrap()
            .keys()
            .collect::<Vec<_>>(),
        ["unknown"]
    );
    assert_eq!(
        answer["FailedAndUnresolvableNodes"]
            .as_object()
            .unwrap()
            .keys()
            .collect::<Vec<_>>(),
        ["n1"]
    );
    let proposed = json!({"n1": {"Pods": [{"UID": "uid-a"}, {"UID": "uid-c"}], "NumPDBViolations": 0}});
    let body = json!({"Pod": new, "NodeNameToMetaVictims": proposed}).to_string();
    let (_, text) = world.send("POST", "/gpushare-scheduler/preempt", body).await;
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    let victims = answer["NodeNameToMetaVictims"]["n1"]["Pods"].as_array().unwrap();
    assert_eq!(victims.len(), 2, "{text}");
    for victim in victims {
        let name = &victim["UID"].as_str().unwrap()["uid-".len()..];
        world.delete_pod(&units(name, 50));
    }
    assert_eq!(world.fitting(&new, &["n1"]).await, ["n1"]);
}

/// A pod that the scheduler cannot account for holds every device of its node, so that nothing is placed twice (dp D6).
#[tokio::test(start_paused = true)]
async fn pods_without_a_record_are_counted_everywhere() {
    let world = World::new().with_node("n1", &[100, 100]);
    world.apply_pod(&on(units("stray", 60), "n1"));
    assert_eq!(world.used("n1").await, [60, 60]);
    assert_eq!(world.index.read().snapshot().n_conservative, 1);
    let shown = world.inspect(Some("n1")).await;
    assert_eq!(
        shown["nodes"][0]["devs"][1]["pods"][0]["problem"],
        "it has no allocation record"
    );
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        world.fitting(&units("q", 50), &["n1"]).await,
        Vec::<String>::new()
    );
}

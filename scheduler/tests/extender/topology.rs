//! Pods that say how their devices are to be chosen: partitions, joint allocation, hints and virtual functions, from the pod's
//! annotations to the record that a bind writes, and back into the accounting of a restarted scheduler.

use proptest::prelude::*;
use scheduler::index::Index;
use scheduler::offline;
use scheduler::read_api::explain;
use serde_json::{Value, json};

use crate::objects::{annotated, device, node, on, pod, shared};
use crate::world::World;

const RECORD: &str = "scheduling.koordinator.sh/device-allocated";
const HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";
const JOINT: &str = "scheduling.koordinator.sh/device-joint-allocate";
const SPEC: &str = "scheduling.koordinator.sh/gpu-partition-spec";

/// GPUs of 100 MiB, each on a switch of its own, four switches to a NUMA node; whole ones are chosen here.
fn gpus(n: usize) -> Value {
    let mut object = device("n1", &vec![100; n]);
    for (at, entry) in object["spec"]["devices"]
        .as_array_mut()
        .unwrap()
        .iter_mut()
        .enumerate()
    {
        entry["topology"] = place(at);
    }
    object["metadata"]["labels"] = json!({"gpushare/serves-vendor": "true"});
    object
}

fn place(switch: usize) -> Value {
    json!({"socketID": -1, "nodeID": switch / 4, "pcieID": format!("0000:{switch:02x}:00.0"), "busID": ""})
}

/// The object with an adapter on each of these switches, in the order of minors, with `n_functions` virtual functions each.
fn with_nics(mut object: Value, switches: &[usize], n_functions: usize) -> Value {
    let nic = |(minor, switch): (usize, &usize)| {
        let function = |nth: usize| json!({"minor": nth, "busID": format!("0000:{minor:02x}:01.{nth}")});
        let groups = json!([{"labels": {"type": "general"}, "vfs": (0..n_functions).map(function).collect::<Vec<_>>()}]);
        json!({"type": "rdma", "id": format!("0000:{minor:02x}:00.0"), "minor": minor, "health": true, "topology": place(*switch),
            "labels": {"type": "fakeW"}, "resources": {"koordinator.sh/rdma": "100"}, "vfGroups": if n_functions > 0 { groups } else { json!([]) }})
    };
    object["spec"]["devices"]
        .as_array_mut()
        .unwrap()
        .extend(switches.iter().enumerate().map(nic));
    object
}

/// The object with a partition table and its policy.
fn with_table(mut object: Value, table: &Value, policy: &str) -> Value {
    object["metadata"]["annotations"]["scheduling.koordinator.sh/gpu-partitions"] = table.to_string().into();
    object["metadata"]["labels"]["node.koordinator.sh/gpu-partition-policy"] = policy.into();
    object
}

fn world(object: &Value) -> World {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    world.apply_device(object);
    world
}

fn asking(name: &str, gpus: u64, rdma: u64) -> Value {
    let mut limits = json!({});
    for (resource, amount) in [("nvidia.com/gpu", gpus), ("koordinator.sh/rdma", rdma)]
        .into_iter()
        .filter(|(_, amount)| *amount > 0)
    {
        limits[resource] = amount.to_string().into();
    }
    pod(name, &limits)
}

fn record(world: &World, pod: &Value) -> Value {
    serde_json::from_str(
        world.api.pod(pod)["metadata"]["annotations"][RECORD]
            .as_str()
            .unwrap(),
    )
    .unwrap()
}

/// Minors of a type in a pod's record.
fn minors(world: &World, pod: &Value, kind: &str) -> Vec<u64> {
    let record = record(world, pod);
    record[kind]
        .as_array()
        .into_iter()
        .flatten()
        .map(|entry| entry["minor"].as_u64().unwrap())
        .collect()
}

/// True if the node passes the filter; no room is kept for the pod.
async fn fits(world: &World, pod: &Value) -> bool {
    let fits = !world.fitting(pod, &["n1"]).await.is_empty();
    world
        .index
        .write()
        .unhint(pod["metadata"]["uid"].as_str().unwrap());
    fits
}

fn holdings(index: &Index) -> Vec<String> {
    let of_node = |node: placement::NodeView<'_>| {
        node.held()
            .map(|held| format!("{} {:?}", held.owner, held.holdings))
            .collect::<Vec<_>>()
    };
    let mut all: Vec<String> = index.fleet().nodes().flat_map(of_node).collect();
    all.sort();
    all
}

/// Asserts that a scheduler which starts now counts the same, and nothing with doubt.
fn assert_restart(world: &World, object: &Value, pods: &[&Value]) {
    let shown = pods.iter().map(|pod| world.api.pod(pod));
    let restarted = offline::index(
        [node("n1", "MiB")].into_iter(),
        [object.clone()].into_iter(),
        shown,
    );
    assert_eq!(holdings(&restarted), holdings(&world.index.read()));
    assert_eq!(restarted.fleet().check(), Vec::new());
    assert_eq!(restarted.snapshot().n_conservative, 0);
    assert_eq!(world.index.read().snapshot().n_conservative, 0);
}

fn table() -> Value {
    json!({"2": [
        {"minors": [0, 1], "gpuLinkType": "NVLink", "ringBusBandwidth": "200Gi", "allocationScore": 1},
        {"minors": [2, 3], "gpuLinkType": "NVLink", "ringBusBandwidth": "400Gi", "allocationScore": 10},
    ]})
}

#[tokio::test]
async fn the_partition_with_the_highest_score_is_chosen_and_restricted_takes_no_other() {
    let object = with_table(gpus(4), &table(), "Honor");
    let world = world(&object);
    let (first, second) = (
        asking("a", 2, 0),
        annotated(asking("b", 2, 0), SPEC, r#"{"allocatePolicy": "BestEffort"}"#),
    );
    assert!(
        !fits(&world, &asking("three", 3, 0)).await,
        "no partition has three"
    );
    world.place(&first, "n1").await;
    assert_eq!(minors(&world, &first, "gpu"), [2, 3]);
    assert!(
        !fits(
            &world,
            &annotated(asking("c", 2, 0), SPEC, r#"{"allocatePolicy": "Restricted"}"#)
        )
        .await
    );
    world.place(&second, "n1").await;
    assert_eq!(minors(&world, &second, "gpu"), [0, 1]);
    assert_restart(&world, &object, &[&first, &second]);
}

#[tokio::test]
async fn a_partition_needs_the_requested_ring_bandwidth() {
    let world = world(&with_table(gpus(4), &table(), "Prefer"));
    let wishing = |name: &str, bandwidth: &str| {
        annotated(
            asking(name, 2, 0),
            SPEC,
            &json!({"ringBusBandwidth": bandwidth}).to_string(),
        )
    };
    assert!(!fits(&world, &wishing("a", "401Gi")).await);
    world.place(&wishing("b", "400Gi"), "n1").await;
    assert_eq!(minors(&world, &wishing("b", "400Gi"), "gpu"), [2, 3]);
    assert!(!fits(&world, &wishing("c", "201Gi")).await);
    assert!(fits(&world, &wishing("c", "200Gi")).await);
    assert!(
        fits(&world, &asking("d", 1, 0)).await,
        "partitions are preferred only, and it asks for none"
    );
}

/// The refusal of `n1` for a pod in the words of filter, and the detail of the explanation.
async fn refusal(world: &World, pod: &Value) -> (String, String) {
    world.apply_pod(pod);
    let filtered = world.filter(pod, &["n1"]).await;
    let failed = &filtered["FailedNodes"]["n1"];
    let unresolvable = &filtered["FailedAndUnresolvableNodes"]["n1"];
    let text = failed.as_str().or(unresolvable.as_str()).unwrap();
    let shown = explain(
        &world.index,
        "default",
        pod["metadata"]["name"].as_str().unwrap(),
        true,
    )
    .unwrap();
    let detail = shown.verdicts[0].detail.clone().unwrap_or_default();
    (text.to_owned(), detail)
}

/// A node must not look like one without a table, or without a free partition, because its table has a mistake.
#[tokio::test]
async fn a_refusal_names_the_mistake_of_a_table_that_cannot_be_read() {
    const MISTAKE: &str =
        "annotation scheduling.koordinator.sh/gpu-partitions: the set [0, 0] under 2 names a GPU twice";
    let broken = json!({"2": [{"minors": [0, 0]}]});
    let world = world(&with_table(gpus(4), &broken, "Honor"));
    let expected = format!("the node's partition table cannot be read: {MISTAKE}");
    let whole = asking("a", 2, 0);
    assert_eq!(
        refusal(&world, &whole).await,
        (expected.clone(), expected.clone())
    );
    world.api.put(&whole);
    assert_eq!(world.bind(&whole, "n1").await, format!("node \"n1\": {expected}"));
    let problems = &world.inspect(Some("n1")).await["nodes"][0]["problems"];
    assert_eq!(*problems, json!([format!("Device object: {MISTAKE}")]));

    // If partitions are only preferred, only a pod that demands one is refused.
    world.apply_device(&with_table(gpus(4), &broken, "Prefer"));
    assert!(fits(&world, &asking("b", 2, 0)).await);
    let demanding = annotated(asking("c", 2, 0), SPEC, r#"{"allocatePolicy": "BestEffort"}"#);
    assert_eq!(refusal(&world, &demanding).await, (expected.clone(), expected));
}

/// A set with a GPU that is not there does not count, whatever its score, and the refusal says so; the other sets do.
#[tokio::test]
async fn a_set_with_a_missing_gpu_does_not_count_and_is_named() {
    const MISTAKE: &str = "annotation scheduling.koordinator.sh/gpu-partitions: the set [3, 4] names minor 4, which no GPU of the \
                           object has; the set does not count";
    let of_more = json!({"2": [{"minors": [3, 4], "allocationScore": 10}, {"minors": [1, 2]}]});
    let world = world(&with_table(gpus(4), &of_more, "Honor"));
    let problems = &world.inspect(Some("n1")).await["nodes"][0]["problems"];
    assert_eq!(*problems, json!([format!("Device object: {MISTAKE}")]));
    let restricted = annotated(asking("a", 2, 0), SPEC, r#"{"allocatePolicy": "Restricted"}"#);
    world.place(&restricted, "n1").await;
    assert_eq!(minors(&world, &restricted, "gpu"), [1, 2]);
    let (text, detail) = refusal(&world, &asking("b", 2, 0)).await;
    assert!(
        text.starts_with("devices that belong together are not free"),
        "{text}"
    );
    assert!(text.ends_with(&format!("; {MISTAKE}")), "{text}");
    assert_eq!(detail, format!("no partition of 2 GPUs is free; {MISTAKE}"));
}

/// The plugin publishes no table that it cannot read, and says why in a condition of its GPUs.
#[tokio::test]
async fn a_refusal_names_the_mistake_in_the_operators_file() {
    let with_condition = |status: &str, reason: &str| {
        let mut object = gpus(4);
        object["metadata"]["labels"]["node.koordinator.sh/gpu-partition-policy"] = "Honor".into();
        for device in object["spec"]["devices"].as_array_mut().unwrap() {
            device["conditions"] = json!([{"type": "ReportValid", "status": status, "reason": reason,
                "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "--gpu-partitions: f.json: a mistake"}]);
        }
        object
    };
    let world = world(&with_condition("False", "PartitionsUnreadable"));
    let expected =
        "the node's partition table cannot be read: --gpu-partitions: f.json: a mistake".to_owned();
    assert_eq!(
        refusal(&world, &asking("a", 2, 0)).await,
        (expected.clone(), expected)
    );
    let problems = &world.inspect(Some("n1")).await["nodes"][0]["problems"];
    assert_eq!(
        *problems,
        json!(["Device object: --gpu-partitions: f.json: a mistake"])
    );

    // The table of another kind of node is no problem of this one, but the reason that it has none.
    world.apply_device(&with_condition("Unknown", "PartitionsOfOtherNode"));
    assert_eq!(
        world.inspect(Some("n1")).await["nodes"][0]["problems"],
        Value::Null
    );
    let demanding = annotated(asking("c", 2, 0), SPEC, r#"{"allocatePolicy": "BestEffort"}"#);
    assert_eq!(
        refusal(&world, &demanding).await.1,
        "the node has no table of GPU partitions; --gpu-partitions: f.json: a mistake"
    );
    world.apply_device(&with_condition("True", "PartitionsUnreadable"));
    assert_eq!(
        refusal(&world, &demanding).await.1,
        "the node has no table of GPU partitions"
    );
}

/// Annotations of which the last valid value stays in force, and devices of other plugins that the object does not list.
#[tokio::test]
async fn annotations_that_cannot_be_used_are_problems_of_their_node() {
    let checkpoint =
        |id: &str| json!([{"podUID": "u", "resourceName": "nvidia.com/gpu", "deviceIDs": [id]}]).to_string();
    let problems = async |key: &str, value: &str| {
        let mut object = device("n1", &[100, 100]);
        object["metadata"]["annotations"][key] = value.into();
        world(&object).inspect(Some("n1")).await["nodes"][0]["problems"].clone()
    };
    for (key, value, expected) in [
        ("gpushare/exchanged-records", "{".to_owned(), "does not parse"),
        (
            "gpushare/pods-without-devices",
            "{}".to_owned(),
            "its last valid value counts",
        ),
        (
            "node.koordinator.sh/devices-checkpoints",
            "{}".to_owned(),
            "its last valid value counts",
        ),
        (
            "node.koordinator.sh/devices-checkpoints",
            checkpoint("GPU-x"),
            "names GPU \"GPU-x\", which the object does not list",
        ),
        (
            "node.koordinator.sh/gpu-checkpoints",
            checkpoint("GPU-x"),
            "names GPU \"GPU-x\", which the object does not list",
        ),
        (
            "gpushare/gpu-links",
            r#"[{"minors": [1, 2], "links": 1}]"#.to_owned(),
            "names minor 2, which no GPU",
        ),
    ] {
        let found = problems(key, &value).await;
        let text = found[0].as_str().unwrap_or_default();
        assert!(
            text.starts_with("Device object: annotation ") && text.contains(key),
            "{found}"
        );
        assert!(text.contains(expected), "{found}");
        assert_eq!(found.as_array().map(Vec::len), Some(1), "{found}");
    }
    for id in ["GPU-n1-0", "GPU-n1-0::2", "MIG-1234"] {
        let found = problems("node.koordinator.sh/devices-checkpoints", &checkpoint(id)).await;
        assert_eq!(found, Value::Null, "{id}");
    }
}

/// Four GPUs with an adapter on each of their switches; then four with the one adapter that there is.
#[tokio::test]
async fn four_gpus_get_an_adapter_of_each_of_their_switches() {
    for (nics, expected) in [(&[0, 1, 2, 3, 4, 5, 6, 7][..], 4), (&[5][..], 1)] {
        let object = with_nics(gpus(8), nics, 0);
        let world = world(&object);
        let pod = annotated(asking("p", 4, 1), JOINT, r#"{"deviceTypes": ["gpu", "rdma"]}"#);
        world.place(&pod, "n1").await;
        let (gpus, rdma) = (minors(&world, &pod, "gpu"), minors(&world, &pod, "rdma"));
        assert_eq!((gpus.len(), rdma.len()), (4, expected));
        let on_switches = rdma
            .iter()
            .all(|minor| gpus.contains(&u64::try_from(nics[usize::try_from(*minor).unwrap()]).unwrap()));
        assert!(on_switches, "GPUs {gpus:?}, adapters {rdma:?}");
        let amounts = record(&world, &pod);
        assert!(
            amounts["rdma"]
                .as_array()
                .unwrap()
                .iter()
                .all(|entry| entry["resources"] == json!({"koordinator.sh/rdma": "1"}))
        );
        assert_restart(&world, &object, &[&pod]);
    }
}

#[tokio::test]
async fn required_scope_same_pcie_needs_all_devices_on_one_switch() {
    let world = world(&with_nics(gpus(4), &[1], 0));
    let joint = |name: &str, gpus: u64, types: &str| {
        annotated(
            asking(name, gpus, 1),
            JOINT,
            &format!(r#"{{"deviceTypes": {types}, "requiredScope": "SamePCIe"}}"#),
        )
    };
    assert!(
        !fits(&world, &joint("a", 2, r#"["gpu", "rdma"]"#)).await,
        "one adapter, two switches"
    );
    for (name, types) in [("b", r#"["gpu", "rdma"]"#), ("c", r#"["rdma", "gpu"]"#)] {
        let pod = joint(name, 1, types);
        world.place(&pod, "n1").await;
        assert_eq!(
            (minors(&world, &pod, "gpu"), minors(&world, &pod, "rdma")),
            (vec![1], vec![0]),
            "{types}"
        );
        world.delete_pod(&world.api.pod(&pod));
    }
    world.place(&asking("d", 0, 100), "n1").await;
    assert!(
        !fits(&world, &joint("e", 1, r#"["rdma", "gpu"]"#)).await,
        "the adapter is gone"
    );
}

#[tokio::test]
async fn an_exclusive_switch_excludes_earlier_and_later_pods() {
    let exclusive = |name: &str| {
        annotated(
            asking(name, 0, 1),
            HINT,
            r#"{"rdma": {"exclusivePolicy": "PCIeLevel"}}"#,
        )
    };
    let object = with_nics(gpus(2), &[0, 0], 0);
    let world = world(&object);
    let first = exclusive("a");
    world.place(&first, "n1").await;
    assert!(
        !fits(&world, &asking("b", 0, 1)).await,
        "the other adapter is on the same switch"
    );
    assert_restart(&world, &object, &[&first]);
    world.delete_pod(&world.api.pod(&first));
    world.place(&asking("c", 0, 1), "n1").await;
    assert!(!fits(&world, &exclusive("d")).await);
    assert!(fits(&world, &asking("e", 0, 1)).await);
    world.apply_device(&with_nics(gpus(2), &[0, 0, 1], 0));
    let other = exclusive("f");
    world.place(&other, "n1").await;
    assert_eq!(minors(&world, &other, "rdma"), [2]);
}

#[tokio::test]
async fn requests_as_count_gives_one_device_per_unit() {
    let object = with_nics(gpus(1), &[0, 0, 0], 0);
    let world = world(&object);
    let counted = annotated(
        asking("a", 0, 2),
        HINT,
        r#"{"rdma": {"allocateStrategy": "RequestsAsCount"}}"#,
    );
    world.place(&counted, "n1").await;
    let each = |amount: &str| json!({"koordinator.sh/rdma": amount});
    let amounts = |pod: &Value| {
        record(&world, pod)["rdma"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["resources"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(amounts(&counted), [each("1"), each("1")]);
    let hint = r#"{"rdma": {"allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"}}"#;
    assert!(!fits(&world, &annotated(asking("b", 0, 2), HINT, hint)).await);
    let alone = annotated(asking("c", 0, 1), HINT, hint);
    world.place(&alone, "n1").await;
    assert_eq!(amounts(&alone), [each("100")]);
    assert_restart(&world, &object, &[&counted, &alone]);
}

#[tokio::test]
async fn apply_for_all_gives_every_selected_device() {
    let object = with_nics(gpus(1), &[0, 0, 0], 0);
    let world = world(&object);
    let hint =
        r#"{"rdma": {"allocateStrategy": "ApplyForAll", "selector": {"matchLabels": {"type": "fakeW"}}}}"#;
    let all = annotated(asking("a", 0, 100), HINT, hint);
    world.place(&all, "n1").await;
    assert_eq!(minors(&world, &all, "rdma"), [0, 1, 2]);
    assert!(!fits(&world, &asking("b", 0, 1)).await);
    assert_restart(&world, &object, &[&all]);
}

#[tokio::test]
async fn virtual_functions_of_own_and_foreign_records_are_counted() {
    let object = with_nics(gpus(1), &[0], 2);
    let world = world(&object);
    let function = |name: &str| annotated(asking(name, 0, 1), HINT, r#"{"rdma": {"vfSelector": {}}}"#);
    let first = function("a");
    world.place(&first, "n1").await;
    let entry = |nth: u32| {
        json!({"rdma": [{"minor": 0, "id": "0000:00:00.0", "resources": {"koordinator.sh/rdma": "1"},
            "extension": {"vfs": [{"minor": nth, "busID": format!("0000:00:01.{nth}")}]}}]})
    };
    assert_eq!(record(&world, &first), entry(0));
    assert_restart(&world, &object, &[&first]);
    let shown = world.inspect(Some("n1")).await["nodes"][0].clone();
    assert_eq!(
        shown["otherDevices"][0]["virtualFunctions"],
        json!({"free": 1, "total": 2})
    );
    assert_eq!(
        (&shown["devs"][0]["numaNode"], &shown["devs"][0]["pcieID"]),
        (&json!(0), &json!("0000:00:00.0"))
    );
    let foreign = annotated(on(asking("k", 0, 1), "n1"), RECORD, &entry(1).to_string());
    world.apply_pod(&foreign);
    assert!(!fits(&world, &function("b")).await, "both are taken");
    world.delete_pod(&foreign);
    assert!(fits(&world, &function("b")).await);
}

/// A network plugin may serve the functions too; the Device object lists their addresses.
#[tokio::test]
async fn virtual_functions_that_kubelet_allocated_to_other_pods_are_taken() {
    let given = |function: &str| {
        let mut object = with_nics(gpus(1), &[0], 2);
        let entry = json!([{"podUID": "x", "containerName": "c", "resourceName": "example.com/vf", "deviceIDs": [function]}]);
        object["metadata"]["annotations"]["node.koordinator.sh/devices-checkpoints"] =
            entry.to_string().into();
        object
    };
    let world = world(&given("0000:00:01.0"));
    let first = annotated(asking("a", 0, 1), HINT, r#"{"rdma": {"vfSelector": {}}}"#);
    world.place(&first, "n1").await;
    assert_eq!(
        record(&world, &first)["rdma"][0]["extension"]["vfs"][0]["busID"],
        "0000:00:01.1"
    );
    assert!(
        !fits(
            &world,
            &annotated(asking("b", 0, 1), HINT, r#"{"rdma": {"vfSelector": {}}}"#)
        )
        .await
    );
}

/// Such a pod may hold any function of the adapter; a function that no longer exists is held by no pod.
#[tokio::test]
async fn a_record_with_an_unknown_virtual_function_blocks_all_of_its_adapter() {
    let world = world(&with_nics(gpus(1), &[0], 2));
    let function = annotated(asking("a", 0, 1), HINT, r#"{"rdma": {"vfSelector": {}}}"#);
    let record = |functions: &Value| json!({"rdma": [{"minor": 0, "resources": {"koordinator.sh/rdma": "1"}, "extension": {"vfs": functions}}]});
    let conservative = || world.index.read().snapshot().n_conservative;
    for (functions, is_free, n_doubtful) in [
        (json!([{"minor": -1}]), false, 1),
        (json!("nonsense"), false, 1),
        (json!([{"minor": 1}]), true, 0),
        (json!([{"minor": 0, "busID": "0000:99:01.0"}]), true, 1),
    ] {
        world.apply_pod(&annotated(
            on(asking("k", 0, 1), "n1"),
            RECORD,
            &record(&functions).to_string(),
        ));
        assert_eq!(
            (fits(&world, &function).await, conservative()),
            (is_free, n_doubtful),
            "{functions}"
        );
    }
}

#[tokio::test]
async fn constraints_apply_to_the_sum_of_all_containers() {
    let object = with_nics(with_table(gpus(4), &table(), "Honor"), &[2, 3], 0);
    let world = world(&object);
    let mut both = annotated(
        asking("a", 1, 0),
        JOINT,
        r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#,
    );
    let mut sidecar = asking("x", 1, 1)["spec"]["containers"][0].clone();
    sidecar["name"] = "sidecar".into();
    both["spec"]["containers"].as_array_mut().unwrap().push(sidecar);
    world.place(&both, "n1").await;
    assert_eq!(
        (minors(&world, &both, "gpu"), minors(&world, &both, "rdma")),
        (vec![2, 3], vec![0, 1])
    );
    assert_restart(&world, &object, &[&both]);
}

#[tokio::test]
async fn a_changed_hint_of_a_bound_pod_changes_what_it_excludes_only() {
    let object = with_nics(gpus(1), &[0, 0], 0);
    let world = world(&object);
    let pod = annotated(
        asking("a", 0, 1),
        HINT,
        r#"{"rdma": {"exclusivePolicy": "PCIeLevel"}}"#,
    );
    world.place(&pod, "n1").await;
    assert!(!fits(&world, &asking("b", 0, 1)).await);
    for (hint, is_free) in [
        (r#"{"rdma": {"allocateStrategy": "ApplyForAll"}}"#, true),
        ("nonsense", true),
        (
            r#"{"rdma": {"allocateStrategy": "RequestsAsCount", "exclusivePolicy": "PCIeLevel"}}"#,
            false,
        ),
    ] {
        world.apply_pod(&annotated(world.api.pod(&pod), HINT, hint));
        assert_eq!(fits(&world, &asking("b", 0, 1)).await, is_free, "{hint}");
        assert_eq!(world.index.read().snapshot().n_conservative, 0, "{hint}");
    }
}

#[tokio::test]
async fn hints_of_other_devices_are_ignored_and_unknown_words_are_refused() {
    let world = world(&with_nics(gpus(1), &[0], 0));
    assert!(
        fits(
            &world,
            &annotated(asking("a", 0, 1), HINT, r#"{"fpga": {"vfSelector": {}}}"#)
        )
        .await
    );
    assert!(
        fits(
            &world,
            &annotated(
                asking("b", 1, 0),
                JOINT,
                r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#
            )
        )
        .await
    );
    let bad = annotated(
        asking("c", 0, 1),
        HINT,
        r#"{"rdma": {"allocateStrategy": "All"}}"#,
    );
    let answer = world.filter(&bad, &["n1"]).await;
    let said = answer["FailedAndUnresolvableNodes"]["n1"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        said.ends_with(r#"rdma.allocateStrategy is "All", none of ApplyForAll, RequestsAsCount"#),
        "{said}"
    );
    world.api.put(&bad);
    world.apply_pod(&bad);
    assert_eq!(world.bind(&bad, "n1").await, said);
}

/// The explanation of a pending pod says so for each node, and so does the error of a bind.
#[tokio::test]
async fn refusals_name_the_constraint_and_the_nearest_miss() {
    let world = world(&with_nics(gpus(4), &[0, 1, 2], 0));
    world.apply_node(&node("n2", "MiB"));
    let mut other = with_nics(gpus(2), &[], 0);
    other["metadata"]["name"] = "n2".into();
    world.apply_device(&other);
    let pod = annotated(
        asking("p", 4, 1),
        JOINT,
        r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#,
    );
    world.api.put(&pod);
    world.apply_pod(&pod);
    let shown = explain(&world.index, "default", "p", true).unwrap();
    let verdicts: Vec<_> = shown
        .verdicts
        .iter()
        .map(|verdict| (&*verdict.node, &*verdict.reason, verdict.detail.as_deref()))
        .collect();
    let apart = "devices that belong together are not free as a partition, or as close to one another, as the pod or the node demands (asked: 4 whole GPUs)";
    assert_eq!(
        verdicts,
        [
            (
                "n1",
                apart,
                Some("4 GPUs fit, no rdma left on switch 0000:03:00.0")
            ),
            (
                "n2",
                "request is larger than the node's GPUs even when they are empty (asked: 4 whole GPUs)",
                Some("the node has 2 GPUs, the largest with 100 MiB")
            ),
        ]
    );
    assert_eq!(
        (shown.asked.as_str(), shown.nodes, shown.fitting),
        ("4 whole GPUs, koordinator.sh/rdma 1", 2, 0)
    );
    let on_n1 = shown
        .verdicts
        .iter()
        .find(|verdict| verdict.node == "n1")
        .unwrap();
    let error = world.bind(&pod, "n1").await;
    assert_eq!(
        error,
        format!(
            "node \"n1\": {}: {}",
            on_n1.reason,
            on_n1.detail.as_deref().unwrap()
        )
    );
    world.delete_pod(&pod);
    assert_eq!(explain(&world.index, "default", "p", true), None);
}

/// The adapters, links and NUMA nodes of a node that does not exist yet are unknown; its GPU model may imply its partitions.
#[tokio::test]
async fn a_node_template_is_not_refused_for_a_topology_that_is_unknown() {
    let world = World::new();
    let capacity = json!({"aliyun.com/gpu-count": "8", "koordinator.sh/gpu-memory": "640Gi", "nvidia.com/gpu": "8", "koordinator.sh/rdma": "800"});
    let template = |labels: Value| json!({"metadata": {"name": "new", "labels": labels}, "status": {"capacity": capacity}});
    let share = |name: &str| {
        pod(
            name,
            &json!({"koordinator.sh/gpu.shared": "4", "koordinator.sh/gpu-memory-ratio": "400", "koordinator.sh/rdma": "1"}),
        )
    };
    let model = json!({"node.koordinator.sh/gpu-model": "H100"});
    for (key, text, labels, expected) in [
        (JOINT, r#"{"deviceTypes": ["gpu", "rdma"]}"#, json!({}), true),
        (
            JOINT,
            r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#,
            json!({}),
            true,
        ),
        (
            HINT,
            r#"{"gpu": {"requiredTopologyScope": "NUMANode"}}"#,
            json!({}),
            false,
        ),
        (SPEC, "{}", json!({}), false),
        (SPEC, "{}", model, true),
    ] {
        let answer = world
            .filter_whole(&annotated(share("p"), key, text), &[template(labels)])
            .await;
        let fits = !answer["Nodes"]["items"].as_array().unwrap().is_empty();
        assert_eq!(fits, expected, "{text}: {answer}");
    }
}

/// The hint of such a type is read once a Device object has named the type.
#[tokio::test]
async fn constraints_apply_to_device_types_known_from_device_objects() {
    let world = world(&gpus(2));
    let bad = annotated(
        pod("a", &json!({"example.com/npu": "1"})),
        HINT,
        r#"{"npu": {"exclusivePolicy": "All"}}"#,
    );
    assert!(
        fits(&world, &bad).await,
        "a resource of another plugin, as far as is known"
    );
    let mut object = gpus(2);
    let npu = |minor: usize| {
        json!({"type": "npu", "id": format!("npu-{minor}"), "minor": minor, "health": true, "topology": place(1),
            "resources": {"example.com/npu": "1"}})
    };
    object["spec"]["devices"]
        .as_array_mut()
        .unwrap()
        .extend([npu(0), npu(1)]);
    world.apply_device(&object);
    assert!(!fits(&world, &bad).await);
    let limits = json!({"example.com/npu": "1", "koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "10Mi"});
    let joint = annotated(
        pod("b", &limits),
        JOINT,
        r#"{"deviceTypes": ["npu", "gpu"], "requiredScope": "SamePCIe"}"#,
    );
    world.place(&joint, "n1").await;
    assert_eq!(
        (minors(&world, &joint, "npu"), minors(&world, &joint, "gpu")),
        (vec![0], vec![1])
    );
    assert_restart(&world, &object, &[&joint]);
}

#[tokio::test]
async fn a_hint_keeps_virtual_functions_too() {
    let world = world(&with_nics(gpus(1), &[0], 1));
    let function = |name: &str| annotated(asking(name, 0, 1), HINT, r#"{"rdma": {"vfSelector": {}}}"#);
    assert_eq!(world.fitting(&function("a"), &["n1"]).await, ["n1"]);
    assert!(
        !fits(&world, &function("b")).await,
        "the only function is expected to be taken"
    );
    assert_eq!(
        world.fitting(&function("a"), &["n1"]).await,
        ["n1"],
        "by this very pod"
    );
}

/// The requests and the annotations of a pod.
fn wishing() -> impl Strategy<
    Value = (
        u64,
        u64,
        Option<&'static str>,
        Option<&'static str>,
        Option<&'static str>,
    ),
> {
    let hints = prop_oneof![
        3 => Just(None),
        1 => Just(Some(r#"{"rdma": {"vfSelector": {}}}"#)),
        1 => Just(Some(r#"{"rdma": {"allocateStrategy": "RequestsAsCount"}}"#)),
        1 => Just(Some(r#"{"rdma": {"exclusivePolicy": "PCIeLevel"}, "gpu": {"exclusivePolicy": "PCIeLevel"}}"#)),
        1 => Just(Some(r#"{"rdma": {"exclusivePolicy": "DeviceLevel", "vfSelector": {}}}"#)),
        1 => Just(Some(r#"{"gpu": {"requiredTopologyScope": "NUMANode"}, "rdma": {"allocateStrategy": "ApplyForAll"}}"#)),
    ];
    let joints = prop_oneof![
        1 => Just(None),
        1 => Just(Some(r#"{"deviceTypes": ["gpu", "rdma"]}"#)),
        1 => Just(Some(r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#)),
        1 => Just(Some(r#"{"deviceTypes": ["rdma", "gpu"]}"#)),
    ];
    let specs = prop_oneof![4 => Just(None), 1 => Just(Some("{}")), 1 => Just(Some(r#"{"allocatePolicy": "Restricted"}"#))];
    (
        0..4_u64,
        prop::sample::select(vec![0, 1, 2, 60, 100, 200]),
        hints,
        joints,
        specs,
    )
}

/// A bind succeeds where the filter passed, and a restarted scheduler counts the same devices without doubt.
#[test]
fn filter_bind_and_restart_agree() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 60,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&proptest::collection::vec(wishing(), 1..8), |pods| {
        runtime.block_on(async {
            let object = with_nics(with_table(gpus(6), &table(), "Prefer"), &[0, 1, 1, 4], 2);
            let world = world(&object);
            let mut placed = Vec::new();
            for (at, (gpus, rdma, hint, joint, spec)) in pods.into_iter().enumerate() {
                let mut pod = if at % 3 == 2 && gpus > 0 {
                    shared(&format!("p{at}"), 1, 30)
                } else {
                    asking(&format!("p{at}"), gpus, rdma)
                };
                for (key, text) in [(HINT, hint), (JOINT, joint), (SPEC, spec)] {
                    pod = text.map_or(pod.clone(), |text| annotated(pod.clone(), key, text));
                }
                let is_admitted = fits(&world, &pod).await;
                world.api.put(&pod);
                world.apply_pod(&pod);
                let error = world.bind(&pod, "n1").await;
                prop_assert_eq!(error.is_empty(), is_admitted, "{}: {}", pod, error);
                if is_admitted {
                    world.see(&pod);
                    placed.push(pod);
                }
            }
            assert_restart(
                &world,
                &object,
                &placed
                    .iter()
                    .filter(|pod| world.api.pod(pod)["metadata"]["annotations"][RECORD].is_string())
                    .collect::<Vec<_>>(),
            );
            Ok(())
        })
    });
    result.unwrap();
}

use proto::resource::FPGA;
use serde_json::{Value, json};

use super::*;

const GIB: u64 = 1 << 30;

fn snapshot(pods: &[Value]) -> ClusterSnapshot {
    let device = |minor: i32| {
        json!({"type": "gpu", "id": format!("GPU-n-{minor}"), "minor": minor, "health": true,
               "resources": {GPU_MEMORY: "8Gi", GPU_CORE: "100", GPU_MEMORY_RATIO: "100"}})
    };
    let object = json!({"apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device",
                        "metadata": {"name": "n"}, "spec": {"devices": [device(0), device(1)]}});
    let node = json!({"metadata": {"name": "n", "annotations": {"aliyun.com/gpu-mem-unit": "GiB"}}});
    let mut snapshot = ClusterSnapshot::default();
    snapshot
        .devices
        .insert("n".to_owned(), serde_json::from_value(object).unwrap());
    snapshot
        .nodes
        .insert("n".to_owned(), serde_json::from_value(node).unwrap());
    for pod in pods {
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        snapshot.pods.insert(format!("default/{}", pod.name_any()), pod);
    }
    snapshot
}

/// A running pod with a record that names these minors.
fn pod(name: &str, limits: &Value, minors: &[i32], bytes: u64, core: u64) -> Value {
    let entry = |minor: &i32| json!({"minor": minor, "id": format!("GPU-n-{minor}"), "resources": {GPU_MEMORY: bytes.to_string(), GPU_CORE: core.to_string()}});
    let record = json!({"gpu": minors.iter().map(entry).collect::<Vec<_>>()}).to_string();
    let mut annotations = json!({DEVICE_ALLOCATED: record, BIND_TIMESTAMP: "17"});
    if let Some(units) = limits.get(GPU_MEM) {
        annotations[MEM_IDX] = json!(minors[0].to_string());
        annotations[MEM_POD] = units.clone();
    }
    json!({
        "metadata": {"name": name, "namespace": "default", "annotations": annotations},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    })
}

fn violations(pods: &[Value]) -> Vec<String> {
    held_amounts(&snapshot(pods), &NONE_EXCUSED).violations
}

#[test]
fn a_sound_cluster_has_no_violations() {
    let quarter = |name| {
        pod(
            name,
            &json!({GPU_SHARED: "1", GPU_MEMORY_RATIO: "25", GPU_CORE: "50"}),
            &[0],
            2 * GIB,
            50,
        )
    };
    let units = pod("units", &json!({GPU_MEM: "4"}), &[0], 4 * GIB, 0);
    let two = pod(
        "two",
        &json!({GPU_SHARED: "2", GPU_MEMORY: "8Gi"}),
        &[0, 1],
        4 * GIB,
        0,
    );
    assert_eq!(
        violations(&[quarter("a"), quarter("b"), units]),
        Vec::<String>::new()
    );
    let held = held_amounts(&snapshot(&[two]), &NONE_EXCUSED);
    let used: Vec<u64> = held.gpus.values().map(GpuUse::used).collect();
    assert_eq!((used, held.violations), (vec![4 * GIB, 4 * GIB], vec![]));
}

#[test]
fn too_much_memory_or_core_on_one_gpu_is_a_violation() {
    let half = |name| pod(name, &json!({GPU_MEM: "5"}), &[1], 5 * GIB, 0);
    let found = violations(&[half("a"), half("b")]);
    assert_eq!(
        found,
        ["GPU 1 of n: 10737418240 of 8589934592 bytes are held by [\"default/a\", \"default/b\"]"]
    );
    let busy = |name| {
        pod(
            name,
            &json!({GPU_SHARED: "1", GPU_MEMORY: "1Gi", GPU_CORE: "60"}),
            &[1],
            GIB,
            60,
        )
    };
    assert_eq!(
        violations(&[busy("a"), busy("b")]),
        ["GPU 1 of n: 120 % of its core is held by [\"default/a\", \"default/b\"]"]
    );
}

#[test]
fn a_record_must_agree_with_the_request_and_the_inventory() {
    let limits = json!({GPU_SHARED: "2", GPU_MEMORY: "4Gi"});
    let says = |pod: Value| violations(&[pod]).join("\n");
    assert!(says(pod("p", &limits, &[0], 2 * GIB, 0)).contains("asks for 2 devices"));
    assert!(says(pod("p", &limits, &[0, 0], 2 * GIB, 0)).contains("asks for 2 devices"));
    assert!(says(pod("p", &limits, &[0, 7], 2 * GIB, 0)).contains("there is no GPU 7"));
    assert!(
        says(pod("p", &limits, &[0, 1], 4 * GIB, 0))
            .contains("says koordinator.sh/gpu-memory Some(4294967296)")
    );
    assert!(says(pod("p", &limits, &[0, 1], 2 * GIB, 9)).contains("says koordinator.sh/gpu-core 9"));
    let mut wrong_units = pod("p", &json!({GPU_MEM: "4"}), &[0], 4 * GIB, 0);
    wrong_units["metadata"]["annotations"][MEM_POD] = json!("5");
    assert!(says(wrong_units).contains("ALIYUN_COM_GPU_MEM_POD=5"));
    let mut unrecorded = pod("p", &json!({GPU_MEM: "4"}), &[0], 4 * GIB, 0);
    unrecorded["metadata"]["annotations"] = json!({});
    assert!(says(unrecorded).contains("no record"));
}

#[test]
fn excused_and_finished_pods_are_ignored() {
    let mut broken = pod("broken", &json!({GPU_MEM: "4"}), &[0], 4 * GIB, 0);
    broken["metadata"]["annotations"] = json!({DEVICE_ALLOCATED: "{"});
    let mut ended = broken.clone();
    ended["metadata"]["name"] = json!("ended");
    ended["status"]["phase"] = json!("Succeeded");
    let excused = BTreeSet::from(["default/broken".to_owned()]);
    assert_eq!(
        held_amounts(&snapshot(&[broken, ended]), &excused).violations,
        Vec::<String>::new()
    );
}

/// The amounts of an excused pod count whole, although its record is wrong.
#[test]
fn an_oversubscription_by_an_excused_pod_is_a_violation() {
    let fpgas = |name: &str, minors: &[i32]| {
        let entry = |minor| json!({"minor": minor, "resources": {FPGA: "60"}});
        let mut pod = pod(name, &json!({FPGA: "60"}), &[], 0, 0);
        let record = json!({"fpga": minors.iter().map(entry).collect::<Vec<_>>()});
        pod["metadata"]["annotations"][DEVICE_ALLOCATED] = json!(record.to_string());
        pod
    };
    let mut unasked = fpgas("broken", &[7, 0]);
    unasked["spec"]["containers"][0]["resources"]["limits"][GPU_MEM] = json!("4");
    let mut snapshot = snapshot(&[unasked, fpgas("sound", &[0])]);
    let card = json!({"type": "fpga", "minor": 0, "health": true, "resources": {FPGA: "100"}});
    let card = serde_json::from_value(card).unwrap();
    snapshot.devices.get_mut("n").unwrap().spec.devices.push(card);
    let excused = BTreeSet::from(["default/broken".to_owned()]);
    assert_eq!(
        held_amounts(&snapshot, &excused).violations,
        ["fpga 0 of n: 120 of 100 koordinator.sh/fpga are held by [\"default/broken\", \"default/sound\"]"]
    );
}

#[test]
fn the_last_environment_printed_in_a_log_counts() {
    let log = "A=1\nNVIDIA_VISIBLE_DEVICES=GPU-a\nA=1\nNVIDIA_VISIBLE_DEVICES=GPU-c,GPU-b\n";
    assert_eq!(seen(log, None), ["GPU-b", "GPU-c"]);
    assert_eq!(seen("NVIDIA_VISIBLE_DEVICES=void\n", None), Vec::<String>::new());
    assert_eq!(
        seen("NVIDIA_VISIBLE_DEVICES=void\nGPUSHARE_GPU_DEVICES=GPU-a\n", None),
        ["GPU-a"]
    );
    assert_eq!(
        seen("XNVIDIA_VISIBLE_DEVICES=GPU-a\n", None),
        Vec::<String>::new()
    );
}

#[test]
fn device_nodes_printed_in_a_log_count_before_variables() {
    let snapshot = snapshot(&[]);
    let device = snapshot.devices.get("n");
    let log = "NVIDIA_VISIBLE_DEVICES=void\nDEVICE_NODES=/dev/nvidia1,/dev/nvidia7,/dev/nvidiactl\n";
    assert_eq!(seen(log, device), ["GPU-n-1", "minor 7"]);
    assert_eq!(
        seen("NVIDIA_VISIBLE_DEVICES=GPU-n-0\nDEVICE_NODES=\n", device),
        Vec::<String>::new()
    );
}

#[test]
fn a_swapped_record_counts_instead_of_the_annotation() {
    let limits = json!({GPU_MEM: "2"});
    let with_uid = |name: &str, minor: i32| {
        let mut pod = pod(name, &limits, &[minor], 2 * GIB, 0);
        pod["metadata"]["uid"] = json!(format!("uid-{name}"));
        pod
    };
    let mut snapshot = snapshot(&[with_uid("a", 0), with_uid("b", 1)]);
    let record = |minor: i32| json!({"gpu": [{"minor": minor, "id": format!("GPU-n-{minor}"), "resources": {GPU_MEMORY: "2Gi"}}]});
    let exchanged = json!({"uid-a": record(1), "uid-b": record(0)}).to_string();
    let device = snapshot.devices.get_mut("n").unwrap();
    device.metadata.annotations = Some([(plugin_reports::EXCHANGED_RECORDS.to_owned(), exchanged)].into());
    let held = held_amounts(&snapshot, &NONE_EXCUSED);
    assert_eq!(held.violations, Vec::<String>::new());
    assert_eq!(held.gpus[&("n".to_owned(), 1)].pods, ["default/a"]);
    assert_eq!(
        should_see(&snapshot.pods["default/a"], snapshot.devices.get("n"), "c"),
        ["GPU-n-1"]
    );
}

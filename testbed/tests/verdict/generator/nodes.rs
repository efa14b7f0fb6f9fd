//! Random nodes and Device objects.

use serde_json::{Map, Value, json};

use super::Dice;

const GIB: u64 = 1 << 30;

/// The program that serves GPUs on a node.
#[derive(Clone, Copy)]
enum Plugin {
    Ours,
    /// gpushare's old plugin: capacities and no Device object.
    Old,
    /// The vendor's plugin: whole GPUs and no Device object.
    Vendor,
    /// None.
    None,
}

/// The UUID of a GPU.
pub(super) fn uuid(node: &str, minor: u64) -> String {
    format!("GPU-{node}-{minor}")
}

/// A node, and its Device object if it has one.
pub(super) fn node(dice: &mut Dice<'_>, name: &str) -> (Value, Option<Value>) {
    let plugin = match dice.up_to(99) {
        0..80 => Plugin::Ours,
        80..87 => Plugin::Old,
        87..93 => Plugin::Vendor,
        _ => Plugin::None,
    };
    let unit = dice.pick(&["GiB", "GiB", "GiB", "GiB", "MiB", "256Mi"]);
    let gpus = random_gpus(dice, name);
    let mut amounts = match plugin {
        Plugin::Ours => amounts_of_ours(dice, &gpus, unit),
        Plugin::Old => amounts_of_old(dice, gpus.len()),
        Plugin::Vendor => Map::from_iter([("nvidia.com/gpu".to_owned(), gpus.len().to_string().into())]),
        Plugin::None => Map::new(),
    };
    let device = matches!(plugin, Plugin::Ours).then(|| device(dice, name, gpus, &mut amounts));
    add_host_amounts(dice, &mut amounts);
    let mut node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": format!("uid-{name}"), "labels": labels(dice, name), "annotations": {}},
        "spec": {"taints": taints(dice)},
        "status": {"capacity": amounts, "allocatable": amounts},
    });
    if dice.chance(5) {
        node["spec"]["unschedulable"] = true.into();
    }
    if matches!(plugin, Plugin::Ours) || dice.chance(30) {
        node["metadata"]["annotations"]["aliyun.com/gpu-mem-unit"] =
            if dice.chance(97) { unit } else { "Mib" }.into();
    }
    if matches!(plugin, Plugin::Ours) && dice.chance(15) {
        let serving = dice.chance(70);
        let state = json!({"serving": serving, "since": "2026-01-01T00:00:00Z"});
        node["metadata"]["annotations"]["gpushare/device-plugin"] = state.to_string().into();
    }
    // Some objects lack an amount that others of their kind have, or have less of it.
    if dice.chance(8) {
        let allocatable = node["status"]["allocatable"].as_object_mut().unwrap();
        let names: Vec<String> = allocatable.keys().cloned().collect();
        let amount = dice.pick(&names.iter().collect::<Vec<_>>());
        if dice.chance(50) {
            allocatable.remove(amount);
        } else {
            allocatable.insert(amount.clone(), dice.pick(&["0", "1", "2"]).into());
        }
    }
    (node, device.flatten())
}

fn random_gpus(dice: &mut Dice<'_>, node: &str) -> Vec<Value> {
    let size = dice.pick(&[8, 16, 24]);
    let has_places = dice.chance(60);
    let mut gpus = Vec::new();
    for minor in 0..dice.pick(&[1, 2, 2, 3, 4, 8]) {
        let size = if dice.chance(90) { size } else { 16 };
        let mut gpu = json!({
            "type": "gpu", "id": uuid(node, minor), "minor": minor, "health": dice.chance(85),
            "resources": {
                "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": format!("{size}Gi"),
                "koordinator.sh/gpu-memory-ratio": "100",
            },
            "labels": {},
        });
        if has_places {
            let place = minor / 2;
            gpu["topology"] =
                json!({"socketID": place / 2, "nodeID": place / 2, "pcieID": format!("switch-{place}")});
        }
        if dice.chance(25) {
            gpu["labels"]["gpushare/enforcement"] = dice.pick(&["driver", "hami-core"]).into();
        }
        if dice.chance(25) {
            gpu["labels"]["grade"] = dice.pick(&["a", "b"]).into();
        }
        if dice.chance(4) {
            gpu["labels"]["gpushare/sharing"] = "disabled".into();
        }
        gpus.push(gpu);
    }
    gpus
}

/// The amounts that our plugin serves and patches, from the healthy GPUs.
fn amounts_of_ours(dice: &mut Dice<'_>, gpus: &[Value], unit: &str) -> Map<String, Value> {
    let healthy: Vec<&Value> = gpus.iter().filter(|gpu| gpu["health"] == true).collect();
    let unit_bytes = match unit {
        "GiB" => GIB,
        "MiB" => 1 << 20,
        _ => 256 << 20,
    };
    let size = |gpu: &&Value| {
        let text = gpu["resources"]["koordinator.sh/gpu-memory"].as_str().unwrap();
        text.strip_suffix("Gi").unwrap().parse::<u64>().unwrap() * GIB
    };
    let bytes: u64 = healthy.iter().map(size).sum();
    let percent = (100 * healthy.len()).to_string();
    let mut amounts = Map::new();
    let mut insert = |name: &str, amount: String| amounts.insert(name.to_owned(), amount.into());
    insert("aliyun.com/gpu-mem", (bytes / unit_bytes).to_string());
    insert("aliyun.com/gpu-count", gpus.len().to_string());
    insert("koordinator.sh/gpu-memory", bytes.to_string());
    for name in ["gpu.shared", "gpu-memory-ratio", "gpu-core", "gpu"] {
        insert(&format!("koordinator.sh/{name}"), percent.clone());
    }
    if dice.chance(25) {
        insert("nvidia.com/gpu", healthy.len().to_string());
    }
    amounts
}

fn amounts_of_old(dice: &mut Dice<'_>, n_gpus: usize) -> Map<String, Value> {
    let units = n_gpus * dice.pick(&[8, 16]);
    Map::from_iter([
        ("aliyun.com/gpu-count".to_owned(), n_gpus.to_string().into()),
        ("aliyun.com/gpu-mem".to_owned(), units.to_string().into()),
    ])
}

/// A Device object; adds the amounts of devices of other types.
fn device(
    dice: &mut Dice<'_>,
    name: &str,
    gpus: Vec<Value>,
    amounts: &mut Map<String, Value>,
) -> Option<Value> {
    if dice.chance(4) {
        // Not written yet.
        return None;
    }
    let n_gpus = gpus.len();
    let mut devices = gpus;
    for (kind, percent) in [("rdma", 30), ("fpga", 10)] {
        if dice.chance(percent) {
            let others = other_devices(dice, name, kind);
            let amount = 100 * others.len();
            amounts.insert(format!("koordinator.sh/{kind}"), amount.to_string().into());
            devices.extend(others);
        }
    }
    let mut device = json!({
        "apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device",
        "metadata": {"name": name, "labels": {}, "annotations": {}}, "spec": {"devices": devices},
    });
    let annotations = &mut device["metadata"]["annotations"];
    if dice.chance(20) {
        annotations["scheduling.koordinator.sh/gpu-partitions"] = partitions(dice, n_gpus).into();
    }
    if dice.chance(15) {
        let links = json!([{"minors": [0, 1], "links": 4}, {"minors": [2, 3], "links": 4}]);
        annotations["gpushare/gpu-links"] = links.to_string().into();
    }
    if dice.chance(10) {
        annotations["gpushare/pods-without-devices"] = json!(["uid-p0", "uid-p1"]).to_string().into();
    }
    if amounts.contains_key("nvidia.com/gpu") && dice.chance(80) {
        device["metadata"]["labels"]["gpushare/serves-vendor"] = "true".into();
    }
    if dice.chance(4) && !dice.is_real {
        device["spec"]["devices"] = "none".into();
    }
    Some(device)
}

fn other_devices(dice: &mut Dice<'_>, node: &str, kind: &str) -> Vec<Value> {
    let mut devices = Vec::new();
    for minor in 0..=dice.up_to(2) {
        let mut device = json!({
            "type": kind, "id": format!("{node}-{kind}-{minor}"), "minor": minor, "health": dice.chance(90),
            "resources": {format!("koordinator.sh/{kind}"): "100"}, "labels": {"grade": dice.pick(&["a", "b"])},
        });
        if dice.chance(60) {
            device["topology"] = json!({"socketID": 0, "nodeID": 0, "pcieID": format!("switch-{minor}")});
        }
        if dice.chance(30) {
            let functions =
                json!([{"minor": 0, "busID": "0000:3b:00.2"}, {"minor": 1, "busID": "0000:3b:00.3"}]);
            device["vfGroups"] = json!([{"labels": {"speed": "fast"}, "vfs": functions}]);
        }
        devices.push(device);
    }
    devices
}

/// A table of partitions, sometimes one that cannot be read.
fn partitions(dice: &mut Dice<'_>, n_gpus: usize) -> String {
    let mut pairs = Vec::new();
    for first in (0..n_gpus.saturating_sub(1)).step_by(2) {
        let score = dice.up_to(1);
        pairs.push(json!({
            "minors": [first, first + 1], "gpuLinkType": "NVLink", "allocationScore": score, "ringBusBandwidth": "200Gi",
        }));
    }
    match dice.up_to(9) {
        0 => "{".to_owned(),
        1 => json!({"2": [{"minors": [0]}]}).to_string(),
        _ => json!({"2": pairs}).to_string(),
    }
}

fn add_host_amounts(dice: &mut Dice<'_>, amounts: &mut Map<String, Value>) {
    let host = [
        ("cpu", dice.pick(&["4", "16", "64", "7500m"])),
        ("memory", dice.pick(&["16Gi", "64Gi", "256Gi", "17179869183"])),
        (
            "pods",
            dice.pick(&["3", "110", "110", "110", "110", "110", "110", "110"]),
        ),
        ("ephemeral-storage", dice.pick(&["10Gi", "100Gi"])),
    ];
    for (name, amount) in host {
        if dice.chance(99) {
            amounts.insert(name.to_owned(), amount.into());
        }
    }
    if dice.chance(20) {
        amounts.insert("hugepages-2Mi".to_owned(), "64Mi".into());
    }
    if dice.chance(30) {
        amounts.insert(
            "example.com/widget".to_owned(),
            dice.pick(&["0", "1", "4"]).into(),
        );
    }
}

fn labels(dice: &mut Dice<'_>, name: &str) -> Value {
    let mut labels = json!({"kubernetes.io/hostname": name, "zone": dice.pick(&["a", "b"])});
    for (key, values) in [
        ("disk", &["ssd", "hdd"][..]),
        ("cores", &["8", "16", "08", "many"]),
        ("koordinator.sh/gpu-isolation-provider", &["HAMi-core", "other"]),
        ("node.koordinator.sh/gpu-model", &["T4", "A100"]),
        ("node.koordinator.sh/gpu-partition-policy", &["Honor", "Prefer"]),
    ] {
        if dice.chance(35) {
            labels[key] = dice.pick(values).into();
        }
    }
    labels
}

fn taints(dice: &mut Dice<'_>) -> Value {
    let mut taints = Vec::new();
    for key in ["dedicated", "nvidia.com/gpu"] {
        if dice.chance(9) {
            let effect = dice.pick(&["NoSchedule", "NoSchedule", "NoExecute", "PreferNoSchedule"]);
            let mut taint = json!({"key": key, "effect": effect});
            if dice.chance(60) {
                taint["value"] = dice.pick(&["present", "team-a"]).into();
            }
            taints.push(taint);
        }
    }
    taints.into()
}

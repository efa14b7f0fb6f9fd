//! Random pods: requests in every dialect, valid and not, annotations, and constraints on nodes.

use serde_json::{Map, Value, json};

use super::Dice;

/// A pod without a node.
pub(super) fn pod(dice: &mut Dice<'_>, name: &str) -> Value {
    let namespace = dice.pick(&["default", "default", "team-a"]);
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": namespace, "uid": format!("uid-{name}"), "labels": {},
            "annotations": annotations(dice),
        },
        "spec": {"containers": [], "schedulerName": "another-scheduler"},
        "status": {"phase": "Pending"},
    });
    add_containers(dice, &mut pod["spec"]);
    add_constraints(dice, &mut pod["spec"]);
    if dice.chance(6) {
        pod["metadata"]["labels"]["koordinator.sh/gpu-isolation-provider"] = "HAMi-core".into();
    }
    // A pod with the annotation alone is no pod that kube-scheduler asks the extender about.
    let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
    let asks = limits.as_object().is_some_and(|limits| !limits.is_empty());
    if asks && dice.chance(3) {
        pod["metadata"]["annotations"]["gpushare/all-devices"] = dice.pick(&["true", "false", "yes"]).into();
    }
    pod
}

fn add_containers(dice: &mut Dice<'_>, spec: &mut Value) {
    let limits = request(dice);
    let mut main = container("main", &limits);
    let is_pod_level = dice.chance(5);
    if is_pod_level {
        spec["resources"] =
            json!({"requests": {"cpu": dice.pick(&["1", "3"]), "memory": dice.pick(&["1Gi", "8Gi"])}});
    } else if dice.chance(60) {
        add_host_requests(dice, &mut main);
    }
    let mut containers = vec![main];
    if dice.chance(15) {
        let limits = if dice.chance(50) { limits } else { Map::new() };
        containers.push(container("second", &limits));
    }
    spec["containers"] = containers.into();
    let mut inits = Vec::new();
    for name in ["first-init", "second-init"] {
        if dice.chance(10) {
            let limits = if dice.chance(30) {
                request(dice)
            } else {
                Map::new()
            };
            let mut init = container(name, &limits);
            if dice.chance(50) {
                init["restartPolicy"] = "Always".into();
            }
            if !is_pod_level {
                add_host_requests(dice, &mut init);
            }
            inits.push(init);
        }
    }
    if !inits.is_empty() {
        spec["initContainers"] = inits.into();
    }
    if dice.chance(5) {
        spec["overhead"] = json!({"cpu": "250m", "memory": "120Mi"});
    }
}

/// A container that has these limits of extended resources.
fn container(name: &str, limits: &Map<String, Value>) -> Value {
    json!({"name": name, "image": "busybox:1.36", "resources": {"limits": limits, "requests": limits}})
}

fn add_host_requests(dice: &mut Dice<'_>, container: &mut Value) {
    let requests = &mut container["resources"]["requests"];
    requests["cpu"] = dice.pick(&["100m", "100m", "1", "1500m", "4"]).into();
    requests["memory"] = dice.pick(&["64Mi", "64Mi", "1Gi", "1500M", "12Gi"]).into();
    if dice.chance(8) {
        requests["ephemeral-storage"] = dice.pick(&["1Gi", "20Gi"]).into();
    }
    if dice.chance(4) {
        for part in ["limits", "requests"] {
            container["resources"][part]["hugepages-2Mi"] = dice.pick(&["32Mi", "32Mi"]).into();
        }
    }
}

/// Amounts of extended resources.
fn request(dice: &mut Dice<'_>) -> Map<String, Value> {
    let mut limits = Map::new();
    let mut ask = |name: &str, amount: &str| limits.insert(name.to_owned(), amount.into());
    match dice.up_to(99) {
        0..28 => drop(ask("aliyun.com/gpu-mem", dice.pick(&UNITS))),
        28..48 => {
            ask("koordinator.sh/gpu.shared", dice.pick(&["1", "1", "2", "3", "4"]));
            ask("koordinator.sh/gpu-memory", dice.pick(&BYTES));
            if dice.chance(30) {
                ask(
                    "koordinator.sh/gpu-core",
                    dice.pick(&["10", "50", "60", "100", "200"]),
                );
            }
        }
        48..64 => {
            let n_gpus = dice.pick(&["1", "1", "2", "4"]);
            let percent = dice.pick(&["25", "50", "60", "100", "200", "400", "33"]);
            if dice.chance(90) {
                ask("koordinator.sh/gpu.shared", n_gpus);
            }
            ask("koordinator.sh/gpu-memory-ratio", percent);
            if dice.chance(70) {
                ask("koordinator.sh/gpu-core", percent);
            }
        }
        64..68 => {
            ask("koordinator.sh/gpu.shared", dice.pick(&["1", "2"]));
            ask("koordinator.sh/gpu", dice.pick(&["50", "100", "200"]));
        }
        68..78 => {
            let vendor = match dice.up_to(19) {
                0 => "dcu.com/gpu",
                1 => "amd.com/gpu",
                _ => "nvidia.com/gpu",
            };
            ask(vendor, dice.pick(&["1", "1", "2", "4"]));
        }
        78..83 => {
            ask("koordinator.sh/gpu.shared", "1");
            ask("koordinator.sh/gpu-memory-ratio", dice.pick(&["50", "100"]));
            ask("koordinator.sh/rdma", dice.pick(&["1", "50", "100", "200"]));
        }
        83..86 => drop(ask("koordinator.sh/rdma", dice.pick(&["1", "2", "100", "200"]))),
        86..88 => drop(ask("koordinator.sh/fpga", dice.pick(&["50", "100"]))),
        // What no node can satisfy.
        90 => drop(ask("koordinator.sh/gpu-memory", "4Gi")),
        91 => drop(ask("koordinator.sh/gpu-core", "50")),
        92 => drop(ask("koordinator.sh/gpu.shared", "1")),
        93 => {
            ask("aliyun.com/gpu-mem", "2");
            ask("koordinator.sh/gpu.shared", "1");
        }
        94 => {
            ask("nvidia.com/gpu", "1");
            ask("koordinator.sh/gpu-core", "50");
        }
        95 => {
            ask("aliyun.com/gpu-mem", "2");
            ask("kubernetes.io/gpu-core", "50");
        }
        96 => {
            ask("koordinator.sh/gpu.shared", "2");
            ask("koordinator.sh/gpu-memory-ratio", "75");
            ask("koordinator.sh/gpu-memory", "4Gi");
        }
        _ => {}
    }
    if dice.chance(3) {
        limits.insert(
            "example.com/widget".to_owned(),
            dice.pick(&["0", "1", "2"]).into(),
        );
    }
    limits
}

const UNITS: [&str; 13] = [
    "1", "2", "2", "4", "4", "8", "12", "16", "24", "0", "2048", "8192", "8k",
];
const BYTES: [&str; 9] = ["1Gi", "2Gi", "4Gi", "6Gi", "8Gi", "16Gi", "48Gi", "8192", "9G"];

/// Annotations about the choice of nodes and devices, some of them wrong.
fn annotations(dice: &mut Dice<'_>) -> Value {
    let mut annotations = json!({});
    if dice.chance(15) {
        let kind = dice.pick(&["gpu", "gpu", "rdma", "fpga"]);
        annotations["scheduling.koordinator.sh/device-allocate-hint"] = hint(dice, kind).into();
    }
    if dice.chance(8) {
        let joint = match dice.up_to(5) {
            0 => json!({"deviceTypes": ["gpu", "gpu"]}),
            1 => json!({"deviceTypes": ["gpu", "rdma"], "requiredscope": "SamePCIe"}),
            2 => json!({"deviceTypes": ["gpu", "rdma"]}),
            _ => json!({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}),
        };
        annotations["scheduling.koordinator.sh/device-joint-allocate"] = joint.to_string().into();
    }
    if dice.chance(6) {
        let partition = match dice.up_to(3) {
            0 => json!({"allocatePolicy": "Restricted"}),
            1 => json!({"ringBusBandwidth": "300Gi"}),
            2 => json!({"allocatePolicy": "Best"}),
            _ => json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "100Gi"}),
        };
        annotations["scheduling.koordinator.sh/gpu-partition-spec"] = partition.to_string().into();
    }
    for (key, values) in [
        (
            "gpushare/node-policy",
            &["fill", "binpack", "spread", "least-allocated", "most"][..],
        ),
        (
            "gpushare/device-policy",
            &["fill", "binpack", "spread", "in-order", "any"],
        ),
        ("gpushare/enforcement", &["driver", "any", "none"]),
    ] {
        if dice.chance(6) {
            annotations[key] = dice.pick(values).into();
        }
    }
    annotations
}

fn hint(dice: &mut Dice<'_>, kind: &str) -> String {
    let hint = match dice.up_to(9) {
        0 => json!({"selector": {"matchLabels": {"grade": "a"}}}),
        1 => {
            json!({"selector": {"matchExpressions": [{"key": "grade", "operator": "NotIn", "values": ["a"]}]}})
        }
        2 => json!({"exclusivePolicy": "DeviceLevel"}),
        3 => json!({"exclusivePolicy": "PCIeLevel"}),
        4 => json!({"requiredTopologyScope": dice.pick(&["Device", "PCIe", "NUMANode", "Node"])}),
        5 => json!({"allocateStrategy": "ApplyForAll"}),
        6 => json!({"allocateStrategy": "RequestsAsCount"}),
        7 => json!({"vfSelector": {"matchLabels": {"speed": "fast"}}}),
        8 => json!({"vfSelector": {}}),
        _ => json!({"exclusivePolicy": "Level"}),
    };
    match dice.up_to(19) {
        0 => "{".to_owned(),
        _ => json!({kind: hint}).to_string(),
    }
}

/// Node selector, required node affinity and tolerations.
fn add_constraints(dice: &mut Dice<'_>, spec: &mut Value) {
    if dice.chance(8) {
        let (key, value) = dice.pick(&[("zone", "a"), ("zone", "b"), ("disk", "ssd"), ("zone", "c")]);
        spec["nodeSelector"] = json!({key: value});
    }
    if dice.chance(15) {
        let terms: Vec<Value> = (0..=dice.up_to(1)).map(|_| term(dice)).collect();
        spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
            json!({"nodeSelectorTerms": terms});
    }
    if dice.chance(10) {
        let preference = json!({"weight": 10, "preference": {"matchExpressions": [expression(dice)]}});
        spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] =
            json!([preference]);
    }
    let mut tolerations = Vec::new();
    for _ in 0..dice.pick(&[0, 0, 1, 1, 2]) {
        tolerations.push(toleration(dice));
    }
    if !tolerations.is_empty() {
        spec["tolerations"] = tolerations.into();
    }
}

fn term(dice: &mut Dice<'_>) -> Value {
    let mut term = json!({});
    if dice.chance(85) {
        let expressions: Vec<Value> = (0..=dice.up_to(1)).map(|_| expression(dice)).collect();
        term["matchExpressions"] = expressions.into();
    }
    if dice.chance(20) {
        let mut fields = Vec::new();
        for _ in 0..=dice.up_to(1) {
            let (operator, node) = (
                dice.pick(&["In", "In", "NotIn"]),
                dice.pick(&["n0", "n1", "n2", "n9"]),
            );
            fields.push(json!({"key": "metadata.name", "operator": operator, "values": [node]}));
        }
        term["matchFields"] = fields.into();
    }
    term
}

fn expression(dice: &mut Dice<'_>) -> Value {
    let key = dice.pick(&[
        "zone",
        "zone",
        "disk",
        "cores",
        "cores",
        "node.koordinator.sh/gpu-model",
        "absent",
    ]);
    let values = match key {
        "zone" => dice.pick(&[["a", "b"], ["a", "a"], ["b", "c"]]),
        "cores" => dice.pick(&[["8", "16"], ["10", "8"], ["9", "many"]]),
        _ => dice.pick(&[["ssd", "T4"], ["hdd", "A100"]]),
    };
    match dice.up_to(9) {
        0..4 => json!({"key": key, "operator": "In", "values": values}),
        4..6 => json!({"key": key, "operator": "NotIn", "values": values[..1]}),
        6 => json!({"key": key, "operator": "Exists"}),
        7 => json!({"key": key, "operator": "DoesNotExist"}),
        _ => {
            let (operator, bound) = (dice.pick(&["Gt", "Lt"]), dice.pick(&["7", "8", "12", "0"]));
            json!({"key": "cores", "operator": operator, "values": [bound]})
        }
    }
}

fn toleration(dice: &mut Dice<'_>) -> Value {
    let key = dice.pick(&["dedicated", "nvidia.com/gpu", "node.kubernetes.io/unschedulable"]);
    let mut toleration = match dice.up_to(9) {
        0 => json!({"operator": "Exists"}),
        1..5 => json!({"key": key, "operator": "Exists"}),
        5 => json!({"key": key}),
        6..8 => json!({"key": key, "operator": "Equal", "value": dice.pick(&["present", "team-a"])}),
        _ => json!({"key": key, "value": dice.pick(&["present", "team-a"])}),
    };
    if dice.chance(60) {
        toleration["effect"] = dice.pick(&["NoSchedule", "NoExecute"]).into();
    }
    toleration
}

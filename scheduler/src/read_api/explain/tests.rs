//! Explanations of waiting pods of each kind, as a person reads them.

use proto::read_api::Explanation;
use serde_json::{Value, json};

use super::explain;
use crate::index::Shared;
use crate::offline;

/// A node of the device plugin with these GPUs in GiB; a GPU of 0 GiB is an unhealthy one of 16 GiB.
fn gpu_node(name: &str, gpus: &[u64], spec: &Value) -> (Value, Value) {
    let n_gpus = gpus.len();
    let sum: u64 = gpus.iter().sum();
    let mut devices = Vec::new();
    for (minor, gib) in gpus.iter().enumerate() {
        let size = if *gib == 0 { 16 } else { *gib };
        devices.push(json!({
            "type": "gpu", "id": format!("GPU-{name}-{minor}"), "minor": minor, "health": *gib > 0,
            "resources": {"koordinator.sh/gpu-memory": format!("{size}Gi")},
        }));
    }
    let node = json!({
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "zone": "a"},
            "annotations": {"aliyun.com/gpu-mem-unit": "GiB"},
        },
        "spec": spec,
        "status": {"allocatable": {
            "cpu": "8", "memory": "64Gi", "pods": "20",
            "aliyun.com/gpu-mem": sum.to_string(),
            "koordinator.sh/gpu.shared": (100 * n_gpus).to_string(),
            "koordinator.sh/gpu-memory": format!("{sum}Gi"),
            "koordinator.sh/gpu-memory-ratio": (100 * n_gpus).to_string(),
            "koordinator.sh/gpu-core": (100 * n_gpus).to_string(),
        }},
    });
    (
        node,
        json!({"metadata": {"name": name}, "spec": {"devices": devices}}),
    )
}

/// A pending pod with these limits, and with `more` fields in its spec.
fn pod(name: &str, limits: &Value, more: &Value) -> Value {
    let mut spec =
        json!({"containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]});
    for (key, value) in more.as_object().into_iter().flatten() {
        spec[key] = value.clone();
    }
    json!({
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-{name}")},
        "spec": spec,
        "status": {"phase": "Pending"},
    })
}

/// A running pod with memory of one GPU of its node.
fn holder(name: &str, node: &str, minor: usize, gib: u64) -> Value {
    let mut pod = pod(
        name,
        &json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": format!("{gib}Gi")}),
        &json!({"nodeName": node}),
    );
    let record = json!({"gpu": [{
        "minor": minor, "id": format!("GPU-{node}-{minor}"),
        "resources": {"koordinator.sh/gpu-memory": format!("{gib}Gi"), "koordinator.sh/gpu-memory-ratio": (gib * 100 / 16).to_string()},
    }]});
    pod["metadata"]["annotations"]["scheduling.koordinator.sh/device-allocated"] = record.to_string().into();
    pod["status"]["phase"] = "Running".into();
    pod
}

fn memory(gib: u64) -> Value {
    json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": format!("{gib}Gi")})
}

/// The limits of a pod whose memory is divided over `n` GPUs.
fn over(n: u64, gib: u64) -> Value {
    json!({"koordinator.sh/gpu.shared": n.to_string(), "koordinator.sh/gpu-memory": format!("{gib}Gi")})
}

/// An explanation as lines of text.
fn text(explanation: &Explanation) -> String {
    let mut lines = vec![format!(
        "{} needs {}; {} of {}",
        explanation.name, explanation.asked, explanation.fitting, explanation.nodes
    )];
    lines.extend(
        explanation
            .warning
            .iter()
            .map(|warning| format!("  warning: {warning}")),
    );
    lines.extend(explanation.summary.iter().map(|sentence| format!("  {sentence}")));
    lines.extend(
        explanation
            .kube_scheduler
            .iter()
            .map(|words| format!("  kube-scheduler says: {words}")),
    );
    for verdict in &explanation.verdicts {
        let refused_by = verdict.refused_by.map(|by| json!(by));
        let by = refused_by.as_ref().and_then(Value::as_str).unwrap_or("takes it");
        lines.push(format!("    {}: {by}: {}", verdict.node, verdict.reason));
        lines.extend(verdict.detail.iter().map(|detail| format!("      {detail}")));
        for gpu in verdict.gpus.iter().filter(|gpu| !gpu.fits) {
            lines.push(format!("      GPU {} {}, {}", gpu.minor, gpu.reason, gpu.lacks));
        }
    }
    lines.join("\n")
}

/// Four nodes: one with a full and a half-full GPU, one with an unhealthy GPU, and two empty ones, with a taint and cordoned.
#[test]
fn waiting_pods_of_each_kind() {
    let taint = json!({"taints": [{"key": "team", "value": "vision", "effect": "NoSchedule"}]});
    let (nodes, devices): (Vec<Value>, Vec<Value>) = [
        gpu_node("busy", &[16, 16], &json!({})),
        gpu_node("sick", &[0, 16], &json!({})),
        gpu_node("tainted", &[16, 16, 16, 16], &taint),
        gpu_node("cordoned", &[80], &json!({"unschedulable": true})),
    ]
    .into_iter()
    .unzip();
    let gated = json!({"schedulingGates": [{"name": "example.com/quota"}]});
    let mut waiting = vec![
        pod("memory", &memory(12), &json!({})),
        pod(
            "core",
            &json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu-core": "101"}),
            &json!({}),
        ),
        pod("too-large", &memory(100), &json!({})),
        pod("three-gpus", &over(3, 3), &json!({})),
        pod("vendor", &json!({"nvidia.com/gpu": "1"}), &json!({})),
        pod(
            "much-cpu",
            &json!({"aliyun.com/gpu-mem": "1", "cpu": "9"}),
            &json!({}),
        ),
        pod(
            "some-cpu",
            &json!({"aliyun.com/gpu-mem": "1", "cpu": "6"}),
            &json!({"nodeSelector": {"kubernetes.io/hostname": "busy"}}),
        ),
        pod("elsewhere", &memory(1), &json!({"nodeSelector": {"zone": "b"}})),
        pod(
            "by-affinity",
            &memory(1),
            &json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "gpu-model", "operator": "In", "values": ["H100", "H200"]}, {"key": "zone", "operator": "Exists"}]}
            ]}}}}),
        ),
        pod(
            "tolerant",
            &memory(12),
            &json!({"tolerations": [{"key": "team", "operator": "Exists"}]}),
        ),
        pod("invalid", &json!({"koordinator.sh/gpu.shared": "1"}), &json!({})),
        pod("gated", &memory(1), &gated),
        pod("isolated", &memory(1), &json!({})),
        pod(
            "mistyped",
            &json!({"aliyun.com/gpu-mem": "1", "example.com/disk": "1"}),
            &json!({}),
        ),
        pod("other-unit", &json!({"aliyun.com/gpu-mem": "8192M"}), &json!({})),
        pod(
            "tiny",
            &json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "8192"}),
            &json!({}),
        ),
        pod("unknown-type", &memory(1), &json!({})),
    ];
    waiting[16]["metadata"]["annotations"]["scheduling.koordinator.sh/device-allocate-hint"] =
        r#"{"gpus": {"exclusivePolicy": "DeviceLevel"}}"#.into();
    waiting[11]["status"]["conditions"] = json!([
        {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty scheduling gates"}
    ]);
    waiting[0]["status"]["conditions"] = json!([
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes are available: 1 node(s) had untolerated taint(s)"}
    ]);
    waiting[12]["metadata"]["labels"] = json!({"koordinator.sh/gpu-isolation-provider": "HAMi-core"});
    let names: Vec<String> = waiting
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    let mut cpu = pod("cpu", &json!({"cpu": "4"}), &json!({"nodeName": "busy"}));
    cpu["status"]["phase"] = "Running".into();
    let running = [
        holder("full", "busy", 0, 16),
        holder("half", "busy", 1, 8),
        holder("most", "sick", 1, 10),
        cpu,
    ];
    let index = offline::index(
        nodes.into_iter(),
        devices.into_iter(),
        waiting.into_iter().chain(running),
    );
    let index = Shared::new(index);
    let texts: Vec<String> = names
        .iter()
        .map(|name| text(&explain(&index, "team", name, true).unwrap()))
        .collect();
    insta::assert_snapshot!(texts.join("\n\n"));
}

#[test]
fn names_of_pods_that_the_client_does_not_see_are_counted() {
    let (node, device) = gpu_node("busy", &[16], &json!({}));
    let pods = [
        holder("full", "busy", 0, 16),
        pod("waits", &memory(12), &json!({})),
    ];
    let index = Shared::new(offline::index(
        [node].into_iter(),
        [device].into_iter(),
        pods.into_iter(),
    ));
    let explanation = super::explain_to(&index, "team", "waits", true, |_| false).unwrap();
    let text = serde_json::to_string(&explanation).unwrap();
    assert!(!text.contains("full"), "{text}");
    assert!(text.contains("when a pod of another namespace ends"), "{text}");
}

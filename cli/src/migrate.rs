//! `migrate status` and `autoscaler-hints`: the place of each node on its way from another plugin, and the resources and labels
//! that autoscalers need for nodes like one of the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use proto::resource::{GPU, GPU_CORE, GPU_COUNT, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde::Serialize;
use serde_json::{Value, json};

use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::{INSTANCE_TYPE, NODE_LABEL, label, label_node, name};
use crate::output::{Screen, TextTable, number, text};
use crate::source::AnswerSource;

const NVIDIA_GPU: &str = "nvidia.com/gpu";
/// The resources that gpushare's plugin publishes in the status of a node.
const RESOURCES: [&str; 8] = [
    GPU_MEM,
    GPU_COUNT,
    GPU_SHARED,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_CORE,
    GPU,
    NVIDIA_GPU,
];
/// The labels of a node by which pods choose GPUs.
const LABELS: [&str; 3] = [
    NODE_LABEL,
    proto::device::GPU_VENDOR_LABEL,
    proto::device::GPU_MODEL_LABEL,
];

/// Amounts by the names of resources, or values by the keys of labels.
type ValuesByKey = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeStage {
    node: String,
    stage: &'static str,
    /// The number of pods that hold a part of a GPU of the node.
    pods: usize,
    next: String,
}

/// Prints the stage of each node on its way from another plugin to gpushare, with the pods on its GPUs and the next step.
pub(crate) async fn status(connection: &ClusterConnection, screen: &Screen) -> CommandResult {
    let nodes = connection.list_json("/api/v1/nodes").await?;
    let state = AnswerSource::open(connection, screen).await?.state(false).await?;
    let mut pods_on: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for node in &state.nodes {
        // A set, because a pod on several GPUs holds a part of each.
        let pods = pods_on.entry(&node.name).or_default();
        for holder in node.gpus.iter().flat_map(|gpu| &gpu.holders) {
            pods.insert(&holder.uid);
        }
    }
    let mut stages = Vec::new();
    for node in &nodes {
        let n_pods = pods_on.get(name(node)).map_or(0, BTreeSet::len);
        stages.extend(stage_of(node, n_pods));
    }
    let names = stages.iter().map(|stage| format!("node/{}", stage.node));
    screen.show(&stages, names, |_| render_stages(&stages, screen))?;
    Ok(ExitCode::SUCCESS)
}

fn render_stages(stages: &[NodeStage], screen: &Screen) -> String {
    if stages.is_empty() {
        return "No node has GPUs that gpushare or another plugin serves.\n".to_owned();
    }
    let mut table = TextTable::new([
        text("NODE", 0),
        text("STAGE", 1),
        number("PODS", 2),
        text("NEXT STEP", 0),
    ]);
    for stage in stages {
        table.push([
            stage.node.as_str().into(),
            stage.stage.into(),
            stage.pods.to_string().into(),
            stage.next.as_str().into(),
        ]);
    }
    table.render(screen)
}

/// The stage of a node, by gpushare's label and the resources in its capacity; `None` if it has neither.
fn stage_of(node: &Value, pods: usize) -> Option<NodeStage> {
    let capacity = node.pointer("/status/capacity").unwrap_or(&Value::Null);
    // kubelet keeps the resource of a plugin that is gone, with the capacity 0.
    let has = |resource: &str| !matches!(capacity.get(resource).and_then(Value::as_str), None | Some("0"));
    let label = label(node, NODE_LABEL);
    let is_labelled = label == "true";
    // The old gpushare plugin serves memory units alone, and none of these two.
    let serves_gpushare = has(GPU_MEMORY) && has(GPU_SHARED);
    let name = name(node);
    let label_command = format!("`{}`", label_node(name));
    let (stage, next) = match (is_labelled, serves_gpushare) {
        // deploy/uninstall.sh labels nodes so, and a pod on each then removes what the plugin wrote.
        _ if label == "uninstall" => (
            "being removed",
            "wait for the pod gpushare-uninstall of the node".to_owned(),
        ),
        (true, true) => ("moved", "none".to_owned()),
        (true, false) if has(GPU_MEM) => (
            "both plugins",
            "remove the old plugin's label from the node, so that one plugin serves the resource".to_owned(),
        ),
        (true, false) => (
            "labelled",
            "wait for the device plugin; `kubectl gpushare doctor` says what it lacks".to_owned(),
        ),
        (false, true) => (
            "left",
            format!(
                "gpushare's label is gone: its resources go with the next pods that end; {label_command} brings the node back"
            ),
        ),
        (false, false) if has(GPU_MEM) => (
            "old gpushare plugin",
            format!("{label_command}, and remove the old plugin's label; running pods stay"),
        ),
        (false, false) if has(NVIDIA_GPU) => (
            "vendor's plugin",
            format!("drain pods with nvidia.com/gpu, then {label_command}; see docs/migrate.md"),
        ),
        (false, false) => return None,
    };
    Some(NodeStage {
        node: name.to_owned(),
        stage,
        pods,
        next,
    })
}

/// Shows the resources and labels that autoscalers need for nodes like the one of this name.
pub(crate) async fn autoscaler_hints(
    connection: &ClusterConnection,
    screen: &Screen,
    name: &str,
) -> CommandResult {
    let action = format!("read node {name}");
    let Some(node) = connection.get(&action, &format!("/api/v1/nodes/{name}")).await? else {
        return Err(CommandFailure::Input(format!(
            "there is no node {name:?}; `kubectl get nodes` lists all"
        )));
    };
    let resources = picked(&node, "/status/capacity", &RESOURCES);
    let mut labels = picked(&node, "/metadata/labels", &LABELS);
    // The plugin labels the Device object alone with the enforcement level; of a node that an autoscaler may create the scheduler
    // reads the level from the template's labels.
    let device = format!("/apis/scheduling.koordinator.sh/v1alpha1/devices/{name}");
    if let Some(device) = connection.get(&format!("read Device {name}"), &device).await? {
        labels.append(&mut picked(
            &device,
            "/metadata/labels",
            &[proto::device::ENFORCEMENT],
        ));
    }
    if resources.is_empty() {
        return Err(CommandFailure::Input(format!(
            "node {name} has no resource of gpushare; name a node that shares its GPUs"
        )));
    }
    let hints = json!({"resources": resources, "labels": labels});
    let instance_type = match label(&node, INSTANCE_TYPE) {
        "" => "TYPE",
        name => name,
    };
    let shown_name = format!("node/{name}");
    screen.show(&hints, [shown_name], |_| {
        render(&resources, &labels, instance_type)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The texts under these keys of the map at a JSON pointer in an object; keys that the map lacks are left out.
fn picked(object: &Value, pointer: &str, keys: &[&str]) -> ValuesByKey {
    let map = object.pointer(pointer).unwrap_or(&Value::Null);
    let mut picked = ValuesByKey::new();
    for key in keys {
        if let Some(value) = map.get(key).and_then(Value::as_str) {
            picked.insert((*key).to_owned(), value.to_owned());
        }
    }
    picked
}

/// The resources and labels in the form that each autoscaler reads. Checked against Cluster Autoscaler 1.36, its provider for
/// Cluster API, and Karpenter 1.14.
fn render(resources: &ValuesByKey, labels: &ValuesByKey, instance_type: &str) -> String {
    let mut text = String::from(
        "# A node group without nodes has no node to learn from: an autoscaler needs its extended resources and labels.\n\n\
         # Cluster Autoscaler on AWS: tags of the Auto Scaling group, or of the EKS node group.\n",
    );
    for (kind, values) in [("resources", resources), ("label", labels)] {
        for (name, value) in values {
            text += &format!("k8s.io/cluster-autoscaler/node-template/{kind}/{name}: \"{value}\"\n");
        }
    }
    text += "\n# Cluster Autoscaler on Azure: tags of the scale set, in which _ stands for a slash and ~2 for _ in a label.\n";
    for (name, value) in resources {
        let name = name.replace('/', "_");
        text += &format!("k8s.io_cluster-autoscaler_node-template_resources_{name}: \"{value}\"\n");
    }
    // Cluster Autoscaler decodes ~2 in labels alone.
    for (name, value) in labels {
        let name = name.replace('_', "~2").replace('/', "_");
        text += &format!("k8s.io_cluster-autoscaler_node-template_label_{name}: \"{value}\"\n");
    }
    text += "\n# Cluster Autoscaler with Cluster API: an annotation of the MachineDeployment, which also needs capacity.cluster-autoscaler.\n\
             # kubernetes.io/cpu and memory. There is none for several extended resources: put them into status.capacity of the\n\
             # infrastructure's machine template, or keep one node in the group (min-size 1).\n";
    let pairs = labels.iter().map(|(name, value)| format!("{name}={value}"));
    let pairs: Vec<String> = pairs.collect();
    text += &format!(
        "capacity.cluster-autoscaler.kubernetes.io/labels: \"{}\"\n",
        pairs.join(",")
    );
    text += "status:\n  capacity:\n";
    text += &indented(4, resources);
    text += "\n# Karpenter, with the feature gate NodeOverlay: extended resources of an instance type. Labels go into spec.template.metadata\n\
             # of the NodePool.\n\
             apiVersion: karpenter.sh/v1alpha1\nkind: NodeOverlay\nmetadata:\n  name: gpushare\nspec:\n  requirements:\n    \
             - key: node.kubernetes.io/instance-type\n      operator: In\n";
    text += &format!("      values: [\"{instance_type}\"]\n  capacity:\n");
    text += &indented(4, resources);
    text
}

/// Lines of YAML, one for each entry of a map, behind `width` blanks.
fn indented(width: usize, values: &ValuesByKey) -> String {
    let mut lines = String::new();
    for (name, value) in values {
        lines += &format!("{:width$}{name}: \"{value}\"\n", "");
    }
    lines
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing(json!({}), json!({}), None)]
    #[case::vendor(json!({}), json!({"nvidia.com/gpu": "8"}), Some("vendor's plugin"))]
    #[case::old(json!({}), json!({"aliyun.com/gpu-mem": "120"}), Some("old gpushare plugin"))]
    #[case::waiting(json!({"gpushare": "true"}), json!({}), Some("labelled"))]
    #[case::both(json!({"gpushare": "true"}), json!({"aliyun.com/gpu-mem": "120"}), Some("both plugins"))]
    #[case::moved(json!({"gpushare": "true"}), json!({"koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu.shared": "100"}), Some("moved"))]
    #[case::left(json!({}), json!({"koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu.shared": "100"}), Some("left"))]
    fn stages(#[case] labels: Value, #[case] capacity: Value, #[case] expected: Option<&str>) {
        let node = json!({"metadata": {"name": "n1", "labels": labels}, "status": {"capacity": capacity}});
        let stage = stage_of(&node, 0);
        assert_eq!(stage.as_ref().map(|stage| stage.stage), expected);
        let has_name = |stage: NodeStage| {
            !stage.next.contains("kubectl label") || stage.next.contains("node n1 gpushare=true")
        };
        assert!(stage.is_none_or(has_name));
    }

    #[test]
    fn hints() {
        let amounts = |pairs: &[(&str, &str)]| -> ValuesByKey {
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect()
        };
        let resources = amounts(&[(GPU_SHARED, "800"), (GPU_MEMORY, "687194767360")]);
        let labels = amounts(&[(NODE_LABEL, "true"), ("example.com/gpu_kind", "big")]);
        insta::assert_snapshot!(render(&resources, &labels, "p5.48xlarge"));
    }
}

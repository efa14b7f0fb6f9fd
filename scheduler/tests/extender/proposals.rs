//! The examples of the five proposals, with the outcome that their texts state: `proto/cases/proposals`, run through the
//! webhooks, filter and bind, and through filter and bind alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use proto::admission::AdmissionRequest;
use proto::quantity::Quantity;
use scheduler::admission::{Refusal, Rules, Verdict};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::objects::{node, old_node, on, placed_by_old_extender, pod};
use crate::world::World;

const RECORD: &str = "scheduling.koordinator.sh/device-allocated";
const FILES: [&str; 5] = [
    "gpu-sharing-in-kubernetes",
    "enhance-gpu-share-api",
    "fine-grained-device-scheduling",
    "gpu-partitioning-apis",
    "device-allocate-hint-apis",
];

#[derive(Deserialize)]
struct Proposal {
    proposal: String,
    examples: Vec<Example>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Example {
    name: String,
    /// The sentence with the outcome.
    text: String,
    /// Machines, each a node of its name.
    nodes: Vec<String>,
    #[serde(default)]
    held: Vec<Held>,
    pod: Value,
    outcome: Outcome,
    /// The refusal of the filter in a cluster without webhooks; without it the outcome is the same.
    without_webhooks: Option<String>,
    /// The difference from the text, and the sentence that forces it.
    deviation: Option<String>,
    forced_by: Option<String>,
}

/// Pods that run already, by a record for one GPU or by these annotations.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Held {
    node: String,
    gpu: Option<u64>,
    #[serde(default = "once")]
    copies: usize,
    limits: Value,
    #[serde(default)]
    annotations: Value,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Outcome {
    /// The beginning or a part of the refusal.
    refused: Option<String>,
    node: String,
    /// Minors of the devices.
    gpu: Vec<u64>,
    rdma: Vec<u64>,
    fpga: Vec<u64>,
    /// Amounts of each GPU, or else of each adapter.
    each: BTreeMap<String, String>,
    /// Limits that the container has after the webhooks.
    limits: Value,
    annotations: BTreeMap<String, String>,
    /// Number of virtual functions.
    functions: usize,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Machine {
    units: Vec<u64>,
    gpus: Vec<String>,
    per_numa: Option<usize>,
    adapters: Vec<usize>,
    functions: usize,
    fpgas: usize,
    capacity: Value,
    labels: Value,
    annotations: Value,
    device: Value,
}

fn once() -> usize {
    1
}

fn read<T: DeserializeOwned>(name: &str) -> T {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../proto/cases/proposals");
    let text = std::fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
    let read = serde_yaml_ng::from_str(&text);
    read.map_err(|error| format!("{name}.yaml: {error}")).unwrap()
}

impl Machine {
    fn apply(&self, world: &World, name: &str) {
        if let [units, ..] = self.units[..] {
            let n_gpus = self.units.len() as u64;
            return world.apply_node(&old_node(name, n_gpus, units * n_gpus));
        }
        let mut node = node(name, "MiB");
        for (resource, amount) in self.capacity.as_object().into_iter().flatten() {
            for amounts in ["capacity", "allocatable"] {
                node["status"][amounts][resource] = amount.clone();
            }
        }
        world.apply_node(&node);
        world.apply_device(&if self.device.is_null() {
            self.device_object(name)
        } else {
            self.device.clone()
        });
    }

    /// The Device object, whose GPUs this project's own plugin gives whole too.
    fn device_object(&self, name: &str) -> Value {
        let place = |switch: usize| {
            let numa = switch / self.per_numa.unwrap_or(8);
            json!({"socketID": -1, "nodeID": numa, "pcieID": format!("0000:{switch:02x}:00.0"), "busID": ""})
        };
        let mut devices = Vec::new();
        for (minor, memory) in self.gpus.iter().enumerate() {
            devices.push(json!({
                "type": "gpu", "id": format!("GPU-{name}-{minor}"), "minor": minor, "health": true, "topology": place(minor),
                "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": memory,
                    "koordinator.sh/gpu-memory-ratio": "100"},
            }));
        }
        for (minor, switch) in self.adapters.iter().enumerate() {
            let function = |nth: usize| json!({"minor": nth, "busID": format!("0000:{minor:02x}:01.{nth}")});
            let functions: Vec<Value> = (0..self.functions).map(function).collect();
            devices.push(json!({
                "type": "rdma", "id": format!("0000:{minor:02x}:00.0"), "minor": minor, "health": true, "topology": place(*switch),
                "resources": {"koordinator.sh/rdma": "100"}, "vfGroups": [{"labels": {}, "vfs": functions}],
            }));
        }
        for minor in 0..self.fpgas {
            devices.push(
                json!({"type": "fpga", "id": format!("fpga-{minor}"), "minor": minor, "health": true,
                "resources": {"koordinator.sh/fpga": "100"}}),
            );
        }
        let mut labels = self.labels.clone();
        labels["gpushare/serves-vendor"] = "true".into();
        json!({"metadata": {"name": name, "labels": labels, "annotations": self.annotations}, "spec": {"devices": devices}})
    }
}

impl Held {
    fn apply(&self, world: &World, at: usize, machine: &Machine) {
        for copy in 0..self.copies {
            let held = pod(&format!("held{at}-{copy}"), &self.limits);
            let mut held = match (self.gpu, self.limits["aliyun.com/gpu-mem"].as_u64()) {
                (Some(gpu), Some(units)) => {
                    placed_by_old_extender(held, &self.node, gpu, units, machine.units[0])
                }
                _ => on(held, &self.node),
            };
            if let (Some(gpu), true) = (self.gpu, machine.units.is_empty()) {
                let mut resources = self.limits.clone();
                resources
                    .as_object_mut()
                    .unwrap()
                    .remove("koordinator.sh/gpu.shared");
                let entry =
                    json!({"minor": gpu, "id": format!("GPU-{}-{gpu}", self.node), "resources": resources});
                held["metadata"]["annotations"][RECORD] = json!({"gpu": [entry]}).to_string().into();
            }
            for (key, value) in self.annotations.as_object().into_iter().flatten() {
                held["metadata"]["annotations"][key] = value.clone();
            }
            world.apply_pod(&held);
        }
    }
}

/// The pod as the API server hands it to webhooks: named, and with requests where only limits are given.
fn completed(mut pod: Value) -> Value {
    let name = pod["metadata"]["name"].as_str().unwrap_or("test-pod").to_owned();
    pod["metadata"]["name"] = name.into();
    pod["metadata"]["namespace"] = "default".into();
    pod["metadata"]["uid"] = "uid-of-example".into();
    pod["status"]["phase"] = "Pending".into();
    for container in pod["spec"]["containers"].as_array_mut().unwrap() {
        for (resource, limit) in container["resources"]["limits"]
            .clone()
            .as_object()
            .into_iter()
            .flatten()
        {
            container["resources"]["requests"][resource] = limit.clone();
        }
    }
    pod
}

/// The pod as the webhooks leave it, or their refusal.
fn admitted(world: &World, pod: &Value) -> Result<Value, String> {
    let rules = Rules {
        allow_all_devices: true,
        ..Rules::default()
    };
    let request = |pod: &Value| -> AdmissionRequest {
        let resource = json!({"group": "", "version": "v1", "resource": "pods"});
        let request = json!({"uid": "u", "operation": "CREATE", "resource": resource, "name": "p", "namespace": "default",
            "object": pod, "oldObject": null});
        serde_json::from_value(request).unwrap()
    };
    let words = |refusal| match refusal {
        Refusal::Invalid(message) | Refusal::Forbidden(message) => message,
    };
    let mut pod = pod.clone();
    match rules.mutate(&request(&pod)).unwrap() {
        Verdict::Refused(refusal) => return Err(words(refusal)),
        Verdict::Allowed { patch, .. } => {
            let patch: json_patch::Patch =
                serde_json::from_value(serde_json::to_value(patch).unwrap()).unwrap();
            json_patch::patch(&mut pod, &patch).unwrap();
        }
    }
    match rules.validate(&request(&pod), &world.index).unwrap() {
        Verdict::Refused(refusal) => Err(words(refusal)),
        Verdict::Allowed { .. } => Ok(pod),
    }
}

/// The node and annotations that a bind gives a pod, or the refusal of the filter on the last of the nodes.
async fn scheduled(world: &World, pod: &Value, nodes: &[String]) -> Result<(String, Value), String> {
    let names: Vec<&str> = nodes.iter().map(String::as_str).collect();
    world.api.put(pod);
    world.apply_pod(pod);
    let answer = world.filter(pod, &names).await;
    let Some(node) = answer["NodeNames"][0].as_str() else {
        let last = *names.last().unwrap();
        let failed = [
            &answer["FailedNodes"][last],
            &answer["FailedAndUnresolvableNodes"][last],
        ];
        return Err(failed
            .iter()
            .find_map(|text| text.as_str())
            .unwrap_or_default()
            .to_owned());
    };
    match world.bind(pod, node).await.as_str() {
        "" => Ok((
            node.to_owned(),
            world.api.pod(pod)["metadata"]["annotations"].clone(),
        )),
        error => Err(error.to_owned()),
    }
}

impl Example {
    fn world(&self, machines: &BTreeMap<String, Machine>) -> World {
        let world = World::allowing_all_devices();
        for name in &self.nodes {
            machines[name].apply(&world, name);
        }
        for (at, held) in self.held.iter().enumerate() {
            held.apply(&world, at, &machines[&held.node]);
        }
        world
    }

    /// The difference between the outcome and the stated one; `None` if there is none.
    async fn difference(&self, machines: &BTreeMap<String, Machine>, has_webhooks: bool) -> Option<String> {
        let pod = completed(self.pod.clone());
        let world = self.world(machines);
        let (pod, outcome) = match if has_webhooks {
            admitted(&world, &pod)
        } else {
            Ok(pod)
        } {
            Ok(pod) => {
                let outcome = scheduled(&world, &pod, &self.nodes).await;
                (pod, outcome)
            }
            Err(refusal) => (Value::Null, Err(refusal)),
        };
        let refused = match &self.without_webhooks {
            Some(refused) if !has_webhooks => Some(refused),
            _ => self.outcome.refused.as_ref(),
        };
        let (node, annotations) = match (outcome, refused) {
            (Err(text), Some(part)) => return (!text.contains(part)).then_some(text),
            (Err(text), None) => return Some(text),
            (Ok((node, annotations)), Some(_)) => return Some(format!("{node} {annotations}")),
            (Ok(placed), None) => placed,
        };
        let record: Value = serde_json::from_str(annotations[RECORD].as_str().unwrap_or("{}")).unwrap();
        let limits = &pod["spec"]["containers"][0]["resources"]["limits"];
        let is_as_stated = node == self.outcome.node
            && self.outcome.has(&record)
            && self
                .outcome
                .annotations
                .iter()
                .all(|(key, value)| annotations[key] == **value)
            && (!has_webhooks || has_all(limits, &self.outcome.limits));
        (!is_as_stated).then(|| format!("{node}, {annotations}, limits {limits}"))
    }
}

/// Returns true if an object has all entries of another.
fn has_all(object: &Value, entries: &Value) -> bool {
    entries
        .as_object()
        .into_iter()
        .flatten()
        .all(|(key, value)| object[key] == *value)
}

impl Outcome {
    /// Returns true if a record names these devices, with these amounts.
    fn has(&self, record: &Value) -> bool {
        let minors = |kind: &str| -> Vec<u64> {
            let entries = record[kind].as_array().into_iter().flatten();
            entries.map(|entry| entry["minor"].as_u64().unwrap()).collect()
        };
        let has_devices =
            minors("gpu") == self.gpu && minors("rdma") == self.rdma && minors("fpga") == self.fpga;
        let entries = record[if self.gpu.is_empty() { "rdma" } else { "gpu" }]
            .as_array()
            .into_iter()
            .flatten();
        let quantity = |text: &str| text.parse::<Quantity>().unwrap();
        let mut has_amounts = true;
        for entry in entries {
            for (resource, amount) in &self.each {
                let found = entry["resources"][resource].as_str();
                has_amounts &= found.is_some_and(|found| quantity(found) == quantity(amount));
            }
        }
        let adapters = record["rdma"].as_array().into_iter().flatten();
        let n_functions: usize = adapters
            .map(|entry| entry["extension"]["vfs"].as_array().map_or(0, Vec::len))
            .sum();
        has_devices && has_amounts && n_functions == self.functions
    }
}

/// Every example, with the webhooks and without. A deviation is part of the data, with the sentence that forces it.
#[tokio::test]
async fn every_example_of_the_proposals_has_the_stated_outcome() {
    let machines: BTreeMap<String, Machine> = read("machines");
    let (mut wrong, mut n_examples, mut n_deviations) = (String::new(), 0, 0);
    for file in FILES {
        for example in read::<Proposal>(file).examples {
            n_examples += 1;
            n_deviations += usize::from(example.deviation.is_some());
            assert_eq!(
                example.deviation.is_some(),
                example.forced_by.is_some(),
                "{}",
                example.name
            );
            for has_webhooks in [true, false] {
                if let Some(difference) = example.difference(&machines, has_webhooks).await {
                    let _ = writeln!(
                        wrong,
                        "{file}, {}, webhooks: {has_webhooks}: {difference}",
                        example.name
                    );
                }
            }
        }
    }
    assert_eq!(wrong, "");
    assert_eq!((n_examples, n_deviations), (44, 7));
}

/// The document's tables are those of the data.
#[test]
fn the_document_lists_every_example() {
    let document = include_str!("../../../docs/proposals.md");
    let mut expected = String::new();
    for file in FILES {
        let Proposal { proposal, examples } = read(file);
        let _ = write!(
            expected,
            "## {proposal}\n\n| example | the text | here |\n|---|---|---|\n"
        );
        for example in examples {
            let here = match (&example.deviation, &example.forced_by) {
                (Some(deviation), Some(sentence)) => format!("{deviation} Forced by: {sentence}"),
                _ => "as stated".to_owned(),
            };
            let _ = writeln!(expected, "| {} | {} | {here} |", example.name, example.text);
        }
        expected.push('\n');
    }
    let (_, tables) = document.split_at(document.find("\n## ").unwrap() + 1);
    assert_eq!(tables.trim_end(), expected.trim_end());
}

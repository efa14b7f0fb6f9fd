//! `docs/quotas.md`: gpushare reads pods as the quotas of a real cluster count them.
//!
//! `tests/recorded/quotas.json` holds what kube-apiserver and kube-controller-manager made of the document's own manifests.

use std::collections::BTreeMap;

use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::request::{Dialect, Memory, PodRequest};
use proto::resource::{GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, ResourceNames};
use serde::Deserialize;
use serde_json::Value;

use super::{blocks, read, root};

/// The resource whose devices [`Dialect::Vendor`] counts in the recording.
const WHOLE: &str = "nvidia.com/gpu";

#[derive(Deserialize)]
struct Recording {
    program: String,
    quota: String,
    range: String,
    counted: Vec<Counted>,
    limited: Vec<Limited>,
    steps: Vec<Step>,
}

/// A pod, and the amounts by which it raised a quota's use.
#[derive(Deserialize)]
struct Counted {
    case: String,
    pod: Pod,
    used: BTreeMap<String, Value>,
}

/// A pod that was created under the `LimitRange`.
#[derive(Deserialize)]
struct Limited {
    case: String,
    pod: Value,
    /// Its containers as the API server stored them.
    stored: Option<BTreeMap<String, Vec<Value>>>,
    refused: Option<String>,
}

/// One event in the namespace of the quota.
#[derive(Deserialize)]
struct Step {
    action: String,
    name: String,
    pod: Option<Pod>,
    refused: Option<String>,
    used: BTreeMap<String, Value>,
}

fn recording() -> Recording {
    serde_json::from_str(&read(&root().join("testbed/tests/recorded/quotas.json"))).unwrap()
}

/// The amounts of a pod by gpushare's reading, by the resource that the pod named them with.
fn amounts(pod: &Pod) -> BTreeMap<&'static str, u64> {
    let request = PodRequest::read_new(pod, &ResourceNames::default()).unwrap();
    let Some(gpus) = request.and_then(|request| request.gpus) else {
        return BTreeMap::new();
    };
    if gpus.dialect == Dialect::Vendor {
        return BTreeMap::from([(WHOLE, u64::from(gpus.devices))]);
    }
    let (name, memory) = match gpus.memory {
        Memory::Units(units) => (GPU_MEM, units),
        Memory::Bytes(bytes) => (GPU_MEMORY, bytes),
        Memory::Ratio(ratio) => (GPU_MEMORY_RATIO, ratio),
    };
    BTreeMap::from([(name, memory), (GPU_CORE, gpus.core)])
}

/// The amounts that a quota shows as used, with `koordinator.sh/gpu` as the two amounts that it stands for, and without
/// `gpu.shared`, which quotas add up over containers.
fn counted(used: &BTreeMap<String, Value>) -> BTreeMap<&str, u64> {
    let mut counted = BTreeMap::new();
    for (name, amount) in used {
        let amount = whole(amount);
        match name.trim_start_matches("requests.") {
            GPU_SHARED => {}
            GPU => {
                *counted.entry(GPU_CORE).or_default() += amount;
                *counted.entry(GPU_MEMORY_RATIO).or_default() += amount;
            }
            name => *counted.entry(name).or_default() += amount,
        }
    }
    counted
}

fn whole(amount: &Value) -> u64 {
    Quantity::deserialize(amount).unwrap().unsigned().unwrap()
}

fn without_zeros(amounts: BTreeMap<&str, u64>) -> BTreeMap<&str, u64> {
    amounts.into_iter().filter(|(_, amount)| *amount > 0).collect()
}

#[test]
fn the_recorded_manifests_are_those_of_the_document() {
    let (recording, document) = (recording(), read(&root().join("docs/quotas.md")));
    let blocks = blocks(&document, "yaml");
    for recorded in [&recording.quota, &recording.range] {
        assert!(
            blocks.iter().any(|block| block == recorded.trim_end()),
            "{recorded}"
        );
    }
    let version = recording.program.rsplit('v').next().unwrap();
    assert!(document.contains(version), "{}", recording.program);
}

#[test]
fn a_quota_counts_what_gpushare_charges() {
    let recording = recording();
    assert!(recording.counted.len() > 15);
    for Counted { case, pod, used } in &recording.counted {
        assert_eq!(
            without_zeros(amounts(pod)),
            without_zeros(counted(used)),
            "{case}"
        );
    }
}

/// The API server writes the defaults of a `LimitRange` into every container; they must not change what a pod asks for.
#[test]
fn defaults_of_a_limit_range_change_no_request() {
    let names = ResourceNames::default();
    let (mut n_refused, mut n_stored) = (0, 0);
    for Limited {
        case,
        pod,
        stored,
        refused,
    } in recording().limited
    {
        let before = PodRequest::read_new(&Pod::deserialize(&pod).unwrap(), &names).unwrap();
        let Some(stored) = stored else {
            n_refused += 1;
            let refused = refused.unwrap();
            assert!(
                refused.contains("maximum koordinator.sh/gpu-memory usage per Container is 16Gi"),
                "{refused}"
            );
            continue;
        };
        n_stored += 1;
        let mut changed = pod;
        for (list, containers) in stored {
            for (idx, container) in containers.into_iter().enumerate() {
                let resources = container.get("resources").unwrap().clone();
                *changed
                    .pointer_mut(&format!("/spec/{list}/{idx}/resources"))
                    .unwrap() = resources;
            }
        }
        let after = PodRequest::read_new(&Pod::deserialize(&changed).unwrap(), &names);
        assert_eq!(after, Ok(before), "{case}");
    }
    assert!(
        n_refused == 2 && n_stored > 15,
        "{n_refused} refused, {n_stored} stored"
    );
}

/// The document's quota admits and refuses pods by the sums of gpushare's own amounts.
#[test]
fn the_documents_quota_adds_up() {
    let recording = recording();
    let quota: Value = serde_yaml_ng::from_str(&recording.quota).unwrap();
    let hard: BTreeMap<String, Value> =
        serde_json::from_value(quota.pointer("/spec/hard").unwrap().clone()).unwrap();
    let hard = counted(&hard);
    let mut pods: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
    let mut n_refused = 0;
    for step in &recording.steps {
        match (&step.pod, &step.refused) {
            (Some(pod), None) => {
                pods.insert(&step.name, amounts(pod));
            }
            (Some(pod), Some(words)) => {
                n_refused += 1;
                assert!(words.starts_with("exceeded quota: gpus"), "{words}");
                let mut with = pods.clone();
                with.insert(&step.name, amounts(pod));
                let is_over = sums(&with)
                    .iter()
                    .any(|(name, sum)| hard.get(name).is_some_and(|most| sum > most));
                assert!(is_over, "{} fits into {hard:?}", step.name);
            }
            (None, _) => {
                assert!(["end", "delete"].contains(&step.action.as_str()));
                pods.remove(step.name.as_str());
            }
        }
        let sums = sums(&pods);
        assert!(
            sums.iter()
                .all(|(name, sum)| hard.get(name).is_none_or(|most| sum <= most)),
            "{}: {sums:?}",
            step.name
        );
        assert_eq!(
            without_zeros(sums),
            without_zeros(counted(&step.used)),
            "{}",
            step.name
        );
    }
    assert!(n_refused > 5, "{n_refused} pods refused");
}

fn sums<'a>(pods: &BTreeMap<&str, BTreeMap<&'a str, u64>>) -> BTreeMap<&'a str, u64> {
    let mut sums = BTreeMap::new();
    for (name, amount) in pods.values().flatten() {
        *sums.entry(*name).or_default() += amount;
    }
    sums
}

/// A transformation of Kueue's configuration.
#[derive(Deserialize)]
struct Transformation {
    input: String,
    strategy: String,
    outputs: BTreeMap<String, Value>,
}

/// Kueue's arithmetic: each unit of an input becomes the amounts of its outputs. Kueue 0.19.2 counted so.
fn transformed(used: &BTreeMap<String, Value>, transformations: &[Transformation]) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, i128> = BTreeMap::new();
    for (name, amount) in used {
        let amount = i128::from(whole(amount));
        match transformations.iter().find(|rule| rule.input == *name) {
            Some(rule) => {
                for (output, factor) in &rule.outputs {
                    let factor = Quantity::deserialize(factor).unwrap().thousandths();
                    *sums.entry(output.clone()).or_default() += amount * factor;
                }
            }
            None => *sums.entry(name.clone()).or_default() += amount * 1000,
        }
    }
    sums.into_iter()
        .map(|(name, thousandths)| (name, u64::try_from(thousandths / 1000).unwrap()))
        .collect()
}

/// With the document's transformations Kueue counts each pod's memory and compute as gpushare charges a GPU of 80 GiB.
#[test]
fn the_transformations_of_kueue_count_what_gpushare_charges() {
    const GIB: u64 = 1 << 30;
    let document = read(&root().join("docs/quotas.md"));
    let found = blocks(&document, "yaml")
        .into_iter()
        .find(|block| block.contains("config.kueue.x-k8s.io"));
    let configuration: Value = serde_yaml_ng::from_str(&found.unwrap()).unwrap();
    let rules = configuration
        .pointer("/resources/transformations")
        .unwrap()
        .clone();
    let rules: Vec<Transformation> = serde_json::from_value(rules).unwrap();
    assert!(rules.iter().all(|rule| rule.strategy == "Replace"));
    for Counted { case, pod, used } in recording().counted {
        let mut counted = transformed(&used, &rules);
        counted.remove(GPU_SHARED);
        let mut charged: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, amount) in amounts(&pod) {
            match name {
                GPU_MEM => *charged.entry(GPU_MEMORY).or_default() += amount * GIB,
                GPU_MEMORY_RATIO => *charged.entry(GPU_MEMORY).or_default() += amount * 80 * GIB / 100,
                WHOLE => {
                    *charged.entry(GPU_MEMORY).or_default() += amount * 80 * GIB;
                    *charged.entry(GPU_CORE).or_default() += amount * 100;
                }
                name => *charged.entry(name).or_default() += amount,
            }
        }
        let counted = counted
            .iter()
            .map(|(name, amount)| (name.as_str(), *amount))
            .collect();
        assert_eq!(without_zeros(charged), without_zeros(counted), "{case}");
    }
}

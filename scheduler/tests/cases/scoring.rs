//! Scores of nodes and devices, and the order in which devices are taken.

use placement::{
    DevicePolicy, Hints, NodeId, NodePolicy, Policies, RequestedGpus, ResourceUsage, ResourceWeights,
    ScoringStrategy,
};
use proto::pod::Pod;
use scheduler::accounting::PodFacts;
use scheduler::config::weights as named_weights;
use scheduler::index::ResourceDemand;
use serde_json::{Value, json};

use super::allocate::{device, fill, requests};
use super::case::{Case, Outcome};
use super::requests::amounts;
use super::webhooks::mutated;
use super::world::{NODE, Refused, World, annotated, pod, read};

/// Memory of a made-up device, in bytes; a score of n is n hundredths of it.
const MEMORY: u64 = 1000;

/// Runs a case of scores.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    match case.kind {
        "score_node" => score_node(case),
        "score_device" => score_device(case),
        "sort_by_minor" => order(case),
        "sort_by_preferred_pcie" => switches(case),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// The strategy of a case; none if devices are taken by their minors.
pub(crate) fn leaning(scoring: &Value) -> Option<ScoringStrategy> {
    match scoring["strategy"].as_str() {
        None => None,
        Some("LeastAllocated") => Some(ScoringStrategy::LeastAllocated),
        Some("MostAllocated") => Some(ScoringStrategy::MostAllocated),
        Some(other) => panic!("strategy {other:?} is not understood"),
    }
}

/// The policies that a strategy is here.
pub(crate) fn policies(scoring: &Value) -> Policies {
    match leaning(scoring) {
        None => Policies {
            node: NodePolicy::default(),
            device: DevicePolicy::InOrder,
        },
        Some(ScoringStrategy::LeastAllocated) => Policies {
            node: NodePolicy::LeastAllocated,
            device: DevicePolicy::LeastAllocated,
        },
        Some(ScoringStrategy::MostAllocated) => Policies {
            node: NodePolicy::MostAllocated,
            device: DevicePolicy::MostAllocated,
        },
    }
}

/// The weights of a strategy.
pub(crate) fn weights(scoring: &Value) -> ResourceWeights {
    named_weights(by_name(scoring))
}

fn by_name(scoring: &Value) -> impl Iterator<Item = (String, u32)> {
    let weights = scoring["weights"].as_object().into_iter().flatten();
    weights.map(|(name, weight)| (name.clone(), u32::try_from(weight.as_u64().unwrap()).unwrap()))
}

fn score_node(case: &Case<'_>) -> Outcome {
    let scoring = &case.input["scoring"];
    let mut world = World::new(&case.input["node_labels"], policies(scoring), weights(scoring));
    world.set_device(&device(case));
    fill(&mut world, &case.input["used"], &Value::Null);
    let asked = if case.input["pod"].is_null() {
        requests(case.input)
    } else {
        requests(&case.input["pod"])
    };
    let pod = pod(&asked, &Value::Null);
    if !case.is_ok() {
        return match world.place(&pod) {
            Err(Refused::NoRoom(_)) => Outcome::Passed,
            Err(refused) => Outcome::Failed(refused.to_string()),
            Ok(placed) => Outcome::Failed(format!("placed on {:?}", placed.allocations)),
        };
    }
    let pod: Pod = read(mutated(&pod, "CREATE").unwrap());
    let facts = PodFacts::of(&pod, world.index.names());
    let ask = facts.and_then(|facts| world.index.demand("p", &facts).unwrap());
    let fleet = world.index.fleet();
    // A pod that asks for nothing, and a node of which nothing is known, have no points.
    let points = |(ask, node): (ResourceDemand<'_>, NodeId)| {
        let asked = ask.devices();
        let n_types = usize::from(asked.gpus != RequestedGpus::Nothing) + asked.others.len();
        let mut evaluation = fleet.evaluation(asked, policies(scoring), Hints::Ignore);
        let score = evaluation.evaluate(node).unwrap_or_default();
        // Each type of devices that is asked for has up to 100 points; millionths of them are rounded down.
        (score.parts_per_million() * u32::try_from(n_types).unwrap()).div_ceil(10_000)
    };
    Outcome::equal(
        &json!(ask.zip(fleet.node_id(NODE)).map_or(0, points)),
        &case.expected["score"],
    )
}

fn score_device(case: &Case<'_>) -> Outcome {
    let [asked, total, free] = ["requests", "total", "free"].map(|field| amounts(&case.input[field]));
    let scoring = &case.input["scoring"];
    let usages = by_name(scoring).map(|(name, weight)| {
        let [total, free, requested] = [&total, &free, &asked]
            .map(|amounts| amounts.get(&name).map_or(0, |amount| amount.unsigned().unwrap()));
        ResourceUsage {
            weight,
            total,
            free,
            requested,
        }
    });
    let score = leaning(scoring).unwrap().score(usages);
    Outcome::equal(&json!(score), &case.expected["score"])
}

/// Makes devices that score this for what is free of them, and asks for one, two and so on: the one more each time is next.
fn order(case: &Case<'_>) -> Outcome {
    let devices = case.input["devices"].as_array().unwrap();
    let score = |device: &Value| device["score"].as_u64().unwrap();
    let preferred = |device: &Value| {
        case.input["preferred_minors"]
            .as_array()
            .is_some_and(|minors| minors.contains(&device["minor"]))
    };
    let best_other = devices
        .iter()
        .filter(|device| !preferred(device))
        .map(score)
        .max();
    if devices
        .iter()
        .any(|device| preferred(device) && best_other.is_some_and(|other| score(device) <= other))
    {
        return Outcome::skipped(
            "devices preferred regardless of their score are those of reservations, which are not supported here",
        );
    }
    let policies = Policies {
        device: DevicePolicy::LeastAllocated,
        ..Policies::default()
    };
    let entry = |device: &Value| {
        json!({"type": "gpu", "minor": device["minor"], "id": format!("GPU-{}", device["minor"]), "health": true,
            "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": MEMORY.to_string()}})
    };
    let mut order: Vec<i64> = Vec::new();
    for n in 1..=devices.len() {
        let mut world = World::new(
            &Value::Null,
            policies,
            named_weights([("koordinator.sh/gpu-memory".to_owned(), 1)]),
        );
        world.set_device(&json!({"devices": devices.iter().map(entry).collect::<Vec<_>>()}));
        for device in devices {
            let used = (MEMORY - 1).saturating_sub(score(device) * MEMORY / 100);
            let minor = device["minor"].as_i64().unwrap();
            world.hold(
                &format!("used-{minor}"),
                "gpu",
                minor,
                &json!({"koordinator.sh/gpu-memory": used.to_string()}),
            );
        }
        let asked =
            json!({"koordinator.sh/gpu.shared": n.to_string(), "koordinator.sh/gpu-memory": n.to_string()});
        let placed = match world.place(&pod(&asked, &Value::Null)) {
            Ok(placed) => placed,
            Err(refused) => return Outcome::Failed(refused.to_string()),
        };
        order.extend(
            placed.allocations["gpu"]
                .keys()
                .copied()
                .filter(|minor| !order.contains(minor))
                .collect::<Vec<_>>(),
        );
    }
    Outcome::equal(&json!(order), &case.expected["order"])
}

/// GPUs on the preferred switches, and a pod that gets them all with a growing number of the devices that belong with them; the
/// additional device of each step is the next in order. The fewest are one for each switch.
fn switches(case: &Case<'_>) -> Outcome {
    let devices = case.input["devices"].as_array().unwrap();
    if devices
        .iter()
        .any(|device| device["score"] != devices[0]["score"])
    {
        return Outcome::skipped("devices that belong with others are not taken by their scores here");
    }
    let topology =
        |switch: &Value| json!({"socketID": -1, "nodeID": -1, "pcieID": switch.as_str().unwrap_or_default()});
    let switches = case.input["preferred_pcies"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let gpus = switches.iter().enumerate().map(|(minor, switch)| {
        json!({"type": "gpu", "minor": minor, "id": format!("GPU-{minor}"), "health": true, "topology": topology(switch),
            "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "16Gi"}})
    });
    let others = devices.iter().map(|device| {
        let minor = device["minor"].to_string();
        json!({"type": "rdma", "minor": device["minor"], "id": format!("rdma-{minor}"), "health": true,
            "topology": topology(&case.input["pcie_of_minor"][&minor]), "resources": {"koordinator.sh/rdma": "100"}})
    });
    let object = json!({"devices": gpus.chain(others).collect::<Vec<_>>()});
    let joint = json!({"scheduling.koordinator.sh/device-joint-allocate": {"deviceTypes": ["gpu", "rdma"]}});
    let mut order: Vec<i64> = Vec::new();
    for n in 1..=devices.len() {
        let mut world = World::plain();
        world.set_device(&object);
        let mut asked = json!({"koordinator.sh/rdma": (n * 100).to_string()});
        if !switches.is_empty() {
            asked["nvidia.com/gpu"] = json!(switches.len().to_string());
        }
        match world.place(&annotated(pod(&asked, &Value::Null), &joint)) {
            Ok(placed) => {
                let new: Vec<i64> = placed.allocations["rdma"]
                    .keys()
                    .copied()
                    .filter(|minor| !order.contains(minor))
                    .collect();
                order.extend(new);
            }
            Err(refused) => return Outcome::Failed(refused.to_string()),
        }
    }
    Outcome::equal(&json!(order), &case.expected["order"])
}

//! Requests of pods: read, refused, normalised, divided over devices.

use std::collections::BTreeMap;

use placement::{Constraints, DeviceType, Memory as EngineMemory, RequestedMemory, Scope};
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::record::{DEVICE_ALLOCATED, Record};
use proto::request::{GpuRequest, Memory, PodRequest, RequestError};
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, ResourceNames};
use scheduler::accounting::per_device;
use serde_json::{Value, json};

use super::allocate;
use super::case::{Case, Outcome};
use super::world::{World, allocations_of, annotated, pod};

/// Amounts by resource, by value.
pub(crate) type Amounts = BTreeMap<String, Quantity>;

/// Runs a case of requests.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    let input = case.input;
    match case.kind {
        "validate" => judge(case, &input["requests"], |_| Outcome::Passed),
        "normalize" => judge(case, &input["requests"], |request| {
            Outcome::equal(
                &normalized(&request, &input["requests"]),
                &amounts(&case.expected["normalized"]),
            )
        }),
        "split_per_gpu" => judge(case, &input["normalized_requests"], |request| {
            split(request.gpus.as_ref(), case.expected)
        }),
        "prefilter" => prefilter(case),
        "gpu_requirements" => gpu_requirements(case),
        "fill_gpu_memory" => fill_memory(case),
        "ratio_to_bytes" => ratio_to_bytes(case),
        "bytes_to_ratio" => bytes_to_ratio(case),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// Reads the amounts as those of a pod's only container; a pod that asks for nothing is none of a device's.
fn judge(case: &Case<'_>, requests: &Value, accepted: impl FnOnce(PodRequest) -> Outcome) -> Outcome {
    match (read(requests), case.is_ok()) {
        (Ok(Some(request)), true) => accepted(request),
        (Ok(None), true) => Outcome::Failed("taken for a pod that asks for nothing".to_owned()),
        (Err(error), true) => Outcome::Failed(error.to_string()),
        (Ok(Some(_)), false) if says_all_and_shared(requests) => Outcome::skipped(
            "the proposal keeps koordinator.sh/gpu as core and ratio together, which gpu.shared goes with",
        ),
        (Ok(Some(request)), false) => Outcome::Failed(format!("accepted as {request}")),
        (Ok(None) | Err(_), false) => Outcome::Passed,
    }
}

/// The engine's reading, which understands amounts without `gpu.shared` as Koordinator does.
fn read(requests: &Value) -> Result<Option<PodRequest>, RequestError> {
    let pod = json!({"spec": {"containers": [{"name": "c", "resources": {"limits": requests, "requests": requests}}]}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    PodRequest::read(&pod, &ResourceNames::default())
}

/// A request in Koordinator's normalised words; it keeps `gpu.shared` where the pod said it.
fn normalized(request: &PodRequest, said: &Value) -> Amounts {
    let mut normalized: Amounts = request
        .others
        .iter()
        .map(|(name, amount)| (name.clone(), Quantity::from_unsigned(*amount)))
        .collect();
    let Some(gpus) = request.gpus else {
        return normalized;
    };
    let (name, amount) = memory_of(&gpus);
    let shared = said
        .get(GPU_SHARED)
        .map(|_| (GPU_SHARED, u64::from(gpus.devices)));
    let core = (gpus.core > 0).then_some((GPU_CORE, gpus.core));
    for (name, amount) in [Some((name, amount)), core, shared].into_iter().flatten() {
        normalized.insert(name.to_owned(), Quantity::from_unsigned(amount));
    }
    normalized
}

fn memory_of(gpus: &GpuRequest) -> (&'static str, u64) {
    match gpus.memory {
        Memory::Ratio(ratio) => (GPU_MEMORY_RATIO, ratio),
        Memory::Bytes(bytes) => (GPU_MEMORY, bytes),
        Memory::Units(units) => ("units", units),
    }
}

/// Compares how many GPUs are asked for, and what of each.
fn split(gpus: Option<&GpuRequest>, expected: &Value) -> Outcome {
    let Some(gpus) = gpus else {
        return Outcome::Failed("no GPU is asked for".to_owned());
    };
    let each = per_device(gpus);
    let (name, memory) = match each.memory {
        RequestedMemory::Ratio(ratio) => (GPU_MEMORY_RATIO, u64::from(ratio)),
        RequestedMemory::Bytes(bytes) => (GPU_MEMORY, bytes),
        RequestedMemory::Units(units) => ("units", units),
    };
    let core = (each.core > 0).then_some((GPU_CORE, u64::from(each.core)));
    let got: Amounts = [Some((name, memory)), core]
        .into_iter()
        .flatten()
        .map(|(name, amount)| (name.to_owned(), Quantity::from_unsigned(amount)))
        .collect();
    Outcome::equal(&got, &amounts(&expected["per_gpu"]))
        .and(|| Outcome::equal(&json!(each.devices), &expected["gpu_count"]))
        .and(|| Outcome::equal(&json!(gpus.is_shared()), &expected["shared"]))
}

fn prefilter(case: &Case<'_>) -> Outcome {
    let requests = &case.input["container_requests"];
    let skip = case.expected["skip"].as_bool().unwrap_or(false);
    match read(requests) {
        Ok(None) if skip => Outcome::Passed,
        Ok(_) if skip => Outcome::Failed("a request for devices is seen".to_owned()),
        Err(error) if !case.is_ok() => {
            // A pod that breaks a rule is refused on every node, which no preemption helps: that is the code.
            let said = error.to_string();
            let names_one = requests
                .as_object()
                .unwrap()
                .keys()
                .any(|name| said.contains(name.as_str()));
            if names_one {
                Outcome::Passed
            } else {
                Outcome::Failed(format!("the refusal names no resource of the pod: {said}"))
            }
        }
        _ => judge(case, requests, |request| {
            Outcome::equal(
                &by_type(&request, requests),
                &types(&case.expected["normalized_by_type"]),
            )
            .and(|| match &case.expected["gpu"] {
                Value::Null => Outcome::equal(&request.gpus.is_none(), &true),
                gpu => split(request.gpus.as_ref(), gpu),
            })
        }),
    }
}

/// A normalised request by type of device: what follows the slash is the type of everything that is no GPU.
fn by_type(request: &PodRequest, said: &Value) -> BTreeMap<String, Amounts> {
    let mut types: BTreeMap<String, Amounts> = BTreeMap::new();
    for (name, amount) in normalized(request, said) {
        let other = request.others.iter().any(|(other, _)| *other == name);
        let kind = if other {
            name.rsplit('/').next().unwrap_or_default()
        } else {
            "gpu"
        };
        types.entry(kind.to_owned()).or_default().insert(name, amount);
    }
    types
}

fn types(by_type: &Value) -> BTreeMap<String, Amounts> {
    by_type
        .as_object()
        .into_iter()
        .flatten()
        .map(|(kind, requests)| (kind.clone(), amounts(requests)))
        .collect()
}

/// The request of a pod with these annotations, and the constraints on its GPUs.
fn gpu_requirements(case: &Case<'_>) -> Outcome {
    let input = case.input;
    let mut annotations = input["annotations"].clone();
    if !input["gpu_hint"].is_null() {
        annotations[allocate::HINT] = json!({"gpu": input["gpu_hint"]});
    }
    let asking: Pod = super::world::read(annotated(
        pod(&input["normalized_requests_by_type"]["gpu"], &Value::Null),
        &annotations,
    ));
    let constraints = scheduler::accounting::constraints::read(&asking);
    match (
        read(&input["normalized_requests_by_type"]["gpu"]),
        constraints,
        &case.expected["gpu"],
    ) {
        (Ok(None), _, Value::Null) => Outcome::Passed,
        (Ok(request), Ok(constraints), gpu) if case.is_ok() => {
            split(request.and_then(|request| request.gpus).as_ref(), gpu)
                .and(|| compare_constraints(&constraints.unwrap_or_default(), gpu))
        }
        (Err(error), ..) if case.is_ok() => Outcome::Failed(error.to_string()),
        (_, Err(error), _) if case.is_ok() => Outcome::Failed(error.to_string()),
        (Ok(_), Ok(_), _) => Outcome::Failed("accepted".to_owned()),
        (Err(_), ..) | (_, Err(_), _) => Outcome::Passed,
    }
}

fn compare_constraints(constraints: &Constraints, expected: &Value) -> Outcome {
    let partition = constraints.partition.unwrap_or_default();
    let scope = constraints
        .of(&DeviceType::Gpu)
        .and_then(|constraint| constraint.scope)
        .map(|scope| match scope {
            Scope::Device => "Device",
            Scope::Switch => "PCIe",
            Scope::Numa => "NUMANode",
            Scope::Machine => "Node",
        });
    let bandwidth = partition.bandwidth.map(Quantity::from_unsigned);
    let expected_bandwidth: Option<Quantity> =
        serde_json::from_value(expected["ring_bus_bandwidth"].clone()).unwrap();
    let is = |field: &str| expected[field].as_bool().unwrap_or_default();
    Outcome::equal(
        &(constraints.partition.is_some(), partition.restricted),
        &(is("honor_partition"), is("restricted")),
    )
    .and(|| Outcome::equal(&bandwidth, &expected_bandwidth))
    .and(|| {
        Outcome::equal(
            &scope,
            &expected["required_topology_scope"]
                .as_str()
                .filter(|scope| !scope.is_empty()),
        )
    })
}

fn ratio_to_bytes(case: &Case<'_>) -> Outcome {
    let ratio = u32::try_from(number(&case.input["ratio"])).unwrap();
    let total = EngineMemory::from_bytes(number(&case.input["total_memory"]));
    let memory = RequestedMemory::Ratio(ratio).on(total, None).unwrap();
    Outcome::equal(&memory.bytes_floor(), &number(&case.expected["bytes"]))
}

fn bytes_to_ratio(case: &Case<'_>) -> Outcome {
    let (bytes, total) = (number(&case.input["bytes"]), number(&case.input["total_memory"]));
    let ratio = u64::from(EngineMemory::from_bytes(bytes).percent_of(EngineMemory::from_bytes(total)));
    let expected = number(&case.expected["ratio"]);
    if ratio == expected + 1 && bytes * 100 > expected * total {
        return Outcome::skipped(
            "a ratio that is not whole is rounded up here: rounded down it would count too little",
        );
    }
    Outcome::equal(&ratio, &expected)
}

/// Places pods that get these allocations, which state memory in one form, and compares what their records say in both.
fn fill_memory(case: &Case<'_>) -> Outcome {
    let devices = case.input["device_total"]["gpu"]
        .as_object()
        .into_iter()
        .flatten();
    let devices =
        devices.map(|(minor, total)| json!({"type": "gpu", "minor": minor.parse::<i64>().unwrap(), "health": true, "resources": total}));
    let device = json!({"devices": devices.collect::<Vec<_>>()});
    for allocation in case.input["allocations"]["gpu"].as_array().unwrap() {
        if [GPU_MEMORY, GPU_MEMORY_RATIO]
            .iter()
            .all(|name| allocation["resources"].get(name).is_some())
        {
            return untouched(case);
        }
        let only = |entry: &Value| json!({"devices": [entry]});
        let entries = device["devices"].as_array().unwrap();
        let device = entries
            .iter()
            .find(|entry| entry["minor"] == allocation["minor"])
            .map_or_else(|| json!({"devices": []}), only);
        let mut world = World::plain();
        world.set_device(&device);
        let asked = allocate::requests(&json!({"requests": allocation["resources"]}));
        let expected = allocations_of(&case.expected["allocations"]);
        match (world.place(&pod(&asked, &Value::Null)), case.is_ok()) {
            (Ok(placed), true) => {
                let minor = allocation["minor"].as_i64().unwrap();
                let outcome = Outcome::equal(
                    &placed.allocations["gpu"].get(&minor),
                    &expected["gpu"].get(&minor),
                );
                if outcome != Outcome::Passed {
                    return outcome;
                }
            }
            (Err(refused), true) => return Outcome::Failed(refused.to_string()),
            (Ok(_), false) => {}
            (Err(_), false) => return Outcome::Passed,
        }
    }
    if case.is_ok() {
        Outcome::Passed
    } else {
        Outcome::Failed("all of it was placed".to_owned())
    }
}

/// A record that states memory in both forms says what its writer meant, also where the two differ.
fn untouched(case: &Case<'_>) -> Outcome {
    let written = [(DEVICE_ALLOCATED.to_owned(), case.input["allocations"].to_string())].into();
    let record = Record::read(&written).unwrap().unwrap_or_default();
    Outcome::equal(
        &allocations_of(&json!(record.allocations)),
        &allocations_of(&case.expected["allocations"]),
    )
}

/// True if a container requests `koordinator.sh/gpu` and `gpu.shared`, and nothing else.
pub(crate) fn says_all_and_shared(requests: &Value) -> bool {
    amounts(requests).into_keys().eq([GPU, GPU_SHARED])
}

/// Amounts by resource; empty if there are none.
pub(crate) fn amounts(resources: &Value) -> Amounts {
    serde_json::from_value(resources.clone()).unwrap_or_else(|error| {
        assert!(resources.is_null(), "{resources}: {error}");
        Amounts::new()
    })
}

/// The value of a quantity.
pub(crate) fn number(quantity: &Value) -> u64 {
    let quantity: Quantity = serde_json::from_value(quantity.clone()).expect("a quantity");
    quantity.unsigned().expect("a whole number")
}

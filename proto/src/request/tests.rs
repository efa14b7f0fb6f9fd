//! Tables of requests, and properties of any request.

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::{
    ContainerKind, ContainerRequest, Dialect, GpuRequest, Memory, PodRequest, RequestError, containers,
    refuse_other_unit,
};
use crate::memory_unit::MemoryUnit;
use crate::pod::{ALL_DEVICES, Pod, PodSpec};
use crate::resource::{GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, ResourceNames};

fn spec(value: serde_json::Value) -> PodSpec {
    serde_json::from_value(value).unwrap()
}

/// A pod of app containers with these limits.
fn pod(limits: &[serde_json::Value]) -> PodSpec {
    let list: Vec<_> = limits
        .iter()
        .enumerate()
        .map(|(n, limits)| json!({"name": format!("c{n}"), "resources": {"limits": limits}}))
        .collect();
    spec(json!({"containers": list}))
}

fn whole(spec: &PodSpec) -> Pod {
    Pod {
        spec: spec.clone(),
        ..Pod::default()
    }
}

/// A pod with the annotation for all GPUs.
fn marked(spec: &PodSpec, mark: &str) -> Pod {
    let mut pod = whole(spec);
    pod.metadata.annotations = Some([(ALL_DEVICES.to_owned(), mark.to_owned())].into());
    pod
}

/// Reads a new pod, as the filter does.
fn read(spec: &PodSpec) -> Result<Option<PodRequest>, RequestError> {
    PodRequest::read_new(&whole(spec), &ResourceNames::default())
}

/// Reads a bound pod, as the cluster cache does.
fn read_bound(spec: &PodSpec) -> Result<Option<PodRequest>, RequestError> {
    PodRequest::read(&whole(spec), &ResourceNames::default())
}

fn gpus(dialect: Dialect, devices: u32, memory: Memory, core: u64) -> PodRequest {
    PodRequest {
        gpus: Some(GpuRequest {
            dialect,
            devices,
            memory,
            core,
        }),
        others: Vec::new(),
    }
}

fn koordinator(devices: u32, memory: Memory, core: u64) -> PodRequest {
    gpus(Dialect::Koordinator, devices, memory, core)
}

fn memory(request: Result<Option<PodRequest>, RequestError>) -> Memory {
    request.unwrap().unwrap().gpus.unwrap().memory
}

#[rstest]
#[case::memory(json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "8Gi"}), koordinator(1, Memory::Bytes(8 << 30), 0))]
#[case::ratio(json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": "50"}), koordinator(1, Memory::Ratio(50), 0))]
#[case::memory_and_core(
    json!({"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-memory": "4Gi", "koordinator.sh/gpu-core": 100}),
    koordinator(2, Memory::Bytes(4 << 30), 100)
)]
#[case::ratio_over_devices(
    json!({"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-memory-ratio": 200, "koordinator.sh/gpu-core": 200}),
    koordinator(2, Memory::Ratio(200), 200)
)]
#[case::old_name(json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu": 50}), koordinator(1, Memory::Ratio(50), 50))]
#[case::gpushare(
    json!({"aliyun.com/gpu-mem": 8138}),
    gpus(Dialect::Gpushare, 1, Memory::Units(8138), 0)
)]
fn valid_requests_are_read(#[case] limits: serde_json::Value, #[case] expected: PodRequest) {
    assert_eq!(read(&pod(&[limits])), Ok(Some(expected)));
}

#[rstest]
#[case::nvidia(json!({"nvidia.com/gpu": 2}), gpus(Dialect::Vendor, 2, Memory::Ratio(200), 200))]
#[case::hygon(json!({"dcu.com/gpu": 1}), gpus(Dialect::Vendor, 1, Memory::Ratio(100), 100))]
#[case::amd(json!({"amd.com/gpu": "1"}), gpus(Dialect::Vendor, 1, Memory::Ratio(100), 100))]
#[case::rdma(json!({"koordinator.sh/rdma": 200}), PodRequest { gpus: None, others: vec![("koordinator.sh/rdma".to_owned(), 200)] })]
#[case::fpga(json!({"koordinator.sh/fpga": 50}), PodRequest { gpus: None, others: vec![("koordinator.sh/fpga".to_owned(), 50)] })]
#[case::unheard_of(json!({"example.com/npu": 3}), PodRequest { gpus: None, others: vec![("example.com/npu".to_owned(), 3)] })]
fn accepted_as_devices(#[case] limits: serde_json::Value, #[case] expected: PodRequest) {
    assert_eq!(read(&pod(&[limits])), Ok(Some(expected)));
}

/// Koordinator counts these by percent. No plugin of gpushare serves them, so only bound pods may have such requests.
#[rstest]
#[case::one_of_both(json!({"koordinator.sh/gpu": 50}), koordinator(1, Memory::Ratio(50), 50))]
#[case::several_of_both(json!({"koordinator.sh/gpu": 200}), koordinator(2, Memory::Ratio(200), 200))]
#[case::ratio(json!({"koordinator.sh/gpu-memory-ratio": 300}), koordinator(3, Memory::Ratio(300), 0))]
#[case::ratio_decides(json!({"koordinator.sh/gpu-memory-ratio": 200, "koordinator.sh/gpu-core": 50}), koordinator(2, Memory::Ratio(200), 50))]
#[case::bytes(json!({"koordinator.sh/gpu-memory": "8Gi"}), koordinator(1, Memory::Bytes(8 << 30), 0))]
#[case::core_decides(
    json!({"koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-core": 200}),
    koordinator(2, Memory::Bytes(8 << 30), 200)
)]
fn amounts_without_a_number_of_devices_are_read_of_bound_pods_only(
    #[case] limits: serde_json::Value,
    #[case] expected: PodRequest,
) {
    let spec = pod(&[limits]);
    assert_eq!(read_bound(&spec), Ok(Some(expected)));
    assert!(
        read(&spec)
            .unwrap_err()
            .to_string()
            .contains("but not for koordinator.sh/gpu.shared")
    );
}

#[rstest]
#[case::both(json!({"koordinator.sh/gpu": 101}), "the pod: koordinator.sh/gpu (101) is more than one device, so it must be a multiple of 100")]
#[case::ratio(json!({"koordinator.sh/gpu-memory-ratio": 150}), "koordinator.sh/gpu-memory-ratio (150) is more than one device")]
#[case::core(json!({"koordinator.sh/gpu-memory": 1, "koordinator.sh/gpu-core": 150}), "koordinator.sh/gpu-core (150) is more than one device")]
#[case::core_alone(json!({"koordinator.sh/gpu-core": 50}), "koordinator.sh/gpu-core (50) needs koordinator.sh/gpu-memory or")]
#[case::rdma(json!({"koordinator.sh/rdma": 101}), "koordinator.sh/rdma (101) is more than one device, so it must be a multiple of 100")]
#[case::fpga(json!({"koordinator.sh/fpga": 250}), "koordinator.sh/fpga (250) is more than one device")]
#[case::half_an_fpga(json!({"koordinator.sh/fpga": "500m"}), "koordinator.sh/fpga is \"500m\"")]
#[case::vendor_and_share(json!({"nvidia.com/gpu": 1, "koordinator.sh/gpu.shared": 1}), "the pod asks for both koordinator.sh/gpu.shared (1) and nvidia.com/gpu (1)")]
#[case::two_vendors(json!({"nvidia.com/gpu": 1, "amd.com/gpu": 1}), "the pod asks for both nvidia.com/gpu (1) and amd.com/gpu (1)")]
#[case::absurdly_many(json!({"nvidia.com/gpu": 2000}), "the pod: nvidia.com/gpu (2000) is more than 1024")]
#[case::absurdly_many_percent(json!({"koordinator.sh/gpu-memory-ratio": 200_000}), "koordinator.sh/gpu-memory-ratio (200000) is more than 1024 devices")]
fn a_broken_rule_is_an_error_for_bound_pods_too(#[case] limits: serde_json::Value, #[case] words: &str) {
    let spec = pod(&[limits]);
    let message = read_bound(&spec).unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
    assert!(PodRequest::read_new(&whole(&spec), &ResourceNames::default()).is_err());
}

/// Helm charts write a zero for a pod without GPUs; it counts as no request, as in Kubernetes.
#[rstest]
#[case::vendors(json!({"nvidia.com/gpu": "0", "amd.com/gpu": 0}))]
#[case::units(json!({"aliyun.com/gpu-mem": 0}))]
#[case::shares(json!({"koordinator.sh/gpu.shared": "0", "koordinator.sh/gpu-memory": "0Gi", "koordinator.sh/gpu-core": "0m"}))]
#[case::amount_alone(json!({"koordinator.sh/gpu-memory": "0"}))]
#[case::core_alone(json!({"koordinator.sh/gpu-core": 0}))]
#[case::gpu(json!({"koordinator.sh/gpu": "0e3"}))]
#[case::both_memories(json!({"koordinator.sh/gpu-memory": "0", "koordinator.sh/gpu-memory-ratio": "0"}))]
#[case::others(json!({"koordinator.sh/rdma": 0, "koordinator.sh/fpga": "0"}))]
#[case::old_name(json!({"kubernetes.io/gpu": "0"}))]
fn a_request_for_zero_requests_nothing(#[case] zeros: serde_json::Value) {
    assert_eq!(read(&pod(std::slice::from_ref(&zeros))), Ok(None));
    assert_eq!(read_bound(&pod(std::slice::from_ref(&zeros))), Ok(None));
    for asked in [
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "1Gi"}),
        json!({"aliyun.com/gpu-mem": 2}),
        json!({"nvidia.com/gpu": 1}),
    ] {
        assert_eq!(
            read(&pod(&[asked.clone(), zeros.clone()])),
            read(&pod(std::slice::from_ref(&asked))),
            "{asked} beside it"
        );
        assert_eq!(
            containers(&pod(&[zeros.clone(), asked.clone()]), &ResourceNames::default()).len(),
            1,
            "kubelet is asked about one"
        );
    }
}

/// A request counts beside a zero in the same container.
#[test]
fn zero_devices_beside_an_amount_of_memory_are_refused() {
    let zero_served = pod(&[json!({"koordinator.sh/gpu.shared": 0, "koordinator.sh/gpu-memory": "1Gi"})]);
    let refusal = read(&zero_served).unwrap_err().to_string();
    assert!(
        refusal.contains("but not for koordinator.sh/gpu.shared"),
        "{refusal}"
    );
    let both = json!({"nvidia.com/gpu": "0", "koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu-memory-ratio": 0});
    let plain = json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "1Gi"});
    assert_eq!(read(&pod(&[both])), read(&pod(&[plain])));
}

#[test]
fn a_marked_pod_sees_all_devices_and_names_no_amounts() {
    let names = ResourceNames::default();
    let shared = |n: u64| pod(&[json!({"koordinator.sh/gpu.shared": n}), json!({"cpu": 1})]);
    let expected = gpus(Dialect::AllDevices, 1, Memory::Bytes(0), 0);
    assert_eq!(
        PodRequest::read_new(&marked(&shared(1), "true"), &names),
        Ok(Some(expected))
    );
    let refused = |pod: &Pod| PodRequest::read_new(pod, &names).unwrap_err().to_string();
    assert_eq!(
        refused(&marked(&shared(1), "yes")),
        "annotation gpushare/all-devices is \"yes\": neither true nor false"
    );
    assert!(
        refused(&marked(&shared(1), "false"))
            .contains("koordinator.sh/gpu.shared (1) needs koordinator.sh/gpu-memory")
    );
    let unserved = pod(&[json!({"cpu": 1})]);
    assert!(
        refused(&marked(&unserved, "true"))
            .contains("annotation gpushare/all-devices needs koordinator.sh/gpu.shared")
    );
    let greedy = pod(&[json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 7})]);
    assert!(refused(&marked(&greedy, "true")).contains(
        "annotation gpushare/all-devices excludes amounts, but the pod asks for koordinator.sh/gpu-memory (7)"
    ));
}

#[test]
fn other_devices_are_summed_like_amounts_of_gpus() {
    let spec = spec(json!({
        "initContainers": [{"name": "i", "resources": {"limits": {"koordinator.sh/rdma": 100}}}],
        "containers": [
            {"name": "a", "resources": {"limits": {"koordinator.sh/rdma": 30, "example.com/npu": 2}}},
            {"name": "b", "resources": {"limits": {"koordinator.sh/rdma": 30}}},
        ],
    }));
    let others = read(&spec).unwrap().unwrap().others;
    assert_eq!(
        others,
        [
            ("example.com/npu".to_owned(), 2),
            ("koordinator.sh/rdma".to_owned(), 100)
        ]
    );
}

#[rstest]
#[case::nothing(json!({"cpu": "1", "memory": "1Gi"}))]
#[case::names_of_kubernetes(json!({"kubernetes.io/x": 1, "batch.kubernetes.io/x": 2}))]
#[case::no_number_of_something_unknown(json!({"example.com/dongle": "500m"}))]
fn resources_of_other_plugins_are_ignored(#[case] limits: serde_json::Value) {
    assert_eq!(read(&pod(&[limits])), Ok(None));
}

#[rstest]
#[case::memory_without_shared(
    json!({"koordinator.sh/gpu-memory": "8Gi"}),
    "container \"c0\" asks for koordinator.sh/gpu-memory (8Gi) but not for koordinator.sh/gpu.shared"
)]
#[case::ratio_without_shared(json!({"koordinator.sh/gpu-memory-ratio": 100}), "asks for koordinator.sh/gpu-memory-ratio (100) but not for")]
#[case::core_without_shared(json!({"koordinator.sh/gpu-core": 50}), "asks for koordinator.sh/gpu-core (50) but not for")]
#[case::gpu_without_shared(json!({"koordinator.sh/gpu": 100}), "asks for koordinator.sh/gpu (100) but not for")]
#[case::core_only(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-core": 50}),
    "container \"c0\": koordinator.sh/gpu-core (50) needs koordinator.sh/gpu-memory or"
)]
#[case::shared_only(json!({"koordinator.sh/gpu.shared": 1}), "koordinator.sh/gpu.shared (1) needs koordinator.sh/gpu-memory or")]
#[case::memory_and_ratio(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 1, "koordinator.sh/gpu-memory-ratio": 1}),
    "exclude each other"
)]
#[case::gpu_and_core(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu": 50, "koordinator.sh/gpu-core": 50}),
    "koordinator.sh/gpu (50) already says"
)]
#[case::uneven_core(
    json!({"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-memory": 2, "koordinator.sh/gpu-core": 101}),
    "the pod: koordinator.sh/gpu-core (101) does not divide evenly over koordinator.sh/gpu.shared (2)"
)]
#[case::core_over_100(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 2, "koordinator.sh/gpu-core": 200}),
    "koordinator.sh/gpu-core (200) over koordinator.sh/gpu.shared (1) is more than 100 per device"
)]
#[case::ratio_over_100(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory-ratio": 101}),
    "koordinator.sh/gpu-memory-ratio (101) over koordinator.sh/gpu.shared (1) is more than 100 per device"
)]
#[case::two_dialects(
    json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "1Gi", "aliyun.com/gpu-mem": 1}),
    "the pod asks for both aliyun.com/gpu-mem (1) and koordinator.sh/gpu.shared (1)"
)]
#[case::units_and_core(json!({"koordinator.sh/gpu-core": 10, "aliyun.com/gpu-mem": 1}), "the pod asks for both aliyun.com/gpu-mem (1) and koordinator.sh/gpu-core (10)")]
#[case::vendor_and_units(json!({"nvidia.com/gpu": 1, "aliyun.com/gpu-mem": 1}), "the pod asks for both aliyun.com/gpu-mem (1) and nvidia.com/gpu (1)")]
#[case::negative(json!({"aliyun.com/gpu-mem": "-3"}), "aliyun.com/gpu-mem is \"-3\"")]
#[case::fraction(json!({"aliyun.com/gpu-mem": "500m"}), "aliyun.com/gpu-mem is \"500m\"")]
#[case::absurd(json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "2Pi"}), "koordinator.sh/gpu-memory is \"2Pi\"")]
#[case::far_out_of_range(json!({"aliyun.com/gpu-mem": "99999999999999999999"}), "aliyun.com/gpu-mem is \"99999999999999999999\"")]
#[case::no_number(json!({"aliyun.com/gpu-mem": "eight"}), "aliyun.com/gpu-mem is \"eight\"")]
#[case::no_quantity_at_all(json!({"aliyun.com/gpu-mem": {"a": 1}}), "aliyun.com/gpu-mem is")]
#[case::too_many_devices(json!({"koordinator.sh/gpu.shared": 2000, "koordinator.sh/gpu-memory": 2000}), "more than 1024")]
fn invalid_requests_are_refused(#[case] limits: serde_json::Value, #[case] words: &str) {
    let message = read(&pod(&[limits])).unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
}

#[test]
fn dialects_must_not_mix_across_containers_either() {
    let mixed = pod(&[
        json!({"aliyun.com/gpu-mem": 1}),
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 1}),
    ]);
    let refusal = read(&mixed).unwrap_err().to_string();
    assert!(
        refusal.contains("use the resources of one dialect only"),
        "{refusal}"
    );
    let forms = pod(&[
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory-ratio": 1}),
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 1}),
    ]);
    assert!(
        read(&forms)
            .unwrap_err()
            .to_string()
            .contains("also in different containers")
    );
}

#[test]
fn containers_are_summed_and_init_containers_raise_the_sum() {
    let limits = |units: u64| json!({"limits": {"aliyun.com/gpu-mem": units}});
    let spec = spec(json!({
        "initContainers": [
            {"name": "first", "resources": limits(2)},
            {"name": "proxy", "restartPolicy": "Always", "resources": limits(3)},
            {"name": "warm-up", "resources": limits(9)},
        ],
        "containers": [{"name": "a", "resources": limits(4)}, {"name": "b", "resources": limits(4)}, {"name": "plain"}],
    }));
    // The sidecar runs beside the second init container (3 + 9) and beside the app containers (3 + 4 + 4).
    assert_eq!(memory(read(&spec)), Memory::Units(12));
    let kinds: Vec<_> = containers(&spec, &ResourceNames::default())
        .into_iter()
        .map(|c| (c.name, c.kind, c.memory_units))
        .collect();
    let expected = [
        ("first", ContainerKind::Init, 2),
        ("proxy", ContainerKind::Sidecar, 3),
        ("warm-up", ContainerKind::Init, 9),
        ("a", ContainerKind::App, 4),
        ("b", ContainerKind::App, 4),
    ];
    assert_eq!(
        kinds,
        expected.map(|(name, kind, units)| (name.to_owned(), kind, units))
    );
}

#[test]
fn requests_count_where_limits_are_missing() {
    let spec = spec(
        json!({"containers": [{"name": "c", "resources": {"requests": {"aliyun.com/gpu-mem": "5"}, "limits": null}}]}),
    );
    assert_eq!(memory(read(&spec)), Memory::Units(5));
}

#[test]
fn the_name_of_the_memory_resource_is_configurable() {
    let names = ResourceNames {
        memory: "example.com/vram".to_owned(),
    };
    let request = PodRequest::read_new(&whole(&pod(&[json!({"example.com/vram": 5})])), &names);
    assert_eq!(memory(request), Memory::Units(5));
    assert_eq!(names.memory_unit_annotation(), "example.com/vram-unit");
}

proptest! {
    /// Any quantities give a request within the documented ranges, or a refusal.
    #[test]
    fn any_quantities_are_read_or_refused(quantities in prop::collection::vec(("[-+]?[0-9]{1,22}(Gi|Mi|k|m|E|)", 0..9_usize), 0..6), mark in prop::option::of("true|false|[a-z]{0,3}")) {
        let names = ["koordinator.sh/gpu.shared", "koordinator.sh/gpu-memory", "koordinator.sh/gpu-memory-ratio",
            "koordinator.sh/gpu-core", "koordinator.sh/gpu", "aliyun.com/gpu-mem", "nvidia.com/gpu", "koordinator.sh/rdma", "example.com/npu"];
        let limits: serde_json::Map<_, _> = quantities.into_iter().map(|(text, name)| (names[name].to_owned(), json!(text))).collect();
        let spec = pod(&[json!(limits), json!(limits)]);
        let pod = mark.map_or_else(|| whole(&spec), |mark| marked(&spec, &mark));
        let names = ResourceNames::default();
        let read = PodRequest::read_new(&pod, &names);
        if let Ok(Some(request)) = read {
            prop_assert!(PodRequest::read(&pod, &names).is_ok());
            prop_assert!(request.others.iter().all(|(_, amount)| *amount > 0));
            let Some(gpus) = request.gpus else { return Ok(()) };
            prop_assert!(gpus.devices >= 1 && gpus.devices <= 1024);
            prop_assert!(gpus.core <= 100 * u64::from(gpus.devices));
            prop_assert!(!containers(&spec, &names).is_empty());
        }
    }

    #[test]
    fn no_json_panics(text in "\\PC{0,80}") {
        if let Ok(spec) = serde_json::from_str::<PodSpec>(&text) {
            let _ = read(&spec);
        }
    }

    /// JSON of the right outline with any values for names and amounts.
    #[test]
    fn no_container_panics(name in "(koordinator.sh/(gpu|rdma|gpu-memory)|[a-z./]{0,12})", amount in prop_oneof![
        any::<i64>().prop_map(|number| json!(number)), any::<f64>().prop_map(|number| json!(number)),
        "\\PC{0,12}".prop_map(|text| json!(text)), Just(json!(null)), Just(json!([{}])),
    ]) {
        let limits = json!({"containers": [{"name": "c", "resources": {"requests": {name: amount}}}]});
        if let Ok(spec) = serde_json::from_value::<PodSpec>(limits) {
            let _ = (read(&spec), read_bound(&spec), containers(&spec, &ResourceNames::default()));
        }
    }
}

/// The sets of containers that run at the same time: each ordinary init container beside the sidecars before it, and the app
/// containers beside all sidecars.
fn running_together(containers: &[ContainerRequest]) -> Vec<Vec<&ContainerRequest>> {
    let (mut sets, mut lasting) = (Vec::new(), Vec::new());
    for container in containers {
        match container.kind {
            ContainerKind::Init => sets.push(lasting.iter().copied().chain([container]).collect()),
            ContainerKind::Sidecar | ContainerKind::App => lasting.push(container),
        }
    }
    sets.push(lasting);
    sets
}

/// An amount of memory in one of the dialects: units, bytes, percent of memory, percent of both, whole GPUs.
fn amounts(dialect: usize, amount: u64, shared: u64) -> serde_json::Value {
    match dialect {
        0 => json!({"aliyun.com/gpu-mem": amount}),
        1 => json!({"koordinator.sh/gpu.shared": shared, "koordinator.sh/gpu-memory": amount * 12_345_679}),
        2 => {
            json!({"koordinator.sh/gpu.shared": shared, "koordinator.sh/gpu-memory-ratio": amount, "koordinator.sh/gpu-core": amount})
        }
        3 => json!({"koordinator.sh/gpu.shared": shared, "koordinator.sh/gpu": amount}),
        _ => json!({"nvidia.com/gpu": amount % 8}),
    }
}

proptest! {
    /// The parts of all containers that run together are at most the part of the pod, on each of its devices.
    #[test]
    fn containers_that_run_together_share_the_part_of_their_pod(
        dialect in 0..5_usize,
        parts in prop::collection::vec((0..3_usize, 0..130_u64, 1..4_u64), 1..6),
        device_bytes in 1..200_000_000_000_u64,
    ) {
        let (mut init, mut apps) = (Vec::new(), Vec::new());
        for (at, (kind, amount, shared)) in parts.into_iter().enumerate() {
            let mut container = json!({"name": format!("c{at}"), "resources": {"limits": amounts(dialect, amount, shared)}});
            match kind {
                0 => init.push(container),
                1 => {
                    container["restartPolicy"] = json!("Always");
                    init.push(container);
                }
                _ => apps.push(container),
            }
        }
        let spec = spec(json!({"initContainers": init, "containers": apps}));
        let Ok(Some(PodRequest { gpus: Some(request), .. })) = read_bound(&spec) else { return Ok(()) };
        let (unit, n_devices) = (MemoryUnit::GIB, u64::from(request.devices));
        let of_pod = match request.memory {
            Memory::Units(units) => u128::from(units) * u128::from(unit.bytes()),
            Memory::Bytes(bytes) => u128::from(bytes),
            Memory::Ratio(ratio) => u128::from(ratio) * u128::from(device_bytes) / 100,
        } / u128::from(n_devices);
        for together in running_together(&containers(&spec, &ResourceNames::default())) {
            let memory: u128 = together
                .iter()
                .filter_map(|container| container.memory_share(n_devices, device_bytes, unit))
                .map(u128::from)
                .sum();
            prop_assert!(memory <= of_pod, "{memory} of {of_pod}");
            let core: u64 = together.iter().map(|container| container.core_share(n_devices)).sum();
            prop_assert!(core <= request.core / n_devices, "{core} of {}", request.core);
        }
    }
}

/// The number of GPUs alone says neither that they are to be seen nor how much of them.
#[test]
fn shared_alone_is_refused_with_both_ways_out() {
    let refusal = read(&pod(&[json!({GPU_SHARED: 1})])).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "container \"c0\": koordinator.sh/gpu.shared (1) needs koordinator.sh/gpu-memory or koordinator.sh/gpu-memory-ratio beside it, \
         or the annotation gpushare/all-devices: \"true\" to see all GPUs of the node without an amount"
    );
}

/// `HAMi`'s users write MiB without a suffix.
#[rstest]
#[case::mebibytes(json!({GPU_SHARED: 1, GPU_MEMORY: 8192}), Some("koordinator.sh/gpu-memory is 8192 bytes; did you mean 8192Mi?"))]
#[case::gibibytes(json!({GPU_SHARED: 2, GPU_MEMORY: "16"}), Some("koordinator.sh/gpu-memory is 16 bytes; did you mean 16Gi?"))]
#[case::just_below(json!({GPU_SHARED: 1, GPU_MEMORY: "1023Ki"}), Some("koordinator.sh/gpu-memory is 1047552 bytes; did you mean 1047552Mi?"))]
#[case::one_mebibyte(json!({GPU_SHARED: 1, GPU_MEMORY: "1Mi"}), None)]
#[case::ratio(json!({GPU_SHARED: 1, GPU_MEMORY_RATIO: 1}), None)]
#[case::units(json!({"aliyun.com/gpu-mem": 8}), None)]
fn amounts_below_one_mebibyte_are_doubted(#[case] limits: serde_json::Value, #[case] warning: Option<&str>) {
    let request = read(&pod(&[limits])).unwrap().unwrap();
    assert_eq!(request.gpus.unwrap().warning().as_deref(), warning);
}

/// A suffix makes an absurd number of units, of which no node has enough.
#[rstest]
#[case::mebibytes_meant(8_192_000_000, Some(1 << 20), "8000000 GiB (8192000000 units of 1 MiB)", "80 GiB (81920 units of 1 MiB)", "did you mean 8192?")]
#[case::gibibytes_meant(8_000_000_000, Some(1 << 20), "7812500 GiB (8000000000 units of 1 MiB)", "80 GiB (81920 units of 1 MiB)", "did you mean 8192?")]
#[case::bytes_meant(8 << 30, Some(1 << 20), "8388608 GiB (8589934592 units of 1 MiB)", "80 GiB (81920 units of 1 MiB)", "did you mean 8192?")]
#[case::units_of_a_gibibyte(8 << 30, Some(1 << 30), "8589934592 GiB (8589934592 units of 1 GiB)", "81920 GiB (81920 units of 1 GiB)", "did you mean 8?")]
#[case::several_units(
    8_192_000_000,
    None,
    "8192000000 memory units",
    "81920 memory units",
    "write it without a suffix"
)]
fn units_beyond_any_gpu_are_refused(
    #[case] units: u64,
    #[case] unit: Option<u64>,
    #[case] asked: &str,
    #[case] largest: &str,
    #[case] meant: &str,
) {
    let refusal = refuse_other_unit(units, 81_920, unit, &ResourceNames::default()).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        format!(
            "the pod: aliyun.com/gpu-mem is {asked}, and the largest GPU of the cluster has {largest}; the amount is a number of \
             units: {meant}"
        )
    );
}

#[test]
fn units_below_a_thousand_gpus_are_left_to_the_nodes() {
    let refuse = |units, largest| refuse_other_unit(units, largest, Some(1 << 20), &ResourceNames::default());
    assert_eq!(refuse(81_919_999, 81_920), Ok(()));
    assert!(refuse(81_920_000, 81_920).is_err());
    assert_eq!(refuse(u64::MAX, 0), Ok(()), "no GPU is known");
}

//! Tables of what pods may ask for, and that no pod makes the reader panic.

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::{ContainerKind, Dialect, Memory, PodRequest, RequestError, containers};
use crate::pod::PodSpec;
use crate::resource::ResourceNames;

fn spec(value: serde_json::Value) -> PodSpec {
    serde_json::from_value(value).unwrap()
}

/// A pod of app containers with these limits.
fn pod(limits: &[serde_json::Value]) -> PodSpec {
    let list: Vec<_> =
        limits.iter().enumerate().map(|(n, limits)| json!({"name": format!("c{n}"), "resources": {"limits": limits}})).collect();
    spec(json!({"containers": list}))
}

fn read(spec: &PodSpec) -> Result<Option<PodRequest>, RequestError> {
    PodRequest::of(spec, &ResourceNames::default())
}

fn koordinator(devices: u32, memory: Memory, core: u64) -> PodRequest {
    PodRequest { dialect: Dialect::Koordinator, devices, memory, core }
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
    PodRequest { dialect: Dialect::Gpushare, devices: 1, memory: Memory::Units(8138), core: 0 }
)]
fn accepted(#[case] limits: serde_json::Value, #[case] expected: PodRequest) {
    assert_eq!(read(&pod(&[limits])), Ok(Some(expected)));
}

#[rstest]
#[case::nothing(json!({"cpu": "1", "memory": "1Gi"}))]
#[case::whole_gpus_of_the_vendor(json!({"nvidia.com/gpu": 1}))]
fn not_ours(#[case] limits: serde_json::Value) {
    assert_eq!(read(&pod(&[limits])), Ok(None));
}

#[rstest]
#[case::memory_without_shared(
    json!({"koordinator.sh/gpu-memory": "8Gi"}),
    "container \"c0\" asks for koordinator.sh/gpu-memory but not for koordinator.sh/gpu.shared"
)]
#[case::ratio_without_shared(json!({"koordinator.sh/gpu-memory-ratio": 100}), "asks for koordinator.sh/gpu-memory-ratio but not for")]
#[case::core_without_shared(json!({"koordinator.sh/gpu-core": 50}), "asks for koordinator.sh/gpu-core but not for")]
#[case::gpu_without_shared(json!({"koordinator.sh/gpu": 100}), "asks for koordinator.sh/gpu but not for")]
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
    "koordinator.sh/gpu already says"
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
    "the pod asks for both aliyun.com/gpu-mem and koordinator.sh/gpu.shared"
)]
#[case::units_and_core(json!({"koordinator.sh/gpu-core": 10, "aliyun.com/gpu-mem": 1}), "the pod asks for both aliyun.com/gpu-mem and")]
#[case::vendor_and_units(json!({"nvidia.com/gpu": 1, "aliyun.com/gpu-mem": 1}), "the pod asks for both aliyun.com/gpu-mem and nvidia.com/gpu")]
#[case::zero(json!({"aliyun.com/gpu-mem": 0}), "container \"c0\": aliyun.com/gpu-mem is \"0\", which is not a whole number from 1")]
#[case::negative(json!({"aliyun.com/gpu-mem": "-3"}), "aliyun.com/gpu-mem is \"-3\"")]
#[case::fraction(json!({"aliyun.com/gpu-mem": "500m"}), "aliyun.com/gpu-mem is \"500m\"")]
#[case::absurd(json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": "2Pi"}), "koordinator.sh/gpu-memory is \"2Pi\"")]
#[case::far_out_of_range(json!({"aliyun.com/gpu-mem": "99999999999999999999"}), "aliyun.com/gpu-mem is \"99999999999999999999\"")]
#[case::no_number(json!({"aliyun.com/gpu-mem": "eight"}), "aliyun.com/gpu-mem is \"eight\"")]
#[case::no_quantity_at_all(json!({"aliyun.com/gpu-mem": {"a": 1}}), "aliyun.com/gpu-mem is")]
#[case::too_many_devices(json!({"koordinator.sh/gpu.shared": 2000, "koordinator.sh/gpu-memory": 2000}), "more than 1024")]
fn refused(#[case] limits: serde_json::Value, #[case] words: &str) {
    let message = read(&pod(&[limits])).unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
}

#[test]
fn dialects_must_not_mix_across_containers_either() {
    let mixed = pod(&[json!({"aliyun.com/gpu-mem": 1}), json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 1})]);
    assert!(matches!(read(&mixed), Err(RequestError::MixedDialects { .. })));
    let forms = pod(&[
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory-ratio": 1}),
        json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 1}),
    ]);
    assert!(read(&forms).unwrap_err().to_string().contains("also in different containers"));
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
    assert_eq!(read(&spec).unwrap().unwrap().memory, Memory::Units(12));
    let kinds: Vec<_> = containers(&spec, &ResourceNames::default()).into_iter().map(|c| (c.name, c.kind, c.memory_units)).collect();
    let expected = [
        ("first", ContainerKind::Init, 2),
        ("proxy", ContainerKind::Sidecar, 3),
        ("warm-up", ContainerKind::Init, 9),
        ("a", ContainerKind::App, 4),
        ("b", ContainerKind::App, 4),
    ];
    assert_eq!(kinds, expected.map(|(name, kind, units)| (name.to_owned(), kind, units)));
}

#[test]
fn requests_count_where_limits_are_missing() {
    let spec = spec(json!({"containers": [{"name": "c", "resources": {"requests": {"aliyun.com/gpu-mem": "5"}, "limits": null}}]}));
    assert_eq!(read(&spec).unwrap().unwrap().memory, Memory::Units(5));
}

#[test]
fn the_memory_resource_can_have_another_name() {
    let names = ResourceNames { memory: "example.com/vram".to_owned() };
    let request = PodRequest::of(&pod(&[json!({"example.com/vram": 5})]), &names).unwrap().unwrap();
    assert_eq!(request.memory, Memory::Units(5));
    assert_eq!(names.memory_unit_annotation(), "example.com/vram-unit");
}

proptest! {
    /// Whatever the quantities, the answer is a request within its documented ranges or a refusal.
    #[test]
    fn any_quantities_are_judged(quantities in prop::collection::vec(("[-+]?[0-9]{1,22}(Gi|Mi|k|m|E|)", 0..6_usize), 0..6)) {
        let names = ["koordinator.sh/gpu.shared", "koordinator.sh/gpu-memory", "koordinator.sh/gpu-memory-ratio",
            "koordinator.sh/gpu-core", "koordinator.sh/gpu", "aliyun.com/gpu-mem"];
        let limits: serde_json::Map<_, _> = quantities.into_iter().map(|(text, name)| (names[name].to_owned(), json!(text))).collect();
        let spec = pod(&[json!(limits), json!(limits)]);
        if let Ok(Some(request)) = read(&spec) {
            prop_assert!(request.devices >= 1 && request.devices <= 1024);
            prop_assert!(request.core <= 100 * u64::from(request.devices));
            prop_assert!(!containers(&spec, &ResourceNames::default()).is_empty());
        }
    }

    #[test]
    fn no_json_panics(text in "\\PC{0,80}") {
        if let Ok(spec) = serde_json::from_str::<PodSpec>(&text) {
            let _ = read(&spec);
        }
    }
}

//! Devices that pods hold by spec and record, and the problems reported for missing, malformed and contradictory records.

use placement::{
    Device, DevicePolicy, DeviceRef, DeviceType, HeldMemory, HeldPart, Holdings, Inventory, Memory,
    NodePolicy, Policies, RequestedMemory, ShareRequest,
};
use proto::pod::Pod;
use proto::request::hints::{DEVICE_POLICIES, DEVICE_POLICY, NODE_POLICIES, NODE_POLICY};
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::{Account, NodeContext, ParsedRequest, PluginReport, PodFacts, hold};
use crate::inventory::device_types::DeviceTypes;

const MIB: u64 = 1 << 20;

/// Two GPUs of 1000 MiB, counted in units of 10 MiB.
fn inventory() -> Inventory {
    let gpu = |minor| Device {
        memory_bytes: 1000 * MIB,
        core: 100,
        slots: 100,
        ..Device::new(format!("GPU-{minor}"), minor)
    };
    Inventory {
        gpus: vec![gpu(0), gpu(1)].into(),
        unit_bytes: Some(10 * MIB),
        ..Inventory::default()
    }
}

/// The account of a pod with these limits and annotations, on the node of [`inventory`] without reports of a plugin.
fn account(limits: &Value, annotations: &Value) -> Account {
    account_where(true, &inventory(), limits, annotations)
}

fn account_where(
    allows_all_devices: bool,
    inventory: &Inventory,
    limits: &Value,
    annotations: &Value,
) -> Account {
    account_reported(
        PluginReport::Silent,
        allows_all_devices,
        inventory,
        limits,
        annotations,
    )
}

fn account_reported(
    report: PluginReport,
    allows_all_devices: bool,
    inventory: &Inventory,
    limits: &Value,
    annotations: &Value,
) -> Account {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "d", "uid": "u", "annotations": annotations},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "resources": {"limits": limits}}]},
    }))
    .unwrap();
    let context = NodeContext {
        inventory: Some(inventory),
        kinds: &DeviceTypes::default(),
        allocated: &[],
        allows_all_devices,
        report,
    };
    let facts = PodFacts::of(&pod, &ResourceNames::default()).unwrap();
    hold::account_of(&facts, &facts.bound.as_ref().unwrap().record, context)
}

fn units(units: u64) -> Value {
    json!({"aliyun.com/gpu-mem": units})
}

fn bytes(devices: u64, mib: u64) -> Value {
    json!({"koordinator.sh/gpu.shared": devices, "koordinator.sh/gpu-memory": mib * MIB})
}

fn ratio(devices: u64, ratio: u64) -> Value {
    json!({"koordinator.sh/gpu.shared": devices, "koordinator.sh/gpu-memory-ratio": ratio, "koordinator.sh/gpu-core": 10 * devices})
}

/// Koordinator's record: minor, UUID and MiB of each device.
fn record(shares: &[(i32, &str, u64)]) -> Value {
    let share = |(minor, id, mib): &(i32, &str, u64)| json!({"minor": minor, "id": id, "resources": {"koordinator.sh/gpu-memory": format!("{mib}Mi")}});
    let shares: Vec<Value> = shares.iter().map(share).collect();
    json!({"scheduling.koordinator.sh/device-allocated": json!({"gpu": shares}).to_string()})
}

/// The annotations of gpushare-scheduler-extender: the GPU by index, the units of the pod, and those of the GPU.
fn old_record(idx: &str, pod: &str, device: &str) -> Value {
    json!({"ALIYUN_COM_GPU_MEM_IDX": idx, "ALIYUN_COM_GPU_MEM_POD": pod, "ALIYUN_COM_GPU_MEM_DEV": device, "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"})
}

/// For each GPU its UUID or minor, the MiB that are held of it if that is fixed, and whether the share is trusted.
fn shown(account: &Account) -> Vec<(String, Option<u64>, bool)> {
    if unknown_gpus(&account.holdings).is_some() {
        return Vec::new();
    }
    let gpu = |gpu: &DeviceRef| match gpu {
        DeviceRef::Id(uuid) => uuid.to_string(),
        DeviceRef::Minor(minor) => minor.to_string(),
        DeviceRef::Any => unreachable!("all are known"),
    };
    let mib = |memory: HeldMemory| match memory {
        HeldMemory::Exact(memory) => Some(memory.bytes_ceil() / MIB),
        HeldMemory::Requested(RequestedMemory::Units(units)) => Some(units * 10),
        HeldMemory::Requested(_) => None,
    };
    let gpus = account
        .holdings
        .parts
        .iter()
        .filter(|part| part.kind == DeviceType::Gpu);
    gpus.map(|part| (gpu(&part.device), mib(part.memory), part.trusted))
        .collect()
}

/// The memory of GPUs that are held, but not known: charged to each of them, or pending.
fn unknown_gpus(holdings: &Holdings) -> Option<HeldMemory> {
    let mut unknown = holdings
        .parts
        .iter()
        .filter(|part| part.kind == DeviceType::Gpu && part.device == DeviceRef::Any);
    let pending = holdings
        .pending
        .map(|request| HeldMemory::Requested(request.memory));
    unknown.next().map(|part| part.memory).or(pending)
}

#[rstest]
#[case::units(units(8), record(&[(0, "GPU-0", 80)]), &[("GPU-0", 80)])]
#[case::units_by_minor_only(units(8), record(&[(1, "", 80)]), &[("1", 80)])]
#[case::uuid_counts_whatever_the_minor(units(8), record(&[(1, "GPU-0", 80)]), &[("GPU-0", 80)])]
#[case::bytes(bytes(1, 50), record(&[(0, "GPU-0", 50)]), &[("GPU-0", 50)])]
#[case::two_devices(bytes(2, 100), record(&[(0, "GPU-0", 50), (1, "GPU-1", 50)]), &[("GPU-0", 50), ("GPU-1", 50)])]
#[case::old_extender(units(8), old_record("1", "8", "100"), &[("1", 80)])]
#[case::old_extender_without_totals(units(8), json!({"ALIYUN_COM_GPU_MEM_IDX": "1"}), &[("1", 80)])]
fn records_that_agree_with_the_request_are_charged_as_written(
    #[case] limits: Value,
    #[case] annotations: Value,
    #[case] expected: &[(&str, u64)],
) {
    let account = account(&limits, &annotations);
    assert_eq!(account.problem, None);
    let expected: Vec<_> = expected
        .iter()
        .map(|(gpu, mib)| ((*gpu).to_owned(), Some(*mib), true))
        .collect();
    assert_eq!(shown(&account), expected);
}

/// The request bounds the amounts that count, and the account names the contradiction.
#[rstest]
#[case::record_is_less(bytes(1, 50), record(&[(0, "GPU-0", 40)]), &[("GPU-0", Some(50), false)], "says 41943040 bytes on GPU GPU-0, its spec 52428800")]
#[case::record_is_more(units(4), record(&[(0, "GPU-0", 80)]), &[("GPU-0", Some(40), false)], "its spec 41943040")]
#[case::more_devices(bytes(1, 50), record(&[(0, "GPU-0", 50), (1, "GPU-1", 50)]), &[("GPU-0", Some(50), false)], "names 2 devices, its spec asks for 1 only")]
#[case::old_record_is_more(units(4), old_record("0", "8", "100"), &[("0", Some(40), false)], "its record says 8 units, its spec 4")]
#[case::units_were_larger(units(8), old_record("0", "8", "10"), &[("0", Some(800), false)], "had 10 units when it was placed and has 100 now")]
#[case::units_were_smaller(units(80), old_record("0", "80", "1000"), &[("0", Some(800), false)], "had 1000 units when it was placed and has 100 now")]
fn a_record_that_contradicts_the_request_is_bounded_and_reported(
    #[case] limits: Value,
    #[case] annotations: Value,
    #[case] expected: &[(&str, Option<u64>, bool)],
    #[case] problem: &str,
) {
    let account = account(&limits, &annotations);
    let found = account.problem.clone().unwrap_or_default();
    assert!(found.contains(problem), "{found}");
    let expected: Vec<_> = expected
        .iter()
        .map(|(gpu, mib, trusted)| ((*gpu).to_owned(), *mib, *trusted))
        .collect();
    assert_eq!(shown(&account), expected);
}

/// On a node that our plugin serves, a pod with unknown devices is charged once, and a pod to which kubelet allocated nothing
/// holds nothing.
#[rstest]
#[case::units(units(8), json!({}), RequestedMemory::Units(8))]
#[case::unknown_minor(units(8), old_record("7", "8", "100"), RequestedMemory::Units(8))]
#[case::core_alone(json!({"koordinator.sh/gpu-core": 50}), json!({}), RequestedMemory::Bytes(0))]
#[case::core_alone_and_a_record(json!({"koordinator.sh/gpu-core": 50}), record(&[(99, "", 1000)]), RequestedMemory::Bytes(0))]
#[case::two_dialects(json!({"aliyun.com/gpu-mem": 8, "koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": 20 * MIB}), json!({}), RequestedMemory::Bytes(100 * MIB))]
fn a_pod_with_unknown_devices_is_charged_as_its_node_reports(
    #[case] limits: Value,
    #[case] annotations: Value,
    #[case] expected: RequestedMemory,
) {
    let of = |report| account_reported(report, false, &inventory(), &limits, &annotations);
    let (silent, pending, nothing) = (
        of(PluginReport::Silent),
        of(PluginReport::Pending),
        of(PluginReport::NoDevices),
    );
    let memory = Some(HeldMemory::Requested(expected));
    assert!(silent.holdings.pending.is_none(), "{silent:?}");
    assert_eq!(unknown_gpus(&silent.holdings), memory, "{silent:?}");
    let is_pending =
        matches!(pending.holdings.pending, Some(ShareRequest { memory, .. }) if memory == expected);
    assert!(is_pending && pending.holdings.parts.is_empty(), "{pending:?}");
    assert!(pending.problem.is_some());
    assert!(nothing.holdings.is_empty(), "{nothing:?}");
    assert_eq!(nothing.contradicts, annotations != json!({}), "{nothing:?}");
}

/// Any account that may create pods could write such a record: it takes no device away where our plugin serves the node, and
/// none that is not there where it does not.
#[rstest]
#[case::unknown_minor(record(&[(99, "", 1000)]), 0)]
#[case::unknown_uuid(record(&[(0, "GPU-9", 1000)]), 0)]
#[case::twice(record(&[(0, "GPU-0", 1000), (0, "", 1000)]), 0)]
#[case::one_that_is_there(record(&[(0, "GPU-0", 1000)]), 1)]
fn the_record_of_a_pod_without_a_request_takes_no_device_of_a_served_node(
    #[case] annotations: Value,
    #[case] n_silent: usize,
) {
    for (report, expected) in [
        (PluginReport::Silent, n_silent),
        (PluginReport::Pending, 0),
        (PluginReport::NoDevices, 0),
    ] {
        let account = account_reported(report, false, &inventory(), &json!({"cpu": "1m"}), &annotations);
        assert_eq!(shown(&account).len(), expected, "{report:?}: {account:?}");
        assert_eq!(unknown_gpus(&account.holdings), None, "{account:?}");
        assert!(account.contradicts && account.problem.is_some());
    }
}

/// After the unit of a node has changed, the bytes of a record are right although its units are worth others now.
#[rstest]
#[case::of_another_unit("8", "10", Some(800))]
#[case::of_this_unit("8", "100", Some(80))]
#[case::of_other_units("80", "10", Some(80))]
fn records_keep_their_bytes_when_the_memory_unit_changes(
    #[case] pod_units: &str,
    #[case] device_units: &str,
    #[case] mib: Option<u64>,
) {
    let mut annotations = old_record("0", pod_units, device_units);
    annotations["scheduling.koordinator.sh/device-allocated"] =
        record(&[(0, "GPU-0", 800)])["scheduling.koordinator.sh/device-allocated"].clone();
    let account = account(&units(8), &annotations);
    assert_eq!(shown(&account), [("GPU-0".to_owned(), mib, false)]);
}

/// A record of the old extender has the number of units from before the driver's memory was kept from pods. It is not doubtful.
#[test]
fn units_that_the_driver_keeps_by_now_make_no_other_unit() {
    let mut inventory = inventory();
    for gpu in inventory.gpus.iter_mut() {
        (gpu.memory_bytes, gpu.reserved_bytes) = (985 * MIB, 15 * MIB);
    }
    let account = account_where(true, &inventory, &units(8), &old_record("0", "8", "100"));
    assert_eq!(account.problem, None);
    assert_eq!(shown(&account).first().map(|share| share.2), Some(true));
}

/// The device is unknown: every device of the node is charged, and the account says why.
#[rstest]
#[case::missing(units(8), json!({}), "it has no allocation record")]
#[case::no_json(units(8), json!({"scheduling.koordinator.sh/device-allocated": "{"}), "annotation scheduling.koordinator.sh/device-allocated is \"{\"")]
#[case::other_devices_only(bytes(1, 50), json!({"scheduling.koordinator.sh/device-allocated": "{\"rdma\":[{\"minor\":0}]}"}), "it has no allocation record")]
#[case::negative_amount(units(8), json!({"scheduling.koordinator.sh/device-allocated": "{\"gpu\":[{\"minor\":0,\"resources\":{\"koordinator.sh/gpu-memory\":\"-1\"}}]}"}), "says koordinator.sh/gpu-memory is -1, which is no amount")]
#[case::negative_minor(units(8), record(&[(-1, "", 80)]), "names minor -1")]
#[case::index_is_no_number(
    units(8),
    old_record("x", "8", "100"),
    "annotation ALIYUN_COM_GPU_MEM_IDX is \"x\""
)]
#[case::negative_index(
    units(8),
    old_record("-1", "8", "100"),
    "annotation ALIYUN_COM_GPU_MEM_IDX is \"-1\""
)]
#[case::units_are_no_number(units(8), old_record("0", "8Gi", "100"), "annotation ALIYUN_COM_GPU_MEM_POD")]
#[case::fewer_devices(bytes(2, 100), record(&[(0, "GPU-0", 50)]), "names 1 devices, its spec asks for 2")]
#[case::same_device_twice(bytes(2, 100), record(&[(0, "GPU-0", 50), (0, "GPU-0", 50)]), "names GPU GPU-0 twice")]
#[case::same_device_by_uuid_and_minor(bytes(2, 100), record(&[(0, "GPU-0", 50), (0, "", 50)]), "names GPU minor 0 twice")]
#[case::unknown_uuid(units(8), record(&[(0, "GPU-9", 80)]), "names GPU GPU-9, which the node does not have")]
#[case::unknown_minor(
    units(8),
    old_record("7", "8", "100"),
    "names GPU minor 7, which the node does not have"
)]
#[case::wrong_dialect(bytes(1, 50), old_record("0", "8", "100"), "its only record is gpushare's")]
fn unknown_devices(#[case] limits: Value, #[case] annotations: Value, #[case] problem: &str) {
    let account = account(&limits, &annotations);
    assert!(
        unknown_gpus(&account.holdings).is_some() && account.holdings.pending.is_none(),
        "{account:?}"
    );
    let found = account.problem.unwrap_or_default();
    assert!(found.contains(problem), "{found}");
}

/// A ratio is charged by the spec, exactly, on the record's device; the bytes in the record are rounded.
#[test]
fn a_ratio_is_charged_by_the_spec_and_not_by_rounded_bytes() {
    let account = account(&ratio(2, 66), &record(&[(0, "GPU-0", 331), (1, "GPU-1", 331)]));
    let share = |gpu: &str| HeldPart {
        memory: HeldMemory::Requested(RequestedMemory::Ratio(33)),
        core: 10,
        slots: 1,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Id(gpu.into()))
    };
    let holdings = Holdings::from(vec![share("GPU-0"), share("GPU-1")]);
    assert_eq!(
        account,
        Account {
            holdings,
            ..Account::default()
        }
    );
}

/// A bound pod whose request breaks a rule is charged by its record, or by the amounts that it names.
#[test]
fn a_bound_pod_with_an_invalid_request_is_charged() {
    let invalid =
        json!({"aliyun.com/gpu-mem": 8, "koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory": MIB});
    let unrecorded = account(&invalid, &json!({}));
    let expected = HeldMemory::Requested(RequestedMemory::Bytes(81 * MIB));
    assert_eq!(unknown_gpus(&unrecorded.holdings), Some(expected));
    let recorded = account(&invalid, &record(&[(0, "GPU-0", 50)]));
    assert!(
        recorded
            .problem
            .unwrap()
            .contains("use the resources of one dialect only")
    );
    assert_eq!(unknown_gpus(&recorded.holdings), None);
}

#[test]
fn a_record_rounded_down_by_another_writer_agrees_with_the_request() {
    let third = record(&[(0, "GPU-0", 33), (1, "GPU-1", 33)]);
    let limits = json!({"koordinator.sh/gpu.shared": 2, "koordinator.sh/gpu-memory": 66 * MIB + 1});
    let account = account(&limits, &third);
    assert_eq!(account.problem, None);
    assert_eq!(
        account.holdings.parts[0].memory,
        HeldMemory::Exact(Memory::from_bytes(33 * MIB + 1))
    );
}

#[test]
fn a_pod_without_a_request_has_no_facts() {
    let pod: Pod = serde_json::from_value(
        json!({"metadata": {"uid": "u"}, "spec": {"nodeName": "n", "containers": [{"name": "c"}]}}),
    )
    .unwrap();
    assert_eq!(PodFacts::of(&pod, &ResourceNames::default()), None);
}

/// kubelet gives a pod that asks for nothing no device; one unit beside the zeros, or no number, counts.
#[rstest]
#[case::units(json!({"aliyun.com/gpu-mem": "0"}), false)]
#[case::several(json!({"koordinator.sh/gpu.shared": "0", "koordinator.sh/gpu-memory": "0"}), false)]
#[case::one_is_not(json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "0"}), true)]
#[case::no_number(json!({"aliyun.com/gpu-mem": "x"}), true)]
fn a_bound_pod_that_requests_zero_holds_nothing(#[case] limits: Value, #[case] holds: bool) {
    let containers = json!([{"name": "c", "resources": {"limits": limits}}]);
    let facts = |node: Value| {
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"uid": "u"}, "spec": {"nodeName": node, "containers": containers}}),
        )
        .unwrap();
        PodFacts::of(&pod, &ResourceNames::default())
    };
    let is_refused = facts(Value::Null).map(|facts| matches!(facts.request, ParsedRequest::Invalid(..)));
    assert_eq!(is_refused, holds.then_some(true), "as long as it is not bound");
    assert_eq!(facts("n1".into()).is_some(), holds);
}

const HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";

/// A decision for a pod that sees all GPUs excludes no other pod, so the account read back from its annotations must not either.
#[rstest]
#[case::shares(json!({}), 1)]
#[case::sees_all(json!({"gpushare/all-devices": "true"}), 0)]
#[case::another_annotation_is_bad(json!({"scheduling.koordinator.sh/device-joint-allocate": "{"}), 1)]
fn a_bound_pod_keeps_its_exclusive_policy_unless_it_sees_all_gpus(
    #[case] mut annotations: Value,
    #[case] expected: usize,
) {
    let limits = if expected == 1 {
        bytes(1, 100)
    } else {
        json!({"koordinator.sh/gpu.shared": 1})
    };
    annotations[HINT] = json!(r#"{"gpu": {"exclusivePolicy": "DeviceLevel"}}"#);
    let every = [(0, "GPU-0", 0), (1, "GPU-1", 0)];
    for (key, value) in record(if expected == 1 {
        &[(0, "GPU-0", 100)]
    } else {
        &every
    })
    .as_object()
    .unwrap()
    {
        annotations[key] = value.clone();
    }
    assert_eq!(account(&limits, &annotations).holdings.exclusions.len(), expected);
}

/// Two GPUs, of which these are healthy.
fn inventory_of(healthy: &[u32]) -> Inventory {
    let mut inventory = inventory();
    for gpu in inventory.gpus.iter_mut() {
        gpu.healthy = healthy.contains(&gpu.minor);
    }
    inventory
}

/// The author of a pod writes the annotation, and may have written the record: neither gets the pod a GPU without a charge.
#[rstest]
#[case::every_gpu(true, &[0, 1], json!([0, 1]), None)]
#[case::every_healthy_gpu(true, &[1], json!([1]), None)]
#[case::a_sick_one_too(true, &[1], json!([0, 1]), None)]
#[case::one_that_is_gone(true, &[0, 1], json!([0, 1, 7]), None)]
#[case::the_operator_does_not_allow_it(false, &[0, 1], json!([0, 1]), Some("does not count without --allow-all-devices"))]
#[case::fewer(true, &[0, 1], json!([0]), Some("GPU GPU-1 is not in it"))]
#[case::fewer_since_one_recovered(true, &[0, 1], json!([1]), Some("GPU GPU-0 is not in it"))]
#[case::twice_the_same(true, &[0, 1], json!([1, 1]), Some("GPU GPU-0 is not in it"))]
#[case::only_unknown_ones(true, &[0, 1], json!([7, 8]), Some("GPU GPU-0 is not in it"))]
#[case::none(true, &[0, 1], Value::Null, Some("only with an allocation record"))]
fn the_all_devices_annotation_counts_only_with_a_record_of_every_healthy_gpu(
    #[case] is_allowed: bool,
    #[case] healthy: &[u32],
    #[case] named: Value,
    #[case] doubt: Option<&str>,
) {
    let names = |minor: &Value| json!({"minor": minor, "id": format!("GPU-{minor}"), "resources": {}});
    let record = named
        .as_array()
        .map(|named| json!({"gpu": named.iter().map(names).collect::<Vec<_>>()}).to_string());
    let annotations =
        json!({"gpushare/all-devices": "true", "scheduling.koordinator.sh/device-allocated": record});
    let annotations: serde_json::Map<_, _> = annotations
        .as_object()
        .unwrap()
        .clone()
        .into_iter()
        .filter(|(_, v)| !v.is_null())
        .collect();
    let account = account_where(
        is_allowed,
        &inventory_of(healthy),
        &json!({"koordinator.sh/gpu.shared": 1}),
        &annotations.into(),
    );
    let memory_of = |part: &HeldPart| match part.memory {
        HeldMemory::Requested(memory) => memory,
        HeldMemory::Exact(memory) => RequestedMemory::Bytes(u64::from(memory != Memory::from_bytes(0))),
    };
    let pending = account.holdings.pending.map(|request| request.memory);
    let parts = account.holdings.parts.iter().map(memory_of);
    let holds_all_of: Vec<RequestedMemory> = pending.into_iter().chain(parts).collect();
    match doubt {
        None => assert!(
            holds_all_of
                .iter()
                .all(|memory| *memory == RequestedMemory::Bytes(0)),
            "{holds_all_of:?}"
        ),
        Some(doubt) => {
            assert!(
                holds_all_of
                    .iter()
                    .all(|memory| *memory == RequestedMemory::Ratio(100)),
                "{holds_all_of:?}"
            );
            let problem = account.problem.unwrap_or_default();
            assert!(problem.contains(doubt), "{problem}");
        }
    }
    assert!(!holds_all_of.is_empty());
}

/// A pod's annotations may name each of the engine's policies, and count more than the cluster's policies.
#[test]
fn annotations_of_a_pod_override_the_policies_of_the_cluster() {
    let preference = |annotations: Value| {
        let limits = json!({"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-memory-ratio": 50});
        let spec = json!({"containers": [{"name": "c", "resources": {"limits": limits}}]});
        let pod =
            serde_json::from_value(json!({"metadata": {"annotations": annotations}, "spec": spec})).unwrap();
        PodFacts::of(&pod, &ResourceNames::default()).unwrap()
    };
    let cluster = Policies {
        node: NodePolicy::Spread,
        device: DevicePolicy::InOrder,
    };
    assert_eq!(preference(json!({})).preference.or(cluster), cluster);
    for name in NODE_POLICIES {
        let facts = preference(json!({NODE_POLICY: name}));
        assert_eq!(facts.preference.or(cluster).node.to_string(), name);
        assert_eq!(facts.preference.or(cluster).device, cluster.device);
    }
    for name in DEVICE_POLICIES {
        assert_eq!(
            preference(json!({DEVICE_POLICY: name}))
                .preference
                .or(cluster)
                .device
                .to_string(),
            name
        );
    }
    let facts = preference(json!({NODE_POLICY: "tetris"}));
    let ParsedRequest::Invalid(error, _) = facts.request else {
        panic!("{facts:?}")
    };
    insta::assert_snapshot!(
        error,
        @r#"annotation gpushare/node-policy is "tetris": choose one of fill, binpack, spread, least-allocated, most-allocated"#
    );
}

#[test]
fn an_enforcement_level_that_no_pod_may_demand_is_refused() {
    let pod = json!({"metadata": {"annotations": {"gpushare/enforcement": "hami-core"}},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}}]}});
    let pod: Pod = serde_json::from_value(pod).unwrap();
    let error = proto::request::PodRequest::read_new(&pod, &ResourceNames::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"annotation gpushare/enforcement is "hami-core": choose one of driver, any"#
    );
}

//! IDs and the size of their list, checked against what the encoder makes of it.

use std::collections::BTreeSet;

use proptest::prelude::*;
use prost::Message;
use proto::kubelet::UNHEALTHY;
use proto::kubelet::deviceplugin::{Device, ListAndWatchResponse};
use proto::quantity::Quantity;
use proto::resource::RDMA;
use rstest::rstest;

use super::*;
use crate::devices::inventory::OtherDevice;
use crate::tests::builders::{adapter, gpu};

fn gpus(uuids: &[&str], memory_bytes: u64) -> Vec<Gpu> {
    uuids
        .iter()
        .map(|uuid| Gpu {
            uuid: uuid.parse().unwrap(),
            memory_bytes,
            ..gpu(0)
        })
        .collect()
}

fn encoded_len(scheme: &IdScheme, resource: ExtendedResource) -> u64 {
    let ids = scheme.numbered(resource).iter().flat_map(NumberedIds::iter);
    let devices = ids
        .map(|id| Device {
            id,
            health: UNHEALTHY.to_owned(),
            topology: None,
        })
        .collect();
    ListAndWatchResponse { devices }.encoded_len() as u64
}

#[rstest]
#[case::usual(&["GPU-5a1d9f6c-0000-1111-2222-333333333333", "GPU-6b1d9f6c-0000-1111-2222-333333333333"], &["dea6ca9d", "3f3f2d80"])]
#[case::beside_no_other(&["GPU-5a1d9f6c-0000-1111-2222-333333333333"], &["dea6ca9d"])]
#[case::alike_but_for_the_last_digit(&["GPU-node-1-0", "GPU-node-1-1"], &["0bd03d6f", "0bd03c6f"])]
#[case::collision_lengthens_both(&["GPU-66394", "GPU-414987", "GPU-a"], &["e1ced20fa77e", "e1ced20f3f7d", "c8a15d95"])]
fn stems_are_short_and_distinct(#[case] uuids: &[&str], #[case] expected: &[&str]) {
    assert_eq!(stems(&gpus(uuids, 1 << 30)), expected);
}

#[test]
fn an_id_names_its_gpu_and_other_texts_name_none() {
    let found = gpus(&["GPU-a-1", "GPU-a"], 3 << 30);
    let scheme = IdScheme::new(&found, 2, MemoryUnit::GIB).unwrap();
    assert_eq!(
        scheme
            .ids(ExtendedResource::Shared, &found[0].uuid)
            .collect::<Vec<_>>(),
        ["GPU-a-1::0", "GPU-a-1::1"]
    );
    assert_eq!(
        scheme
            .ids(ExtendedResource::Memory, &found[1].uuid)
            .collect::<Vec<_>>(),
        ["c8a15d95-0", "c8a15d95-1", "c8a15d95-2"]
    );
    assert_eq!(
        scheme.device_of(ExtendedResource::Memory, "74d9f81d-2"),
        Some(&found[0].uuid)
    );
    for stranger in [
        "c8a15d95-3",
        "c8a15d95-",
        "c8a15d95",
        "b-0",
        "",
        "é",
        "GPU-a::0",
        "c8a15d95-99999999999999999999",
    ] {
        assert_eq!(
            scheme.device_of(ExtendedResource::Memory, stranger),
            None,
            "{stranger}"
        );
    }
    assert_eq!(scheme.device_of(ExtendedResource::Shared, "GPU-a::2"), None);
}

/// A GPU of 4 GiB, of which the driver keeps 1.5 GiB since the last start. kubelet has given the third unit to a pod.
#[test]
fn units_that_pods_hold_stay_when_the_driver_keeps_their_memory() {
    let mut found = gpus(&["GPU-a"], 4 << 30);
    (found[0].memory_bytes, found[0].reserved_bytes) = (5 << 29, 3 << 29);
    let scheme = IdScheme::new(&found, 2, MemoryUnit::GIB).unwrap();
    let ids = |scheme: &IdScheme| {
        let ids = scheme.ids(ExtendedResource::Memory, &found[0].uuid);
        ids.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(ids(&scheme), "c8a15d95-0 c8a15d95-1");
    let bytes = scheme.longest_list_bytes(ExtendedResource::Memory);
    // One that is listed in any case, one that is kept, and others that this GPU never had.
    let allocated = ["c8a15d95-0", "c8a15d95-2", "c8a15d95-4", "c8a15d95-+3", "b-2"];
    let allocated = allocated.map(str::to_owned).into();
    let scheme = scheme.with_allocated(&allocated, &found, MemoryUnit::GIB);
    assert_eq!(ids(&scheme), "c8a15d95-0 c8a15d95-1 c8a15d95-2");
    assert_eq!(scheme.longest_list_bytes(ExtendedResource::Memory), bytes / 2 * 3);
    let gpu_of = |id| scheme.device_of(ExtendedResource::Memory, id).is_some();
    assert_eq!(["c8a15d95-2", "c8a15d95-3"].map(gpu_of), [true, false]);
}

/// One ID for each GPU, shared or not; of other devices as many as they have percent.
#[test]
fn a_whole_gpu_has_one_id_and_another_device_one_per_percent() {
    let gpus = gpus(&["GPU-a", "GPU-b"], 1 << 30);
    let others = vec![
        OtherDevice {
            resources: [(RDMA.to_owned(), Quantity::from_unsigned(2))].into(),
            ..adapter(1)
        },
        adapter(2),
    ];
    let inventory = NodeInventory {
        gpus: gpus.clone(),
        others,
        ..NodeInventory::default()
    };
    let scheme = IdScheme::new(&gpus[..1], 2, MemoryUnit::GIB)
        .unwrap()
        .with_inventory(&inventory);
    let ids = |resource: ExtendedResource| {
        scheme
            .numbered(resource)
            .iter()
            .flat_map(NumberedIds::iter)
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(ExtendedResource::Whole), ["GPU-a", "GPU-b"]);
    assert_eq!(
        scheme.device_of(ExtendedResource::Whole, "GPU-b"),
        Some(&gpus[1].uuid)
    );
    assert_eq!(
        (
            ids(ExtendedResource::Rdma).len(),
            &ids(ExtendedResource::Rdma)[..3]
        ),
        (
            102,
            &["0000:01:00.0::0", "0000:01:00.0::1", "0000:02:00.0::0"].map(str::to_owned)[..]
        )
    );
    for (resource, id) in [
        (ExtendedResource::Rdma, "0000:01:00.0::2"),
        (ExtendedResource::Rdma, "0000:01:00.0"),
        (ExtendedResource::Whole, "GPU-b::0"),
        (ExtendedResource::Shared, "GPU-b::0"),
    ] {
        assert_eq!(scheme.device_of(resource, id), None, "{id}");
    }
    assert_eq!(
        ExtendedResource::ALL.map(|resource| scheme.has(resource)),
        [true, true, true, true, false]
    );
    let encoded: u64 = ids(ExtendedResource::Whole)
        .iter()
        .map(|id| device_bytes(id.len() as u64, 0))
        .sum();
    assert_eq!(scheme.longest_list_bytes(ExtendedResource::Whole), encoded);
}

/// 8 GPUs of 80 GiB by the MiB: the smallest unit that fits is named, and does fit where one less does not.
#[test]
fn too_many_units_are_refused_with_the_unit_to_use() {
    let found: Vec<Gpu> = (0..8)
        .map(|minor| Gpu {
            memory_bytes: 80 << 30,
            ..gpu(minor)
        })
        .collect();
    let error = IdScheme::new(&found, 100, MemoryUnit::MIB).unwrap_err();
    let TooLong::Units { fitting, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        error.to_string(),
        "--memory-unit MiB makes a device list of 18916560 bytes, and kubelet takes at most 4194304; \
         the smallest unit that fits the GPUs of this node is --memory-unit 5Mi"
    );
    assert!(IdScheme::new(&found, 100, fitting).is_ok());
    assert!(IdScheme::new(&found, 100, unit_of((fitting.bytes() >> 20) - 1).unwrap()).is_err());
}

#[test]
fn too_many_slots_are_refused_with_the_number_to_use() {
    let error = IdScheme::new(&[gpu(0)], 100_000, MemoryUnit::GIB).unwrap_err();
    let TooLong::Slots { fitting, .. } = error else {
        panic!("{error}")
    };
    assert!(IdScheme::new(&[gpu(0)], fitting, MemoryUnit::GIB).is_ok());
    assert!(IdScheme::new(&[gpu(0)], fitting + 1, MemoryUnit::GIB).is_err());
}

/// Counting every byte of a petabyte must not take longer than counting one GPU's.
#[test]
fn a_gpu_with_too_much_memory_is_refused_at_once() {
    let found = gpus(&["GPU-a"], u64::MAX);
    assert_eq!(
        IdScheme::new(&found, 1, MemoryUnit::MIB).unwrap_err(),
        TooLong::AnyUnit
    );
}

proptest! {
    #[test]
    fn the_computed_size_of_a_list_is_that_of_the_encoder(lens in prop::collection::btree_set(1_usize..36, 1..5), slots in 1_u32..1200, mib in 0_u64..12_000) {
        let uuids: Vec<String> = lens.iter().map(|len| format!("GPU-{}", "f".repeat(*len))).collect();
        let found = gpus(&uuids.iter().map(String::as_str).collect::<Vec<_>>(), mib << 20);
        let scheme = IdScheme::new(&found, slots, MemoryUnit::MIB).unwrap();
        for resource in ExtendedResource::ALL {
            prop_assert_eq!(scheme.longest_list_bytes(resource), encoded_len(&scheme, resource));
        }
    }

    #[test]
    fn ids_are_distinct_and_stable(uuids in prop::collection::btree_set("(GPU-|MIG-|)[ab1-]{1,12}", 1..6), slots in 1_u32..12) {
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        let mut found = gpus(&uuids, 11 << 30);
        let scheme = IdScheme::new(&found, slots, MemoryUnit::GIB).unwrap();
        for resource in ExtendedResource::ALL {
            let ids: Vec<_> = found.iter().flat_map(|gpu| scheme.ids(resource, &gpu.uuid).map(|id| (id, gpu.uuid.clone()))).collect();
            prop_assert_eq!(ids.iter().map(|(id, _)| id).collect::<BTreeSet<_>>().len(), ids.len());
            for (id, uuid) in &ids {
                prop_assert_eq!(scheme.device_of(resource, id), Some(uuid));
            }
        }
        found.reverse();
        let again = IdScheme::new(&found, slots, MemoryUnit::GIB).unwrap();
        for gpu in &found {
            prop_assert!(again.ids(ExtendedResource::Memory, &gpu.uuid).eq(scheme.ids(ExtendedResource::Memory, &gpu.uuid)));
        }
    }
}

/// dcgm-exporter finds the GPU of a share with `KUBERNETES_VIRTUAL_GPUS`: the part of an ID before `::`, unless the ID has the
/// form of a MIG device or of GKE's plugin (`toDeviceToSharingPods` in 4.5.3).
#[test]
fn dcgm_exporter_finds_the_gpu_of_a_share() {
    let found = gpus(&["GPU-00000000-aaaa-bbbb-cccc-000000000000"], 3 << 30);
    let scheme = IdScheme::new(&found, 2, MemoryUnit::GIB).unwrap();
    for id in scheme.ids(ExtendedResource::Shared, &found[0].uuid) {
        assert!(
            !id.starts_with("MIG-") && !id.starts_with("nvidia") && !id.contains("/vgpu"),
            "{id}"
        );
        assert_eq!(id.split("::").next(), Some(found[0].uuid.as_str()));
    }
}

//! Devices that kubelet allocated to pods of other schedulers, from the checkpoints on a node's Device object.

use std::collections::BTreeMap;

use placement::{
    Device, DeviceRef, DeviceType, HeldMemory, HeldPart, Holdings, Inventory, NamedAmounts, RequestedMemory,
    VirtualFunction,
};
use proto::kubelet_allocations::{KubeletAllocations, physical_id};
use proto::resource::{FPGA, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS};

use crate::inventory::is_certainly_absent;

/// A device that kubelet allocated to a pod. All of it counts as used.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AllocatedDevice {
    /// kubelet's device ID without the part that names a replica or an instance: mostly a UUID or a PCI address.
    pub(crate) id: Box<str>,
    /// True if kubelet's ID names a replica or an instance of the device, so that several pods may hold the device.
    is_replica: bool,
    /// True if the name of the resource shows that it is a GPU.
    is_gpu: bool,
}

pub(crate) type AllocationsByPod = BTreeMap<Box<str>, Vec<AllocatedDevice>>;

/// The devices that kubelet allocated to each pod, by the annotation of a Device object, except for the resources that our plugin
/// serves.
pub(crate) fn of_checkpoints(checkpoints: &KubeletAllocations, names: &ResourceNames) -> AllocationsByPod {
    let mut by_pod = AllocationsByPod::new();
    let own_resources = [GPU_SHARED, RDMA, FPGA, &names.memory];
    for allocation in &checkpoints.entries {
        let resource = allocation.resource_name.as_str();
        // kubelet's IDs of resources that our plugin serves are no devices; the records of the pods name the devices.
        if own_resources.contains(&resource) {
            continue;
        }
        let devices = by_pod.entry(allocation.pod_uid.as_str().into()).or_default();
        for id in &allocation.device_ids {
            let physical = physical_id(id);
            devices.push(AllocatedDevice {
                id: physical.into(),
                is_replica: physical.len() != id.len(),
                is_gpu: VENDOR_GPUS.contains(&resource),
            });
        }
    }
    for devices in by_pod.values_mut() {
        // Containers of a pod may have replicas of one device.
        devices.sort();
        devices.dedup();
    }
    by_pod
}

/// Adds allocated devices to the holdings of a pod. Devices that the node does not have are left out, and reported as a problem.
pub(crate) fn add_allocated(
    holdings: &mut Holdings,
    allocated: &[AllocatedDevice],
    inventory: Option<&Inventory>,
) -> Option<String> {
    let mut unknown = Vec::new();
    for device in allocated {
        // A node that has not reported its devices may have it.
        if !hold(holdings, device, inventory) && inventory.is_some() {
            unknown.push(&device.id);
        }
    }
    // The text reaches people, and IDs have any length.
    let shown: String = unknown.first()?.chars().take(64).collect();
    let more = match unknown.len() - 1 {
        0 => String::new(),
        n => format!(", and {n} more"),
    };
    Some(format!(
        "kubelet has given it a device that the node does not have: {shown:?}{more}"
    ))
}

/// The holdings of a pod that no watch has shown on the node, by the devices that kubelet allocated to it there; and the problem
/// of devices that the node does not have.
pub(crate) fn of_unknown_pod(
    allocated: &[AllocatedDevice],
    inventory: Option<&Inventory>,
) -> (Holdings, Option<String>) {
    let mut holdings = Holdings {
        is_vendor: true,
        ..Holdings::default()
    };
    let problem = add_allocated(&mut holdings, allocated, inventory);
    for device in allocated {
        // kubelet may name a GPU by other means than its UUID, such as an index: it may be any of those that the node reports.
        let is_certain = inventory.is_none_or(|inventory| {
            find(inventory, &device.id).is_some() || is_certainly_absent(&device.id, inventory)
        });
        holdings.n_unknown_gpus += u32::from(device.is_gpu && !is_certain);
    }
    (holdings, problem)
}

/// Adds a device to holdings, unless they have it already. Returns false if it cannot be counted: the node has reported devices
/// without it, or has reported none and the resource does not show that it is a GPU.
fn hold(holdings: &mut Holdings, allocated: &AllocatedDevice, inventory: Option<&Inventory>) -> bool {
    let found = inventory.and_then(|inventory| find(inventory, &allocated.id));
    let mut part = match found {
        Some((DeviceType::Gpu, gpu, _)) => whole_gpu(&allocated.id, gpu.core),
        Some((kind, device, function)) => HeldPart {
            // The part of the device that a virtual function uses is not known.
            resources: match function {
                Some(_) => NamedAmounts::new(),
                None => device.resources.clone(),
            },
            virtual_functions: function.into_iter().map(|function| function.id.clone()).collect(),
            ..HeldPart::new(kind.clone(), DeviceRef::Id(device.id.clone()))
        },
        // As long as the node has not reported its devices, the name of the resource alone says that this is a GPU.
        None if inventory.is_none() && allocated.is_gpu => whole_gpu(&allocated.id, 100),
        None => return false,
    };
    // Several pods may hold replicas of one device, which is no oversubscription.
    part.trusted = !allocated.is_replica;
    let minor = found.map(|(_, device, _)| device.minor);
    if !is_held(holdings, &part, minor) {
        holdings.parts.push(part);
    }
    true
}

/// A part that takes all memory of a GPU, and `core` percent of its compute.
fn whole_gpu(id: &str, core: u32) -> HeldPart {
    HeldPart {
        memory: HeldMemory::Requested(RequestedMemory::Ratio(100)),
        core,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Id(id.into()))
    }
}

/// The device with this ID, or the one with a virtual function of this PCI address, and the function.
fn find<'a>(
    inventory: &'a Inventory,
    id: &str,
) -> Option<(&'a DeviceType, &'a Device, Option<&'a VirtualFunction>)> {
    for (kind, devices) in inventory.types() {
        for device in devices {
            if device.id.as_str() == id {
                return Some((kind, device, None));
            }
            // kubelet allocates no virtual functions of GPUs.
            let mut functions = device.attributes.all_functions();
            if *kind != DeviceType::Gpu
                && let Some(function) = functions.find(|function| function.id.as_str() == id)
            {
                return Some((kind, device, Some(function)));
            }
        }
    }
    None
}

/// Returns true if the holdings by the pod's spec and record have this part already. `minor` is that of the part's device.
fn is_held(holdings: &Holdings, part: &HeldPart, minor: Option<u32>) -> bool {
    // The pod's pending shares count on some GPU of the node, and that may be the allocated GPU.
    if part.kind == DeviceType::Gpu && holdings.pending.is_some() {
        return true;
    }
    for held in holdings.parts.iter().filter(|held| held.kind == part.kind) {
        let is_device = match &held.device {
            DeviceRef::Id(_) => held.device == part.device,
            DeviceRef::Minor(held) => minor == Some(*held),
            DeviceRef::Any => part.kind == DeviceType::Gpu,
        };
        let has_function =
            |function| held.virtual_functions.is_empty() || held.virtual_functions.contains(function);
        if is_device && part.virtual_functions.iter().all(has_function) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use placement::{DeviceAttributes, DevicesOfType, FunctionGroup};
    use rstest::rstest;

    use super::*;

    /// A node with the GPU `gpu` and the adapter `nic`, which has the virtual functions `vf-0` and `vf-1`.
    fn gpu_and_adapter() -> Inventory {
        let functions = ["vf-0", "vf-1"].map(|id| VirtualFunction {
            id: id.into(),
            minor: -1,
        });
        let group = FunctionGroup {
            functions: functions.to_vec(),
            ..FunctionGroup::default()
        };
        let nic = Device {
            attributes: DeviceAttributes {
                function_groups: vec![group],
                ..DeviceAttributes::default()
            },
            ..Device::new("nic", 0)
        };
        Inventory {
            gpus: vec![Device::new("gpu", 0)].into(),
            other_devices: Some(vec![DevicesOfType {
                kind: "rdma".into(),
                devices: vec![nic].into(),
            }]),
            ..Inventory::default()
        }
    }

    /// An allocated device is added unless the pod's spec or record names it already, by whatever means.
    #[rstest]
    #[case::the_same_gpu(DeviceType::Gpu, DeviceRef::Id("gpu".into()), &[], "gpu", 1)]
    #[case::the_gpu_by_minor(DeviceType::Gpu, DeviceRef::Minor(0), &[], "gpu", 1)]
    #[case::any_gpu_may_be_it(DeviceType::Gpu, DeviceRef::Any, &[], "gpu", 1)]
    #[case::another_gpu(DeviceType::Gpu, DeviceRef::Minor(1), &[], "gpu", 2)]
    #[case::any_adapter("rdma".into(), DeviceRef::Any, &[], "nic", 2)]
    #[case::a_gpu_of_the_same_minor(DeviceType::Gpu, DeviceRef::Minor(0), &[], "nic", 2)]
    #[case::a_function_of_the_held_adapter("rdma".into(), DeviceRef::Id("nic".into()), &[], "vf-0", 1)]
    #[case::the_held_function("rdma".into(), DeviceRef::Id("nic".into()), &["vf-0"], "vf-0", 1)]
    #[case::another_function("rdma".into(), DeviceRef::Id("nic".into()), &["vf-1"], "vf-0", 2)]
    fn a_device_is_counted_once(
        #[case] kind: DeviceType,
        #[case] device: DeviceRef,
        #[case] functions: &[&str],
        #[case] allocated: &str,
        #[case] n_parts: usize,
    ) {
        let part = HeldPart {
            virtual_functions: functions.iter().copied().map(Into::into).collect(),
            ..HeldPart::new(kind, device)
        };
        let mut holdings = Holdings::from(vec![part]);
        let allocated = AllocatedDevice {
            id: allocated.into(),
            is_replica: false,
            is_gpu: false,
        };
        let problem = add_allocated(&mut holdings, &[allocated], Some(&gpu_and_adapter()));
        assert_eq!(problem, None);
        assert_eq!(holdings.parts.len(), n_parts, "{holdings:?}");
    }

    /// A device that a node does not have is a problem; one of a node that has not reported its devices may be there.
    #[rstest]
    #[case::no_gpu(
        false,
        Some(Inventory::default()),
        Some("kubelet has given it a device that the node does not have: \"0000:81:00.0\""),
        0
    )]
    #[case::no_gpu_before_the_report(false, None, None, 0)]
    #[case::gpu_before_the_report(true, None, None, 1)]
    fn devices_are_missing_on_nodes_that_have_reported(
        #[case] is_gpu: bool,
        #[case] inventory: Option<Inventory>,
        #[case] problem: Option<&str>,
        #[case] n_held: usize,
    ) {
        let device = AllocatedDevice {
            id: "0000:81:00.0".into(),
            is_replica: false,
            is_gpu,
        };
        let (holdings, found) = of_unknown_pod(&[device], inventory.as_ref());
        assert_eq!(found.is_some(), problem.is_some(), "{found:?}");
        assert!(problem.is_none_or(|problem| found.unwrap().ends_with(problem)));
        assert_eq!(holdings.parts.len(), n_held);
    }
}

//! Checks that pods hold devices as their annotations demand, from API objects alone.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use kube::core::{Selector, SelectorExt};
use proto::device::{Device, DeviceInfo, TYPE_GPU};
use proto::record::{DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations};
use proto::request::hints::{ALLOCATE_HINT as HINT, JOINT_ALLOCATE as JOINT};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::pod_fields::device_record;

/// The annotation for device types that are allocated together, the primary type first.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Joint {
    device_types: Vec<String>,
    required_scope: String,
}

/// Koordinator's allocation hint for the devices of one type.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HintDemands {
    selector: Option<LabelSelector>,
    vf_selector: Option<LabelSelector>,
    allocate_strategy: String,
    exclusive_policy: String,
    required_topology_scope: String,
}

#[derive(Debug, Default)]
pub(super) struct PodDemands {
    joint: Joint,
    hints: BTreeMap<String, HintDemands>,
}

/// A bound pod whose demands are checked: the devices that its record names, and the Device object of its node.
struct BoundPod<'a> {
    device: &'a Device,
    record: DeviceAllocations,
    demands: PodDemands,
}

impl PodDemands {
    /// Reads the demands of a pod; an annotation that does not parse demands nothing.
    pub(super) fn of(pod: &Pod) -> Self {
        Self {
            joint: read_annotation(pod, JOINT),
            hints: read_annotation(pod, HINT),
        }
    }

    /// Returns true if the annotations may change the number of devices of a type that the pod holds, or the amounts.
    pub(super) fn may_change_amounts_of(&self, kind: &str) -> bool {
        self.hints.contains_key(kind) || self.joint.device_types.iter().any(|joined| joined == kind)
    }

    /// Returns true if `held`, the amount of each device of a type that the pod holds, fits its request and its hint.
    pub(super) fn should_hold(&self, kind: &str, asked: u64, held: &[u64]) -> bool {
        let hint = self.hints.get(kind);
        let (n_devices, n_whole) = (held.len() as u64, (asked / 100).max(1));
        let each_has = |amount: u64| held.iter().all(|held| *held == amount);
        let strategy = hint.map_or("", |hint| hint.allocate_strategy.as_str());
        match strategy {
            // More than 100, the amount of one device, requests whole devices.
            _ if asked > 100 && asked.is_multiple_of(100) => {
                each_has(100) && self.is_enough(kind, n_devices, n_whole)
            }
            "ApplyForAll" => each_has(asked) && n_devices > 0,
            // The request is a number of devices, not an amount of one.
            "RequestsAsCount" => {
                let whole = hint.is_some_and(|hint| hint.exclusive_policy == "DeviceLevel");
                each_has(if whole { 100 } else { 1 }) && self.is_enough(kind, n_devices, asked)
            }
            _ => each_has(asked) && self.is_enough(kind, n_devices, 1),
        }
    }

    /// Returns true if the number of devices is the requested one, or larger for a secondary type of a joint allocation.
    fn is_enough(&self, kind: &str, n_devices: u64, n_requested: u64) -> bool {
        let mut secondary_types = self.joint.device_types.iter().skip(1);
        let is_secondary = secondary_types.any(|joined| joined == kind);
        n_devices == n_requested || (is_secondary && n_devices > n_requested)
    }
}

/// Returns a sentence for each demand of a bound pod that its record does not meet.
pub(super) fn unmet(pod: &Pod, device: &Device) -> Vec<String> {
    let Some(pod) = BoundPod::of(pod, device) else {
        return Vec::new();
    };
    let mut unmet = Vec::new();
    for (kind, hint) in &pod.demands.hints {
        if let Some(held) = pod.record.get(kind) {
            unmet.extend(pod.unmet(kind, hint, held));
        }
    }
    if pod.demands.joint.required_scope == "SamePCIe" {
        let mut switches: BTreeSet<Vec<String>> = BTreeSet::new();
        for kind in &pod.demands.joint.device_types {
            if pod.record.contains_key(kind) {
                switches.insert(pod.switches(kind));
            }
        }
        if switches.len() > 1 {
            unmet.push(format!("its devices are on the switches {switches:?} by type"));
        }
    }
    unmet
}

impl<'a> BoundPod<'a> {
    /// `None` for a pod without a record, or with one that does not parse.
    fn of(pod: &Pod, device: &'a Device) -> Option<Self> {
        pod.annotations().get(DEVICE_ALLOCATED)?;
        Some(Self {
            device,
            record: device_record(pod).ok()?,
            demands: PodDemands::of(pod),
        })
    }

    fn devices(&self, kind: &str) -> impl Iterator<Item = &'a DeviceInfo> {
        let devices = self.device.spec.devices.iter();
        devices.filter(move |info| info.device_type == kind)
    }

    fn minors(&self, kind: &str) -> BTreeSet<i32> {
        let held = self.record.get(kind).into_iter().flatten();
        held.map(|one| one.minor).collect()
    }

    /// The places (NUMA node and PCIe switch) of the pod's devices of a type, each once.
    fn places(&self, kind: &str) -> BTreeSet<(i32, String)> {
        let minors = self.minors(kind);
        let mut places = BTreeSet::new();
        for info in self.devices(kind) {
            if let (Some(minor), Some(place)) = (info.minor, &info.topology)
                && minors.contains(&minor)
            {
                places.insert((place.node_id, place.pcie_id.clone()));
            }
        }
        places
    }

    /// The PCIe switches of the pod's devices of a type, each once.
    fn switches(&self, kind: &str) -> Vec<String> {
        let places = self.places(kind).into_iter();
        places.map(|(numa, switch)| format!("{numa}/{switch}")).collect()
    }

    /// Lists the demands of a pod's hint for one device type that the devices it holds do not meet.
    fn unmet(&self, kind: &str, hint: &HintDemands, held: &[DeviceAllocation]) -> Vec<String> {
        let mut unmet = Vec::new();
        for one in held {
            let mut of_kind = self.devices(kind);
            let Some(info) = of_kind.find(|info| info.minor == Some(one.minor)) else {
                continue;
            };
            if !is_selected(hint, info) {
                unmet.push(format!(
                    "{kind} {} has not the labels that are demanded",
                    one.minor
                ));
            }
            if let Some(selector) = &hint.vf_selector {
                unmet.extend(wrong_virtual_function(kind, selector, one, info));
            }
        }
        if hint.allocate_strategy == "ApplyForAll" {
            let selected = self.devices(kind).filter(|info| is_selected(hint, info));
            let n_selected = selected.count();
            if held.len() != n_selected {
                unmet.push(format!("it has {} of {n_selected} {kind} devices", held.len()));
            }
        }
        unmet.extend(self.unmet_scope(kind, hint));
        unmet
    }

    /// Returns a sentence if the hint demands one PCIe switch or NUMA node, and the pod's GPUs are at several.
    fn unmet_scope(&self, kind: &str, hint: &HintDemands) -> Option<String> {
        let places = self.places(kind);
        let n_places = match hint.required_topology_scope.as_str() {
            "PCIe" => places.len(),
            "NUMANode" => places.iter().map(|(numa, _)| numa).collect::<BTreeSet<_>>().len(),
            _ => return None,
        };
        // Koordinator reads the scope of GPUs alone.
        (kind == TYPE_GPU && n_places > 1).then(|| format!("its {kind} devices are at {places:?}"))
    }

    /// Returns true if the other pod has a device that this pod's hint claims exclusively.
    fn excludes(&self, kind: &str, hint: &HintDemands, other: &Self) -> bool {
        match hint.exclusive_policy.as_str() {
            "DeviceLevel" => !other.minors(kind).is_disjoint(&self.minors(kind)),
            "PCIeLevel" => !other.places(kind).is_disjoint(&self.places(kind)),
            _ => false,
        }
    }
}

/// Returns true if a device has the labels that the hint selects; without a selector every device has.
fn is_selected(hint: &HintDemands, info: &DeviceInfo) -> bool {
    match &hint.selector {
        Some(selector) => selects(selector, &info.labels),
        None => true,
    }
}

/// Returns a sentence if a device is not recorded with exactly one virtual function that the selector selects.
fn wrong_virtual_function(
    kind: &str,
    selector: &LabelSelector,
    held: &DeviceAllocation,
    info: &DeviceInfo,
) -> Option<String> {
    let mut selected_ids: Vec<&str> = Vec::new();
    for group in &info.vf_groups {
        if selects(selector, &group.labels) {
            selected_ids.extend(group.vfs.iter().map(|vf| vf.bus_id.as_str()));
        }
    }
    let recorded_ids = virtual_function_ids(held);
    match &*recorded_ids {
        [one] if selected_ids.contains(&one.as_str()) => None,
        _ => Some(format!(
            "{kind} {} comes with the functions {recorded_ids:?}, not one of {selected_ids:?}",
            held.minor
        )),
    }
}

/// Returns a sentence for each virtual function that two pods of a node hold, and for each pod that holds what another excludes.
pub(super) fn clashes(device: &Device, pods: &[(&str, &Pod)]) -> Vec<String> {
    let mut bound: Vec<(&str, BoundPod<'_>)> = Vec::new();
    for (name, pod) in pods {
        if let Some(pod) = BoundPod::of(pod, device) {
            bound.push((name, pod));
        }
    }
    let mut clashes = Vec::new();
    let mut holders: BTreeMap<String, &str> = BTreeMap::new();
    for (name, pod) in &bound {
        for function in pod.record.values().flatten().flat_map(virtual_function_ids) {
            if let Some(other) = holders.insert(function.clone(), name) {
                clashes.push(format!("{other} and {name} both have the function {function}"));
            }
        }
        for (kind, hint) in &pod.demands.hints {
            for (other_name, other) in &bound {
                if other_name != name && pod.excludes(kind, hint, other) {
                    clashes.push(format!("{name} keeps {kind} devices that {other_name} has"));
                }
            }
        }
    }
    clashes
}

/// Bus IDs of the virtual functions that the record allocates of a device.
fn virtual_function_ids(held: &DeviceAllocation) -> Vec<String> {
    let extension = held.extension.as_ref();
    let functions = extension.and_then(|extension| extension.get("vfs")?.as_array());
    let mut ids = Vec::new();
    for function in functions.into_iter().flatten() {
        ids.extend(function.get("busID").and_then(Value::as_str).map(str::to_owned));
    }
    ids
}

fn read_annotation<T: Default + DeserializeOwned>(pod: &Pod, key: &str) -> T {
    let text = pod.annotations().get(key);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// True if a selector selects these labels; a malformed selector selects none.
fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    Selector::try_from(selector.clone()).is_ok_and(|selector| selector.matches(labels))
}

#[cfg(test)]
mod tests;

//! Checks that pods have got their devices as their annotations demand, worked out from the objects alone.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt;
use proto::device::{Device, DeviceInfo, TYPE_GPU};
use proto::record::{DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations};
use proto::request::hints::{ALLOCATE_HINT as HINT, JOINT_ALLOCATE as JOINT};
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Joint {
    device_types: Vec<String>,
    required_scope: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Hint {
    selector: Option<LabelSelector>,
    vf_selector: Option<LabelSelector>,
    allocate_strategy: String,
    exclusive_policy: String,
    required_topology_scope: String,
}

/// The demands of a pod's annotations.
#[derive(Debug, Default)]
pub(super) struct Constraints {
    joint: Joint,
    hints: BTreeMap<String, Hint>,
}

/// The devices of a pod, and the Device object of its node.
struct Case<'a> {
    device: &'a Device,
    record: DeviceAllocations,
    constraints: Constraints,
}

impl Constraints {
    /// Those that can be read.
    pub(super) fn of(pod: &Pod) -> Self {
        Self {
            joint: read(pod, JOINT),
            hints: read(pod, HINT),
        }
    }

    /// True if they change the number of devices of a type, or the share of each.
    pub(super) fn speak_of(&self, kind: &str) -> bool {
        self.hints.contains_key(kind) || self.joint.device_types.iter().any(|joined| joined == kind)
    }

    /// The share of each device for a pod's request of a type's resource, and true if that fixes the number of devices.
    pub(super) fn should_hold(&self, kind: &str, asked: u64, held: &[u64]) -> bool {
        let hint = self.hints.get(kind);
        let (n_devices, n_least) = (held.len() as u64, (asked / 100).max(1));
        let each_has = |amount: u64| held.iter().all(|held| *held == amount);
        let strategy = hint.map_or("", |hint| hint.allocate_strategy.as_str());
        match strategy {
            _ if asked > 100 && asked.is_multiple_of(100) => {
                each_has(100) && self.is_enough(kind, n_devices, n_least)
            }
            "ApplyForAll" => each_has(asked) && n_devices > 0,
            "RequestsAsCount" => {
                let whole = hint.is_some_and(|hint| hint.exclusive_policy == "DeviceLevel");
                each_has(if whole { 100 } else { 1 }) && self.is_enough(kind, n_devices, asked)
            }
            _ => each_has(asked) && self.is_enough(kind, n_devices, 1),
        }
    }

    /// Devices that come along with others may be more than were asked for.
    fn is_enough(&self, kind: &str, n_devices: u64, asked: u64) -> bool {
        let comes_along = self
            .joint
            .device_types
            .iter()
            .skip(1)
            .any(|joined| joined == kind);
        n_devices == asked || (comes_along && n_devices > asked)
    }
}

/// A sentence for each demand of a bound pod that its record does not meet.
pub(super) fn unmet(pod: &Pod, device: &Device) -> Vec<String> {
    let Some(record) = pod
        .annotations()
        .get(DEVICE_ALLOCATED)
        .and_then(|text| serde_json::from_str(text).ok())
    else {
        return Vec::new();
    };
    let case = Case {
        device,
        record,
        constraints: Constraints::of(pod),
    };
    let by_kind = case
        .constraints
        .hints
        .iter()
        .filter_map(|(kind, hint)| Some((kind, hint, case.record.get(kind)?)));
    let mut unmet: Vec<String> = by_kind
        .flat_map(|(kind, hint, held)| case.unmet(kind, hint, held))
        .collect();
    if case.constraints.joint.required_scope == "SamePCIe" {
        let kinds = case
            .constraints
            .joint
            .device_types
            .iter()
            .filter(|kind| case.record.contains_key(*kind));
        let switches: BTreeSet<Vec<String>> = kinds.map(|kind| case.switches(kind)).collect();
        unmet.extend(
            (switches.len() > 1).then(|| format!("its devices are on the switches {switches:?} by type")),
        );
    }
    unmet
}

impl Case<'_> {
    fn info(&self, kind: &str, minor: i32) -> Option<&DeviceInfo> {
        self.device
            .spec
            .devices
            .iter()
            .find(|info| info.device_type == kind && info.minor == Some(minor))
    }

    /// The places of the devices of a type, each once.
    fn places(&self, kind: &str) -> BTreeSet<(i32, String)> {
        let infos = self
            .record
            .get(kind)
            .into_iter()
            .flatten()
            .filter_map(|held| self.info(kind, held.minor));
        infos
            .filter_map(|info| info.topology.as_ref())
            .map(|place| (place.node_id, place.pcie_id.clone()))
            .collect()
    }

    fn switches(&self, kind: &str) -> Vec<String> {
        self.places(kind)
            .into_iter()
            .map(|(numa, switch)| format!("{numa}/{switch}"))
            .collect()
    }

    fn unmet(&self, kind: &str, hint: &Hint, held: &[DeviceAllocation]) -> Vec<String> {
        let mut unmet = Vec::new();
        for one in held {
            let Some(info) = self.info(kind, one.minor) else {
                continue;
            };
            if hint
                .selector
                .as_ref()
                .is_some_and(|selector| !selects(selector, &info.labels))
            {
                unmet.push(format!(
                    "{kind} {} has not the labels that are demanded",
                    one.minor
                ));
            }
            if let Some(selector) = &hint.vf_selector {
                let groups = info
                    .vf_groups
                    .iter()
                    .filter(|group| selects(selector, &group.labels));
                let fitting: Vec<&str> = groups
                    .flat_map(|group| &group.vfs)
                    .map(|vf| vf.bus_id.as_str())
                    .collect();
                let given = functions(one);
                let fits = matches!(&*given, [one] if fitting.contains(&one.as_str()));
                unmet.extend((!fits).then(|| {
                    format!(
                        "{kind} {} comes with the functions {given:?}, not one of {fitting:?}",
                        one.minor
                    )
                }));
            }
        }
        if hint.allocate_strategy == "ApplyForAll" {
            let all = self
                .device
                .spec
                .devices
                .iter()
                .filter(|info| info.device_type == kind);
            let n_selected = all
                .filter(|info| {
                    hint.selector
                        .as_ref()
                        .is_none_or(|selector| selects(selector, &info.labels))
                })
                .count();
            unmet.extend(
                (held.len() != n_selected)
                    .then(|| format!("it has {} of {n_selected} {kind} devices", held.len())),
            );
        }
        unmet.extend(self.scope(kind, hint));
        unmet
    }

    fn scope(&self, kind: &str, hint: &Hint) -> Option<String> {
        let places = self.places(kind);
        let n_places = match hint.required_topology_scope.as_str() {
            "PCIe" => places.len(),
            "NUMANode" => places.iter().map(|(numa, _)| numa).collect::<BTreeSet<_>>().len(),
            _ => return None,
        };
        (kind == TYPE_GPU && n_places > 1).then(|| format!("its {kind} devices are at {places:?}"))
    }
}

/// A sentence for each function that two pods of a node hold, and for each device that one pod keeps and another one holds.
pub(super) fn clashes(device: &Device, pods: &[(&str, &Pod)]) -> Vec<String> {
    let record =
        |pod: &Pod| serde_json::from_str::<DeviceAllocations>(pod.annotations().get(DEVICE_ALLOCATED)?).ok();
    let cases: Vec<(&str, Case<'_>)> = pods
        .iter()
        .filter_map(|(name, pod)| {
            Some((
                *name,
                Case {
                    device,
                    record: record(pod)?,
                    constraints: Constraints::of(pod),
                },
            ))
        })
        .collect();
    let mut clashes = Vec::new();
    let mut holders: BTreeMap<String, &str> = BTreeMap::new();
    for (name, case) in &cases {
        for function in case.record.values().flatten().flat_map(functions) {
            if let Some(other) = holders.insert(function.clone(), name) {
                clashes.push(format!("{other} and {name} both have the function {function}"));
            }
        }
        for (kind, hint) in &case.constraints.hints {
            let others = || cases.iter().filter(|(other, _)| other != name);
            let minors = |case: &Case<'_>| {
                case.record
                    .get(kind)
                    .into_iter()
                    .flatten()
                    .map(|one| one.minor)
                    .collect::<BTreeSet<_>>()
            };
            let is_broken = |other: &Case<'_>| match hint.exclusive_policy.as_str() {
                "DeviceLevel" => !minors(other).is_disjoint(&minors(case)),
                "PCIeLevel" => !other.places(kind).is_disjoint(&case.places(kind)),
                _ => false,
            };
            clashes.extend(
                others()
                    .filter(|(_, other)| is_broken(other))
                    .map(|(other, _)| format!("{name} keeps {kind} devices that {other} has")),
            );
        }
    }
    clashes
}

fn functions(held: &DeviceAllocation) -> Vec<String> {
    let functions = held
        .extension
        .as_ref()
        .and_then(|extension| extension.get("vfs")?.as_array());
    functions
        .into_iter()
        .flatten()
        .filter_map(|vf| Some(vf.get("busID")?.as_str()?.to_owned()))
        .collect()
}

fn read<T: Default + DeserializeOwned>(pod: &Pod, key: &str) -> T {
    pod.annotations()
        .get(key)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let mut pairs = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    pairs.all(|(key, value)| labels.get(key) == Some(value))
        && expressions.all(|expression| {
            let is_one_of = labels
                .get(&expression.key)
                .map(|value| expression.values.iter().flatten().any(|one| one == value));
            match expression.operator.as_str() {
                "In" => is_one_of == Some(true),
                "NotIn" => is_one_of != Some(true),
                "Exists" => is_one_of.is_some(),
                _ => is_one_of.is_none(),
            }
        })
}

#[cfg(test)]
mod tests;

//! The device type of each resource, learnt from the Device objects of all nodes, so that a new type of device needs no change
//! here.
//!
//! RDMA and FPGA are known beforehand. GPU resources belong to GPUs, whatever devices list them.

use std::collections::{BTreeMap, BTreeSet};

use placement::{DeviceRequest, DeviceType, DevicesOfType, ResourceName};
use proto::device::TYPE_GPU;
use proto::resource::{FPGA, RDMA, ResourceNames, WHOLE_PERCENT, is_gpu_resource};

/// The resources that count percent of a device, and the device type of each.
const PERCENT: [(&str, &str); 2] = [(RDMA, "rdma"), (FPGA, "fpga")];

/// The type of device that each resource belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceTypes {
    /// The number of nodes with devices of the type that list the resource.
    learnt: BTreeMap<(ResourceName, DeviceType), usize>,
}

impl DeviceTypes {
    /// Counts the devices `now` of a node in place of those `before`; returns the resources whose device type this changes.
    pub(crate) fn replace(
        &mut self,
        before: &[DevicesOfType],
        now: &[DevicesOfType],
        names: &ResourceNames,
    ) -> Vec<ResourceName> {
        let (before, now) = (resource_types(before, names), resource_types(now, names));
        let mut kinds = Vec::new();
        for (resource, _) in before.iter().chain(&now) {
            kinds.push((resource.clone(), self.kind_of(resource.as_str())));
        }
        // The new devices are counted first, so that a type which the node keeps is never forgotten in between.
        for listed in now {
            *self.learnt.entry(listed).or_default() += 1;
        }
        for listed in before {
            if let Some(n_nodes) = self.learnt.get_mut(&listed) {
                *n_nodes = n_nodes.saturating_sub(1);
            }
        }
        self.learnt.retain(|_, n_nodes| *n_nodes > 0);
        kinds.retain(|(resource, kind)| self.kind_of(resource.as_str()) != *kind);
        kinds.into_iter().map(|(resource, _)| resource).collect()
    }

    /// The type of device that has a resource; if several claim it, the first by name.
    fn kind_of(&self, resource: &str) -> Option<DeviceType> {
        if let Some((_, kind)) = PERCENT.iter().find(|(name, _)| *name == resource) {
            return Some(DeviceType::from(*kind));
        }
        let mut learnt = self.learnt.keys();
        let (_, kind) = learnt.find(|(name, _)| name.as_str() == resource)?;
        Some(kind.clone())
    }

    /// The names of all device types: those of Koordinator, and those whose devices some node lists.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        let mut names = BTreeSet::from([TYPE_GPU]);
        names.extend(PERCENT.iter().map(|(_, kind)| *kind));
        names.extend(self.learnt.keys().map(|(_, kind)| kind.as_str()));
        names
    }

    /// The device requests that a pod's amounts of resources come to, one per device type. Resources that no device has are
    /// left out.
    pub(crate) fn requests(&self, amounts: &[(String, u64)]) -> Vec<DeviceRequest> {
        let mut requests: BTreeMap<DeviceType, DeviceRequest> = BTreeMap::new();
        for (resource, amount) in amounts {
            let Some(kind) = self.kind_of(resource) else {
                continue;
            };
            // A whole RDMA adapter or FPGA is 100 percent; of other types the node's largest device counts as a whole one.
            let is_percent = PERCENT.iter().any(|(name, _)| name == resource);
            let whole = is_percent.then_some(WHOLE_PERCENT);
            let new = DeviceRequest {
                kind: kind.clone(),
                amounts: BTreeMap::new(),
                whole,
            };
            let request = requests.entry(kind).or_insert(new);
            let resource = ResourceName::from(resource.as_str());
            request.amounts.insert(resource, *amount);
        }
        requests.into_values().collect()
    }
}

/// All pairs of a resource and the type of a device that lists it. Resources of GPUs are left out.
fn resource_types(types: &[DevicesOfType], names: &ResourceNames) -> BTreeSet<(ResourceName, DeviceType)> {
    let mut found = BTreeSet::new();
    for of_type in types {
        for resource in of_type.devices.iter().flat_map(|device| device.resources.keys()) {
            if !is_gpu_resource(resource.as_str(), names) {
                found.insert((resource.clone(), of_type.kind.clone()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use placement::{Device, DevicesOfType};
    use proto::resource::ResourceNames;

    use super::DeviceTypes;

    fn class(kind: &str, resources: &[&str]) -> DevicesOfType {
        let resources = resources.iter().map(|name| ((*name).into(), 100)).collect();
        DevicesOfType {
            kind: kind.into(),
            devices: vec![Device {
                resources,
                ..Device::new("d", 0)
            }]
            .into(),
        }
    }

    fn shown(kinds: &DeviceTypes, amounts: &[(&str, u64)]) -> Vec<String> {
        let amounts: Vec<(String, u64)> = amounts
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), *amount))
            .collect();
        let requests = kinds.requests(&amounts);
        requests
            .iter()
            .map(|request| format!("{} {:?} of {:?}", request.kind, request.amounts, request.whole))
            .collect()
    }

    #[test]
    fn device_types_are_known_while_a_node_has_them() {
        let (names, mut kinds) = (ResourceNames::default(), DeviceTypes::default());
        let asked = [
            ("example.com/npu", 2),
            ("koordinator.sh/rdma", 50),
            ("example.com/dongle", 1),
        ];
        assert_eq!(
            shown(&kinds, &asked),
            [r#"rdma {"koordinator.sh/rdma": 50} of Some(100)"#]
        );
        let npu = [class("npu", &["example.com/npu", "koordinator.sh/gpu-memory"])];
        assert_eq!(
            kinds.replace(&[], &npu, &names),
            ["example.com/npu".into()],
            "GPU memory belongs to GPUs"
        );
        assert_eq!(
            kinds.replace(&[], &npu, &names),
            [],
            "a second node teaches nothing new"
        );
        assert_eq!(shown(&kinds, &asked)[0], r#"npu {"example.com/npu": 2} of None"#);
        assert_eq!(kinds.replace(&npu, &[], &names), []);
        assert_eq!(kinds.replace(&npu, &npu, &names), []);
        assert_eq!(kinds.replace(&npu, &[], &names), ["example.com/npu".into()]);
        assert_eq!(kinds, DeviceTypes::default());
    }

    #[test]
    fn of_two_device_types_with_one_resource_name_the_first_counts() {
        let (names, mut kinds) = (ResourceNames::default(), DeviceTypes::default());
        let [one, other] = ["b", "a"].map(|kind| [class(kind, &["example.com/x"])]);
        kinds.replace(&[], &one, &names);
        assert_eq!(kinds.replace(&[], &other, &names), ["example.com/x".into()]);
        assert_eq!(
            shown(&kinds, &[("example.com/x", 1)]),
            [r#"a {"example.com/x": 1} of None"#]
        );
        assert_eq!(kinds.replace(&other, &[], &names), ["example.com/x".into()]);
    }
}

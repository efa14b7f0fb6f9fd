//! Devices of other types than GPUs: their totals, and the amounts that pods' records hold.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use proto::device::{Device, TYPE_GPU};
use proto::record::DEVICE_ALLOCATED;
use proto::resource::canonical;

use super::constraints::PodDemands;
use crate::kube_scheduler::ResourceAmounts;
use crate::pod_fields::device_record;

/// The thousandths in which [`ResourceAmounts`] counts one unit.
const THOUSAND: i128 = 1000;

/// Node, device type, minor number, resource.
type AmountKey = (String, String, i32, String);

/// The amount of one resource that a device has, the part that pods hold, and these pods.
#[derive(Clone, Debug, Default)]
struct DeviceAmount {
    total: u64,
    used: u64,
    pods: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct OtherDevices {
    amounts: BTreeMap<AmountKey, DeviceAmount>,
}

impl OtherDevices {
    /// Adds the devices of a node that are not GPUs, which no pod holds yet.
    pub(super) fn add_node(&mut self, node: &str, device: &Device) {
        for info in &device.spec.devices {
            if info.device_type == TYPE_GPU {
                continue;
            }
            for (resource, amount) in &info.resources {
                let (kind, minor) = (info.device_type.clone(), info.minor.unwrap_or(-1));
                let key = (node.to_owned(), kind, minor, canonical(resource).to_owned());
                let total = amount.unsigned().unwrap_or(0);
                self.amounts.insert(
                    key,
                    DeviceAmount {
                        total,
                        ..DeviceAmount::default()
                    },
                );
            }
        }
    }

    /// Adds the amounts of a pod's record; an error, after all are added, if they differ from the pod's request for the node's
    /// devices. By its annotations ([`PodDemands`]) the request may be for another amount.
    pub(super) fn add_pod(&mut self, node: &str, name: &str, pod: &Pod) -> Result<(), String> {
        let on_node = self.amounts.keys().filter(|(on, ..)| on == node);
        let resources_of_node: BTreeSet<String> = on_node.map(|(.., resource)| resource.clone()).collect();
        let record =
            device_record(pod).map_err(|error| format!("{DEVICE_ALLOCATED} does not parse: {error}"))?;
        let mut held: BTreeMap<(&str, &str), Vec<u64>> = BTreeMap::new();
        let mut missing = None;
        for (kind, devices) in &record {
            if kind == TYPE_GPU {
                continue;
            }
            for device in devices {
                for (resource, amount) in &device.resources {
                    let amount = amount.unsigned().unwrap_or(0);
                    let key = (node.to_owned(), kind.clone(), device.minor, resource.clone());
                    let Some(on_device) = self.amounts.get_mut(&key) else {
                        missing = Some(format!("there is no {kind} {} with {resource}", device.minor));
                        continue;
                    };
                    on_device.used += amount;
                    on_device.pods.push(name.to_owned());
                    held.entry((resource, kind)).or_default().push(amount);
                }
            }
        }
        if let Some(missing) = missing {
            return Err(missing);
        }
        let asked = ResourceAmounts::of_pod(pod).map_err(|error| error.to_string())?;
        let demands = PodDemands::of(pod);
        for resource in resources_of_node {
            let asked = u64::try_from(asked.get(&resource) / THOUSAND).unwrap_or(0);
            let of_resource: Vec<_> = held.iter().filter(|((name, _), _)| *name == resource).collect();
            let is_right = match &*of_resource {
                [] => asked == 0,
                [((_, kind), amounts)] => {
                    if demands.may_change_amounts_of(kind) {
                        demands.should_hold(kind, asked, amounts)
                    } else {
                        amounts.iter().sum::<u64>() == asked
                    }
                }
                // No resource belongs to devices of two types.
                _ => false,
            };
            if !is_right {
                return Err(format!(
                    "it asks for {resource} {asked} and holds {of_resource:?}"
                ));
            }
        }
        Ok(())
    }

    /// A sentence for each resource of a device of which pods hold more than the device has.
    pub(super) fn oversubscribed(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        for ((node, kind, minor, resource), DeviceAmount { total, used, pods }) in &self.amounts {
            if used > total {
                let held = format!("{used} of {total} {resource} are held by {pods:?}");
                sentences.push(format!("{kind} {minor} of {node}: {held}"));
            }
        }
        sentences
    }
}

//! Devices of other types than GPUs: their totals, and the amounts that pods' records hold.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use proto::device::{Device, TYPE_GPU};
use proto::record::DEVICE_ALLOCATED;
use proto::resource::canonical;

use super::constraints::PodDemands;
use crate::kube_scheduler::ResourceAmounts;
use crate::pod_fields::device_record;

/// Node, type, minor, resource.
type AmountKey = (String, String, i32, String);

/// Totals and held amounts of devices other than GPUs, with their holders.
#[derive(Clone, Debug, Default)]
pub(super) struct OtherDevices {
    amounts: BTreeMap<AmountKey, (u64, u64, Vec<String>)>,
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
                let place = (node.to_owned(), kind, minor, canonical(resource).to_owned());
                let total = amount.unsigned().unwrap_or(0);
                self.amounts.insert(place, (total, 0, Vec::new()));
            }
        }
    }

    /// Adds a pod's recorded amounts; an error if they are not what the pod requests of the node's devices.
    pub(super) fn add_pod(&mut self, node: &str, name: &str, pod: &Pod) -> Result<(), String> {
        let on_node = self.amounts.keys().filter(|(on, ..)| on == node);
        let resources: BTreeSet<String> = on_node.map(|(.., resource)| resource.clone()).collect();
        let record =
            device_record(pod).map_err(|error| format!("{DEVICE_ALLOCATED} does not parse: {error}"))?;
        let mut held: BTreeMap<(&str, &str), Vec<u64>> = BTreeMap::new();
        for (kind, devices) in &record {
            if kind == TYPE_GPU {
                continue;
            }
            for device in devices {
                for (resource, amount) in &device.resources {
                    let amount = amount.unsigned().unwrap_or(0);
                    let place = (node.to_owned(), kind.clone(), device.minor, resource.clone());
                    let Some((_, used, pods)) = self.amounts.get_mut(&place) else {
                        return Err(format!("there is no {kind} {} with {resource}", device.minor));
                    };
                    *used += amount;
                    pods.push(name.to_owned());
                    held.entry((resource, kind)).or_default().push(amount);
                }
            }
        }
        let asked = ResourceAmounts::of_pod(pod).map_err(|error| error.to_string())?;
        let constraints = PodDemands::of(pod);
        for resource in resources {
            let asked = u64::try_from(asked.get(&resource) / 1000).unwrap_or(0);
            let of: Vec<_> = held.iter().filter(|((name, _), _)| *name == resource).collect();
            let is_right = match &*of {
                [] => asked == 0,
                [((_, kind), amounts)] => {
                    if constraints.speak_of(kind) {
                        constraints.should_hold(kind, asked, amounts)
                    } else {
                        amounts.iter().sum::<u64>() == asked
                    }
                }
                _ => false,
            };
            if !is_right {
                return Err(format!("it asks for {resource} {asked} and holds {of:?}"));
            }
        }
        Ok(())
    }

    /// A sentence for each device of which pods hold more than it has.
    pub(super) fn oversubscribed(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        for ((node, kind, minor, resource), (total, used, pods)) in &self.amounts {
            if used > total {
                let held = format!("{used} of {total} {resource} are held by {pods:?}");
                sentences.push(format!("{kind} {minor} of {node}: {held}"));
            }
        }
        sentences
    }
}

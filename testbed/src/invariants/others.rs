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
    pub(super) fn add_node(&mut self, node: &str, device: &Device) {
        for info in device
            .spec
            .devices
            .iter()
            .filter(|info| info.device_type != TYPE_GPU)
        {
            for (resource, amount) in &info.resources {
                let place = (
                    node.to_owned(),
                    info.device_type.clone(),
                    info.minor.unwrap_or(-1),
                    canonical(resource).to_owned(),
                );
                self.amounts
                    .insert(place, (amount.unsigned().unwrap_or(0), 0, Vec::new()));
            }
        }
    }

    /// A pod must hold on record as much as it asks for of every resource that the node's devices have.
    pub(super) fn add_pod(&mut self, node: &str, name: &str, pod: &Pod) -> Result<(), String> {
        let resources: BTreeSet<String> = self
            .amounts
            .keys()
            .filter(|(on, ..)| on == node)
            .map(|(.., resource)| resource.clone())
            .collect();
        let record =
            device_record(pod).map_err(|error| format!("{DEVICE_ALLOCATED} does not parse: {error}"))?;
        let mut held: BTreeMap<(&str, &str), Vec<u64>> = BTreeMap::new();
        for (kind, devices) in record.iter().filter(|(kind, _)| *kind != TYPE_GPU) {
            for (device, (resource, amount)) in devices
                .iter()
                .flat_map(|device| device.resources.iter().map(move |one| (device, one)))
            {
                let amount = amount.unsigned().unwrap_or(0);
                let place = (node.to_owned(), kind.clone(), device.minor, resource.clone());
                let entry = self
                    .amounts
                    .get_mut(&place)
                    .ok_or_else(|| format!("there is no {kind} {} with {resource}", device.minor))?;
                entry.1 += amount;
                entry.2.push(name.to_owned());
                held.entry((resource, kind)).or_default().push(amount);
            }
        }
        let (asked, constraints) = (
            ResourceAmounts::of_pod(pod).map_err(|error| error.to_string())?,
            PodDemands::of(pod),
        );
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

    pub(super) fn overfull(&self) -> Vec<String> {
        let over = self.amounts.iter().filter(|(_, (total, used, _))| used > total);
        let sentences = over.map(|((node, kind, minor, resource), (total, used, pods))| {
            format!("{kind} {minor} of {node}: {used} of {total} {resource} are held by {pods:?}")
        });
        sentences.collect()
    }
}

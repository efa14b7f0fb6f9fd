//! Finds the GPUs that DRA drivers have prepared for containers, by the names of the prepared devices.
//!
//! NVIDIA's driver names a GPU by its minor number, `gpu-0`, and an instance (MIG) by that of its GPU, `gpu-0-mig-1g5gb-19-0`.
//! Any other name, such as that of a GPU passed through to a virtual machine, may stand for every GPU of the node.

use std::collections::BTreeSet;

use proto::kubelet::podresources::ListPodResourcesResponse;

use crate::devices::fleet::NodeFleet;

use super::allocation::{Allocation, Claim, ClaimName, DraDevice, PodKey};

/// A device that a driver has prepared for a claim of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimedDevice {
    pub(super) pod: PodKey,
    pub(super) container: String,
    pub(super) claim: ClaimName,
    pub(super) device: DraDevice,
    /// The names of the CDI devices by which the runtime injects it, and possibly other devices of the claim.
    pub(super) cdi_names: BTreeSet<String>,
}

/// The devices of all claims in kubelet's list. A container that uses one request of a claim is listed with all its devices.
pub(super) fn claimed_devices(listed: &ListPodResourcesResponse) -> Vec<ClaimedDevice> {
    let mut claimed = Vec::new();
    for pod in &listed.pod_resources {
        for container in &pod.containers {
            for claim in &container.dynamic_resources {
                for device in &claim.claim_resources {
                    let cdi_names = device.cdi_devices.iter().map(|device| device.name.clone());
                    claimed.push(ClaimedDevice {
                        pod: PodKey::of(pod),
                        container: container.name.clone(),
                        claim: ClaimName {
                            namespace: claim.claim_namespace.clone(),
                            name: claim.claim_name.clone(),
                        },
                        device: DraDevice {
                            driver: device.driver_name.clone(),
                            pool: device.pool_name.clone(),
                            name: device.device_name.clone(),
                        },
                        cdi_names: cdi_names.collect(),
                    });
                }
            }
        }
    }
    claimed
}

/// The minor number of the GPU that a device's name stands for, and true if it stands for an instance of that GPU; none for
/// devices of other kinds.
fn named_gpu(name: &str) -> Option<(u32, bool)> {
    let rest = name.strip_prefix("gpu-")?;
    let (minor, is_instance) = match rest.split_once("-mig-") {
        Some((_, "")) => return None,
        Some((minor, _)) => (minor, true),
        None => (rest, false),
    };
    // A number that Rust parses may have a sign, which no name of NVIDIA's driver has.
    let is_number = minor.as_bytes().iter().all(u8::is_ascii_digit);
    Some((minor.parse().ok().filter(|_| is_number)?, is_instance))
}

/// The allocation that a container holds by a claim: one GPU, or every GPU if the name does not say which. None if no GPU of the
/// fleet is allocated.
pub(super) fn allocation(claimed: ClaimedDevice, fleet: &NodeFleet) -> Option<Allocation> {
    let named = named_gpu(&claimed.device.name);
    let mut gpus = fleet.gpus.iter();
    let gpu = named.and_then(|(minor, _)| gpus.find(|entry| entry.device.minor == minor));
    // A GPU in MIG mode is not in the fleet, so an instance stands for a GPU that is not shared.
    let is_mapped = gpu.is_some() || matches!(named, Some((_, true)));
    let mut device_ids = Vec::new();
    for entry in &fleet.gpus {
        // A device that is not mapped may be any of them, and no other pod must get the one that it is.
        if !is_mapped || gpu == Some(entry) {
            device_ids.push(entry.device.uuid.to_string());
        }
    }
    if device_ids.is_empty() {
        return None;
    }
    let driver = claimed.device.driver.clone();
    Some(Allocation {
        claim: Some(Claim {
            name: claimed.claim,
            device: claimed.device,
            is_mapped,
        }),
        ..Allocation::new(claimed.pod, claimed.container, driver, device_ids)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::tests::builders::{fleet, gpu};

    /// A device of a claim of the pod `team/train`.
    pub(in crate::publish::vendor) fn claimed(device: &str) -> ClaimedDevice {
        ClaimedDevice {
            pod: PodKey::Named {
                namespace: "team".to_owned(),
                name: "train".to_owned(),
            },
            container: "main".to_owned(),
            claim: ClaimName {
                namespace: "team".to_owned(),
                name: "one-gpu".to_owned(),
            },
            device: DraDevice {
                driver: "gpu.nvidia.com".to_owned(),
                pool: "n1".to_owned(),
                name: device.to_owned(),
            },
            cdi_names: BTreeSet::new(),
        }
    }

    /// The minor numbers of the GPUs that a device of this name is taken for, on a node with GPUs 0 to 2.
    fn minors(device: &str) -> Vec<u32> {
        let ids = allocation(claimed(device), &fleet(3))
            .map(|allocation| allocation.device_ids)
            .unwrap_or_default();
        (0..3)
            .filter(|minor| ids.contains(&gpu(*minor).uuid.to_string()))
            .collect()
    }

    /// Names as releases 25.3 to 0.4 of NVIDIA's driver make them.
    #[rstest]
    #[case::gpu("gpu-1", &[1])]
    #[case::instance("gpu-2-mig-1g24gb-19-0", &[2])]
    #[case::instance_of_old_releases("gpu-2-mig-19-0-1", &[2])]
    #[case::instance_of_a_gpu_in_mig_mode("gpu-7-mig-1g24gb-19-0", &[])]
    #[case::gpu_of_no_known_minor("gpu-7", &[0, 1, 2])]
    #[case::passed_through("gpu-vfio-0", &[0, 1, 2])]
    #[case::of_another_driver("gpu-0-128", &[0, 1, 2])]
    #[case::sign("gpu-+1", &[0, 1, 2])]
    #[case::instance_without_name("gpu-1-mig-", &[0, 1, 2])]
    #[case::too_large("gpu-99999999999", &[0, 1, 2])]
    #[case::nothing("", &[0, 1, 2])]
    fn devices_are_gpus_by_their_names(#[case] device: &str, #[case] expected: &[u32]) {
        assert_eq!(minors(device), expected);
    }

    #[test]
    fn a_claim_holds_nothing_on_a_node_without_gpus() {
        assert_eq!(allocation(claimed("gpu-0"), &fleet(0)), None);
    }

    proptest! {
        /// A name stands for one GPU, for an instance of a GPU that is not shared, or for every GPU.
        #[test]
        fn an_unknown_device_name_counts_as_every_gpu(device in "(gpu-|mig-|[0-9]|-|vfio|1g5gb){0,6}") {
            let n_gpus = minors(&device).len();
            let is_instance = matches!(named_gpu(&device), Some((minor, true)) if minor > 2);
            prop_assert!(n_gpus == 1 || n_gpus == 3 || (n_gpus == 0 && is_instance), "{device}: {n_gpus}");
        }
    }
}

//! Devices that DRA drivers have prepared for containers, and which GPUs of this node they are.
//!
//! NVIDIA's driver names a GPU by its minor number, `gpu-0`, and an instance (MIG) by that of its GPU, `gpu-0-mig-1g5gb-19-0`.
//! Any other name, such as that of a GPU passed through to a virtual machine, may stand for every GPU of the node.

use std::collections::BTreeSet;
use std::fmt;

use crate::fleet::Fleet;
use crate::inventory::PhysicalId;

use super::{Allocation, PodName};

/// A `ResourceClaim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A device as its driver publishes it; unique in the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DraDevice {
    /// The driver.
    pub driver: String,
    /// The pool of the driver, which is the node's name for devices of one node.
    pub pool: String,
    /// The device.
    pub name: String,
}

/// A device that a driver has prepared for a claim which a container uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedDevice {
    /// Whose container it is.
    pub pod: PodName,
    /// The container.
    pub container: String,
    /// The claim.
    pub claim: ClaimName,
    /// The device.
    pub device: DraDevice,
    /// The CDI devices that the runtime gives the container for it, and possibly for others of the claim.
    pub cdi_names: BTreeSet<String>,
}

/// By which claim a container holds a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The claim.
    pub name: ClaimName,
    /// The device.
    pub device: DraDevice,
    /// True if the device is known to be of one certain GPU. If not, every GPU counts as allocated.
    pub is_mapped: bool,
}

/// The GPU or GPU instance that a device's name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// The GPU of this minor number.
    Gpu(u32),
    /// An instance of the GPU of this minor number.
    Instance(u32),
    /// Nothing that is understood.
    Unknown,
}

impl Named {
    fn parse(name: &str) -> Self {
        let Some(rest) = name.strip_prefix("gpu-") else {
            return Self::Unknown;
        };
        let (minor, instance) = rest
            .split_once("-mig-")
            .map_or((rest, None), |(minor, instance)| (minor, Some(instance)));
        let is_number = !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit());
        match (minor.parse(), instance) {
            (Ok(minor), None) if is_number => Self::Gpu(minor),
            (Ok(minor), Some(instance)) if is_number && !instance.is_empty() => Self::Instance(minor),
            _ => Self::Unknown,
        }
    }
}

/// The allocation that a container holds by a claim; none if that is no GPU which this plugin shares.
pub(super) fn allocation(claimed: ClaimedDevice, fleet: &Fleet) -> Option<Allocation> {
    let ClaimedDevice {
        pod,
        container,
        claim,
        device,
        ..
    } = claimed;
    let with = |minor: u32| {
        fleet
            .gpus
            .iter()
            .map(|entry| &entry.gpu)
            .find(|gpu| gpu.minor == minor)
            .map(|gpu| &gpu.uuid)
    };
    let (gpu, is_mapped) = match Named::parse(&device.name) {
        // A GPU in MIG mode is not in the fleet.
        Named::Instance(minor) => (with(minor), true),
        Named::Gpu(minor) => (with(minor), with(minor).is_some()),
        Named::Unknown => (None, false),
    };
    let all = fleet
        .gpus
        .iter()
        .map(|entry| &entry.gpu.uuid)
        .filter(|_| !is_mapped);
    let device_ids: Vec<String> = gpu.into_iter().chain(all).map(PhysicalId::to_string).collect();
    (!device_ids.is_empty()).then(|| Allocation {
        pod,
        container,
        resource: device.driver.clone(),
        device_ids,
        is_by_record: false,
        claim: Some(Claim {
            name: claim,
            device,
            is_mapped,
        }),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::builders::{fleet, gpu};

    fn claimed(device: &str) -> ClaimedDevice {
        ClaimedDevice {
            pod: PodName::Named {
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
    fn nothing_is_held_where_no_gpu_is() {
        assert_eq!(allocation(claimed("gpu-0"), &fleet(0)), None);
    }

    proptest! {
        /// A name stands for one GPU, for an instance of a GPU that is not shared, or for every GPU.
        #[test]
        fn any_name_fails_closed(device in "(gpu-|mig-|[0-9]|-|vfio|1g5gb){0,6}") {
            let n_gpus = minors(&device).len();
            let is_instance = matches!(Named::parse(&device), Named::Instance(minor) if minor > 2);
            prop_assert!(n_gpus == 1 || n_gpus == 3 || (n_gpus == 0 && is_instance), "{device}: {n_gpus}");
        }
    }
}

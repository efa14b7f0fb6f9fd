//! The operator's choice of the GPUs that pods share, and of the parts of them that kubelet can allocate.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::str::FromStr;

use proto::memory_unit::MemoryUnit;

use crate::devices::device_ids::{IdScheme, TooLong};
use crate::devices::inventory::{Gpu, NodeInventory, PhysicalId};

/// The settings that determine the IDs of virtual devices which the plugin lists to kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) devices: SharedDevices,
    pub(crate) slots: NonZeroU32,
    pub(crate) memory_unit: MemoryUnit,
    pub(crate) has_numa_hints: bool,
    /// The IDs of memory units that kubelet had allocated when this process began.
    pub(crate) allocated: BTreeSet<String>,
}

impl Sharing {
    /// The IDs of shares and memory units of the shared GPUs in an inventory.
    pub(crate) fn id_scheme(&self, inventory: &NodeInventory) -> Result<IdScheme, TooLong> {
        // A GPU that is not shared gets no IDs of parts, so that kubelet cannot allocate a part of it.
        let gpus = inventory.gpus.iter();
        let shared: Vec<Gpu> = gpus.filter(|gpu| self.devices.includes(gpu)).cloned().collect();
        let ids =
            IdScheme::with_numa_nodes(self.has_numa_hints, &shared, self.slots.get(), self.memory_unit)?;
        Ok(ids.with_allocated(&self.allocated, &shared, self.memory_unit))
    }
}

/// The GPUs that pods may share; the others are left to pods that take whole GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SharedDevices {
    All,
    Only {
        uuids: BTreeSet<PhysicalId>,
        minors: BTreeSet<u32>,
    },
}

impl SharedDevices {
    pub(crate) fn includes(&self, gpu: &Gpu) -> bool {
        match self {
            Self::All => true,
            Self::Only { uuids, minors } => uuids.contains(&gpu.uuid) || minors.contains(&gpu.minor),
        }
    }
}

impl FromStr for SharedDevices {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "all" {
            return Ok(Self::All);
        }
        let (mut uuids, mut minors) = (BTreeSet::new(), BTreeSet::new());
        for name in text.split(',').map(str::trim) {
            // No UUID of NVIDIA's is a number.
            if let Ok(minor) = name.parse() {
                minors.insert(minor);
            } else if let Ok(uuid) = PhysicalId::from_str(name) {
                uuids.insert(uuid);
            } else {
                return Err("write all, or UUIDs and minor numbers of GPUs, separated by commas");
            }
        }
        Ok(Self::Only { uuids, minors })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::tests::builders::gpu;

    #[rstest]
    #[case::all("all", [true, true, true])]
    #[case::minors("0,2", [true, false, true])]
    #[case::blanks(" 1 , 2 ", [false, true, true])]
    #[case::uuid("GPU-00000001-aaaa-bbbb-cccc-000000000001", [false, true, false])]
    #[case::both("GPU-00000001-aaaa-bbbb-cccc-000000000001,0", [true, true, false])]
    #[case::unknown("GPU-x,7", [false, false, false])]
    fn gpus_are_named_by_minor_or_uuid(#[case] text: &str, #[case] expected: [bool; 3]) {
        let shared: SharedDevices = text.parse().unwrap();
        assert_eq!([0, 1, 2].map(|minor| shared.includes(&gpu(minor))), expected);
    }

    #[rstest]
    #[case::nothing("")]
    #[case::nothing_between("0,,1")]
    #[case::blank_within("GPU a")]
    fn invalid_lists_of_shared_devices_are_refused(#[case] text: &str) {
        assert!(text.parse::<SharedDevices>().is_err());
    }

    proptest! {
        #[test]
        fn each_minor_number_names_its_gpu(minors in prop::collection::btree_set(0..9_u32, 1..5), asked in 0..9_u32) {
            let text = minors.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(text.parse::<SharedDevices>().unwrap().includes(&gpu(asked)), minors.contains(&asked));
        }

        #[test]
        fn never_panics(text in ".{0,60}") {
            let _ = text.parse::<SharedDevices>();
        }
    }
}

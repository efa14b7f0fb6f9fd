//! Which GPUs pods may share: the operator's choice.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::inventory::{Gpu, InvalidPhysicalId, PhysicalId};

/// The GPUs that are shared; the others are left to pods that take whole devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedDevices {
    /// Every one.
    All,
    /// Only those that are named.
    Only {
        /// By UUID.
        uuids: BTreeSet<PhysicalId>,
        /// By minor number.
        minors: BTreeSet<u32>,
    },
}

/// The list cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSharedDevices {
    /// One of the names is neither a number nor a UUID.
    #[error("write all, or UUIDs and minor numbers of GPUs, separated by commas")]
    Name(#[source] InvalidPhysicalId),
}

impl SharedDevices {
    /// Whether pods may share this GPU.
    pub fn includes(&self, gpu: &Gpu) -> bool {
        match self {
            Self::All => true,
            Self::Only { uuids, minors } => uuids.contains(&gpu.uuid) || minors.contains(&gpu.minor),
        }
    }
}

impl FromStr for SharedDevices {
    type Err = InvalidSharedDevices;

    fn from_str(text: &str) -> Result<Self, InvalidSharedDevices> {
        if text == "all" {
            return Ok(Self::All);
        }
        let (mut uuids, mut minors) = (BTreeSet::new(), BTreeSet::new());
        for name in text.split(',').map(str::trim) {
            if let Ok(minor) = name.parse() {
                minors.insert(minor);
            } else {
                uuids.insert(name.parse().map_err(InvalidSharedDevices::Name)?);
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
    use crate::builders::gpu;

    #[rstest]
    #[case::all("all", [true, true, true])]
    #[case::minors("0,2", [true, false, true])]
    #[case::blanks(" 1 , 2 ", [false, true, true])]
    #[case::uuid("GPU-00000001-aaaa-bbbb-cccc-000000000001", [false, true, false])]
    #[case::both("GPU-00000001-aaaa-bbbb-cccc-000000000001,0", [true, true, false])]
    #[case::unknown("GPU-x,7", [false, false, false])]
    fn names_gpus(#[case] text: &str, #[case] expected: [bool; 3]) {
        let shared: SharedDevices = text.parse().unwrap();
        assert_eq!([0, 1, 2].map(|minor| shared.includes(&gpu(minor))), expected);
    }

    #[rstest]
    #[case::nothing("")]
    #[case::nothing_between("0,,1")]
    #[case::blank_within("GPU a")]
    fn refuses(#[case] text: &str) {
        assert!(text.parse::<SharedDevices>().is_err());
    }

    proptest! {
        #[test]
        fn every_number_names_its_gpu(minors in prop::collection::btree_set(0..9_u32, 1..5), asked in 0..9_u32) {
            let text = minors.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(text.parse::<SharedDevices>().unwrap().includes(&gpu(asked)), minors.contains(&asked));
        }

        #[test]
        fn never_panics(text in ".{0,60}") {
            let _ = text.parse::<SharedDevices>();
        }
    }
}

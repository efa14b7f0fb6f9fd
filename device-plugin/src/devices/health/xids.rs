//! Sets of XIDs.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A set of critical XIDs, written as `13,31`, `all` or `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Xids {
    /// All XIDs.
    All,
    /// The XIDs of a list.
    List(BTreeSet<u64>),
}

impl Xids {
    /// The XIDs that an application causes by its own fault, and that leave the device in order: graphics engine exception
    /// (13), memory page fault (31), stopped processing (43), preemptive cleanup (45), video processor exception (68) and
    /// compute preemption timeout (109).
    pub fn of_applications() -> Self {
        Self::List(BTreeSet::from([13, 31, 43, 45, 68, 109]))
    }

    /// The XIDs whose immediate action in NVIDIA's XID catalogue is to reset the GPU or to restart the machine, or that leave
    /// it to a diagnosis that ends so: double bit ECC error (48), micro-controller halt (62), failed row remapping (64), `NVLink`
    /// error (74), fallen off the bus (79), uncontained memory error (95), timeouts of the GSP (119, 120), unrecovered ECC error
    /// (140), GPU initialisation error (143) and a changed recovery action (154).
    pub fn of_resets() -> Self {
        Self::List(BTreeSet::from([48, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154]))
    }

    /// Returns true if the set includes this XID.
    pub fn contains(&self, xid: u64) -> bool {
        match self {
            Self::All => true,
            Self::List(xids) => xids.contains(&xid),
        }
    }
}

impl FromStr for Xids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim() == "all" {
            return Ok(Self::All);
        }
        let mut xids = BTreeSet::new();
        if text.trim() == "none" {
            return Ok(Self::List(xids));
        }
        for entry in text.split(',') {
            let xid = entry.trim().parse().map_err(|_| {
                format!("{entry:?} is not an XID: expected numbers separated by commas, `all` or `none`")
            })?;
            xids.insert(xid);
        }
        Ok(Self::List(xids))
    }
}

impl fmt::Display for Xids {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::List(xids) if xids.is_empty() => f.write_str("none"),
            Self::List(xids) => {
                let texts: Vec<_> = xids.iter().map(u64::to_string).collect();
                f.write_str(&texts.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::word("13,foo", "foo")]
    #[case::empty("", "")]
    #[case::trailing_comma("13,", "")]
    #[case::negative("-1", "-1")]
    #[case::all_in_a_list("13,all", "all")]
    fn invalid_lists_of_xids_are_refused(#[case] text: &str, #[case] entry: &str) {
        let error = text.parse::<Xids>().unwrap_err();
        assert!(error.starts_with(&format!("{entry:?} is not an XID")), "{error}");
    }

    #[rstest]
    #[case::application_fault("13,31,43,45,68,109", 31, true)]
    #[case::not_listed("13,31", 79, false)]
    #[case::spaces(" 13, 79 ", 79, true)]
    #[case::all("all", 79, true)]
    #[case::none("none", 13, false)]
    fn lists_of_xids_are_read(#[case] text: &str, #[case] xid: u64, #[case] expected: bool) {
        assert_eq!(text.parse::<Xids>().unwrap().contains(xid), expected);
    }

    #[test]
    fn the_default_is_the_list_of_application_xids() {
        assert_eq!(Xids::of_applications().to_string(), "13,31,43,45,68,109");
    }

    proptest! {
        #[test]
        fn a_displayed_list_is_read_back(xids in prop::collection::btree_set(any::<u64>(), 0..6)) {
            let ignored = Xids::List(xids);
            prop_assert_eq!(ignored.to_string().parse::<Xids>().unwrap(), ignored);
        }
    }
}

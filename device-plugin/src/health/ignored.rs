//! The XIDs that say nothing about a device's health.

use std::{collections::BTreeSet, fmt, num::ParseIntError, str::FromStr};

/// Which critical XIDs are ignored: a list, or all of them.
///
/// Written as `13,31`, `all` or `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IgnoredXids {
    /// XIDs are no sign of illness; only probes count.
    All,
    /// Exactly these.
    List(BTreeSet<u64>),
}

/// The text is not a list of XIDs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{entry:?} is not an XID: expected numbers separated by commas, `all` or `none`")]
pub struct InvalidXidList {
    entry: String,
    #[source]
    source: ParseIntError,
}

impl IgnoredXids {
    /// Whether this XID is ignored.
    pub fn contains(&self, xid: u64) -> bool {
        match self {
            Self::All => true,
            Self::List(xids) => xids.contains(&xid),
        }
    }
}

/// Those that an application causes by its own fault, and that leave the device in order: graphics
/// engine exception (13), memory page fault (31), stopped processing (43), preemptive cleanup (45),
/// video processor exception (68) and compute preemption timeout (109).
impl Default for IgnoredXids {
    fn default() -> Self {
        Self::List(BTreeSet::from([13, 31, 43, 45, 68, 109]))
    }
}

impl FromStr for IgnoredXids {
    type Err = InvalidXidList;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "all" => Ok(Self::All),
            "none" => Ok(Self::List(BTreeSet::new())),
            list => list.split(',').map(parse_xid).collect::<Result<_, _>>().map(Self::List),
        }
    }
}

fn parse_xid(entry: &str) -> Result<u64, InvalidXidList> {
    entry.trim().parse().map_err(|source| InvalidXidList { entry: entry.to_owned(), source })
}

impl fmt::Display for IgnoredXids {
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
    fn refuses(#[case] text: &str, #[case] entry: &str) {
        assert_eq!(text.parse::<IgnoredXids>().unwrap_err().entry, entry);
    }

    #[rstest]
    #[case::application_fault("13,31,43,45,68,109", 31, true)]
    #[case::not_listed("13,31", 79, false)]
    #[case::spaces(" 13, 79 ", 79, true)]
    #[case::all("all", 79, true)]
    #[case::none("none", 13, false)]
    fn reads(#[case] text: &str, #[case] xid: u64, #[case] expected: bool) {
        assert_eq!(text.parse::<IgnoredXids>().unwrap().contains(xid), expected);
    }

    #[test]
    fn default_is_the_usual_list() {
        assert_eq!(IgnoredXids::default().to_string(), "13,31,43,45,68,109");
    }

    proptest! {
        #[test]
        fn what_is_shown_reads_back(xids in prop::collection::btree_set(any::<u64>(), 0..6)) {
            let ignored = IgnoredXids::List(xids);
            prop_assert_eq!(ignored.to_string().parse::<IgnoredXids>().unwrap(), ignored);
        }
    }
}

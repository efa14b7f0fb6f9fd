//! The class of each XID: the consequence that it has for its device.

use std::collections::BTreeMap;
use std::str::FromStr;

/// The XIDs that an application causes by its own fault, and that leave the device in order: graphics engine exception (13),
/// memory page fault (31), stopped processing (43), preemptive cleanup (45), video processor exception (68) and compute
/// preemption timeout (109).
const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// The XIDs whose immediate action in NVIDIA's XID catalogue is to reset the GPU or to restart the machine, or that leave it to a
/// diagnosis that ends so: double bit ECC error (48), micro-controller halt (62), failed row remapping (64), `NVLink` error (74),
/// fallen off the bus (79), uncontained memory error (95), timeouts of the GSP (119, 120), unrecovered ECC error (140), GPU
/// initialisation error (143) and a changed recovery action (154).
const RESET_XIDS: [u64; 11] = [48, 62, 64, 74, 79, 95, 119, 120, 140, 143, 154];

/// The consequence of a critical error for its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XidClass {
    /// The device stays healthy: an application is at fault.
    Application,
    /// The device is unhealthy until it has been reset.
    Reset,
    /// The device is unhealthy until it has been without trouble for a while.
    Critical,
}

/// The classes of all critical XIDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xids {
    by_xid: BTreeMap<u64, XidClass>,
    /// The class of the XIDs that are not in the map.
    others: XidClass,
}

/// The classes of NVIDIA's documentation.
impl Default for Xids {
    fn default() -> Self {
        let mut by_xid = BTreeMap::new();
        by_xid.extend(APPLICATION_XIDS.map(|xid| (xid, XidClass::Application)));
        by_xid.extend(RESET_XIDS.map(|xid| (xid, XidClass::Reset)));
        Self {
            by_xid,
            others: XidClass::Critical,
        }
    }
}

impl Xids {
    /// The class of an XID.
    pub(crate) fn class(&self, xid: u64) -> XidClass {
        self.by_xid.get(&xid).copied().unwrap_or(self.others)
    }
}

/// The built-in classes, changed by entries such as `13=critical` or `all=application`. The last entry for an XID counts.
impl FromStr for Xids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut xids = Self::default();
        for entry in text.split(',') {
            let (xid, class) = parse_entry(entry).ok_or_else(|| {
                format!("{entry:?} is not XID=CLASS: write a number or all, = and one of application, reset, critical")
            })?;
            if let Some(xid) = xid {
                xids.by_xid.insert(xid, class);
            } else {
                // The last entry for an XID counts, and `all` is one for every XID.
                xids.by_xid.clear();
                xids.others = class;
            }
        }
        Ok(xids)
    }
}

/// Parses an entry such as `13=critical` into its XID, none for `all`, and its class.
fn parse_entry(entry: &str) -> Option<(Option<u64>, XidClass)> {
    let (xid, class) = entry.trim().split_once('=')?;
    let class = match class {
        "application" => XidClass::Application,
        "reset" => XidClass::Reset,
        "critical" => XidClass::Critical,
        _ => return None,
    };
    match xid {
        "all" => Some((None, class)),
        xid => Some((Some(xid.parse().ok()?), class)),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::XidClass::{Application, Critical, Reset};
    use super::*;

    #[rstest]
    #[case::no_class("13", "13")]
    #[case::unknown_class("13=reset,31=fatal", "31=fatal")]
    #[case::word("foo=reset", "foo=reset")]
    #[case::empty("", "")]
    #[case::trailing_comma("13=reset,", "")]
    #[case::negative("-1=reset", "-1=reset")]
    fn invalid_classes_of_xids_are_refused(#[case] text: &str, #[case] entry: &str) {
        let error = text.parse::<Xids>().unwrap_err();
        assert!(
            error.starts_with(&format!("{entry:?} is not XID=CLASS")),
            "{error}"
        );
    }

    #[rstest]
    #[case::one_more("92=application", &[(92, Application), (31, Application), (79, Reset), (94, Critical)])]
    #[case::of_an_application_no_more("31=critical, 13=reset", &[(13, Reset), (31, Critical), (43, Application)])]
    #[case::of_a_reset_no_more("79=critical", &[(79, Critical), (48, Reset)])]
    #[case::all("all=application", &[(13, Application), (79, Application), (94, Application)])]
    #[case::all_but_one("all=critical,48=reset", &[(13, Critical), (48, Reset), (79, Critical)])]
    #[case::the_last_entry_counts("48=critical,48=application,13=reset,all=critical", &[(13, Critical), (48, Critical)])]
    fn classes_of_single_xids_can_be_changed(#[case] text: &str, #[case] expected: &[(u64, XidClass)]) {
        let xids: Xids = text.parse().unwrap();
        for (xid, class) in expected {
            assert_eq!(xids.class(*xid), *class, "{xid}");
        }
    }

    /// A user changes single XIDs of these lists.
    #[test]
    fn the_help_text_lists_the_built_in_classes() {
        use clap::CommandFactory;
        let mut command = crate::config::Config::command();
        let help = command.render_long_help().to_string();
        for xids in [APPLICATION_XIDS.as_slice(), &RESET_XIDS] {
            let texts: Vec<String> = xids.iter().map(u64::to_string).collect();
            let list = format!("({} unless changed)", texts.join(", "));
            assert!(help.contains(&list), "{list}");
        }
    }
}

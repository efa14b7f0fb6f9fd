//! The DRA drivers whose devices are GPUs of this node.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::InvalidValue;
use super::values::is_dns_subdomain;

/// No driver.
const NONE: &str = "none";

/// Names of DRA drivers; may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraDrivers(BTreeSet<String>);

impl DraDrivers {
    /// The names.
    pub fn names(&self) -> &BTreeSet<String> {
        &self.0
    }
}

impl FromStr for DraDrivers {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if text == NONE {
            return Ok(Self(BTreeSet::new()));
        }
        let name = |name: &str| {
            let invalid = || {
                InvalidValue(format!(
                    "{name:?} is not the name of a DRA driver; write names such as gpu.nvidia.com, or {NONE}"
                ))
            };
            // The API server takes no longer name.
            if is_dns_subdomain(name) && name.len() <= 63 && name != NONE {
                Ok(name.to_owned())
            } else {
                Err(invalid())
            }
        };
        text.split(',')
            .map(str::trim)
            .map(name)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl fmt::Display for DraDrivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(String::as_str).collect();
        f.write_str(
            if names.is_empty() {
                NONE.to_owned()
            } else {
                names.join(",")
            }
            .as_str(),
        )
    }
}

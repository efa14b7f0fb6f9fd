//! Who serves a vendor's resource on this node, such as `nvidia.com/gpu`.

use std::fmt;
use std::str::FromStr;

use proto::resource::VENDOR_GPUS;

use super::InvalidValue;
use super::values::extended_resource;

/// A resource of whole devices and who serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VendorResource {
    /// Its name in pods and nodes.
    pub name: String,
    /// Whose plugin serves it.
    pub server: VendorServer,
}

/// Whose plugin serves a vendor's resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VendorServer {
    /// The vendor's: what it hands out is watched and published.
    Vendor,
    /// This one.
    Ours,
    /// Nobody, or somebody who needs no watching.
    Ignore,
}

impl FromStr for VendorResource {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        let form =
            || InvalidValue("write the name of a resource, = and one of vendor, ours, ignore".to_owned());
        let (name, server) = text.trim().rsplit_once('=').ok_or_else(form)?;
        let server = match server {
            "vendor" => VendorServer::Vendor,
            "ours" => VendorServer::Ours,
            "ignore" => VendorServer::Ignore,
            _ => return Err(form()),
        };
        extended_resource(name)?;
        if server == VendorServer::Ours && !VENDOR_GPUS.contains(&name) {
            return Err(InvalidValue(format!(
                "this plugin can serve one of {}",
                VENDOR_GPUS.join(", ")
            )));
        }
        Ok(Self {
            name: name.to_owned(),
            server,
        })
    }
}

impl fmt::Display for VendorResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = match self.server {
            VendorServer::Vendor => "vendor",
            VendorServer::Ours => "ours",
            VendorServer::Ignore => "ignore",
        };
        write!(f, "{}={server}", self.name)
    }
}

/// One entry per name; the last one decides.
pub(super) fn distinct(all: Vec<VendorResource>) -> Vec<VendorResource> {
    let mut distinct = Vec::<VendorResource>::new();
    for resource in all {
        distinct.retain(|before| before.name != resource.name);
        distinct.push(resource);
    }
    distinct
}

//! The types of the flags' values, and their parsers. An error is a text without the flag's name, which clap adds.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use proto::quantity::Quantity;
use proto::resource::{GPU_SHARED, VENDOR_GPUS};
use proto::topology::GpuPartitionPolicy;

use crate::inject::mode::Mode;
use crate::node::pods::IN_NODE_STATUS;
use crate::publish::node_overrides::{MAX_LABEL, is_label_text};

/// Parses the flag for the Node's name, which becomes a part of URLs and field selectors.
pub(super) fn node_name(text: &str) -> Result<String, String> {
    if is_dns_subdomain(text) {
        Ok(text.to_owned())
    } else {
        Err("not the name of a node".to_owned())
    }
}

pub(super) fn memory_resource(text: &str) -> Result<String, String> {
    check_extended_resource(text)?;
    // The plugin or the vendor's would serve another resource of this name, or this plugin would patch its amount.
    if text == GPU_SHARED || IN_NODE_STATUS.contains(&text) || VENDOR_GPUS.contains(&text) {
        return Err("this name has another meaning already".to_owned());
    }
    Ok(text.to_owned())
}

/// Checks that the text is the name of an extended resource that pods can request.
pub(super) fn check_extended_resource(text: &str) -> Result<(), String> {
    let Some((domain, name)) = text.split_once('/') else {
        return Err("not of the form domain/name".to_owned());
    };
    // The annotation with the size of a memory unit has the resource's name and `-unit`, and must be valid too.
    if !is_dns_subdomain(domain) || !is_label_text(name) || name.len() > MAX_LABEL - "-unit".len() {
        return Err("not the name of an extended resource".to_owned());
    }
    // The API server takes names of this domain for resources of its own, and no pod could request such a resource.
    if domain == "kubernetes.io" || domain.ends_with(".kubernetes.io") {
        return Err("the domain kubernetes.io belongs to Kubernetes".to_owned());
    }
    Ok(())
}

/// True if the text is a DNS subdomain, which names of Kubernetes objects are: lower-case labels, separated by dots.
pub(super) fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

fn is_dns_label(label: &str) -> bool {
    let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_inner)
}

/// Parses the memory of a GPU into bytes.
pub(super) fn gpu_memory(text: &str) -> Result<u64, String> {
    // A smaller amount is most likely a number whose unit was forgotten.
    match text.parse::<Quantity>().ok().and_then(Quantity::unsigned) {
        Some(bytes) if bytes >= 1 << 20 => Ok(bytes),
        _ => Err("write a quantity of at least 1Mi, such as 96Gi".to_owned()),
    }
}

/// The treatment of the memory that a driver reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReservedMemory {
    /// Pods may share it, as in the first gpushare and in Koordinator: CUDA refuses the last of them a part of their memory.
    Share,
    /// Pods may not share it; pods that were given it before keep it.
    Withhold,
}

/// The source of devices, as written on the command line.
#[derive(Clone, Debug)]
pub enum InventoryKind {
    /// NVML and sysfs.
    Nvml,
    /// A file of simulated devices.
    File(PathBuf),
}

impl FromStr for InventoryKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("file:")) {
            ("nvml", _) => Ok(Self::Nvml),
            (_, Some(path)) if !path.is_empty() => Ok(Self::File(path.into())),
            _ => Err("write nvml, or file: and the path of a file of simulated devices".to_owned()),
        }
    }
}

pub(super) fn partition_policy(text: &str) -> Result<GpuPartitionPolicy, String> {
    match text {
        "honor" => Ok(GpuPartitionPolicy::Honor),
        "prefer" => Ok(GpuPartitionPolicy::Prefer),
        _ => Err("possible values: honor, prefer".to_owned()),
    }
}

/// A reason for which the plugin evicts a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EvictionReason {
    /// Its containers would see other devices than its record names; otherwise they do not start
    Mismatch,
    /// A device of it has been unhealthy for a minute
    Unhealthy,
}

/// The injection mode, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Inject {
    /// The one that works on this node.
    Auto,
    /// By `NVIDIA_VISIBLE_DEVICES`, on which NVIDIA's container runtime acts.
    Envvar,
    /// By CDI devices.
    Cdi,
}

impl Inject {
    /// The injection mode that the operator asks for; none for `auto`.
    pub fn mode(self) -> Option<Mode> {
        match self {
            Self::Auto => None,
            Self::Envvar => Some(Mode::Envvar),
            Self::Cdi => Some(Mode::Cdi),
        }
    }
}

/// Names of DRA drivers, separated by commas; `none` is the empty set.
pub(super) fn dra_drivers(text: &str) -> Result<BTreeSet<String>, String> {
    let mut names = BTreeSet::new();
    if text == "none" {
        return Ok(names);
    }
    for name in text.split(',').map(str::trim) {
        // Longest name of a driver that the API server accepts.
        if !is_dns_subdomain(name) || name.len() > 63 || name == "none" {
            return Err(format!(
                "{name:?} is not the name of a DRA driver; write names such as gpu.nvidia.com, or none"
            ));
        }
        names.insert(name.to_owned());
    }
    Ok(names)
}

/// A resource of whole GPUs, and the device plugin that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VendorResource {
    /// The resource's name in pods and nodes.
    pub name: String,
    /// The device plugin that serves the resource.
    pub server: VendorServer,
}

/// The device plugin that serves a vendor's resource on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VendorServer {
    /// The vendor's plugin, whose allocations this plugin publishes.
    Vendor,
    /// This plugin.
    Ours,
    /// None, or a plugin whose allocations need not be published.
    Ignore,
}

impl FromStr for VendorResource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write the name of a resource, = and one of vendor, ours, ignore";
        let (name, server) = text.trim().rsplit_once('=').ok_or(form)?;
        let server = VendorServer::from_str(server, false).map_err(|_| form)?;
        check_extended_resource(name)?;
        if server == VendorServer::Ours && !VENDOR_GPUS.contains(&name) {
            return Err(format!("this plugin can serve one of {}", VENDOR_GPUS.join(", ")));
        }
        Ok(Self {
            name: name.to_owned(),
            server,
        })
    }
}

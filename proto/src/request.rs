//! What a pod asks for, read from its containers in the terms of both dialects.
//!
//! Applies the proposals' rules; knows no node, so memory units and ratios stay what they are.

use std::fmt;

use crate::pod::{Container, Pod, PodSpec};
use crate::resource::{FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS};

/// Most devices that one pod may share.
const MAX_DEVICES: u64 = 1024;
/// Largest amount of any kind that is not taken for a mistake: 1 PiB of memory, in bytes.
const MAX_AMOUNT: u64 = 1 << 50;

/// Whose words a pod uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `aliyun.com/gpu-mem`: memory units on one device.
    Gpushare,
    /// `koordinator.sh/*`: amounts shared out over `gpu.shared` devices.
    Koordinator,
}

/// Memory in the terms that the pod used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Units of the node that the pod will run on.
    Units(u64),
    /// Bytes.
    Bytes(u64),
    /// Percent of the device that is chosen.
    Ratio(u64),
}

/// What a pod asks for in all: `devices` distinct devices with an equal share of each amount.
///
/// Amounts are those of the pod: app containers and sidecars summed, or the largest init container if that is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PodRequest {
    /// Whose words the pod uses.
    pub dialect: Dialect,
    /// Number of distinct devices, at least 1.
    pub devices: u32,
    /// Memory of all devices together.
    pub memory: Memory,
    /// Percent of computing power of all devices together; 0 if none was asked for.
    pub core: u64,
}

/// How a container relates to the pod's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ContainerKind {
    /// Ends before the next container starts; kubelet hands its device IDs on.
    Init,
    /// An init container that keeps running and keeps its device IDs.
    Sidecar,
    /// An app container.
    App,
}

/// What kubelet will ask the plugin to allocate for one container.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContainerRequest {
    /// The container's name.
    pub name: String,
    /// Its kind.
    pub kind: ContainerKind,
    /// Memory units: an Allocate call with so many IDs, none if 0.
    pub memory_units: u64,
    /// `gpu.shared`: an Allocate call with so many IDs, none if 0.
    pub shared: u64,
    /// Whole GPUs in a vendor's name ([`VENDOR_GPUS`]): an Allocate call with so many IDs, none if 0.
    pub whole: u64,
    /// `rdma`, percent: an Allocate call with so many IDs, none if 0.
    pub rdma: u64,
    /// `fpga`, percent: an Allocate call with so many IDs, none if 0.
    pub fpga: u64,
}

impl ContainerRequest {
    /// Whether kubelet asks the plugin for nothing.
    fn is_empty(&self) -> bool {
        [self.memory_units, self.shared, self.whole, self.rdma, self.fpga] == [0; 5]
    }
}

/// A request that can never be placed, with the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A container asks for amounts but for nothing that makes kubelet call the plugin.
    #[error("container {container:?} asks for {resource} but not for {GPU_SHARED}; without it kubelet does not ask for a device")]
    NotServed {
        /// The container.
        container: String,
        /// One of the amounts that it asks for.
        resource: String,
    },
    /// A pod speaks two dialects.
    #[error("the pod asks for both {one} and {other}; use the resources of one dialect only")]
    MixedDialects {
        /// A resource of one dialect.
        one: String,
        /// A resource of the other.
        other: String,
    },
    /// A quantity that makes no sense.
    #[error("container {container:?}: {resource} is {value:?}, which is not a whole number from 1 to {MAX_AMOUNT}")]
    Quantity {
        /// The container.
        container: String,
        /// The resource.
        resource: String,
        /// What the pod's author wrote.
        value: String,
    },
    /// A combination that the proposal forbids.
    #[error("{place}: {rule}")]
    Rule {
        /// The container, or the pod.
        place: String,
        /// The rule, with names and values.
        rule: String,
    },
}

impl PodRequest {
    /// Reads a pod; `None` if it asks for nothing that gpushare places.
    ///
    /// # Errors
    /// The first rule that a container, or the pod as a whole, breaks.
    pub fn of(spec: &PodSpec, names: &ResourceNames) -> Result<Option<Self>, RequestError> {
        let mut totals = Totals::default();
        for container in &spec.init_containers {
            let amounts = Amounts::of(container, names)?;
            if container.is_sidecar() {
                totals.add_sidecar(&amounts);
            } else {
                totals.add_init(&amounts);
            }
        }
        for container in &spec.containers {
            totals.add_app(&Amounts::of(container, names)?);
        }
        refuse_mixed_dialects(spec, names)?;
        totals.peak().request()
    }
}

/// Whether a pod's request can be placed on some node or other: the rules of the filter and of the validating webhook.
///
/// # Errors
/// The first rule that the pod breaks, in words that name the container, the resource, the value and the rule.
pub fn validate(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    PodRequest::of(&pod.spec, names).map(drop)
}

/// What kubelet will ask the plugin for, container by container in kubelet's order; empty if nothing.
///
/// Unreadable quantities count as nothing: kubelet never admits such a container.
pub fn containers(spec: &PodSpec, names: &ResourceNames) -> Vec<ContainerRequest> {
    let inits = spec.init_containers.iter().map(|c| (c, if c.is_sidecar() { ContainerKind::Sidecar } else { ContainerKind::Init }));
    let apps = spec.containers.iter().map(|c| (c, ContainerKind::App));
    inits
        .chain(apps)
        .map(|(container, kind)| {
            let count = |resource: &str| amount(container, resource).ok().flatten().unwrap_or(0);
            ContainerRequest {
                name: container.name.clone(),
                kind,
                memory_units: count(&names.memory),
                shared: count(GPU_SHARED),
                whole: VENDOR_GPUS.iter().map(|name| count(name)).sum(),
                rdma: count(RDMA),
                fpga: count(FPGA),
            }
        })
        .filter(|request| !request.is_empty())
        .collect()
}

/// Amounts of one container, or of a pod.
#[derive(Clone, Copy, Debug, Default)]
struct Amounts {
    units: u64,
    shared: u64,
    bytes: u64,
    ratio: u64,
    core: u64,
}

impl Amounts {
    /// Reads one container and applies the rules that hold per container.
    fn of(container: &Container, names: &ResourceNames) -> Result<Self, RequestError> {
        let read = |resource| amount(container, resource);
        let whole = read(GPU)?;
        let bytes = read(GPU_MEMORY)?;
        let (ratio, core) = (read(GPU_MEMORY_RATIO)?, read(GPU_CORE)?);
        let (shared, units) = (read(GPU_SHARED)?, read(&names.memory)?);
        let rule = |rule: String| RequestError::Rule { place: format!("container {:?}", container.name), rule };
        if whole.is_some() && (bytes.is_some() || ratio.is_some() || core.is_some()) {
            return Err(rule(format!(
                "{GPU} already says {GPU_CORE} and {GPU_MEMORY_RATIO}; do not ask for it together with them or {GPU_MEMORY}"
            )));
        }
        let (ratio, core) = (whole.or(ratio), whole.or(core));
        let asked = [(whole, GPU), (bytes, GPU_MEMORY), (ratio, GPU_MEMORY_RATIO), (core, GPU_CORE)];
        let asked = asked.iter().find_map(|(value, name)| value.map(|_| *name));
        if let (Some(resource), None, None) = (asked, shared, units) {
            return Err(RequestError::NotServed { container: container.name.clone(), resource: resource.to_owned() });
        }
        if let (Some(bytes), Some(ratio)) = (bytes, ratio) {
            return Err(rule(format!("{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other; ask for one of them")));
        }
        if units.is_none() && bytes.is_none() && ratio.is_none() {
            if let Some(core) = core {
                return Err(rule(format!("{GPU_CORE} ({core}) needs {GPU_MEMORY} or {GPU_MEMORY_RATIO} beside it")));
            }
            if let Some(shared) = shared {
                return Err(rule(format!("{GPU_SHARED} ({shared}) needs {GPU_MEMORY} or {GPU_MEMORY_RATIO} beside it")));
            }
        }
        let or_zero = Option::unwrap_or_default;
        Ok(Self { units: or_zero(units), shared: or_zero(shared), bytes: or_zero(bytes), ratio: or_zero(ratio), core: or_zero(core) })
    }

    fn combine(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            units: combine(self.units, other.units),
            shared: combine(self.shared, other.shared),
            bytes: combine(self.bytes, other.bytes),
            ratio: combine(self.ratio, other.ratio),
            core: combine(self.core, other.core),
        }
    }

    /// Applies the rules that hold for the pod as a whole.
    fn request(self) -> Result<Option<PodRequest>, RequestError> {
        if self.units > 0 {
            return Ok(Some(PodRequest { dialect: Dialect::Gpushare, devices: 1, memory: Memory::Units(self.units), core: 0 }));
        }
        if self.shared == 0 {
            return Ok(None);
        }
        let rule = |rule: String| RequestError::Rule { place: "the pod".to_owned(), rule };
        let devices = u32::try_from(self.shared).ok().filter(|_| self.shared <= MAX_DEVICES);
        let devices = devices.ok_or_else(|| rule(format!("{GPU_SHARED} ({}) is more than {MAX_DEVICES}", self.shared)))?;
        let memory = match (self.bytes, self.ratio) {
            (bytes, 0) => Memory::Bytes(bytes),
            (0, ratio) => Memory::Ratio(ratio),
            (bytes, ratio) => {
                return Err(rule(format!(
                    "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other, also in different containers"
                )));
            }
        };
        for (name, value) in [(GPU_CORE, self.core), (GPU_MEMORY_RATIO, self.ratio)] {
            if !value.is_multiple_of(self.shared) {
                return Err(rule(format!("{name} ({value}) does not divide evenly over {GPU_SHARED} ({devices})")));
            }
            if value / self.shared > 100 {
                return Err(rule(format!("{name} ({value}) over {GPU_SHARED} ({devices}) is more than 100 per device")));
            }
        }
        Ok(Some(PodRequest { dialect: Dialect::Koordinator, devices, memory, core: self.core }))
    }
}

/// Sums a pod's containers as Kubernetes does: init containers run one after another, sidecars stay.
#[derive(Default)]
struct Totals {
    running: Amounts,
    sidecars: Amounts,
    init_peak: Amounts,
}

impl Totals {
    fn add_app(&mut self, amounts: &Amounts) {
        self.running = self.running.combine(*amounts, u64::saturating_add);
    }

    fn add_sidecar(&mut self, amounts: &Amounts) {
        self.sidecars = self.sidecars.combine(*amounts, u64::saturating_add);
        self.add_app(amounts);
    }

    fn add_init(&mut self, amounts: &Amounts) {
        let now = self.sidecars.combine(*amounts, u64::saturating_add);
        self.init_peak = self.init_peak.combine(now, u64::max);
    }

    fn peak(&self) -> Amounts {
        self.running.combine(self.init_peak, u64::max)
    }
}

/// The whole number that a container asks for of a resource; none if it does not name it.
fn amount(container: &Container, resource: &str) -> Result<Option<u64>, RequestError> {
    let resources = &container.resources;
    let Some(text) = resources.limits.get(resource).or_else(|| resources.requests.get(resource)) else {
        return Ok(None);
    };
    let fail = |value: String| RequestError::Quantity {
        container: container.name.clone(),
        resource: resource.to_owned(),
        value: value.chars().take(64).collect(),
    };
    let quantity = text.quantity().map_err(|text| fail(text.into_owned()))?;
    let value = quantity.unsigned().filter(|value| (1..=MAX_AMOUNT).contains(value));
    value.map(Some).ok_or_else(|| fail(quantity.to_string()))
}

fn refuse_mixed_dialects(spec: &PodSpec, names: &ResourceNames) -> Result<(), RequestError> {
    let asks = |resource: &str| {
        let mut containers = spec.init_containers.iter().chain(&spec.containers);
        containers.any(|c| c.resources.limits.contains_key(resource) || c.resources.requests.contains_key(resource))
    };
    let koordinator = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU].into_iter().find(|name| asks(name));
    let units = asks(&names.memory).then_some(names.memory.as_str());
    let vendor = VENDOR_GPUS.into_iter().find(|name| asks(name));
    let mut present = [units, koordinator, vendor].into_iter().flatten();
    match (present.next(), present.next()) {
        (Some(one), Some(other)) => Err(RequestError::MixedDialects { one: one.to_owned(), other: other.to_owned() }),
        _ => Ok(()),
    }
}

impl fmt::Display for PodRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.memory {
            Memory::Units(units) => write!(f, "{units} memory units")?,
            Memory::Bytes(bytes) => write!(f, "{bytes} bytes of memory")?,
            Memory::Ratio(ratio) => write!(f, "{ratio} % of memory")?,
        }
        if self.core > 0 {
            write!(f, " and {} % of core", self.core)?;
        }
        write!(f, " on {} device{}", self.devices, if self.devices == 1 { "" } else { "s" })
    }
}

#[cfg(test)]
mod tests;

//! Amounts of one container, of a pod, and what they come to.

use std::collections::BTreeMap;

use super::rules::{of_container, of_pod};
use super::{Dialect, GpuRequest, MAX_AMOUNT, MAX_DEVICES, Memory, PodRequest, RequestError};
use crate::pod::{ALL_DEVICES, Container, PodSpec};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
    WHOLE_PERCENT, is_extended, is_gpu_resource,
};
use crate::totals::{Summed, Totals};

/// Amounts of one container, or of a pod; 0 is nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct Amounts {
    units: u64,
    shared: u64,
    bytes: u64,
    ratio: u64,
    core: u64,
    /// Percent of both core and memory; not in `ratio` and `core`.
    both: u64,
    whole: u64,
    /// In whose words, if any are asked for.
    vendor: Option<&'static str>,
    others: BTreeMap<String, u64>,
}

impl Summed for Amounts {
    fn plus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    fn most(&self, other: &Self) -> Self {
        self.combine(other, u64::max)
    }
}

impl Amounts {
    /// What a pod's containers ask for together.
    pub(super) fn of_pod(
        spec: &PodSpec,
        names: &ResourceNames,
        sees_all: bool,
    ) -> Result<Self, RequestError> {
        Totals::of(spec, |container| Self::of(container, names, sees_all)).map(|totals| totals.peak())
    }

    /// Reads one container and applies the rules that hold per container.
    fn of(container: &Container, names: &ResourceNames, sees_all: bool) -> Result<Self, RequestError> {
        let read = |resource| amount(container, resource);
        let (both, bytes, ratio, core) = (
            read(GPU)?,
            read(GPU_MEMORY)?,
            read(GPU_MEMORY_RATIO)?,
            read(GPU_CORE)?,
        );
        let (shared, units) = (read(GPU_SHARED)?, read(&names.memory)?);
        let rule = |rule: String| of_container(container, rule);
        if let (Some(both), Some(_)) = (both, bytes.or(ratio).or(core)) {
            return Err(rule(format!(
                "{GPU} ({both}) already says {GPU_CORE} and {GPU_MEMORY_RATIO}; do not ask for it together with them or {GPU_MEMORY}"
            )));
        }
        if let (Some(bytes), Some(ratio)) = (bytes, ratio) {
            return Err(rule(format!(
                "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other; ask for one of them"
            )));
        }
        let has_memory = [units, bytes, ratio, both].iter().any(Option::is_some);
        if let (Some(core), false) = (core, has_memory) {
            return Err(rule(format!(
                "{GPU_CORE} ({core}) needs {GPU_MEMORY} or {GPU_MEMORY_RATIO} beside it"
            )));
        }
        if let (Some(shared), false, false) = (shared, has_memory, sees_all) {
            return Err(rule(format!(
                "{GPU_SHARED} ({shared}) needs {GPU_MEMORY} or {GPU_MEMORY_RATIO} beside it"
            )));
        }
        // Several vendors' names are refused elsewhere.
        let vendor = VENDOR_GPUS.into_iter().find(|name| container.asks_for(name));
        let whole = vendor.map(read).transpose()?.flatten().unwrap_or(0);
        let or_zero = Option::unwrap_or_default;
        let [units, shared, bytes, ratio, core, both] =
            [units, shared, bytes, ratio, core, both].map(or_zero);
        Ok(Self {
            units,
            shared,
            bytes,
            ratio,
            core,
            both,
            whole,
            vendor,
            others: others(container, names)?,
        })
    }

    fn combine(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let mut others = self.others.clone();
        for (resource, amount) in &other.others {
            let own = others.entry(resource.clone()).or_default();
            *own = combine(*own, *amount);
        }
        Self {
            units: combine(self.units, other.units),
            shared: combine(self.shared, other.shared),
            bytes: combine(self.bytes, other.bytes),
            ratio: combine(self.ratio, other.ratio),
            core: combine(self.core, other.core),
            both: combine(self.both, other.both),
            whole: combine(self.whole, other.whole),
            vendor: self.vendor.or(other.vendor),
            others,
        }
    }

    /// What the pod as a whole asks for, if that breaks no rule.
    pub(super) fn request(self, names: &ResourceNames, sees_all: bool) -> Result<PodRequest, RequestError> {
        for name in [RDMA, FPGA] {
            let amount = self.others.get(name).copied().unwrap_or(0);
            refuse_uneven_percent(name, amount)?;
        }
        let gpus = if sees_all {
            self.all_gpus(names)?
        } else {
            self.gpus()?
        };
        Ok(PodRequest {
            gpus,
            others: self.others.into_iter().collect(),
        })
    }

    /// All GPUs of a node and no amounts of them.
    fn all_gpus(&self, names: &ResourceNames) -> Result<Option<GpuRequest>, RequestError> {
        let amounts = [
            (names.memory.as_str(), self.units),
            (GPU_MEMORY, self.bytes),
            (GPU_MEMORY_RATIO, self.ratio),
            (GPU_CORE, self.core),
            (GPU, self.both),
            (self.vendor.unwrap_or_default(), self.whole),
        ];
        if let Some((name, amount)) = amounts.iter().find(|(_, amount)| *amount > 0) {
            return Err(of_pod(format!(
                "annotation {ALL_DEVICES} excludes amounts, but the pod asks for {name} ({amount})"
            )));
        }
        let devices = devices(GPU_SHARED, self.shared)?;
        let request = GpuRequest {
            dialect: Dialect::AllDevices,
            devices,
            memory: Memory::Bytes(0),
            core: 0,
        };
        Ok((self.shared > 0).then_some(request))
    }

    fn gpus(&self) -> Result<Option<GpuRequest>, RequestError> {
        if let Some(name) = self.vendor.filter(|_| self.whole > 0) {
            let devices = devices(name, self.whole)?;
            let percent = self.whole * WHOLE_PERCENT;
            return Ok(Some(GpuRequest {
                dialect: Dialect::Vendor,
                devices,
                memory: Memory::Ratio(percent),
                core: percent,
            }));
        }
        if self.units > 0 {
            return Ok(Some(GpuRequest {
                dialect: Dialect::Gpushare,
                devices: 1,
                memory: Memory::Units(self.units),
                core: 0,
            }));
        }
        let (ratio, core) = (
            self.ratio.saturating_add(self.both),
            self.core.saturating_add(self.both),
        );
        let memory = match (self.bytes, ratio) {
            (0, 0) => return Ok(None),
            (bytes, 0) => Memory::Bytes(bytes),
            (0, ratio) => Memory::Ratio(ratio),
            (bytes, ratio) => {
                return Err(of_pod(format!(
                    "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other, also in different containers"
                )));
            }
        };
        let devices = match self.shared {
            0 => self.devices_of_percent(ratio, core)?,
            shared => devices_of_shares(shared, ratio, core)?,
        };
        Ok(Some(GpuRequest {
            dialect: Dialect::Koordinator,
            devices,
            memory,
            core,
        }))
    }

    /// Number of devices where nothing but percentages says how many.
    fn devices_of_percent(&self, ratio: u64, core: u64) -> Result<u32, RequestError> {
        for (name, percent) in [(GPU, self.both), (GPU_MEMORY_RATIO, ratio), (GPU_CORE, core)] {
            refuse_uneven_percent(name, percent)?;
        }
        let (name, percent) = match (self.both, ratio) {
            (0, 0) => (GPU_CORE, core),
            (0, ratio) => (GPU_MEMORY_RATIO, ratio),
            (_, ratio) => (GPU, ratio),
        };
        let most = MAX_DEVICES * WHOLE_PERCENT;
        let n = u32::try_from((percent / WHOLE_PERCENT).max(1))
            .ok()
            .filter(|_| percent <= most);
        n.ok_or_else(|| of_pod(format!("{name} ({percent}) is more than {MAX_DEVICES} devices")))
    }
}

fn devices(name: &str, n: u64) -> Result<u32, RequestError> {
    let devices = u32::try_from(n).ok().filter(|_| n <= MAX_DEVICES);
    devices.ok_or_else(|| of_pod(format!("{name} ({n}) is more than {MAX_DEVICES}")))
}

fn devices_of_shares(shared: u64, ratio: u64, core: u64) -> Result<u32, RequestError> {
    let devices = devices(GPU_SHARED, shared)?;
    for (name, value) in [(GPU_CORE, core), (GPU_MEMORY_RATIO, ratio)] {
        if !value.is_multiple_of(shared) {
            return Err(of_pod(format!(
                "{name} ({value}) does not divide evenly over {GPU_SHARED} ({devices})"
            )));
        }
        if value / shared > WHOLE_PERCENT {
            return Err(of_pod(format!(
                "{name} ({value}) over {GPU_SHARED} ({devices}) is more than 100 per device"
            )));
        }
    }
    Ok(devices)
}

fn refuse_uneven_percent(name: &str, percent: u64) -> Result<(), RequestError> {
    if percent <= WHOLE_PERCENT || percent.is_multiple_of(WHOLE_PERCENT) {
        return Ok(());
    }
    Err(of_pod(format!(
        "{name} ({percent}) is more than one device, so it must be a multiple of 100"
    )))
}

/// Amounts of everything that is no GPU and may be a device's. A name that no device is known to have may be anybody's, so
/// a value that is no whole number is none of our business there.
fn others(container: &Container, names: &ResourceNames) -> Result<BTreeMap<String, u64>, RequestError> {
    let resources = &container.resources;
    let keys = resources.limits.keys().chain(resources.requests.keys());
    let mut others = BTreeMap::new();
    for name in keys.filter(|name| is_extended(name) && !is_gpu_resource(name, names)) {
        let is_ours = name == RDMA || name == FPGA;
        match amount(container, name) {
            Ok(Some(amount)) => drop(others.insert(name.clone(), amount)),
            Err(error) if is_ours => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    Ok(others)
}

/// The whole number that a container asks for of a resource; none if it does not name it, or writes a zero, as charts do.
pub(super) fn amount(container: &Container, resource: &str) -> Result<Option<u64>, RequestError> {
    let resources = &container.resources;
    let Some(text) = resources
        .limits
        .get(resource)
        .or_else(|| resources.requests.get(resource))
    else {
        return Ok(None);
    };
    let fail = |value: String| RequestError::Quantity {
        container: container.name.clone(),
        resource: resource.to_owned(),
        value: value.chars().take(64).collect(),
    };
    let quantity = text.quantity().map_err(|text| fail(text.into_owned()))?;
    let value = quantity
        .unsigned()
        .filter(|value| *value <= MAX_AMOUNT)
        .ok_or_else(|| fail(quantity.to_string()))?;
    Ok((value > 0).then_some(value))
}

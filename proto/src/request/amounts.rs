//! The amounts that a container or a pod requests, and the rules that they have to obey.

use std::collections::BTreeMap;

use super::{
    Dialect, GpuRequest, MAX_AMOUNT, MAX_DEVICES, Memory, PodRequest, RequestError, excerpt, sees_all_devices,
};
use crate::pod::{ALL_DEVICES, Container, Pod, PodSpec, QuantityText};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, RDMA, ResourceNames,
    VENDOR_GPUS, WHOLE_PERCENT, is_extended, is_gpu_resource,
};
use crate::totals::{self, Amounts};

/// Names of GPU amounts that the plugin patches into node status: kubelet calls no plugin for them.
const PATCHED_AMOUNTS: [&str; 4] = [GPU, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE];

/// The amounts that one container requests, or a pod; 0 for a resource that is not requested.
#[derive(Clone, Debug, Default)]
pub(super) struct GpuAmounts {
    units: u64,
    shared: u64,
    bytes: u64,
    ratio: u64,
    core: u64,
    /// Percent of both core and memory (`koordinator.sh/gpu`); not in `ratio` and `core`.
    both: u64,
    whole: u64,
    /// The resource name of `whole`; `None` if `whole` is 0.
    vendor: Option<&'static str>,
    others: BTreeMap<String, u64>,
}

impl Amounts for GpuAmounts {
    fn plus(&self, other: &Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    fn max(&self, other: &Self) -> Self {
        self.combine(other, u64::max)
    }
}

impl GpuAmounts {
    /// Reads the amounts of a pod: the sum over its containers, as kube-scheduler builds it.
    pub(super) fn of_pod(
        spec: &PodSpec,
        names: &ResourceNames,
        sees_all: bool,
    ) -> Result<Self, RequestError> {
        totals::peak(spec, |container| Self::of_container(container, names, sees_all))
    }

    /// Reads one container and applies the rules that hold per container.
    fn of_container(
        container: &Container,
        names: &ResourceNames,
        sees_all: bool,
    ) -> Result<Self, RequestError> {
        let read = |resource| amount(container, resource);
        let (both, bytes, ratio, core) = (
            read(GPU)?,
            read(GPU_MEMORY)?,
            read(GPU_MEMORY_RATIO)?,
            read(GPU_CORE)?,
        );
        let (shared, units) = (read(GPU_SHARED)?, read(&names.memory)?);
        let rule = |rule: String| container_rule(container, rule);
        // `gpu` is short for core and ratio ("Enhance the GPU Share API"), so another amount beside it would count twice.
        if let (Some(both), Some(_)) = (both, bytes.or(ratio).or(core)) {
            return Err(rule(format!(
                "{GPU} ({both}) already says {GPU_CORE} and {GPU_MEMORY_RATIO}; do not ask for it together with them or {GPU_MEMORY}"
            )));
        }
        // Rule 2 of the proposal's validating webhook: of two limits on the memory of one GPU its size would decide which holds.
        if let (Some(bytes), Some(ratio)) = (bytes, ratio) {
            return Err(rule(format!(
                "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other; ask for one of them"
            )));
        }
        // Rule 3 of the same webhook: a share without memory would count as nothing, and any number of such pods would fit.
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
        // At most one: `refuse_mixed_dialects` has refused a pod with several vendors' names.
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

    /// The amounts of both, combined resource by resource.
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

    /// The request of the pod with these amounts.
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

    /// The request of a pod with the annotation [`ALL_DEVICES`].
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
            return Err(pod_rule(format!(
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

    /// The request of a pod for amounts of GPUs; `None` if the pod requests none.
    fn gpus(&self) -> Result<Option<GpuRequest>, RequestError> {
        // A vendor's GPU is 100 percent of both ("Fine-grained device scheduling", compatibility with `nvidia.com/gpu`).
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
        // The gpushare dialect has no number of devices: all units come from one.
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
                return Err(pod_rule(format!(
                    "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other, also in different containers"
                )));
            }
        };
        // Only bound pods lack `gpu.shared`; `refuse_unserved` refuses new ones.
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

    /// The number of GPUs that the percentages of a pod without `gpu.shared` stand for.
    fn devices_of_percent(&self, ratio: u64, core: u64) -> Result<u32, RequestError> {
        for (name, percent) in [(GPU, self.both), (GPU_MEMORY_RATIO, ratio), (GPU_CORE, core)] {
            refuse_uneven_percent(name, percent)?;
        }
        // The ratio decides, as in Koordinator. Without one it is the core, of which Koordinator would put 200 % on one GPU and
        // fail.
        let (name, percent) = match (self.both, ratio) {
            (0, 0) => (GPU_CORE, core),
            (0, ratio) => (GPU_MEMORY_RATIO, ratio),
            (_, ratio) => (GPU, ratio),
        };
        let most = MAX_DEVICES * WHOLE_PERCENT;
        let n = u32::try_from((percent / WHOLE_PERCENT).max(1))
            .ok()
            .filter(|_| percent <= most);
        n.ok_or_else(|| pod_rule(format!("{name} ({percent}) is more than {MAX_DEVICES} devices")))
    }
}

/// The number of devices as 32 bits.
///
/// # Errors
/// It is larger than [`MAX_DEVICES`].
fn devices(name: &str, n: u64) -> Result<u32, RequestError> {
    let devices = u32::try_from(n).ok().filter(|_| n <= MAX_DEVICES);
    devices.ok_or_else(|| pod_rule(format!("{name} ({n}) is more than {MAX_DEVICES}")))
}

/// The number of GPUs of a pod with `gpu.shared`, over which the percentages have to divide evenly.
fn devices_of_shares(shared: u64, ratio: u64, core: u64) -> Result<u32, RequestError> {
    let devices = devices(GPU_SHARED, shared)?;
    for (name, value) in [(GPU_CORE, core), (GPU_MEMORY_RATIO, ratio)] {
        // The proposal divides each amount by the number of GPUs, and kubelet knows whole numbers alone.
        if !value.is_multiple_of(shared) {
            return Err(pod_rule(format!(
                "{name} ({value}) does not divide evenly over {GPU_SHARED} ({devices})"
            )));
        }
        if value / shared > WHOLE_PERCENT {
            return Err(pod_rule(format!(
                "{name} ({value}) over {GPU_SHARED} ({devices}) is more than 100 per device"
            )));
        }
    }
    Ok(devices)
}

/// Refuses percentages that are more than one device and no whole number of devices ("Fine-grained device scheduling").
fn refuse_uneven_percent(name: &str, percent: u64) -> Result<(), RequestError> {
    if percent <= WHOLE_PERCENT || percent.is_multiple_of(WHOLE_PERCENT) {
        return Ok(());
    }
    Err(pod_rule(format!(
        "{name} ({percent}) is more than one device, so it must be a multiple of 100"
    )))
}

/// The amounts of extended resources that are not of GPUs, by name.
fn others(container: &Container, names: &ResourceNames) -> Result<BTreeMap<String, u64>, RequestError> {
    let resources = &container.resources;
    let keys = resources.limits.keys().chain(resources.requests.keys());
    let mut others = BTreeMap::new();
    for name in keys.filter(|name| is_extended(name) && !is_gpu_resource(name, names)) {
        let is_known = name == RDMA || name == FPGA;
        // Other names may belong to other projects, whose quantities need not be whole numbers.
        match amount(container, name) {
            Ok(Some(amount)) => drop(others.insert(name.clone(), amount)),
            Err(error) if is_known => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    Ok(others)
}

/// The amount of a resource that a container requests; `None` if the container does not name the resource, or requests 0.
pub(super) fn amount(container: &Container, resource: &str) -> Result<Option<u64>, RequestError> {
    let Some(text) = container.quantity(resource) else {
        return Ok(None);
    };
    let fail = |value: &str| RequestError::Quantity {
        container: container.name.clone(),
        resource: resource.to_owned(),
        value: excerpt(value),
    };
    let quantity = text.quantity().map_err(|text| fail(&text))?;
    match quantity.unsigned() {
        // Helm charts write a zero for a resource that is switched off.
        Some(0) => Ok(None),
        Some(amount) if amount <= MAX_AMOUNT => Ok(Some(amount)),
        _ => Err(fail(&quantity.to_string())),
    }
}

/// The error for a rule that the pod as a whole breaks.
fn pod_rule(rule: String) -> RequestError {
    RequestError::Rule {
        place: "the pod".to_owned(),
        rule,
    }
}

/// The error for a rule that one container breaks.
fn container_rule(container: &Container, rule: String) -> RequestError {
    RequestError::Rule {
        place: format!("container {:?}", container.name),
        rule,
    }
}

/// Refuses pods that use two dialects of these: memory units, Koordinator's names, and the name of each vendor.
pub(super) fn refuse_mixed_dialects(spec: &PodSpec, names: &ResourceNames) -> Result<(), RequestError> {
    let amount_of = |resource: &str| {
        let quantity = spec
            .all_containers()
            .find_map(|container| text(container, resource))?;
        Some(format!("{resource} ({})", shown(quantity)))
    };
    // Koordinator's names belong together, however many of them a pod uses.
    let koordinator = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU]
        .into_iter()
        .find_map(amount_of);
    let mut present = [amount_of(&names.memory), koordinator]
        .into_iter()
        .chain(VENDOR_GPUS.map(amount_of))
        .flatten();
    match (present.next(), present.next()) {
        (Some(one), Some(other)) => Err(RequestError::MixedDialects { one, other }),
        _ => Ok(()),
    }
}

/// Returns true if a container names a resource that belongs to a device in every cluster, by its current name.
pub(super) fn asks_for_known_devices(spec: &PodSpec, names: &ResourceNames) -> bool {
    spec.all_containers().any(|container| {
        let resources = &container.resources;
        let mut keys = resources.limits.keys().chain(resources.requests.keys());
        keys.any(|name| is_gpu_resource(name, names) || name == RDMA || name == FPGA)
    })
}

/// Refuses deprecated resource names, which the mutating webhook replaces where it can.
///
/// # Errors
/// The first container that uses one. Kubernetes reserves these names: no node has them, and kube-scheduler asks no extender.
pub fn refuse_old_names(spec: &PodSpec) -> Result<(), RequestError> {
    for container in spec.all_containers() {
        if let Some((old, new)) = OLD_NAMES
            .into_iter()
            .find(|(old, _)| text(container, old).is_some())
        {
            let container = container.name.clone();
            return Err(RequestError::OldName { container, old, new });
        }
    }
    Ok(())
}

/// Refuses containers that request amounts alone: kubelet calls a plugin only for resources that the plugin serves.
pub(super) fn refuse_unserved(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    for container in pod.spec.all_containers() {
        let asked = PATCHED_AMOUNTS
            .into_iter()
            .find_map(|name| Some((name, text(container, name)?)));
        // Memory units have kubelet ask the plugin as well, though mixing them with amounts is refused elsewhere.
        let is_served = [GPU_SHARED, &names.memory]
            .into_iter()
            .any(|name| container.asks_for(name));
        if let (Some((resource, value)), false) = (asked, is_served) {
            let (container, resource) = (container.name.clone(), resource.to_owned());
            return Err(RequestError::NotServed {
                container,
                resource,
                value: shown(value),
            });
        }
    }
    // Without a device ID kubelet asks no plugin, and the container would see what its image asks for.
    let mut containers = pod.spec.all_containers();
    if sees_all_devices(pod)? && !containers.any(|container| container.asks_for(GPU_SHARED)) {
        return Err(pod_rule(format!(
            "annotation {ALL_DEVICES} needs {GPU_SHARED} in the container that is to see the devices"
        )));
    }
    Ok(())
}

/// The quantity of a resource as the manifest has it, unless it is zero.
fn text<'a>(container: &'a Container, resource: &str) -> Option<&'a QuantityText> {
    container.quantity(resource).filter(|text| !text.is_zero())
}

/// The beginning of a quantity, for an error.
fn shown(text: &QuantityText) -> String {
    match text {
        QuantityText::Text(text) => excerpt(text),
        QuantityText::Number(number) => number.to_string(),
        QuantityText::Other(value) => excerpt(&value.to_string()),
    }
}

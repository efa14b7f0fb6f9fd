//! The amounts that a container or a pod requests, and the rules that they have to obey.

use std::collections::BTreeMap;

use super::{
    Dialect, GpuRequest, MAX_AMOUNT, MAX_DEVICES, Memory, PodRequest, RequestError, sees_all_devices,
};
use crate::excerpt::excerpt;
use crate::pod::{ALL_DEVICES, Container, Pod, PodSpec, QuantityText};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, GPU_SHARES, OLD_NAMES, RDMA,
    ResourceNames, VENDOR_GPUS, WHOLE_PERCENT, is_extended, is_gpu_resource,
};
use crate::totals;

/// Names of GPU amounts that the plugin patches into node status: kubelet calls no plugin for them.
const PATCHED_AMOUNTS: [&str; 4] = [GPU, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE];

/// The amounts that a pod requests, by resource name; a resource that is not requested is absent.
struct RequestedAmounts<'a>(BTreeMap<&'a str, u64>);

/// The request of a pod, by the rules for each container and for the pod as a whole. `sees_all` is [`sees_all_devices`].
pub(super) fn request(
    spec: &PodSpec,
    names: &ResourceNames,
    sees_all: bool,
) -> Result<PodRequest, RequestError> {
    let amounts = totals::peak(spec, |container| amounts_of(container, names, sees_all))?;
    let amounts = RequestedAmounts(amounts);
    for name in [RDMA, FPGA] {
        refuse_uneven_percent(name, amounts.of(name))?;
    }
    let gpus = if sees_all {
        amounts.all_gpus(names)?
    } else {
        amounts.gpus(names)?
    };
    let mut others = Vec::new();
    for (name, amount) in amounts.0 {
        if !is_gpu_resource(name, names) {
            others.push((name.to_owned(), amount));
        }
    }
    Ok(PodRequest { gpus, others })
}

impl RequestedAmounts<'_> {
    /// The amount of a resource; 0 if it is not requested.
    fn of(&self, resource: &str) -> u64 {
        self.0.get(resource).copied().unwrap_or(0)
    }

    /// The request of a pod with the annotation [`ALL_DEVICES`], which excludes amounts; `None` without `gpu.shared`.
    fn all_gpus(&self, names: &ResourceNames) -> Result<Option<GpuRequest>, RequestError> {
        let amounts = [&names.memory, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU];
        for name in amounts.into_iter().chain(VENDOR_GPUS) {
            let amount = self.of(name);
            if amount > 0 {
                return Err(pod_rule(&format!(
                    "annotation {ALL_DEVICES} excludes amounts, but the pod asks for {name} ({amount})"
                )));
            }
        }
        let shared = self.of(GPU_SHARED);
        let devices = devices(GPU_SHARED, shared)?;
        let request = GpuRequest {
            dialect: Dialect::AllDevices,
            devices,
            memory: Memory::Bytes(0),
            core: 0,
        };
        Ok((shared > 0).then_some(request))
    }

    /// The request of a pod for amounts of GPUs, in the dialect of its names; `None` if the pod requests none.
    fn gpus(&self, names: &ResourceNames) -> Result<Option<GpuRequest>, RequestError> {
        // At most one: `refuse_mixed_dialects` has refused a pod with several vendors' names.
        let vendor = VENDOR_GPUS.into_iter().find(|name| self.of(name) > 0);
        // A vendor's GPU is 100 percent of memory and core ("Fine-grained device scheduling", section on `nvidia.com/gpu`).
        if let Some(name) = vendor {
            let devices = devices(name, self.of(name))?;
            let percent = self.of(name) * WHOLE_PERCENT;
            return Ok(Some(GpuRequest {
                dialect: Dialect::Vendor,
                devices,
                memory: Memory::Ratio(percent),
                core: percent,
            }));
        }
        // The gpushare dialect has no number of GPUs: all units are of one GPU.
        let units = self.of(&names.memory);
        if units > 0 {
            return Ok(Some(GpuRequest {
                dialect: Dialect::Gpushare,
                devices: 1,
                memory: Memory::Units(units),
                core: 0,
            }));
        }
        let memory_and_core = self.of(GPU);
        let ratio = self.of(GPU_MEMORY_RATIO).saturating_add(memory_and_core);
        let core = self.of(GPU_CORE).saturating_add(memory_and_core);
        let memory = match (self.of(GPU_MEMORY), ratio) {
            (0, 0) => return Ok(None),
            (bytes, 0) => Memory::Bytes(bytes),
            (0, ratio) => Memory::Ratio(ratio),
            (bytes, ratio) => {
                return Err(pod_rule(&format!(
                    "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other, also in different containers"
                )));
            }
        };
        // Only bound pods lack `gpu.shared`; `refuse_unserved` refuses new ones.
        let devices = match self.of(GPU_SHARED) {
            0 => devices_of_percent(memory_and_core, ratio, core)?,
            shared => devices_of_shares(shared, ratio, core)?,
        };
        Ok(Some(GpuRequest {
            dialect: Dialect::Koordinator,
            devices,
            memory,
            core,
        }))
    }
}

/// The number of GPUs that percentages without `gpu.shared` stand for. Those of `koordinator.sh/gpu` are in all three.
fn devices_of_percent(memory_and_core: u64, ratio: u64, core: u64) -> Result<u32, RequestError> {
    refuse_uneven_percent(GPU, memory_and_core)?;
    refuse_uneven_percent(GPU_MEMORY_RATIO, ratio)?;
    refuse_uneven_percent(GPU_CORE, core)?;
    // The memory ratio decides, as in Koordinator. Without one the core decides: Koordinator asks one GPU for all of it, and
    // cannot place 200 percent.
    let (name, percent) = match (memory_and_core, ratio) {
        (0, 0) => (GPU_CORE, core),
        (0, ratio) => (GPU_MEMORY_RATIO, ratio),
        (_, ratio) => (GPU, ratio),
    };
    match u32::try_from((percent / WHOLE_PERCENT).max(1)) {
        Ok(n) if percent <= MAX_DEVICES * WHOLE_PERCENT => Ok(n),
        _ => Err(pod_rule(&format!(
            "{name} ({percent}) is more than {MAX_DEVICES} devices"
        ))),
    }
}

/// A number of devices, up to [`MAX_DEVICES`], as 32 bits.
fn devices(name: &str, n: u64) -> Result<u32, RequestError> {
    match u32::try_from(n) {
        Ok(devices) if n <= MAX_DEVICES => Ok(devices),
        _ => Err(pod_rule(&format!("{name} ({n}) is more than {MAX_DEVICES}"))),
    }
}

/// The number of GPUs of a pod with `gpu.shared`, over which the percentages have to divide evenly.
fn devices_of_shares(shared: u64, ratio: u64, core: u64) -> Result<u32, RequestError> {
    let devices = devices(GPU_SHARED, shared)?;
    for (name, value) in [(GPU_CORE, core), (GPU_MEMORY_RATIO, ratio)] {
        // The proposal divides each amount by the number of GPUs, and kubelet knows whole numbers alone.
        if !value.is_multiple_of(shared) {
            return Err(pod_rule(&format!(
                "{name} ({value}) does not divide evenly over {GPU_SHARED} ({devices})"
            )));
        }
        if value / shared > WHOLE_PERCENT {
            return Err(pod_rule(&format!(
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
    Err(pod_rule(&format!(
        "{name} ({percent}) is more than one device, so it must be a multiple of 100"
    )))
}

/// The amounts that a container requests, by resource name. Of several faults the first counts; amounts of GPUs come first.
fn amounts_of<'a>(
    container: &'a Container,
    names: &'a ResourceNames,
    sees_all: bool,
) -> Result<BTreeMap<&'a str, u64>, RequestError> {
    let mut amounts = BTreeMap::new();
    for name in gpu_amounts(names).into_iter().chain(VENDOR_GPUS) {
        if let Some(amount) = amount(container, name)? {
            amounts.insert(name, amount);
        }
    }
    let of_gpus = gpu_amounts(names).map(|name| amounts.get(name));
    refuse_mixed_amounts(container, of_gpus, sees_all)?;
    for (name, _) in container.quantities() {
        if !is_extended(name) || is_gpu_resource(name, names) {
            continue;
        }
        let is_known = name == RDMA || name == FPGA;
        // Other names may belong to other projects, whose quantities need not be whole numbers.
        match amount(container, name) {
            Ok(Some(amount)) => drop(amounts.insert(name, amount)),
            Err(error) if is_known => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    Ok(amounts)
}

/// The names of amounts of shared GPUs, in the order in which they are read.
fn gpu_amounts(names: &ResourceNames) -> [&str; 6] {
    [
        GPU,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        GPU_CORE,
        GPU_SHARED,
        &names.memory,
    ]
}

/// Refuses a container whose amounts of shared GPUs, in the order of [`gpu_amounts`], do not go together.
fn refuse_mixed_amounts(
    container: &Container,
    [memory_and_core, bytes, ratio, core, shared, units]: [Option<&u64>; 6],
    sees_all: bool,
) -> Result<(), RequestError> {
    let rule = |rule: String| {
        let name = &container.name;
        Err(RequestError::Resources(format!("container {name:?}: {rule}")))
    };
    // `gpu` is short for core and ratio ("Enhance the GPU Share API"), so another amount beside it would count twice.
    if let (Some(memory_and_core), Some(_)) = (memory_and_core, bytes.or(ratio).or(core)) {
        return rule(format!(
            "{GPU} ({memory_and_core}) already says {GPU_CORE} and {GPU_MEMORY_RATIO}; do not ask for it together with them or {GPU_MEMORY}"
        ));
    }
    // Rule 2 of the proposal's validating webhook: of two limits on the memory of one GPU its size would decide which holds.
    if let (Some(bytes), Some(ratio)) = (bytes, ratio) {
        return rule(format!(
            "{GPU_MEMORY} ({bytes}) and {GPU_MEMORY_RATIO} ({ratio}) exclude each other; ask for one of them"
        ));
    }
    // Rule 3 of the same webhook: a share without memory would count as nothing, and any number of such pods would fit.
    let has_memory = [units, bytes, ratio, memory_and_core].iter().any(Option::is_some);
    let needs_memory = [
        (GPU_CORE, core, has_memory),
        (GPU_SHARED, shared, has_memory || sees_all),
    ];
    for (name, amount, is_complete) in needs_memory {
        if let (Some(amount), false) = (amount, is_complete) {
            let needs = format!("{name} ({amount}) needs {GPU_MEMORY} or {GPU_MEMORY_RATIO} beside it");
            if name != GPU_SHARED {
                return rule(needs);
            }
            return rule(format!(
                "{needs}, or the annotation {ALL_DEVICES}: \"true\" to see all GPUs of the node without an amount"
            ));
        }
    }
    Ok(())
}

/// The amount of a resource that a container requests; `None` if the container does not name the resource, or requests 0.
pub(super) fn amount(container: &Container, resource: &str) -> Result<Option<u64>, RequestError> {
    let Some(text) = container.quantity(resource) else {
        return Ok(None);
    };
    let fail = |value: &str| {
        let (name, value) = (&container.name, excerpt(value));
        RequestError::Resources(format!(
            "container {name:?}: {resource} is {value:?}, which is not a whole number up to {MAX_AMOUNT}"
        ))
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
fn pod_rule(rule: &str) -> RequestError {
    RequestError::Resources(format!("the pod: {rule}"))
}

/// Refuses pods with resource names of two dialects, or vendors (rule 1 of the webhook in "Enhance the GPU Share API").
pub(super) fn refuse_mixed_dialects(spec: &PodSpec, names: &ResourceNames) -> Result<(), RequestError> {
    let amount_of = |resource: &str| {
        let mut containers = spec.all_containers();
        let quantity = containers.find_map(|container| nonzero(container, resource))?;
        Some(format!("{resource} ({})", shown(quantity)))
    };
    // Koordinator's names belong together, however many of them a pod uses.
    let koordinator = GPU_SHARES.into_iter().find_map(amount_of);
    let others = [amount_of(&names.memory), koordinator].into_iter();
    let mut present = others.chain(VENDOR_GPUS.map(amount_of)).flatten();
    match (present.next(), present.next()) {
        (Some(one), Some(other)) => Err(RequestError::Resources(format!(
            "the pod asks for both {one} and {other}; use the resources of one dialect only"
        ))),
        _ => Ok(()),
    }
}

/// Refuses deprecated resource names: no device plugin serves them, so that the pod would run without devices.
pub(super) fn refuse_old_names(spec: &PodSpec) -> Result<(), RequestError> {
    for container in spec.all_containers() {
        let name = &container.name;
        for (old, new) in OLD_NAMES {
            if nonzero(container, old).is_some() {
                return Err(RequestError::Resources(format!(
                    "container {name:?} asks for {old}, an old name of {new}; write {new} alone"
                )));
            }
        }
    }
    Ok(())
}

/// Refuses containers that request amounts alone, for which kubelet calls no plugin (rule 4 of the same webhook).
pub(super) fn refuse_unserved(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    for container in pod.spec.all_containers() {
        // kubelet calls the plugin for memory units too; `refuse_mixed_dialects` refuses them beside other amounts.
        if container.asks_for(GPU_SHARED) || container.asks_for(&names.memory) {
            continue;
        }
        for resource in PATCHED_AMOUNTS {
            if let Some(value) = nonzero(container, resource) {
                let (name, value) = (&container.name, shown(value));
                return Err(RequestError::Resources(format!(
                    "container {name:?} asks for {resource} ({value}) but not for {GPU_SHARED}, without which kubelet gives it no device: \
                     add {GPU_SHARED}: 1, or the number of GPUs"
                )));
            }
        }
    }
    // For a container without device IDs kubelet calls no plugin, and the container would see the GPUs that its image asks for.
    let mut containers = pod.spec.all_containers();
    if sees_all_devices(pod)? && !containers.any(|container| container.asks_for(GPU_SHARED)) {
        return Err(pod_rule(&format!(
            "annotation {ALL_DEVICES} needs {GPU_SHARED} in the container that is to see the devices"
        )));
    }
    Ok(())
}

fn nonzero<'a>(container: &'a Container, resource: &str) -> Option<&'a QuantityText> {
    container.quantity(resource).filter(|text| !text.is_zero())
}

fn shown(text: &QuantityText) -> String {
    match text {
        QuantityText::Text(text) => excerpt(text),
        QuantityText::Number(number) => number.to_string(),
        QuantityText::Other(value) => excerpt(&value.to_string()),
    }
}

//! Checks the invariants of a cluster with gpushare, from API objects and container logs; [`stale_spec`] and [`wrong_limit`] also
//! from the containers that the model of kubelet has started.
//!
//! It shares no arithmetic with the scheduler or the plugin, on purpose: a mistake there must not be repeated here.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{Api, Client, ResourceExt};
use proto::device::{Device, DeviceInfo, SERVES_VENDOR_LABEL, TYPE_GPU};
use proto::memory_unit::MemoryUnit;
use proto::plugin_reports;
use proto::pod::ALL_DEVICES;
use proto::quantity::Quantity;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, DRIVER_MEMORY_LIMIT, DRIVER_MEMORY_REQUEST, DeviceAllocations,
    GPU_DEVICES, MEM_CONTAINER, MEM_IDX, MEM_POD,
};
use proto::resource::{GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, VENDOR_GPUS};

use crate::kube_scheduler::ResourceAmounts;
use crate::kubelet::{self, DEVICE_NODES};
use crate::observer::ClusterSnapshot;
use crate::pod_fields::{
    container_statuses, containers, device_record, has_ended, init_container_statuses, node_of, phase,
};
use crate::pods;

pub use crate::kubelet::nvidia_runtime::VISIBLE_DEVICES;

use others::OtherDevices;

mod constraints;
mod others;

/// gpushare's resources for shares of GPUs: kubelet calls the plugin for containers that request them.
const SHARE_RESOURCES: [&str; 2] = [GPU_MEM, GPU_SHARED];

/// One GPU and the amounts that pods hold of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuUse {
    /// Name of its node.
    pub node: String,
    /// Its minor number.
    pub minor: i32,
    /// Its UUID.
    pub uuid: String,
    /// True if the plugin reports it as healthy.
    pub healthy: bool,
    /// Its memory in bytes.
    pub total: u64,
    /// Hundredths of bytes that pods hold: a percentage of a GPU is not always a whole number of bytes.
    used_hundredths: u128,
    /// Percent of computing power that pods hold.
    pub core: u64,
    /// `namespace/name` of the pods that hold a part of the GPU.
    pub pods: Vec<String>,
}

impl GpuUse {
    /// Bytes that pods hold, rounded up.
    pub fn used(&self) -> u64 {
        u64::try_from(self.used_hundredths.div_ceil(100)).unwrap_or(u64::MAX)
    }
}

/// The amounts that pods hold of all devices, and the violations of the invariants.
#[derive(Clone, Debug, Default)]
pub struct HeldAmounts {
    /// Every GPU, by node and minor.
    pub gpus: BTreeMap<(String, i32), GpuUse>,
    others: OtherDevices,
    /// Violations, a sentence each.
    pub violations: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GpuUseKind {
    /// Amounts of one or more GPUs, shared with others.
    Shares,
    /// Whole GPUs under a vendor's resource name.
    Whole,
    /// All GPUs of its node, visible to it without holding any amount.
    All,
}

/// The GPUs that a pod requests, with the amounts of all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RequestedShare {
    use_kind: GpuUseKind,
    n_devices: u64,
    /// Memory units (`aliyun.com/gpu-mem`).
    units: u64,
    /// Bytes of memory (`koordinator.sh/gpu-memory`).
    bytes: u64,
    ratio: u64,
    core: u64,
}

impl RequestedShare {
    /// The share that a pod requests; `None` if it requests no GPU.
    fn of(pod: &Pod) -> Option<Self> {
        let amounts = ResourceAmounts::of_pod(pod).ok()?;
        let whole_units = |name: &str| u64::try_from(amounts.get(name) / 1000).unwrap_or(0);
        let n_whole: u64 = VENDOR_GPUS.into_iter().map(whole_units).sum();
        if n_whole > 0 {
            return Some(Self {
                use_kind: GpuUseKind::Whole,
                n_devices: n_whole,
                units: 0,
                bytes: 0,
                ratio: 100 * n_whole,
                core: 100 * n_whole,
            });
        }
        // `koordinator.sh/gpu` requests a percentage of memory and of computing power alike.
        let percent = whole_units(GPU);
        let units = whole_units(GPU_MEM);
        let n_devices = if units > 0 { 1 } else { whole_units(GPU_SHARED) };
        let sees_all_gpus = pod.annotations().get(ALL_DEVICES).map(String::as_str) == Some("true");
        let use_kind = if sees_all_gpus {
            GpuUseKind::All
        } else {
            GpuUseKind::Shares
        };
        (n_devices > 0).then_some(Self {
            use_kind,
            n_devices,
            units,
            bytes: whole_units(GPU_MEMORY),
            ratio: whole_units(GPU_MEMORY_RATIO) + percent,
            core: whole_units(GPU_CORE) + percent,
        })
    }

    /// Hundredths of bytes that the pod requests of each device, which has `total` bytes on a node with this memory unit.
    fn hundredths(&self, unit: u64, total: u64) -> u128 {
        let exact = u128::from(self.units) * u128::from(unit) * 100
            + u128::from(self.bytes) * 100
            + u128::from(self.ratio) * u128::from(total);
        exact / u128::from(self.n_devices)
    }
}

/// The GPUs that a pod's annotations name: minor number and, if the writer knew it, UUID.
pub fn record(pod: &Pod) -> Result<Vec<(i32, String)>, String> {
    if pod.annotations().contains_key(DEVICE_ALLOCATED) {
        return match device_record(pod) {
            Ok(record) => Ok(gpus_in(&record)),
            Err(error) => Err(format!("{DEVICE_ALLOCATED} does not parse: {error}")),
        };
    }
    let Some(text) = pod.annotations().get(MEM_IDX) else {
        return Err("there is no record of its devices".to_owned());
    };
    match text.parse() {
        Ok(minor) => Ok(vec![(minor, String::new())]),
        Err(_) => Err(format!("{MEM_IDX} is {text:?}")),
    }
}

fn gpus_in(record: &DeviceAllocations) -> Vec<(i32, String)> {
    let gpus = record.get(TYPE_GPU).into_iter().flatten();
    gpus.map(|gpu| (gpu.minor, gpu.id.clone())).collect()
}

/// The devices that a pod runs with: those of its record, or of another pod's that the plugin has swapped for it.
#[derive(Debug, Default)]
struct EffectiveRecord {
    devices: Vec<(i32, String)>,
    /// The whole record, if it is another pod's.
    exchanged: Option<DeviceAllocations>,
}

/// Reads the devices that a pod runs with; the node's Device object names swapped records.
fn effective_record(pod: &Pod, device: Option<&Device>) -> Result<EffectiveRecord, String> {
    let annotations = device.and_then(|device| device.metadata.annotations.as_ref());
    let mut exchanged = plugin_reports::read_swapped_records(annotations).map_err(error_text)?;
    let exchanged = exchanged.remove(&pod.uid().unwrap_or_default());
    let devices = match &exchanged {
        Some(other) => gpus_in(other),
        None => record(pod)?,
    };
    Ok(EffectiveRecord { devices, exchanged })
}

fn error_text(error: impl Into<Box<dyn std::error::Error>>) -> String {
    error.into().to_string()
}

/// The UUIDs that a container should see, sorted, by the record that applies to its pod; none if it requests no GPU.
pub fn should_see(pod: &Pod, device: Option<&Device>, container: &str) -> Vec<String> {
    if !containers(pod).any(|one| one.name == container && requests_gpus(one)) {
        return Vec::new();
    }
    let mut uuids = Vec::new();
    for (minor, uuid) in effective_record(pod, device).unwrap_or_default().devices {
        if uuid.is_empty() {
            // The old extender's record names the minor number alone.
            let known = device.and_then(|device| gpu_of_minor(device, minor));
            uuids.push(known.map(|info| info.id.clone()).unwrap_or_default());
        } else {
            uuids.push(uuid);
        }
    }
    uuids.sort();
    uuids
}

fn gpu_of_minor(device: &Device, minor: i32) -> Option<&DeviceInfo> {
    let mut devices = device.spec.devices.iter();
    devices.find(|info| is_gpu(info) && info.minor == Some(minor))
}

fn is_gpu(info: &DeviceInfo) -> bool {
    info.device_type == TYPE_GPU
}

/// Returns true if the vendor's plugin chooses the whole GPUs of a pod.
fn is_vendors_choice(pod: &Pod, device: Option<&Device>) -> bool {
    // gpushare does not steer that choice, so that a record of the scheduler proves nothing.
    let label = device.and_then(|device| device.labels().get(SERVES_VENDOR_LABEL));
    !pod.annotations().contains_key(DEVICE_ALLOCATED) || label.map(String::as_str) != Some("true")
}

/// No pods are excused.
pub static NONE_EXCUSED: BTreeSet<String> = BTreeSet::new();

/// Adds up the amounts that pods hold of devices, and lists the violations, except for the records of `excused` pods.
pub fn held_amounts(snapshot: &ClusterSnapshot, excused: &BTreeSet<String>) -> HeldAmounts {
    let mut held = HeldAmounts::default();
    for (node, device) in &snapshot.devices {
        for info in &device.spec.devices {
            if is_gpu(info) {
                held.add_gpu(node, info);
            }
        }
        held.others.add_node(node, device);
    }
    for (name, pod) in &snapshot.pods {
        let Some(node) = node_of(pod) else { continue };
        if has_ended(pod) {
            continue;
        }
        let mut gpus = Ok(());
        if let Some(share) = RequestedShare::of(pod) {
            gpus = held.add_pod(snapshot, name, pod, node, share);
        }
        let others = held.others.add_pod(node, name, pod);
        if let Err(what) = gpus.and(others)
            && !excused.contains(name)
        {
            held.violations.push(format!("pod {name} on {node}: {what}"));
        }
    }
    held.check_limits();
    let overfull = held.others.oversubscribed();
    held.violations.extend(overfull);
    held.violations.extend(unmet_demands(snapshot, excused));
    held
}

/// Returns a sentence for each demand of a pod's annotations that is not met, and for each clash of two pods.
fn unmet_demands(snapshot: &ClusterSnapshot, excused: &BTreeSet<String>) -> Vec<String> {
    let mut sentences = Vec::new();
    for (node, device) in &snapshot.devices {
        let mut here: Vec<(&str, &Pod)> = Vec::new();
        for (name, pod) in &snapshot.pods {
            if node_of(pod) == Some(node) && !has_ended(pod) && !excused.contains(name) {
                here.push((name, pod));
            }
        }
        for (name, pod) in &here {
            for what in constraints::unmet(pod, device) {
                sentences.push(format!("pod {name} on {node}: {what}"));
            }
        }
        sentences.extend(constraints::clashes(device, &here));
    }
    sentences
}

impl HeldAmounts {
    /// Adds a GPU of a node's Device object, which no pod holds yet.
    fn add_gpu(&mut self, node: &str, info: &DeviceInfo) {
        let minor = info.minor.unwrap_or(-1);
        let total = info
            .resources
            .get(GPU_MEMORY)
            .copied()
            .and_then(Quantity::unsigned);
        let gpu = GpuUse {
            node: node.to_owned(),
            minor,
            uuid: info.id.clone(),
            healthy: info.health,
            total: total.unwrap_or(0),
            ..GpuUse::default()
        };
        if self.gpus.insert((node.to_owned(), minor), gpu).is_some() {
            let violation = format!("node {node} has two GPUs with minor {minor}");
            self.violations.push(violation);
        }
    }

    /// Adds the amounts of a pod to its GPUs; the error is the pod's first violation.
    fn add_pod(
        &mut self,
        snapshot: &ClusterSnapshot,
        name: &str,
        pod: &Pod,
        node: &str,
        share: RequestedShare,
    ) -> Result<(), String> {
        let device = snapshot.devices.get(node);
        if share.use_kind == GpuUseKind::Whole && is_vendors_choice(pod, device) {
            // Only the pod's containers show which devices it has: see [`clashes`] of this file.
            return Ok(());
        }
        let EffectiveRecord { devices, exchanged } = effective_record(pod, device)?;
        let distinct_minors: BTreeSet<i32> = devices.iter().map(|(minor, _)| *minor).collect();
        if share.use_kind == GpuUseKind::All {
            let gpus_of_node = self.gpus.values().filter(|gpu| gpu.node == node);
            let minors_of_node: BTreeSet<i32> = gpus_of_node.map(|gpu| gpu.minor).collect();
            return if distinct_minors == minors_of_node {
                Ok(())
            } else {
                Err(format!(
                    "it is to see GPUs {minors_of_node:?} and has {devices:?}"
                ))
            };
        }
        let n_devices = share.n_devices;
        if distinct_minors.len() as u64 != n_devices || devices.len() != distinct_minors.len() {
            return Err(format!("it asks for {n_devices} devices and has {devices:?}"));
        }
        // A node of the old plugin has no Device object, so the sizes of its GPUs are not known.
        if device.is_none() {
            return Ok(());
        }
        // Pods of the old gpushare count in memory units, whose size each node chooses.
        let unit = memory_unit(snapshot, node);
        for (minor, uuid) in &devices {
            let Some(gpu) = self.gpus.get_mut(&(node.to_owned(), *minor)) else {
                return Err(format!("there is no GPU {minor}"));
            };
            if !uuid.is_empty() && *uuid != gpu.uuid {
                return Err(format!("its GPU {minor} is {uuid}, the node's is {}", gpu.uuid));
            }
            let hundredths = share.hundredths(unit, gpu.total);
            check_recorded_amounts(pod, exchanged.as_ref(), *minor, share, hundredths)?;
            gpu.used_hundredths += hundredths;
            gpu.core += share.core / share.n_devices;
            gpu.pods.push(name.to_owned());
        }
        // The plugin writes the annotations of a pod with a swapped record only later, so they are not checked here.
        if exchanged.is_some() {
            Ok(())
        } else {
            check_gpushare_annotations(pod, share, &devices)
        }
    }

    /// Adds a violation for each GPU of which pods hold more memory or computing power than it has.
    fn check_limits(&mut self) {
        for gpu in self.gpus.values() {
            let GpuUse {
                total, core, pods, ..
            } = gpu;
            let name = format!("GPU {} of {}", gpu.minor, gpu.node);
            if gpu.used_hundredths > u128::from(*total) * 100 {
                let used = gpu.used();
                self.violations
                    .push(format!("{name}: {used} of {total} bytes are held by {pods:?}"));
            }
            if *core > 100 {
                self.violations
                    .push(format!("{name}: {core} % of its core is held by {pods:?}"));
            }
        }
    }
}

/// Checks that a record has the amounts that the pod requests; bytes may be rounded either way.
fn check_recorded_amounts(
    pod: &Pod,
    exchanged: Option<&DeviceAllocations>,
    minor: i32,
    share: RequestedShare,
    hundredths: u128,
) -> Result<(), String> {
    let own = device_record(pod).map_err(error_text)?;
    let record = exchanged.unwrap_or(&own);
    let mut gpus = record.get(TYPE_GPU).into_iter().flatten();
    let Some(entry) = gpus.find(|entry| entry.minor == minor) else {
        return Ok(());
    };
    let recorded = |name: &str| entry.resources.get(name).copied().and_then(Quantity::unsigned);
    let bytes = recorded(GPU_MEMORY).map(u128::from);
    if bytes.is_none_or(|bytes| bytes != hundredths / 100 && bytes != hundredths.div_ceil(100)) {
        return Err(format!(
            "its record of GPU {minor} says {GPU_MEMORY} {bytes:?}, it asks for {}",
            hundredths.div_ceil(100)
        ));
    }
    let core = share.core / share.n_devices;
    match recorded(GPU_CORE).unwrap_or(0) {
        same if same == core => Ok(()),
        other => Err(format!(
            "its record of GPU {minor} says {GPU_CORE} {other}, it asks for {core}"
        )),
    }
}

/// Checks the annotations that the old gpushare extender wrote too: GPU and units of the pod, and the time of its binding.
fn check_gpushare_annotations(
    pod: &Pod,
    share: RequestedShare,
    devices: &[(i32, String)],
) -> Result<(), String> {
    let annotation = |key: &str| pod.annotations().get(key).cloned().unwrap_or_default();
    if share.units > 0 {
        let minors: Vec<String> = devices.iter().map(|(minor, _)| minor.to_string()).collect();
        let (idx, units) = (annotation(MEM_IDX), annotation(MEM_POD));
        if idx != minors.join(",") || units != share.units.to_string() {
            return Err(format!(
                "it asks for {} units of GPU {minors:?}, but {MEM_IDX}={idx} and {MEM_POD}={units}",
                share.units
            ));
        }
    }
    let is_recorded = pod.annotations().contains_key(DEVICE_ALLOCATED);
    if is_recorded && annotation(BIND_TIMESTAMP).parse::<u64>().is_err() {
        return Err(format!("{BIND_TIMESTAMP} is {:?}", annotation(BIND_TIMESTAMP)));
    }
    Ok(())
}

/// Bytes of a memory unit on a node; GiB, the old plugin's default, where the node does not say.
pub fn memory_unit(snapshot: &ClusterSnapshot, node: &str) -> u64 {
    let annotations = snapshot.nodes.get(node).map(ResourceExt::annotations);
    let text = annotations.and_then(|annotations| annotations.get(&format!("{GPU_MEM}-unit")));
    let unit = text.and_then(|text| text.parse::<MemoryUnit>().ok());
    unit.unwrap_or(MemoryUnit::GIB).bytes()
}

/// The GPUs that one container sees and should see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerView {
    /// `namespace/name`.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// UUIDs in its environment, sorted; empty if it names none.
    pub sees: Vec<String>,
    /// UUIDs that its pod's record names, sorted; empty if it asks for none.
    pub should_see: Vec<String>,
}

/// Reads the GPUs that the started containers of pods with GPUs see from the containers' logs.
pub async fn container_views(
    client: &Client,
    snapshot: &ClusterSnapshot,
) -> kube::Result<Vec<ContainerView>> {
    let mut views = Vec::new();
    for (name, pod) in &snapshot.pods {
        let device = node_of(pod).and_then(|node| snapshot.devices.get(node));
        if device.is_none() || RequestedShare::of(pod).is_none() || phase(pod) == "Failed" {
            continue;
        }
        let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
        for container in started_containers(pod) {
            let log = match pods::read_log(&api, &pod.name_any(), container).await {
                // The pod has gone since the snapshot.
                Err(kube::Error::Api(status)) if status.code == 404 => continue,
                log => log?,
            };
            let sees = seen(&log, device);
            // Any GPU that the vendor's plugin gives is right.
            let should_see = if requests_whole_gpus(container) && is_vendors_choice(pod, device) {
                sees.clone()
            } else {
                should_see(pod, device, &container.name)
            };
            views.push(ContainerView {
                pod: name.clone(),
                container: container.name.clone(),
                sees,
                should_see,
            });
        }
    }
    Ok(views)
}

/// Returns evidence that the content of a started container's CDI specs was not written for this start, if there is any.
pub fn stale_spec(container: &kubelet::RuntimeContainer) -> Option<String> {
    if let Some(name) = container.stale_devices.first() {
        return Some(format!(
            "{name} was injected with content that its spec does not have"
        ));
    }
    // The variable of a spec must have the number of memory units that this container holds.
    let held = container.devices.get(GPU_MEM)?.len().to_string();
    let shown = container.env.get(MEM_CONTAINER);
    if container.cdi_devices.is_empty() || shown == Some(&held) {
        return None;
    }
    Some(format!(
        "its spec says {MEM_CONTAINER} {shown:?}, and it holds {held} units"
    ))
}

/// Returns evidence that the driver limit of a started container is not its share of a GPU of this size, in MiB.
pub fn wrong_limit(container: &kubelet::RuntimeContainer, gpu_mib: u64) -> Option<String> {
    let held = |resource: &str| container.devices.get(resource).map_or(0, Vec::len) as u64;
    // Containers request memory units of a GiB, or shares of a tenth of each GPU.
    let share_mib = match (held(GPU_MEM), held(GPU_SHARED)) {
        (0, 0) => return None,
        (0, _) => gpu_mib / 10,
        (units, _) => units * 1024,
    };
    // A part of a GPU comes with both variables, and with one hook for each GPU; a whole GPU with neither.
    let variable = |name: &str| container.env.get(name).map(String::as_str);
    let n_gpus = variable(GPU_DEVICES).map_or(0, |seen| seen.split(',').count());
    let limit = share_mib.to_string();
    let (expected, n_expected) = if share_mib < gpu_mib {
        ([Some(limit.as_str()), Some("0")], n_gpus)
    } else {
        ([None, None], 0)
    };
    let found = [variable(DRIVER_MEMORY_LIMIT), variable(DRIVER_MEMORY_REQUEST)];
    let hooks = container.hooks.iter();
    let n_hooks = hooks
        .filter(|hook| hook.contains("apply-cuda-memory-limits"))
        .count();
    if found == expected && n_hooks == n_expected {
        return None;
    }
    Some(format!(
        "its limits are {found:?} with {n_hooks} hooks, its part is {share_mib} MiB on {n_gpus} GPUs"
    ))
}

/// Returns a sentence for each container that sees other devices than it should.
pub fn misfits(views: &[ContainerView]) -> Vec<String> {
    let mut sentences = Vec::new();
    for view in views {
        if view.sees != view.should_see {
            sentences.push(format!(
                "container {} of {} sees {:?} and should see {:?}",
                view.container, view.pod, view.sees, view.should_see
            ));
        }
    }
    sentences
}

/// Returns a sentence for each GPU that a running pod holds whole and a container of another pod sees.
pub fn clashes(snapshot: &ClusterSnapshot, views: &[ContainerView]) -> Vec<String> {
    let mut holders = Vec::new();
    for view in views {
        let pod = snapshot.pods.get(&view.pod).filter(|pod| !has_ended(pod));
        let Some(share) = pod.and_then(RequestedShare::of) else {
            continue;
        };
        // A pod that sees all GPUs of its node takes none away from other pods.
        if share.use_kind != GpuUseKind::All {
            holders.push((view, share.use_kind));
        }
    }
    let mut clashes = Vec::new();
    for (holder, kind) in &holders {
        for (other, _) in &holders {
            if *kind != GpuUseKind::Whole || other.pod == holder.pod {
                continue;
            }
            for uuid in holder.sees.iter().filter(|uuid| other.sees.contains(uuid)) {
                let (holder, other) = (&holder.pod, &other.pod);
                clashes.push(format!("{holder} has GPU {uuid} whole, and {other} sees it too"));
            }
        }
    }
    clashes
}

/// Returns true if a container requests shares of a GPU or whole GPUs.
fn requests_gpus(container: &Container) -> bool {
    is_limited(container, &SHARE_RESOURCES) || requests_whole_gpus(container)
}

fn requests_whole_gpus(container: &Container) -> bool {
    is_limited(container, &VENDOR_GPUS)
}

/// Returns true if the container's limits have one of these resources.
fn is_limited(container: &Container, resources: &[&str]) -> bool {
    let limits = container.resources.as_ref().and_then(|all| all.limits.as_ref());
    limits.is_some_and(|limits| resources.iter().any(|name| limits.contains_key(*name)))
}

/// The containers of a pod that have ever started, by the pod's status.
fn started_containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let mut started = BTreeSet::new();
    for status in init_container_statuses(pod).chain(container_statuses(pod)) {
        if let Some(state) = &status.state
            && (state.running.is_some() || state.terminated.is_some())
        {
            started.insert(status.name.as_str());
        }
    }
    containers(pod).filter(move |container| started.contains(container.name.as_str()))
}

/// The GPUs that a container sees by its log, sorted: those of its device nodes if it prints them, else those that its variables
/// name, since simulated GPUs have no nodes.
pub fn seen(log: &str, device: Option<&Device>) -> Vec<String> {
    let Some(nodes) = last_value(log, DEVICE_NODES) else {
        return match last_value(log, VISIBLE_DEVICES) {
            // With CDI the plugin hides all GPUs from NVIDIA's runtime and names them in a variable of its own.
            None | Some("void") => devices_of(last_value(log, GPU_DEVICES).unwrap_or_default()),
            Some(value) => devices_of(value),
        };
    };
    let mut uuids = Vec::new();
    for node in nodes.split(',') {
        // /dev/nvidiactl and its like have no number and show no GPU.
        let minor = node.strip_prefix("/dev/nvidia").map(str::parse::<i32>);
        let Some(Ok(minor)) = minor else { continue };
        uuids.push(match device.and_then(|device| gpu_of_minor(device, minor)) {
            Some(info) => info.id.clone(),
            None => format!("minor {minor}"),
        });
    }
    uuids.sort();
    uuids.dedup();
    uuids
}

/// The value in the last line `name=value` of a log, such as that of a variable which a container has printed last.
pub fn last_value<'a>(log: &'a str, name: &str) -> Option<&'a str> {
    // The last of equal lines counts, as the container may have started more than once.
    let mut lines = log.lines().rev();
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

/// The UUIDs that a value of `NVIDIA_VISIBLE_DEVICES` or `GPUSHARE_GPU_DEVICES` lists, sorted; `all` stays as it is.
pub fn devices_of(value: &str) -> Vec<String> {
    let named = value
        .split(',')
        .filter(|uuid| !matches!(*uuid, "" | "void" | "none"));
    let mut uuids: Vec<String> = named.map(str::to_owned).collect();
    uuids.sort();
    uuids
}

#[cfg(test)]
mod tests;

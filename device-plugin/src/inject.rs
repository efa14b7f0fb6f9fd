//! What a container is told about its devices: variables, device nodes, or the edits of a CDI spec.
//!
//! Pure but for a look at which device nodes and vendor's specs there are. Who the container is and which GPUs its pod has
//! has been decided before.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use proto::kubelet::deviceplugin::{CdiDevice, ContainerAllocateResponse, DeviceSpec};
use proto::record::{MEM_CONTAINER, MEM_DEV, MEM_IDX, MEM_POD};
use proto::request::ContainerRequest;

use crate::cdi::{self, Edits};
use crate::inventory::Gpu;
use crate::plugin::Settings;
use crate::pods::{NodePod, Placement};
use crate::served::Served;

/// Device nodes that go with every NVIDIA GPU, as far as they are there.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// How containers are given their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Manner {
    /// By a variable in the answer to Allocate, which stands as long as the container lives.
    Envvar,
    /// By a CDI device whose spec is written before the container starts.
    Cdi,
}

impl Manner {
    /// What the node's runtime can do, by the name and version that its Node object tells, and why.
    pub fn of_runtime(runtime: &str, is_dir_writable: bool) -> (Self, &'static str) {
        /// The first versions that take CDI devices from kubelet without being configured for it.
        const KNOWN: [(&str, (u32, u32)); 2] = [("containerd", (2, 0)), ("cri-o", (1, 28))];
        let Some((name, version)) = runtime.split_once("://") else {
            return (Self::Envvar, "the node's runtime is not known");
        };
        let mut numbers = version.trim_start_matches('v').split(['.', '-', '+']).map_while(|number| number.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match KNOWN.iter().find(|(known, _)| *known == name) {
            None => (Self::Envvar, "the node's runtime is not known to take CDI devices"),
            Some((_, first)) if version < *first => {
                (Self::Envvar, "the node's runtime is too old to take CDI devices without being configured for it")
            }
            Some(_) if !is_dir_writable => (Self::Envvar, "the directory of CDI specs cannot be written"),
            Some(_) => (Self::Cdi, "the node's runtime takes CDI devices"),
        }
    }
}

/// How, and where what is needed for it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The manner; none if it is to be found out what the node's runtime can do.
    pub manner: Option<Manner>,
    /// Where specs are written.
    pub cdi_dir: PathBuf,
    /// Where the vendor's specs are looked for; later ones override earlier ones.
    pub spec_dirs: Vec<PathBuf>,
    /// Whether device nodes are handed over too.
    pub pass_device_specs: bool,
    /// What device nodes are looked for below.
    pub device_root: PathBuf,
}

impl Injection {
    /// By the variable alone.
    pub fn envvar() -> Self {
        Self {
            manner: Some(Manner::Envvar),
            cdi_dir: "/var/run/cdi".into(),
            spec_dirs: Vec::new(),
            pass_device_specs: false,
            device_root: "/".into(),
        }
    }
}

/// Whether the answer for this resource is the one that says which devices the container sees: of two values of a
/// variable kubelet would keep one at random.
pub fn speaks(resource: Served, container: &ContainerRequest) -> bool {
    resource == Served::Memory || container.memory_units == 0
}

/// The answer that depends on nothing but the device IDs.
pub fn cdi_answer(resource: Served, ids: &[String]) -> ContainerAllocateResponse {
    let name = format!("{}{}", cdi::PREFIX, cdi::device_name(resource, ids));
    ContainerAllocateResponse { cdi_devices: vec![CdiDevice { name }], ..ContainerAllocateResponse::default() }
}

/// Who is given devices.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The pod.
    pub pod: &'a NodePod,
    /// The container.
    pub container: &'a ContainerRequest,
    /// The record that counts.
    pub placement: Option<&'a Placement>,
}

/// The answer that says once and for all what the container of a call sees, which may not be known.
pub fn envvar_answer(settings: &Settings, known: Option<&Known<'_>>, resource: Served, gpus: &[&Gpu]) -> ContainerAllocateResponse {
    let is_speaking = known.is_none_or(|known| speaks(resource, known.container));
    let mut envs: HashMap<String, String> =
        known.map(|known| variables(settings, known, resource, gpus)).unwrap_or_default().into_iter().collect();
    let mut devices = Vec::new();
    if is_speaking {
        envs.insert(settings.visible_devices_env.clone(), visible(gpus));
        if settings.injection.pass_device_specs {
            let spec = |(path, host): (PathBuf, PathBuf)| DeviceSpec {
                container_path: path.to_string_lossy().into_owned(),
                host_path: host.to_string_lossy().into_owned(),
                permissions: "rw".to_owned(),
            };
            devices = device_nodes(&settings.injection.device_root, gpus).into_iter().map(spec).collect();
        }
    }
    ContainerAllocateResponse { envs, devices, ..ContainerAllocateResponse::default() }
}

/// The edits for one resource of a container of this pod.
pub fn cdi_edits(settings: &Settings, known: &Known<'_>, resource: Served, gpus: &[&Gpu]) -> Edits {
    let variable = &settings.visible_devices_env;
    let mut edits = Edits::default();
    if speaks(resource, known.container) {
        edits = cdi::vendor::edits(&settings.injection.spec_dirs, gpus, variable)
            .unwrap_or_else(|| Edits { device_nodes: device_nodes(&settings.injection.device_root, gpus), ..Edits::default() });
    }
    edits.env.extend(variables(settings, known, resource, gpus));
    // A spec must do something, and saying the same twice does no harm.
    edits.env.insert(variable.clone(), visible(gpus));
    edits
}

fn visible(gpus: &[&Gpu]) -> String {
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    uuids.join(",")
}

/// The device nodes of these GPUs that are there: in the container and on the host.
fn device_nodes(root: &Path, gpus: &[&Gpu]) -> Vec<(PathBuf, PathBuf)> {
    let own = gpus.iter().map(|gpu| gpu.device_node.clone());
    let paths = COMMON_NODES.iter().map(PathBuf::from).chain(own);
    let host = |path: &PathBuf| root.join(path.strip_prefix("/").unwrap_or(path));
    paths.map(|path| (path.clone(), host(&path))).filter(|(_, host)| host.exists()).collect()
}

/// Everything but the visible devices.
fn variables(settings: &Settings, known: &Known<'_>, resource: Served, gpus: &[&Gpu]) -> BTreeMap<String, String> {
    let Known { pod, container, placement } = *known;
    let mut env = BTreeMap::new();
    if speaks(resource, container) {
        env.extend(limits(settings, known, gpus));
    }
    if let (Served::Memory, Some(gpu)) = (resource, gpus.first()) {
        let record = placement.and_then(|placement| placement.gpushare);
        let pod_units = record.map(|record| record.pod_units).filter(|units| *units > 0).unwrap_or_else(|| pod.memory_units());
        let device_units = record.map(|record| record.device_units).filter(|units| *units > 0);
        let device_units = device_units.unwrap_or_else(|| settings.memory_unit.units_in(gpu.memory_bytes));
        env.insert(MEM_IDX.to_owned(), gpu.minor.to_string());
        env.insert(MEM_POD.to_owned(), pod_units.to_string());
        env.insert(MEM_CONTAINER.to_owned(), container.memory_units.to_string());
        env.insert(MEM_DEV.to_owned(), device_units.to_string());
    }
    env
}

/// The limits that HAMi-core enforces, of each device by its place among the pod's; none of a device that is all the pod's.
fn limits(settings: &Settings, known: &Known<'_>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
    let Some(placement) = known.placement.filter(|_| known.pod.is_limited) else { return BTreeMap::new() };
    let held = |gpu: &Gpu| placement.gpus.iter().zip(&placement.held).find(|(name, _)| name.names(gpu)).map(|(_, held)| held);
    let mut env = BTreeMap::new();
    for (at, gpu) in gpus.iter().enumerate() {
        let Some(bytes) =
            held(gpu).and_then(|held| held.bytes_of(gpu.memory_bytes)).or_else(|| settings.memory_unit.bytes_of(known.pod.memory_units()))
        else {
            continue;
        };
        if bytes > 0 && bytes < gpu.memory_bytes {
            env.insert(format!("CUDA_DEVICE_MEMORY_LIMIT_{at}"), format!("{}m", bytes >> 20));
        }
    }
    let core = gpus.first().and_then(|gpu| held(gpu)).map_or(0, |held| held.core);
    if core > 0 && core < 100 {
        env.insert("CUDA_DEVICE_SM_LIMIT".to_owned(), core.to_string());
    }
    env
}

#[cfg(test)]
mod tests;

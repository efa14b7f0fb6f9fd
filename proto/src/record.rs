//! The allocation record of a pod: the devices that the scheduler assigned to it, in the annotations of Koordinator and of the
//! old gpushare extender.
//!
//! Nothing here compares a record with the devices of a node.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::annotation::{AnnotationError, keys};
use crate::device::{TYPE_GPU, VirtualFunction};
use crate::pod::null_as_default;
use crate::quantity::Quantity;
use crate::resource::canonical;

/// Pod annotation, on every pod that the scheduler places: JSON of [`DeviceAllocations`], as Koordinator writes it.
pub const DEVICE_ALLOCATED: &str = "scheduling.koordinator.sh/device-allocated";
/// Pod annotation, on every pod that the scheduler places: the assume time in unix nanoseconds (Koordinator).
pub const BIND_TIMESTAMP: &str = "scheduling.koordinator.sh/bind-timestamp";
/// Pod annotation: the minor numbers of the GPUs, such as `0,1`, for other projects' device plugins (Koordinator).
pub const GPU_MINORS: &str = "scheduling.koordinator.sh/gpu-minors";
/// Pod annotation, and variable of the pod's containers: the minor number of the chosen GPU (gpushare).
pub const MEM_IDX: &str = "ALIYUN_COM_GPU_MEM_IDX";
/// Pod annotation: the memory units that the pod requests (gpushare).
pub const MEM_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
/// Pod annotation: all memory units of the chosen GPU (gpushare).
pub const MEM_DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";
/// Pod annotation: `false` from bind on, `true` once kubelet has allocated the device (gpushare).
pub const MEM_ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
/// Pod annotation: the assume time in unix nanoseconds (gpushare). The old gpushare plugin replaces it with the time of Allocate.
pub const MEM_ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// Variable of a container: the memory units that the container requests (gpushare).
pub const MEM_CONTAINER: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";

/// Variable of a container: the GPUs that NVIDIA's runtime shows. The manifest wins over a device plugin, CDI over both.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Variable of a container: the UUIDs of its GPUs, separated by commas; with CDI [`VISIBLE_DEVICES`] is `void`.
pub const GPU_DEVICES: &str = "GPUSHARE_GPU_DEVICES";
/// Variable of a container: the PCI addresses of its RDMA network adapters, separated by commas.
pub const RDMA_DEVICES: &str = "GPUSHARE_RDMA_DEVICES";
/// Variable of a container: the PCI addresses of its virtual functions of network adapters, in the place of [`RDMA_DEVICES`].
pub const RDMA_FUNCTIONS: &str = "GPUSHARE_RDMA_FUNCTIONS";
/// Variable of a container: the PCI addresses of its FPGA cards, separated by commas.
pub const FPGA_DEVICES: &str = "GPUSHARE_FPGA_DEVICES";
/// Variable of a container: the PCI addresses of its virtual functions of FPGA cards, in the place of [`FPGA_DEVICES`].
pub const FPGA_FUNCTIONS: &str = "GPUSHARE_FPGA_FUNCTIONS";

/// Variable of a container: the MiB that the driver reserves on each GPU, for NVIDIA's hook `apply-cuda-memory-limits`.
pub const DRIVER_MEMORY_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";
/// Variable of a container: the limit in MiB on each of its GPUs. The hook does nothing unless both variables are there.
pub const DRIVER_MEMORY_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";

/// Longest record that is read, in bytes; the API server allows 256 KiB for all annotations of an object.
const MAX_RECORD_BYTES: usize = 256 * 1024;

type Annotations = BTreeMap<String, String>;

/// The devices of a pod by device type, such as `gpu`. Several entries for one device add up.
pub type DeviceAllocations = BTreeMap<String, Vec<DeviceAllocation>>;

/// The part of one device that a pod holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceAllocation {
    /// Minor number of the device.
    pub minor: i32,
    /// The amounts of the device that the pod holds, by resource name; none for a pod that sees all GPUs of its node.
    // The misspelt name is that of the example in the proposal "Fine-grained device scheduling".
    #[serde(default, alias = "resouurces", deserialize_with = "canonical_names")]
    pub resources: BTreeMap<String, Quantity>,
    /// UUID of a GPU, PCI address of another device; empty in records of old writers.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Virtual functions (`vfs`), and templates of vendors, which are passed through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extension: Option<Value>,
}

const FUNCTIONS: &str = "vfs";

impl DeviceAllocation {
    /// The virtual functions that the pod holds instead of the device itself. One that cannot be read still counts.
    pub fn functions(&self) -> Vec<VirtualFunction> {
        // The extension is of any form: vendors' plugins put templates of their own there.
        let extension = self.extension.as_ref().unwrap_or(&Value::Null);
        match keys::field(extension, FUNCTIONS) {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(entries)) => entries.iter().map(read_function).collect(),
            // Anything but a list counts as one unknown function, so that the pod is not taken to hold the device itself.
            Some(_) => vec![read_function(&Value::Null)],
        }
    }

    /// The allocation, with these virtual functions of the device instead of the device itself; unchanged if there are none.
    #[must_use]
    pub fn with_functions(self, functions: &[VirtualFunction]) -> Self {
        let extension = (!functions.is_empty()).then(|| json!({FUNCTIONS: functions}));
        Self {
            extension: extension.or(self.extension),
            ..self
        }
    }
}

/// Reads an entry of the list of virtual functions; the number is -1 and the address empty if they cannot be read.
fn read_function(entry: &Value) -> VirtualFunction {
    let minor = keys::field(entry, "minor").and_then(Value::as_i64);
    let bus_id = keys::field(entry, "busID").and_then(Value::as_str);
    VirtualFunction {
        minor: i32::try_from(minor.unwrap_or(-1)).unwrap_or(-1),
        bus_id: bus_id.unwrap_or_default().to_owned(),
    }
}

/// The annotations that the old gpushare extender writes, and this scheduler for pods that request `aliyun.com/gpu-mem`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpushareRecord {
    /// Minor number of the chosen GPU.
    pub idx: u32,
    /// The memory units that the pod requests; 0 if the writer left them out.
    pub pod_units: u64,
    /// All memory units of the chosen GPU; 0 if the writer left them out.
    pub device_units: u64,
    /// True once kubelet has allocated the device.
    pub assigned: bool,
}

/// The allocation record of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Koordinator's record; empty on pods that the old gpushare extender placed.
    pub allocations: DeviceAllocations,
    /// The assume time in unix nanoseconds; koord-scheduler writes it only with the feature gate `DevicePluginAdaption`.
    pub assumed_at: Option<u64>,
    /// The annotations of the old gpushare extender; `None` on pods that do not request `aliyun.com/gpu-mem`.
    pub gpushare: Option<GpushareRecord>,
}

impl Record {
    /// Reads the record in a pod's annotations, if any. After an error the pod must be counted conservatively, not ignored.
    pub fn read(annotations: &Annotations) -> Result<Option<Self>, AnnotationError> {
        let allocations = read_allocations(annotations)?;
        let mut by_type = allocations.iter().flat_map(BTreeMap::values);
        let names_devices = by_type.any(|devices| !devices.is_empty());
        let gpushare = match read_gpushare(annotations) {
            // Annotations of the old extender may be left over from a copied manifest: Koordinator's record alone decides.
            Err(_) if names_devices => None,
            read => read?,
        };
        // An assume time alone is no record: a pod may have kept it from a copied manifest.
        if gpushare.is_none() && allocations.is_none() {
            return Ok(None);
        }
        // Koordinator's key counts first: it is on every pod that this scheduler places. If Koordinator's record names devices, a
        // time of the old extender that does not parse is no error.
        let assumed_at = match number(annotations, BIND_TIMESTAMP)? {
            Some(nanos) => Some(nanos),
            None if names_devices => number(annotations, MEM_ASSUME_TIME).unwrap_or_default(),
            None => number(annotations, MEM_ASSUME_TIME)?,
        };
        Ok(Some(Self {
            allocations: allocations.unwrap_or_default(),
            assumed_at,
            gpushare,
        }))
    }

    /// The annotations of the record.
    pub fn annotations(&self) -> Annotations {
        let mut annotations = BTreeMap::new();
        let mut put = |key: &str, value: String| {
            annotations.insert(key.to_owned(), value);
        };
        if let Ok(json) = serde_json::to_string(&self.allocations)
            && !self.allocations.is_empty()
        {
            put(DEVICE_ALLOCATED, json);
        }
        let gpus = self.allocations.get(TYPE_GPU).into_iter().flatten();
        let minors: Vec<String> = gpus.map(|gpu| gpu.minor.to_string()).collect();
        // Not an empty text, which other projects' plugins would read as a GPU without a number.
        if !minors.is_empty() {
            put(GPU_MINORS, minors.join(","));
        }
        if let Some(nanos) = self.assumed_at {
            put(BIND_TIMESTAMP, nanos.to_string());
        }
        // No other pods get these: the old gpushare plugin would take them for its own.
        if let Some(gpushare) = self.gpushare {
            put(MEM_IDX, gpushare.idx.to_string());
            put(MEM_POD, gpushare.pod_units.to_string());
            put(MEM_DEV, gpushare.device_units.to_string());
            put(MEM_ASSIGNED, gpushare.assigned.to_string());
            // The old gpushare plugin orders pods by this key, and does not know Koordinator's.
            put(MEM_ASSUME_TIME, self.assumed_at.unwrap_or_default().to_string());
        }
        annotations
    }
}

fn read_allocations(annotations: &Annotations) -> Result<Option<DeviceAllocations>, AnnotationError> {
    let Some(text) = annotations.get(DEVICE_ALLOCATED) else {
        return Ok(None);
    };
    if text.len() > MAX_RECORD_BYTES {
        let rule = format!("longer than {MAX_RECORD_BYTES} bytes");
        return Err(AnnotationError::of_value(DEVICE_ALLOCATED, text, rule));
    }
    let read = serde_json::from_str(text).and_then(keys::read_value);
    read.map(Some)
        .map_err(|cause| AnnotationError::of_value(DEVICE_ALLOCATED, text, cause.to_string()))
}

/// Reads amounts by resource, deprecated names as the current ones; `null`, as Go writes a nil map, is empty.
fn canonical_names<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Quantity>, D::Error> {
    let mut resources = BTreeMap::new();
    for (name, amount) in null_as_default::<_, BTreeMap<String, Quantity>>(deserializer)? {
        resources.insert(canonical(&name).to_owned(), amount);
    }
    Ok(resources)
}

/// Reads the annotations of the gpushare dialect; `None` if the pod has no [`MEM_IDX`].
fn read_gpushare(annotations: &Annotations) -> Result<Option<GpushareRecord>, AnnotationError> {
    let Some(text) = annotations.get(MEM_IDX) else {
        return Ok(None);
    };
    let idx = text
        .parse()
        .map_err(|_| AnnotationError::of_value(MEM_IDX, text, "not the number of a GPU"))?;
    let assigned = match annotations.get(MEM_ASSIGNED).map(String::as_str) {
        Some("true") => true,
        None | Some("false") => false,
        Some(other) => {
            let rule = "neither true nor false";
            return Err(AnnotationError::of_value(MEM_ASSIGNED, other, rule));
        }
    };
    Ok(Some(GpushareRecord {
        idx,
        pod_units: number(annotations, MEM_POD)?.unwrap_or_default(),
        device_units: number(annotations, MEM_DEV)?.unwrap_or_default(),
        assigned,
    }))
}

fn number(annotations: &Annotations, key: &'static str) -> Result<Option<u64>, AnnotationError> {
    let Some(text) = annotations.get(key) else {
        return Ok(None);
    };
    let number = text.parse().map(Some);
    number.map_err(|_| AnnotationError::of_value(key, text, "not a whole number"))
}

#[cfg(test)]
mod tests;

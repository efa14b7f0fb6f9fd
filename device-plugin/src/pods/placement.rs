//! Which devices a pod's annotations name, read in the terms of either dialect.
//!
//! Knows no inventory: whether the named devices exist is the answerer's business.

use std::collections::BTreeMap;
use std::fmt;

use proto::device::TYPE_GPU;
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations, GpushareRecord, MEM_ASSUME_TIME, MEM_IDX, Record, RecordError,
};
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use crate::inventory::{Gpu, GpuUuid, InvalidGpuUuid};

/// How an annotation names a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// By UUID, in records of this project's scheduler.
    Uuid(GpuUuid),
    /// By minor number, in records of the old gpushare extender.
    Minor(u32),
}

impl GpuName {
    /// Whether this names the GPU.
    pub fn names(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Uuid(uuid) => *uuid == gpu.uuid,
            Self::Minor(minor) => *minor == gpu.minor,
        }
    }
}

/// What a pod holds of one GPU, as far as its record says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Memory in bytes.
    pub bytes: Option<u64>,
    /// Memory in percent of the GPU.
    pub ratio: Option<u64>,
    /// Percent of computing power; 0 if none was asked for.
    pub core: u64,
}

impl Held {
    /// Its memory of a GPU that has so many bytes.
    pub fn bytes_of(&self, total: u64) -> Option<u64> {
        let of_ratio = |ratio: u64| u64::try_from(u128::from(total) * u128::from(ratio) / 100).unwrap_or(u64::MAX);
        self.bytes.or_else(|| self.ratio.map(of_ratio))
    }
}

/// The usable record of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The pod's devices, at least one, in the record's order.
    pub gpus: Vec<GpuName>,
    /// What it holds of each of them, in the same order.
    pub held: Vec<Held>,
    /// The record as it is written, in Koordinator's form; empty on pods that the old gpushare extender placed.
    pub allocations: DeviceAllocations,
    /// When the scheduler assumed the pod, unix nanoseconds.
    pub assumed_at: u64,
    /// gpushare's own annotations, if it has them.
    pub gpushare: Option<GpushareRecord>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, gpu) in self.gpus.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "," })?;
            match gpu {
                GpuName::Uuid(uuid) => uuid.fmt(f)?,
                GpuName::Minor(minor) => write!(f, "minor {minor}")?,
            }
        }
        Ok(())
    }
}

/// Why a pod has no usable record. Shown to the pod's owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unplaced {
    /// An annotation that must be there is not.
    #[error("annotation {key} is missing: it was not placed by gpushare-scheduler")]
    Missing {
        /// The annotation.
        key: &'static str,
    },
    /// An annotation does not parse.
    #[error("{0}")]
    Unreadable(RecordError),
    /// The record is JSON of the right form and names no GPU.
    #[error("annotation {DEVICE_ALLOCATED} names no GPU")]
    NoGpu,
    /// The record names a GPU by something that cannot be one.
    #[error("annotation {DEVICE_ALLOCATED}: {0}")]
    BadGpu(String),
    /// The two dialects' annotations name different GPUs.
    #[error("annotation {MEM_IDX} is {idx}, which is not the GPU that annotation {DEVICE_ALLOCATED} names (minor {minor})")]
    Contradiction {
        /// What gpushare's annotation says.
        idx: u32,
        /// What Koordinator's says.
        minor: i32,
    },
}

impl Placement {
    /// Reads a pod's annotations; `asks_for_units` says which dialect's annotation is missed when there is none.
    pub(super) fn read(annotations: &BTreeMap<String, String>, asks_for_units: bool) -> Result<Self, Unplaced> {
        let missing = |units, other| Unplaced::Missing { key: if asks_for_units { units } else { other } };
        let record = Record::read(annotations).map_err(Unplaced::Unreadable)?;
        let record = record.ok_or_else(|| missing(MEM_IDX, DEVICE_ALLOCATED))?;
        let assumed_at = record.assumed_at;
        let placement = Self::of_record(record, assumed_at.unwrap_or_default())?;
        assumed_at.map(|_| placement).ok_or_else(|| missing(MEM_ASSUME_TIME, BIND_TIMESTAMP))
    }

    /// What a record says that was assumed then.
    ///
    /// # Errors
    /// It names no GPU, or something that cannot be one.
    pub fn of_record(record: Record, assumed_at: u64) -> Result<Self, Unplaced> {
        let (gpus, held) = named_gpus(&record)?.into_iter().unzip();
        Ok(Self { gpus, held, assumed_at, gpushare: record.gpushare, allocations: record.allocations })
    }

    /// The record that an exchange has given to a pod whose annotations say `told`.
    pub(super) fn exchanged(allocations: &DeviceAllocations, told: &Result<Self, Unplaced>) -> Result<Self, Unplaced> {
        let told = told.as_ref().ok();
        let only = allocations.get(TYPE_GPU).and_then(|devices| devices.first()).and_then(|device| u32::try_from(device.minor).ok());
        let gpushare = told.and_then(|told| told.gpushare).zip(only).map(|(record, idx)| GpushareRecord { idx, ..record });
        let assumed_at = told.map(|told| told.assumed_at);
        Self::of_record(Record { allocations: allocations.clone(), assumed_at, gpushare }, assumed_at.unwrap_or_default())
    }

    /// The record in Koordinator's form, also of a pod that has only gpushare's annotations.
    pub fn to_allocations(&self, memory_unit: MemoryUnit) -> DeviceAllocations {
        let (Some(GpuName::Minor(minor)), Some(gpushare), true) = (self.gpus.first(), self.gpushare, self.allocations.is_empty()) else {
            return self.allocations.clone();
        };
        let bytes = gpushare.pod_units.saturating_mul(memory_unit.bytes());
        let resources = (bytes > 0).then(|| (GPU_MEMORY.to_owned(), Quantity::from_unsigned(bytes)));
        let device = DeviceAllocation {
            minor: i32::try_from(*minor).unwrap_or(i32::MAX),
            resources: resources.into_iter().collect(),
            ..DeviceAllocation::default()
        };
        [(TYPE_GPU.to_owned(), vec![device])].into()
    }

    /// Whether the devices have been handed over before.
    pub fn is_assigned(&self) -> bool {
        self.gpushare.is_some_and(|gpushare| gpushare.assigned)
    }

    /// Whether every one of these GPUs is one of the pod's.
    pub fn includes(&self, gpus: &[Gpu]) -> bool {
        gpus.iter().all(|gpu| self.gpus.iter().any(|name| name.names(gpu)))
    }
}

fn named_gpus(record: &Record) -> Result<Vec<(GpuName, Held)>, Unplaced> {
    let Some(allocations) = record.allocations.get(TYPE_GPU).filter(|allocations| !allocations.is_empty()) else {
        let gpushare = record.gpushare.ok_or(Unplaced::NoGpu)?;
        return Ok(vec![(GpuName::Minor(gpushare.idx), Held::default())]);
    };
    if let (Some(gpushare), [only]) = (record.gpushare, allocations.as_slice())
        && i64::from(gpushare.idx) != i64::from(only.minor)
    {
        return Err(Unplaced::Contradiction { idx: gpushare.idx, minor: only.minor });
    }
    let bad = |cause: &dyn ToString| Unplaced::BadGpu(cause.to_string());
    let mut gpus = Vec::<(GpuName, Held)>::with_capacity(allocations.len());
    for allocation in allocations {
        let name = if allocation.id.is_empty() {
            let minor = u32::try_from(allocation.minor).map_err(|_| bad(&format!("minor {} is no GPU", allocation.minor)))?;
            GpuName::Minor(minor)
        } else {
            GpuName::Uuid(allocation.id.parse().map_err(|error: InvalidGpuUuid| bad(&error))?)
        };
        if !gpus.iter().any(|(known, _)| *known == name) {
            let amount = |resource: &str| allocation.resources.get(resource).and_then(|amount| amount.unsigned());
            let held = Held { bytes: amount(GPU_MEMORY), ratio: amount(GPU_MEMORY_RATIO), core: amount(GPU_CORE).unwrap_or(0) };
            gpus.push((name, held));
        }
    }
    Ok(gpus)
}

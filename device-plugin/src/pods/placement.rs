//! Which devices a pod's annotations name, read in the terms of either dialect.
//!
//! Knows no inventory: whether the named devices exist is the answerer's business.

use std::collections::BTreeMap;
use std::fmt;

use proto::device::TYPE_GPU;
use proto::record::{BIND_TIMESTAMP, DEVICE_ALLOCATED, GpushareRecord, MEM_ASSUME_TIME, MEM_IDX, Record, RecordError};

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

/// The usable record of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The pod's devices, at least one, in the record's order.
    pub gpus: Vec<GpuName>,
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
        let gpus = named_gpus(&record)?;
        let assumed_at = record.assumed_at.ok_or_else(|| missing(MEM_ASSUME_TIME, BIND_TIMESTAMP))?;
        Ok(Self { gpus, assumed_at, gpushare: record.gpushare })
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

fn named_gpus(record: &Record) -> Result<Vec<GpuName>, Unplaced> {
    let Some(allocations) = record.allocations.get(TYPE_GPU).filter(|allocations| !allocations.is_empty()) else {
        let gpushare = record.gpushare.ok_or(Unplaced::NoGpu)?;
        return Ok(vec![GpuName::Minor(gpushare.idx)]);
    };
    if let (Some(gpushare), [only]) = (record.gpushare, allocations.as_slice())
        && i64::from(gpushare.idx) != i64::from(only.minor)
    {
        return Err(Unplaced::Contradiction { idx: gpushare.idx, minor: only.minor });
    }
    let bad = |cause: &dyn ToString| Unplaced::BadGpu(cause.to_string());
    let mut gpus = Vec::with_capacity(allocations.len());
    for allocation in allocations {
        let name = if allocation.id.is_empty() {
            let minor = u32::try_from(allocation.minor).map_err(|_| bad(&format!("minor {} is no GPU", allocation.minor)))?;
            GpuName::Minor(minor)
        } else {
            GpuName::Uuid(allocation.id.parse().map_err(|error: InvalidGpuUuid| bad(&error))?)
        };
        if !gpus.contains(&name) {
            gpus.push(name);
        }
    }
    Ok(gpus)
}

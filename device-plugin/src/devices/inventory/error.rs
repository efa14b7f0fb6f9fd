//! Errors of listing and watching devices.

use std::error::Error;
use std::path::PathBuf;

/// An error of a [`DeviceSource`](super::source::DeviceSource). The variants are those that the daemon treats in different ways.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors show the fields")]
pub enum InventoryError {
    /// The machine has no devices (yet): no library, driver, file or GPU. Waiting may help, and a node without GPUs is no fault.
    #[error("{problem}")]
    Absent {
        problem: String,
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
    },
    /// There are GPUs and none of them can be shared. Only an operator changes that, so the daemon waits instead of ending, which
    /// would make kubelet restart it again and again.
    #[error("none of the GPUs that {} lists can be shared: {reasons}", path.display())]
    NothingToShare { path: PathBuf, reasons: String },
    /// The container was created with another driver, or with none; only a new container gets the library of the present one.
    #[error("this container does not have the library of this node's NVIDIA driver: {how}")]
    DriverReplaced { how: String },
    /// The devices cannot be listed although the driver or the file is there: a fault that needs an operator.
    #[error("{problem}")]
    Failed {
        problem: String,
        #[source]
        source: Option<Box<dyn Error + Send + Sync>>,
    },
}

impl InventoryError {
    pub(super) fn absent(problem: String) -> Self {
        Self::Absent {
            problem,
            source: None,
        }
    }

    pub(super) fn failed(problem: String, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Failed {
            problem,
            source: Some(Box::new(source)),
        }
    }

    /// The reason in one word, for a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Absent { .. } => "GPUsNotFound",
            Self::NothingToShare { .. } => "GPUNotShared",
            Self::DriverReplaced { .. } => "DriverLibraryMissing",
            Self::Failed { .. } => "DriverFails",
        }
    }

    /// Returns true if the machine has no devices that can be shared (yet).
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::Absent { .. } | Self::NothingToShare { .. })
    }
}

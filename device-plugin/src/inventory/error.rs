//! Errors of listing and watching devices.

use std::{io, path::PathBuf};

/// An error of a [`Source`](super::Source).
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// NVML cannot be loaded: usually no driver, or it is not mounted into the container.
    #[error(
        "cannot load the NVIDIA management library {}: install the NVIDIA driver on this node, run this container with \
         the NVIDIA runtime so that the library is mounted, or name the driver's directory with --driver-root",
        library.display()
    )]
    LibraryMissing {
        /// The library.
        library: PathBuf,
        /// The error of the dynamic loader.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No driver directory has the library.
    #[error(
        "no {} in {}: install the NVIDIA driver on this node, or name with --driver-root the directory that holds it",
        library.display(),
        roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoDriverRoot {
        /// The directories.
        roots: Vec<PathBuf>,
        /// The file name of the library.
        library: PathBuf,
    },
    /// The container was created with another driver, or with none; only a new container gets the library of the present one.
    #[error("the NVIDIA driver of this node is not the one that this container was created with: {how}")]
    DriverReplaced {
        /// The evidence.
        how: String,
    },
    /// The library of a driver root is of another version than the kernel driver.
    #[error("{} is of another version than the loaded NVIDIA kernel driver: load the driver's modules again, or reboot this node", library.display())]
    DriverMismatch {
        /// The library.
        library: PathBuf,
    },
    /// NVML is there, the kernel driver is not.
    #[error(
        "{} is present but the NVIDIA kernel driver is not loaded: check `lsmod | grep nvidia` and the kernel log of this \
         node",
        library.display()
    )]
    DriverNotLoaded {
        /// The library.
        library: PathBuf,
    },
    /// The source works and lists no GPU.
    #[error(
        "{} lists no GPU: keep this daemon off nodes without GPUs (node selector), or pass the devices to its container",
        path.display()
    )]
    NoGpu {
        /// The library or the file.
        path: PathBuf,
    },
    /// The machine has no device of the wanted types.
    #[error("{} shows no device of the types that --look-for names", path.display())]
    NoDevice {
        /// The mount point of sysfs.
        path: PathBuf,
    },
    /// There are GPUs and none of them can be shared.
    #[error("none of the GPUs that {} lists can be shared: {reasons}", path.display())]
    NothingToShare {
        /// The library or the file.
        path: PathBuf,
        /// Each GPU with the reason that it is left out.
        reasons: String,
    },
    /// An NVML call failed.
    #[error("NVML: cannot {operation}")]
    Nvml {
        /// The attempted operation.
        operation: String,
        /// NVML's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file of simulated devices cannot be read.
    #[error("cannot read the device file {}", path.display())]
    ReadFile {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file of simulated devices is not a JSON object.
    #[error("the device file {} is not a JSON object", path.display())]
    FileForm {
        /// The file.
        path: PathBuf,
        /// The parser's error, with the position or the field.
        #[source]
        source: serde_json::Error,
    },
    /// A field of the file of simulated devices is invalid.
    #[error("the device file {}, {device}, field {field}: {value}: {problem}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The device, by its position in the list and its UUID, or `top level`.
        device: String,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The rule that the value breaks.
        problem: String,
    },
    /// The watch thread cannot be started.
    #[error("cannot start the thread that watches the devices")]
    Thread {
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

impl InventoryError {
    /// Returns true if there are GPUs and each is left out for a reason of its own, such as MIG mode. Only an operator changes that,
    /// so the daemon waits instead of ending, which would make kubelet restart it again and again.
    pub fn is_by_choice(&self) -> bool {
        matches!(self, Self::NothingToShare { .. })
    }

    /// Returns true if the machine has no devices (yet): no library, driver, file or GPU. Waiting may help, and a node without GPUs
    /// is no fault; every other error needs an operator.
    pub fn is_absence(&self) -> bool {
        match self {
            Self::LibraryMissing { .. }
            | Self::NoDriverRoot { .. }
            | Self::DriverNotLoaded { .. }
            | Self::DriverMismatch { .. }
            | Self::NoGpu { .. }
            | Self::NoDevice { .. }
            | Self::NothingToShare { .. } => true,
            Self::ReadFile { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::DriverReplaced { .. }
            | Self::Nvml { .. }
            | Self::FileForm { .. }
            | Self::Field { .. }
            | Self::Thread { .. } => false,
        }
    }
}

//! Finds and loads NVIDIA's management library.
//!
//! A container gets the library from NVIDIA's runtime, as a mount made with the container; or it sees the directory in which
//! the node keeps its driver, which also shows a driver that was installed later.

use std::path::{Path, PathBuf};

use nvml_wrapper::{Nvml, error::NvmlError};

use super::{NvmlSource, failed};
use crate::inventory::InventoryError;

/// Where the library is below the root of a driver: with distributions and NVIDIA's driver container, as NVIDIA's own tools look
/// for it; then with Container-Optimized OS (`lib64` below its driver directory), Talos and Bottlerocket.
const DIRECTORIES: [&str; 12] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/local/glibc/usr/lib",
    "usr/lib/nvidia/tesla",
];

impl NvmlSource {
    /// Begins a session.
    pub(super) fn open(&self) -> Result<Nvml, InventoryError> {
        let library = self.found_library()?;
        Nvml::builder()
            .lib_path(library.as_os_str())
            .init()
            .map_err(|error| match error {
                NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_)
                    if self.is_stale_container() =>
                {
                    InventoryError::DriverReplaced {
                        how: "it was installed after this container was made".to_owned(),
                    }
                }
                NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
                    InventoryError::LibraryMissing {
                        library,
                        source: Box::new(error),
                    }
                }
                NvmlError::DriverNotLoaded => InventoryError::DriverNotLoaded { library },
                NvmlError::LibRmVersionMismatch if self.driver_roots.is_empty() => {
                    InventoryError::DriverReplaced {
                        how: "it is of another version than the library that this container has".to_owned(),
                    }
                }
                // The library in a driver root changes with the driver, so this container can stay.
                NvmlError::LibRmVersionMismatch => InventoryError::DriverMismatch { library },
                error => failed("begin a session", error),
            })
    }

    /// The library in the first driver root that has one; without driver roots the one that is configured.
    fn found_library(&self) -> Result<PathBuf, InventoryError> {
        if self.driver_roots.is_empty() {
            return Ok(self.library.clone());
        }
        let name = self
            .library
            .file_name()
            .map_or_else(|| Path::new("libnvidia-ml.so.1"), Path::new);
        let all = self.driver_roots.iter().flat_map(|root| {
            DIRECTORIES
                .iter()
                .map(move |directory| root.join(directory).join(name))
        });
        let mut all = all.filter(|path| path.exists());
        all.next().ok_or_else(|| InventoryError::NoDriverRoot {
            roots: self.driver_roots.clone(),
            library: name.to_owned(),
        })
    }

    /// Returns true if a driver is loaded although this container has no library: it gets one only when it is created.
    fn is_stale_container(&self) -> bool {
        self.driver_roots.is_empty() && self.sysfs.join("module/nvidia").exists()
    }
}

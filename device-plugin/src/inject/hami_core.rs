//! The operator's own HAMi-core library on the node. Nothing of HAMi-core is part of this project.

use std::path::PathBuf;

/// The library, which enforces limits in containers that load it.
const LIBRARY: &str = "libvgpu.so";

/// The file by which the dynamic loader loads the library into every program of a container.
const PRELOAD: &str = "ld.so.preload";

/// The place of [`PRELOAD`] in a container.
const LOADER_FILE: &str = "/etc/ld.so.preload";

/// The directory of the library, at the same path on the host and in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HamiCore {
    dir: PathBuf,
}

impl HamiCore {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(crate) fn exists(&self) -> bool {
        self.dir.join(LIBRARY).is_file()
    }

    /// The files that a container with limits gets, each as its paths on the host and in the container.
    pub(crate) fn files(&self) -> Vec<(PathBuf, PathBuf)> {
        let mut files = Vec::new();
        // The operator may copy the library to the node later, so each call looks for it.
        if self.exists() {
            let library = self.dir.join(LIBRARY);
            files.push((library.clone(), library));
            let preload = self.dir.join(PRELOAD);
            if preload.is_file() {
                files.push((preload, PathBuf::from(LOADER_FILE)));
            }
        }
        files
    }
}

//! The directory of a node into which the plugin writes CDI specs; tests block and empty it.
//!
//! A file in place of the directory blocks it. Permissions would not stop root, as which the testbed may run.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::files;
use crate::kubelet::KubeletConfig;

/// The number of times that a change is tried: the plugin creates the directory again as soon as it is missing.
const TRIES: usize = 1000;

/// The directory of CDI specs that the plugin writes to.
#[derive(Debug)]
pub struct CdiDir {
    path: PathBuf,
    aside: PathBuf,
}

impl CdiDir {
    /// The directory of a node.
    pub fn of(config: &KubeletConfig) -> Result<Self> {
        let path = config
            .cdi_dirs
            .last()
            .context("the node has no directory of CDI specs")?
            .clone();
        Ok(Self {
            aside: path.with_extension("aside"),
            path,
        })
    }

    /// Removes all specs.
    pub fn wipe(&self) -> Result<()> {
        remove(&self.path)?;
        match std::fs::create_dir(&self.path) {
            // The plugin was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => Ok(made?),
        }
    }

    /// Lets no process read or write specs.
    pub fn block(&self) -> Result<()> {
        files::make_dir(&self.path)?;
        std::fs::rename(&self.path, &self.aside)?;
        in_place_of(&self.path, || std::fs::write(&self.path, "not a directory"))
    }

    /// Lets all processes read and write specs in another directory, which may be a small file system.
    pub fn replace_by(&self, other: &Path) -> Result<()> {
        std::fs::rename(&self.path, &self.aside)?;
        in_place_of(&self.path, || std::os::unix::fs::symlink(other, &self.path))
    }

    /// Undoes [`CdiDir::block`].
    pub fn unblock(&self) -> Result<()> {
        in_place_of(&self.path, || std::fs::rename(&self.aside, &self.path))
    }
}

/// Replaces the file or directory at a path, and tries again if another one came in between.
fn in_place_of(path: &Path, put: impl Fn() -> io::Result<()>) -> Result<()> {
    let mut n_tries = 0;
    loop {
        n_tries += 1;
        match remove(path).and_then(|()| put()) {
            Err(_) if n_tries < TRIES => {}
            done => return done.with_context(|| format!("cannot replace {}", path.display())),
        }
    }
}

/// Removes a file or directory; it is no error if there is none.
fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

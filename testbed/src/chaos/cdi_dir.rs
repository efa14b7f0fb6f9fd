//! A node's directory of CDI specs, made unusable and usable again.
//!
//! Whoever runs this may be root, whom no permission keeps from writing: a file in place of the directory does.

use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::kubelet::KubeletConfig;

/// The directory.
#[derive(Debug)]
pub(super) struct CdiDir {
    path: PathBuf,
    aside: PathBuf,
}

impl CdiDir {
    pub(super) fn of(config: &KubeletConfig) -> Result<Self> {
        let path = config.cdi_dirs.first().context("the node has no directory of CDI specs")?.clone();
        Ok(Self { aside: path.with_extension("aside"), path })
    }

    /// Removes all specs.
    pub(super) fn wipe(&self) -> Result<()> {
        match std::fs::remove_dir_all(&self.path) {
            Ok(()) => std::fs::create_dir(&self.path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
        .with_context(|| format!("cannot empty {}", self.path.display()))
    }

    /// Lets nobody read or write specs.
    pub(super) fn block(&self) -> Result<()> {
        std::fs::create_dir_all(&self.path)
            .and_then(|()| std::fs::rename(&self.path, &self.aside))
            .and_then(|()| std::fs::write(&self.path, "not a directory"))
            .with_context(|| format!("cannot block {}", self.path.display()))
    }

    /// Undoes [`CdiDir::block`].
    pub(super) fn unblock(&self) -> Result<()> {
        std::fs::remove_file(&self.path)
            .and_then(|()| std::fs::rename(&self.aside, &self.path))
            .with_context(|| format!("cannot restore {}", self.path.display()))
    }
}

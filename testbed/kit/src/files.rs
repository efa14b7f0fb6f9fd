//! Reading and writing of files, with errors that name the file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The text of a file.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes a file, in place of one that is there.
pub fn write(path: &Path, content: &str) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Replaces a file in one step, so that no reader sees half of it.
pub fn replace(path: &Path, content: &str) -> Result<()> {
    let fresh = path.with_extension("new");
    write(&fresh, content)?;
    std::fs::rename(&fresh, path).with_context(|| format!("cannot write {}", path.display()))
}

/// Makes a directory and those above it.
pub fn make_dir(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

/// Removes a file, which must be there.
pub fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// The files of a directory with this extension, by name.
pub fn with_extension(dir: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        // A file that is removed meanwhile is left out.
        let Ok(entry) = entry else { continue };
        let path = entry.path();
        if path.extension().is_some_and(|found| found == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

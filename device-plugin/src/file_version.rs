//! Whether a file is still the one that was read: by what changes with its text, without reading it.
//!
//! Two texts written within one tick of the file system's clock, in place and of one length, are not told apart.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// What changes when a file is written, or another takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<&Metadata> for FileVersion {
    fn from(file: &Metadata) -> Self {
        let (modified, changed) = (
            (file.mtime(), file.mtime_nsec()),
            (file.ctime(), file.ctime_nsec()),
        );
        Self {
            inode: file.ino(),
            bytes: file.len(),
            modified,
            changed,
        }
    }
}

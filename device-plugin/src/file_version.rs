//! Detects changes of a file without reading it.
//!
//! A change is missed if it is written in place, keeps the length, and comes within one tick of the file system's clock after
//! the change before.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Properties of a file that change when it is written or replaced. The times are seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<&Metadata> for FileVersion {
    fn from(file: &Metadata) -> Self {
        Self {
            inode: file.ino(),
            bytes: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

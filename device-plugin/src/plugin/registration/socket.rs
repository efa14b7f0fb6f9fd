//! Socket files: ours, which may be removed by others, and how a file is told from its successor.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// What makes a file this one: a name stays the same, and inode numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl FileId {
    /// The file at `path`, if there is one.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }
}

/// A socket file that this process listens on. Dropping it removes the file, unless it is another by now.
#[derive(Debug)]
pub(super) struct OwnSocket {
    path: PathBuf,
    id: FileId,
}

impl OwnSocket {
    /// Listens at `path`; a socket that an earlier process left there is replaced.
    pub(super) fn bind(path: PathBuf) -> io::Result<(Self, UnixListener)> {
        match fs::symlink_metadata(&path) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(&path)?,
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "there is a file that is no socket",
                ));
            }
            Err(_) => {}
        }
        let listener = UnixListener::bind(&path)?;
        let id = FileId::of(&path)
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the socket has vanished"))?;
        Ok((Self { path, id }, listener))
    }

    /// Whether the file is still there and ours.
    pub(super) fn is_in_place(&self) -> bool {
        FileId::of(&self.path) == Some(self.id)
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if self.is_in_place() {
            // If that fails the next process replaces it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

//! Finds a library of the driver below the root of a system: first in the cache of that system's dynamic loader, then in the
//! folders that the loader's configuration names, and last in those in which distributions and vendors keep a driver.
//!
//! `deploy/which-node.sh` looks in the same places.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::root_dir::RootDir;

const CACHE: &str = "/etc/ld.so.cache";

const CONFIGURATION: &str = "/etc/ld.so.conf";

/// Most levels of configuration files that include others: files may include each other.
const MAX_INCLUDES: u32 = 8;

/// The library's folders below the root of a driver: with distributions and NVIDIA's driver container, in the order of NVIDIA's
/// own tools; then with Container-Optimized OS (`lib64` below its driver directory), Talos, Bottlerocket, NixOS, and
/// installations below `/usr/local` and `/opt`.
const FOLDERS: [&str; 18] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib",
    "/lib",
    "/usr/local/glibc/usr/lib",
    "/usr/lib/nvidia/tesla",
    "/run/opengl-driver/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/lib64",
    "/usr/local/lib",
    "/opt/nvidia/lib64",
];

/// The first bytes of a library for 32-bit programs.
const ELF_32: [u8; 5] = [0x7f, b'E', b'L', b'F', 1];

/// The file of the library in the first of these roots that has it, with all links followed.
pub(super) fn find_library(roots: &[PathBuf], name: &OsStr) -> Option<PathBuf> {
    roots.iter().find_map(|root| find_in(&RootDir::new(root), name))
}

fn find_in(root: &RootDir, name: &OsStr) -> Option<PathBuf> {
    let usable = |path: PathBuf| root.resolve(&path).filter(|file| is_usable(file));
    let from_cache = root.read(Path::new(CACHE)).unwrap_or_default();
    if let Some(found) = cached_paths(&from_cache, name).into_iter().find_map(usable) {
        return Some(found);
    }
    let mut folders = Vec::new();
    add_configured_folders(root, Path::new(CONFIGURATION), 0, &mut folders);
    folders.extend(FOLDERS.map(PathBuf::from));
    folders.into_iter().find_map(|folder| usable(folder.join(name)))
}

/// The paths of a library in the loader's cache. All versions of its format list paths that end with a zero byte.
fn cached_paths(cache: &[u8], name: &OsStr) -> Vec<PathBuf> {
    // The slash keeps out libraries whose longer names end like this one.
    let mut ending = vec![b'/'];
    ending.extend(name.as_bytes());
    let texts = cache.split(|byte| *byte == 0);
    let paths = texts.filter(|text| text.starts_with(b"/") && text.ends_with(&ending));
    paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect()
}

/// Adds the folders that a file of the loader's configuration names, with those of the files that it includes.
fn add_configured_folders(root: &RootDir, file: &Path, depth: u32, folders: &mut Vec<PathBuf>) {
    if depth > MAX_INCLUDES {
        return;
    }
    let bytes = root.read(file).unwrap_or_default();
    for line in String::from_utf8_lossy(&bytes).lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        match line.split_once(char::is_whitespace) {
            Some(("include", patterns)) => {
                for pattern in patterns.split_whitespace() {
                    // A relative pattern begins at the folder of the file that has it.
                    let pattern = file.parent().unwrap_or(file).join(pattern);
                    for included in root.expand(&pattern) {
                        add_configured_folders(root, &included, depth + 1, folders);
                    }
                }
            }
            _ if line.starts_with('/') => folders.push(PathBuf::from(line)),
            _ => {}
        }
    }
}

/// Returns true for a file that a 64-bit program may load: folders for 32-bit programs have a library of the same name.
fn is_usable(file: &Path) -> bool {
    let mut head = [0; ELF_32.len()];
    // A file that is shorter, or cannot be read, counts as usable: the loader's error then names the problem.
    let _ = File::open(file).and_then(|mut file| file.read_exact(&mut head));
    file.is_file() && head != ELF_32
}

#[cfg(test)]
mod tests;

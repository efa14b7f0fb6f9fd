//! CDI devices: their spec files, and the edits they make to a container.
//!
//! Looks at the directories anew at every container creation, and reads the files that have changed, as a runtime does
//! that refreshes its cache: files that have come, gone or been replaced, and those that define the devices in question, at
//! once; what was written into another file where it lies a moment later, as by a watch. A file that does not parse is
//! skipped; two files of one directory that define the same device define none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Deserialize;

/// The part of a spec's edits that a recorded container shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Edits {
    pub(crate) env: Vec<String>,
    pub(crate) device_nodes: Vec<DeviceNode>,
    pub(crate) mounts: Vec<MountPoint>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct DeviceNode {
    pub(crate) path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MountPoint {
    pub(crate) container_path: String,
}

impl Edits {
    fn append(&mut self, other: &Self) {
        self.env.extend(other.env.iter().cloned());
        self.device_nodes.extend(other.device_nodes.iter().cloned());
        self.mounts.extend(other.mounts.iter().cloned());
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    kind: String,
    #[serde(default)]
    container_edits: Edits,
    devices: Vec<SpecDevice>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: Edits,
}

/// Names that no spec defines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unresolvable CDI devices {}", .0.join(", "))]
pub(crate) struct Unresolvable(pub(crate) Vec<String>);

/// The specs of some directories, of which later ones take precedence.
#[derive(Debug)]
pub(crate) struct Specs {
    dirs: Vec<PathBuf>,
    cache: Mutex<Cache>,
}

/// What is known of the files.
#[derive(Debug, Default)]
struct Cache {
    /// What each file said when it was read last; nothing if it does not parse.
    parsed: HashMap<PathBuf, Parsed>,
    /// When every file was looked at.
    complete: Option<Instant>,
}

type Parsed = (Stamp, Option<Arc<Spec>>);

/// How long files that are neither new nor asked about are taken to be as they were.
const UNSEEN: Duration = Duration::from_millis(100);

/// What changes with a file's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    len: u64,
    inode: u64,
}

/// A device that some spec defines.
struct Found {
    path: PathBuf,
    spec: Arc<Spec>,
    /// Its place in the spec.
    at: usize,
}

impl Specs {
    /// The specs of these directories.
    pub(crate) fn of(dirs: Vec<PathBuf>) -> Self {
        Self { dirs, cache: Mutex::default() }
    }

    /// The edits of all `names`: of each spec once, before the first of its devices.
    pub(crate) fn resolve(&self, names: &[String]) -> Result<Edits, Unresolvable> {
        if names.is_empty() {
            return Ok(Edits::default());
        }
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let is_complete = cache.complete.is_none_or(|at| at.elapsed() >= UNSEEN);
        let mut found = self.find(names, &mut cache, is_complete);
        if !is_complete && found.len() < names.len() {
            found = self.find(names, &mut cache, true);
        }
        drop(cache);
        let missing: Vec<String> = names.iter().filter(|name| !found.contains_key(name.as_str())).cloned().collect();
        if !missing.is_empty() {
            return Err(Unresolvable(missing));
        }
        let mut edits = Edits::default();
        let mut seen = BTreeSet::new();
        for Found { path, spec, at } in names.iter().filter_map(|name| found.get(name.as_str())) {
            if seen.insert(path) {
                edits.append(&spec.container_edits);
            }
            if let Some(device) = spec.devices.get(*at) {
                edits.append(&device.container_edits);
            }
        }
        Ok(edits)
    }

    /// `is_complete` to look at every file.
    fn find<'n>(&self, names: &'n [String], cache: &mut Cache, is_complete: bool) -> BTreeMap<&'n str, Found> {
        if is_complete {
            cache.complete = Some(Instant::now());
        }
        let mut known = BTreeMap::new();
        let mut read = HashMap::new();
        for dir in &self.dirs {
            let mut in_dir: BTreeMap<&str, Vec<Found>> = BTreeMap::new();
            for (path, inode) in spec_files(dir) {
                let before = cache.parsed.remove(&path).filter(|(of, _)| of.inode == inode);
                let is_asked = |spec: &Spec| names.iter().any(|name| spec.places(name).next().is_some());
                let is_left = |(_, spec): &Parsed| !is_complete && !spec.as_deref().is_some_and(is_asked);
                let seen = if let Some(seen) = before.clone().filter(is_left) {
                    seen
                } else {
                    let Ok(stamp) = Stamp::of(&path) else { continue };
                    let same = before.filter(|(of, _)| *of == stamp);
                    same.unwrap_or_else(|| (stamp, read_spec(&path).map(Arc::new)))
                };
                let (_, spec) = &seen;
                if let Some(spec) = spec {
                    for (name, at) in names.iter().flat_map(|name| spec.places(name).map(move |at| (name.as_str(), at))) {
                        in_dir.entry(name).or_default().push(Found { path: path.clone(), spec: Arc::clone(spec), at });
                    }
                }
                read.insert(path, seen);
            }
            for (name, mut found) in in_dir {
                known.remove(name);
                if found.len() == 1
                    && let Some(only) = found.pop()
                {
                    known.insert(name, only);
                }
            }
        }
        cache.parsed = read;
        known
    }
}

impl Spec {
    /// Where the spec defines the device of this full name.
    fn places(&self, name: &str) -> impl Iterator<Item = usize> {
        let device = name.strip_prefix(&self.kind).and_then(|rest| rest.strip_prefix('='));
        self.devices.iter().enumerate().filter(move |(_, own)| Some(own.name.as_str()) == device).map(|(at, _)| at)
    }
}

/// The files and their inodes.
fn spec_files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let is_spec = |path: &PathBuf| path.extension().is_some_and(|ext| ext == "json" || ext == "yaml");
    entries.map(|entry| (entry.path(), entry.ino())).filter(|(path, _)| is_spec(path)).collect()
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        Ok(Self { modified: metadata.modified()?, len: metadata.len(), inode: metadata.ino() })
    }
}

fn read_spec(path: &Path) -> Option<Spec> {
    let text = std::fs::read_to_string(path).ok()?;
    // JSON is YAML, so that one parser does for both.
    serde_yaml_ng::from_str(&text).inspect_err(|error| tracing::warn!(path = %path.display(), %error, "CDI spec does not parse")).ok()
}

#[cfg(test)]
mod tests;

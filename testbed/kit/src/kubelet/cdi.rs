//! The runtime's cache of CDI specs, and the edits that their devices make to a container.
//!
//! It models the CDI package 1.1 that containerd and CRI-O use (`tags.cncf.io/container-device-interface`). A watch reads all
//! specs again after each change of a spec directory, and an injection between the change and that reading gets the earlier
//! content. A file that is moved in from another directory is not noticed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use serde::Deserialize;
use tokio_util::task::AbortOnDropHandle;

use crate::dice::dice;

/// The edits of a CDI spec that the model records.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct RecordedEdits {
    pub(crate) env: Vec<String>,
    pub(crate) device_nodes: Vec<DeviceNode>,
    pub(crate) mounts: Vec<MountPoint>,
    pub(crate) hooks: Vec<CdiHook>,
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

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct CdiHook {
    #[serde(default)]
    pub(crate) args: Vec<String>,
}

impl RecordedEdits {
    pub(crate) fn node_paths(&self) -> Vec<String> {
        self.device_nodes.iter().map(|node| node.path.clone()).collect()
    }

    pub(crate) fn mount_paths(&self) -> Vec<String> {
        self.mounts
            .iter()
            .map(|mount| mount.container_path.clone())
            .collect()
    }

    fn append(&mut self, other: &Self) {
        self.env.extend(other.env.iter().cloned());
        self.device_nodes.extend(other.device_nodes.iter().cloned());
        self.mounts.extend(other.mounts.iter().cloned());
        self.hooks.extend(other.hooks.iter().cloned());
    }
}

/// A CDI spec, and the version of the file that it was read from.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CdiSpec {
    /// Vendor and class, such as `nvidia.com/gpu`; `kind=name` is the full name of a device.
    kind: String,
    #[serde(default)]
    container_edits: RecordedEdits,
    devices: Vec<SpecDevice>,
    #[serde(skip)]
    file: SpecFileVersion,
}

/// The spec file as it was when the spec was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SpecFileVersion {
    path: PathBuf,
    inode: u64,
    modified: Option<SystemTime>,
    size: u64,
}

impl SpecFileVersion {
    /// Identifies the version of a spec file, so that a changed file is noticed.
    fn of(path: &Path, metadata: &Metadata) -> Self {
        Self {
            path: path.to_owned(),
            inode: metadata.ino(),
            modified: metadata.modified().ok(),
            size: metadata.len(),
        }
    }

    fn is_unchanged(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|now| Self::of(&self.path, &now) == *self)
    }
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: RecordedEdits,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unresolvable CDI devices {}", .0.join(", "))]
pub(crate) struct Unresolvable(pub(crate) Vec<String>);

/// CDI devices by fully qualified name, each with its spec and its index in the spec.
type CdiDevices = HashMap<String, (Arc<CdiSpec>, usize)>;

/// The edits of all `names`: of each spec once, before the first of its devices.
fn edits_of_all(devices: &CdiDevices, names: &[String]) -> Result<RecordedEdits, Unresolvable> {
    let mut missing = names.to_vec();
    missing.retain(|name| !devices.contains_key(name));
    if !missing.is_empty() {
        return Err(Unresolvable(missing));
    }
    let mut edits = RecordedEdits::default();
    let mut applied_specs: Vec<&Arc<CdiSpec>> = Vec::new();
    for (spec, index) in names.iter().filter_map(|name| devices.get(name)) {
        // InjectDevices of the CDI package: the edits of a spec apply once, however many of its devices a container gets.
        if !applied_specs.iter().any(|known| Arc::ptr_eq(known, spec)) {
            applied_specs.push(spec);
            edits.append(&spec.container_edits);
        }
        if let Some(device) = spec.devices.get(*index) {
            edits.append(&device.container_edits);
        }
    }
    Ok(edits)
}

/// Returns true if the spec file of a cached device has changed, and defines the device differently or not at all. A new file
/// that defines the device instead is not noticed.
fn is_stale(cached: &CdiDevices, name: &str) -> bool {
    let Some((spec, index)) = cached.get(name) else {
        return true;
    };
    // An unchanged file is not opened: gpushare's plugin watches for readers of its specs and would take this for the runtime.
    if spec.file.is_unchanged() {
        return false;
    }
    let Some(on_disk) = read_spec(&spec.file.path) else {
        return true;
    };
    let Some(cached_device) = spec.devices.get(*index) else {
        return true;
    };
    on_disk.kind != spec.kind
        || on_disk.container_edits != spec.container_edits
        || !on_disk.devices.contains(cached_device)
}

/// Reads every spec of these directories, of which the last has the highest priority.
fn read_all(dirs: &[PathBuf]) -> CdiDevices {
    let (mut all, mut conflicts) = (CdiDevices::new(), HashSet::new());
    for dir in dirs {
        let mut in_dir = CdiDevices::new();
        for path in spec_files(dir) {
            let Some(spec) = read_spec(&path) else { continue };
            let spec = Arc::new(spec);
            for (index, device) in spec.devices.iter().enumerate() {
                let name = format!("{}={}", spec.kind, device.name);
                if in_dir.insert(name.clone(), (Arc::clone(&spec), index)).is_some() {
                    conflicts.insert(name);
                }
            }
        }
        all.extend(in_dir);
    }
    // Cache.refresh: no directory of higher priority resolves a conflict between two files of one directory.
    all.retain(|name, _| !conflicts.contains(name));
    all
}

/// Resolves names by the specs as they are on disk, as programs without a cache do, such as NVIDIA's container runtime.
pub(crate) fn resolve_now(dirs: &[PathBuf], names: &[String]) -> Result<RecordedEdits, Unresolvable> {
    edits_of_all(&read_all(dirs), names)
}

/// The cache of one runtime; its watch ends when it is dropped.
#[derive(Debug)]
pub(crate) struct CdiCache {
    state: Arc<Mutex<CacheState>>,
    _watching: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct CacheState {
    dirs: Vec<PathBuf>,
    devices: CdiDevices,
    watches: inotify::Watches,
    tracked: BTreeMap<PathBuf, WatchDescriptor>,
}

impl CdiCache {
    /// The cache of a runtime that starts now. Each delay until a changed spec is read is a random part of `longest_delay`.
    pub(crate) fn start(dirs: Vec<PathBuf>, longest_delay: Duration, seed: u64) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let mut state = CacheState {
            dirs,
            devices: CdiDevices::new(),
            watches: inotify.watches(),
            tracked: BTreeMap::new(),
        };
        // Read after the watches are there, so that no change is missed.
        state.track_new();
        state.devices = read_all(&state.dirs);
        let state = Arc::new(Mutex::new(state));
        let watching = refresh_on_change(Arc::clone(&state), inotify, longest_delay, dice(seed, &["cdi"]));
        Ok(Self {
            state,
            _watching: AbortOnDropHandle::new(tokio::spawn(watching)),
        })
    }

    /// Returns the cached edits of all `names`, and the `names` whose spec on disk has other edits by now.
    pub(crate) fn inject(&self, names: &[String]) -> Result<(RecordedEdits, Vec<String>), Unresolvable> {
        let cached = {
            let mut state = self.state.lock();
            // refreshIfRequired: an injection reads the specs itself only if a directory has appeared, else it trusts the watch.
            if state.track_new() {
                state.devices = read_all(&state.dirs);
            }
            state.devices.clone()
        };
        let edits = edits_of_all(&cached, names)?;
        let mut stale = names.to_vec();
        stale.retain(|name| is_stale(&cached, name));
        Ok((edits, stale))
    }
}

impl CacheState {
    /// Watches the directories that have appeared; returns true if there were any.
    fn track_new(&mut self) -> bool {
        // As in the CDI package, without MOVED_TO.
        let mask = WatchMask::MODIFY
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        let mut has_new = false;
        for dir in &self.dirs {
            if !self.tracked.contains_key(dir)
                && let Ok(descriptor) = self.watches.add(dir, mask)
            {
                self.tracked.insert(dir.clone(), descriptor);
                has_new = true;
            }
        }
        has_new
    }
}

async fn refresh_on_change(
    state: Arc<Mutex<CacheState>>,
    inotify: Inotify,
    longest_delay: Duration,
    mut dice: StdRng,
) {
    let Ok(mut events) = inotify.into_event_stream(vec![0; 4096]) else {
        return;
    };
    while let Some(Ok(event)) = events.next().await {
        let is_spec = event.name.as_deref().is_some_and(is_spec_name);
        // A plugin writes a temporary file first, whose writes must not cost a read of all specs.
        if event.mask.contains(EventMask::MODIFY) && !is_spec {
            continue;
        }
        if !longest_delay.is_zero() {
            tokio::time::sleep(longest_delay.mul_f64(dice.random_range(0.0..1.0))).await;
        }
        let mut state = state.lock();
        if event.mask.intersects(EventMask::DELETE_SELF | EventMask::IGNORED) {
            state.tracked.retain(|_, known| *known != event.wd);
        }
        state.track_new();
        state.devices = read_all(&state.dirs);
    }
}

/// The CDI spec files of a directory in order of their names; none if it cannot be read.
fn spec_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if is_spec_name(&entry.file_name()) {
            files.push(entry.path());
        }
    }
    files.sort();
    files
}

fn is_spec_name(name: &OsStr) -> bool {
    // The CDI package reads no other files, so a plugin can prepare a spec under another name.
    let extension = Path::new(name).extension();
    extension.is_some_and(|extension| extension == "json" || extension == "yaml")
}

/// Reads a CDI spec in JSON or YAML; `None` if the file cannot be read, does not parse, or defines a device twice.
fn read_spec(path: &Path) -> Option<CdiSpec> {
    let mut opened = File::open(path).ok()?;
    let file = SpecFileVersion::of(path, &opened.metadata().ok()?);
    let mut text = String::new();
    opened.read_to_string(&mut text).ok()?;
    // JSON is YAML, but the JSON parser is much faster.
    let parsed = serde_json::from_str(&text).or_else(|_| serde_yaml_ng::from_str::<CdiSpec>(&text));
    let error = match parsed {
        Ok(spec) if has_unique_names(&spec.devices) => return Some(CdiSpec { file, ..spec }),
        Ok(_) => "it defines a device twice".to_owned(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(path = %path.display(), error, "CDI spec is not valid");
    None
}

fn has_unique_names(devices: &[SpecDevice]) -> bool {
    let mut names = HashSet::new();
    devices.iter().all(|device| names.insert(&device.name))
}

#[cfg(test)]
mod tests;

//! The runtime's cache of CDI specs, and the edits that their devices make to a container.
//!
//! It models the CDI package 1.1 that containerd and CRI-O use (`tags.cncf.io/container-device-interface`). A
//! watch reads all specs again after each change of a spec directory. An injection between the change and that
//! reading gets the earlier content. A new directory is noticed at the next injection or change, and a file
//! that is moved in from another directory is not noticed at all. A file that does not parse or defines a device
//! twice is skipped. A device that two files of one directory define is unresolvable, whatever other directories
//! define; otherwise later directories override earlier ones.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
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
    /// Adds the edits of another CDI device.
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

    /// Returns true if nothing has replaced or changed the file.
    fn is_unchanged(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|now| Self::of(&self.path, &now) == *self)
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: RecordedEdits,
}

/// The error for device names that no spec defines.
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

/// Returns true if the spec file of a cached device has changed, and defines the device differently or not at all.
///
/// Opens the file only if it has changed: gpushare's plugin watches for readers of its specs and would take
/// this for the runtime. A new file that defines the device instead is not noticed.
fn is_stale(cached: &CdiDevices, name: &str) -> bool {
    let Some((spec, index)) = cached.get(name) else {
        return true;
    };
    if spec.file.is_unchanged() {
        return false;
    }
    let Some(on_disk) = read_spec(&spec.file.path) else {
        return true;
    };
    let Some(cached_device) = spec.devices.get(*index) else {
        return true;
    };
    let is_the_same = |device: &SpecDevice| {
        device.name == cached_device.name && device.container_edits == cached_device.container_edits
    };
    on_disk.kind != spec.kind
        || on_disk.container_edits != spec.container_edits
        || !on_disk.devices.iter().any(is_the_same)
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

/// The delay after a change of CDI specs until the runtime reads them again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefreshDelay {
    /// The longest delay. Each delay is a random part of it, by the seed of the `CdiCache`.
    pub longest: Duration,
}

/// The cache of one runtime; its watch ends when it is dropped.
#[derive(Debug)]
pub(crate) struct CdiCache {
    shared: Arc<CacheContents>,
    _watching: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct CacheContents {
    dirs: Vec<PathBuf>,
    state: Mutex<CacheState>,
}

#[derive(Debug)]
struct CacheState {
    devices: CdiDevices,
    /// The directories that are watched.
    tracked: BTreeSet<PathBuf>,
    watches: InotifyWatches,
}

struct InotifyWatches {
    inotify: inotify::Watches,
    dirs: BTreeMap<PathBuf, WatchDescriptor>,
}

impl std::fmt::Debug for InotifyWatches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watches")
            .field("dirs", &self.dirs.keys())
            .finish_non_exhaustive()
    }
}

impl CdiCache {
    /// The cache of a runtime that starts now, with a watch of the directories that exist.
    pub(crate) fn start(dirs: Vec<PathBuf>, delay: RefreshDelay, seed: u64) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let watches = InotifyWatches {
            inotify: inotify.watches(),
            dirs: BTreeMap::new(),
        };
        let state = Mutex::new(CacheState {
            devices: CdiDevices::new(),
            tracked: BTreeSet::new(),
            watches,
        });
        let shared = Arc::new(CacheContents { dirs, state });
        {
            let mut state = shared.state.lock();
            state.track_new(&shared.dirs);
            state.devices = read_all(&shared.dirs);
        }
        let watching = tokio::spawn(refresh_on_change(
            Arc::clone(&shared),
            inotify,
            delay,
            dice(seed, &["cdi"]),
        ));
        Ok(Self {
            shared,
            _watching: AbortOnDropHandle::new(watching),
        })
    }

    /// Returns the cached edits of all `names`, and the `names` whose spec on disk has other edits by now.
    pub(crate) fn inject(&self, names: &[String]) -> Result<(RecordedEdits, Vec<String>), Unresolvable> {
        let cached = {
            let mut state = self.shared.state.lock();
            // refreshIfRequired: an injection reads the specs itself only if a directory has appeared, else it trusts the watch.
            if state.track_new(&self.shared.dirs) {
                state.devices = read_all(&self.shared.dirs);
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
    fn track_new(&mut self, dirs: &[PathBuf]) -> bool {
        let mask = WatchMask::MODIFY
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF;
        let mut has_new = false;
        for dir in dirs {
            if !self.tracked.contains(dir)
                && let Ok(descriptor) = self.watches.inotify.add(dir, mask | WatchMask::ONLYDIR)
            {
                self.watches.dirs.insert(dir.clone(), descriptor);
                self.tracked.insert(dir.clone());
                has_new = true;
            }
        }
        has_new
    }

    /// Forgets a watched directory that is gone.
    fn forget(&mut self, descriptor: &WatchDescriptor) {
        let watches = &mut self.watches.dirs;
        watches.retain(|_, known| known != descriptor);
        self.tracked.retain(|dir| watches.contains_key(dir));
    }
}

/// Reads all specs again after each change.
async fn refresh_on_change(
    shared: Arc<CacheContents>,
    inotify: Inotify,
    delay: RefreshDelay,
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
        if !delay.longest.is_zero() {
            tokio::time::sleep(delay.longest.mul_f64(dice.random_range(0.0..1.0))).await;
        }
        let mut state = shared.state.lock();
        if event.mask.intersects(EventMask::DELETE_SELF | EventMask::IGNORED) {
            state.forget(&event.wd);
        }
        state.track_new(&shared.dirs);
        state.devices = read_all(&shared.dirs);
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

//! CDI devices: their spec files, and the edits they make to a container.
//!
//! Reads the directories anew at every container creation, as a runtime with a refreshed cache does. A file
//! that does not parse is skipped; two files of one directory that define the same device define none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

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

/// The edits of all `names`: of each spec once, before the first of its devices.
pub(crate) fn resolve(dirs: &[PathBuf], names: &[String]) -> Result<Edits, Unresolvable> {
    if names.is_empty() {
        return Ok(Edits::default());
    }
    let known = Known::read(dirs);
    let missing: Vec<String> = names.iter().filter(|name| !known.devices.contains_key(*name)).cloned().collect();
    if !missing.is_empty() {
        return Err(Unresolvable(missing));
    }
    let mut edits = Edits::default();
    let mut seen = BTreeSet::new();
    for (path, own) in names.iter().filter_map(|name| known.devices.get(name)) {
        if seen.insert(path)
            && let Some(common) = known.specs.get(path)
        {
            edits.append(common);
        }
        edits.append(own);
    }
    Ok(edits)
}

#[derive(Default)]
struct Known {
    /// Edits that go with every device of a spec, by file.
    specs: BTreeMap<PathBuf, Edits>,
    devices: BTreeMap<String, (PathBuf, Edits)>,
}

impl Known {
    fn read(dirs: &[PathBuf]) -> Self {
        let mut known = Self::default();
        for dir in dirs {
            let mut in_dir: BTreeMap<String, Vec<(PathBuf, Edits)>> = BTreeMap::new();
            for path in spec_files(dir) {
                let Some(spec) = read_spec(&path) else { continue };
                for device in spec.devices {
                    let name = format!("{}={}", spec.kind, device.name);
                    in_dir.entry(name).or_default().push((path.clone(), device.container_edits));
                }
                known.specs.insert(path, spec.container_edits);
            }
            for (name, mut found) in in_dir {
                known.devices.remove(&name);
                if found.len() == 1
                    && let Some(only) = found.pop()
                {
                    known.devices.insert(name, only);
                }
            }
        }
        known
    }
}

fn spec_files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let is_spec = |path: &PathBuf| path.extension().is_some_and(|ext| ext == "json" || ext == "yaml");
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_spec).collect();
    files.sort();
    files
}

fn read_spec(path: &Path) -> Option<Spec> {
    let text = std::fs::read_to_string(path).ok()?;
    // JSON is YAML, so that one parser does for both.
    serde_yaml_ng::from_str(&text).inspect_err(|error| tracing::warn!(path = %path.display(), %error, "CDI spec does not parse")).ok()
}

#[cfg(test)]
mod tests;

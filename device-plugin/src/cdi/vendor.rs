//! The edits that NVIDIA's own CDI specs on this node make for real devices.
//!
//! Looked for anew each time, as they are rewritten when the driver changes; a file that has not changed is not parsed
//! again. What does not parse is left out.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::warn;

use crate::file_version::FileVersion;
use crate::inventory::Gpu;

use super::Edits;

/// The kind of NVIDIA's specs.
const KIND: &str = "nvidia.com/gpu";

/// Longest spec that is read.
const MAX_BYTES: u64 = 4 << 20;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    cdi_version: String,
    kind: String,
    #[serde(default)]
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    #[serde(default)]
    container_edits: Map<String, Value>,
}

impl Device {
    /// Whether it brings the GPU's own device node if it brings any of a GPU: a spec that is older than the last start of
    /// the driver may mean another GPU by a name or a number.
    fn is_of(&self, gpu: &Gpu) -> bool {
        let path = |node: &Value| node.get("path").and_then(Value::as_str).map(str::to_owned);
        let nodes = self.container_edits.get("deviceNodes").and_then(Value::as_array).into_iter().flatten().filter_map(path);
        let is_of_gpu = |path: &String| path.strip_prefix("/dev/nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
        let mut of_gpus = nodes.filter(is_of_gpu).peekable();
        of_gpus.peek().is_none() || of_gpus.all(|path| gpu.device_node == Path::new(&path))
    }
}

/// The specs of some directories, of which later ones override earlier ones.
#[derive(Clone, Debug, Default)]
pub struct VendorSpecs {
    dirs: Vec<PathBuf>,
    /// What each file said when it was read last; none if it does not parse.
    read: Arc<Mutex<HashMap<PathBuf, Read>>>,
}

type Read = (FileVersion, Option<Arc<Spec>>);

impl PartialEq for VendorSpecs {
    fn eq(&self, other: &Self) -> bool {
        self.dirs == other.dirs
    }
}

impl Eq for VendorSpecs {}

impl VendorSpecs {
    /// Those in these directories.
    pub fn of(dirs: Vec<PathBuf>) -> Self {
        Self { dirs, read: Arc::default() }
    }

    /// The edits for all of `gpus` together with what goes with any of them; none if not every one is in a spec.
    ///
    /// `variable` is left out: whoever asks sets it.
    pub fn edits(&self, gpus: &[&Gpu], variable: &str) -> Option<Edits> {
        let specs = self.read();
        let mut edits = Edits::default();
        let mut merged: Vec<&Spec> = Vec::new();
        for gpu in gpus {
            let found = find(&specs, gpu.uuid.as_str()).or_else(|| find(&specs, &gpu.index.to_string()));
            let (spec, device) = found.filter(|(_, device)| device.is_of(gpu))?;
            if !merged.iter().any(|known| std::ptr::eq(*known, spec)) {
                merged.push(spec);
                add(&mut edits, &spec.container_edits, variable);
                edits.version = edits.version.take().max(Some(spec.cdi_version.clone()));
            }
            add(&mut edits, &device.container_edits, variable);
        }
        (!merged.is_empty()).then_some(edits)
    }

    /// The specs of GPUs, the ones that override first.
    fn read(&self) -> Vec<Arc<Spec>> {
        let mut known = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = HashMap::new();
        let mut specs = Vec::new();
        for path in self.dirs.iter().rev().flat_map(|dir| files(dir)) {
            let Some(version) = fs::metadata(&path).ok().filter(|file| file.len() <= MAX_BYTES).map(|file| FileVersion::from(&file)) else {
                continue;
            };
            let before = known.remove(&path).filter(|(of, _)| *of == version);
            let spec = before.map_or_else(|| parse(&path), |(_, spec)| spec);
            specs.extend(spec.clone());
            found.insert(path, (version, spec));
        }
        *known = found;
        specs
    }
}

fn find<'a>(specs: &'a [Arc<Spec>], name: &str) -> Option<(&'a Spec, &'a Device)> {
    specs.iter().find_map(|spec| spec.devices.iter().find(|device| device.name == name).map(|device| (&**spec, device)))
}

fn add(edits: &mut Edits, more: &Map<String, Value>, variable: &str) {
    for (name, value) in more {
        let Some(list) = value.as_array() else { continue };
        if name == "env" {
            let pairs = list.iter().filter_map(|pair| pair.as_str()?.split_once('=')).filter(|(name, _)| *name != variable);
            edits.env.extend(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
            continue;
        }
        let own = edits.others.entry(name.clone()).or_default();
        for value in list {
            if !own.contains(value) {
                own.push(value.clone());
            }
        }
    }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let is_spec = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "yaml" || end == "yml");
    // Specs of our own are most of what is there.
    let others = fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| !is_own(&entry.file_name()));
    let mut paths: Vec<PathBuf> = others.map(|entry| entry.path()).filter(is_spec).collect();
    paths.sort();
    paths
}

fn is_own(file: &OsStr) -> bool {
    file.as_encoded_bytes().starts_with(super::FILE.0.as_bytes())
}

/// A spec of GPUs; none of other kinds.
fn parse(path: &Path) -> Option<Arc<Spec>> {
    let text = fs::read_to_string(path).ok()?;
    // JSON is YAML, so one parser does for both.
    let spec: Result<Spec, _> = serde_yaml_ng::from_str(&text);
    let spec = spec.inspect_err(|error| warn!(file = %path.display(), %error, "a CDI spec is left out")).ok();
    spec.filter(|spec| spec.kind == KIND).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::gpu;

    const YAML: &str = "
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void, A=b]
  deviceNodes: [{path: /dev/nvidiactl}]
  hooks: [{hookName: createContainer, path: /usr/bin/nvidia-ctk, args: [nvidia-ctk, hook]}]
devices:
- name: GPU-00000001-aaaa-bbbb-cccc-000000000001
  containerEdits: {deviceNodes: [{path: /dev/nvidia1}]}
- name: '2'
  containerEdits: {deviceNodes: [{path: /dev/nvidia2}]}
";

    #[test]
    fn edits_of_devices_and_what_goes_with_them_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("nvidia.yaml"), YAML).unwrap();
        fs::write(dir.path().join("broken.json"), "{").unwrap();
        fs::write(dir.path().join("other.json"), r#"{"cdiVersion": "1.0.0", "kind": "other.com/x", "devices": []}"#).unwrap();
        let specs = VendorSpecs::of(vec![PathBuf::from("/does/not/exist"), dir.path().to_owned()]);
        let (one, two, three) = (gpu(1), gpu(2), gpu(3));
        let found = specs.edits(&[&one, &two], "NVIDIA_VISIBLE_DEVICES").unwrap();
        let nodes: Vec<_> = found.others["deviceNodes"].iter().map(|node| node["path"].as_str().unwrap()).collect();
        assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia1", "/dev/nvidia2"]);
        assert_eq!((found.env.len(), found.others["hooks"].len(), found.version.as_deref()), (1, 1, Some("0.5.0")));
        assert_eq!(specs.edits(&[&one, &three], "NVIDIA_VISIBLE_DEVICES"), None);
        assert_eq!(specs.edits(&[], "NVIDIA_VISIBLE_DEVICES"), None);
    }

    /// The driver is changed, in place or by another file; nobody tells this process.
    #[test]
    fn what_a_spec_says_is_what_it_says_now() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("nvidia.yaml");
        let specs = VendorSpecs::of(vec![dir.path().to_owned()]);
        let one = gpu(1);
        let first = |specs: &VendorSpecs| {
            let found = specs.edits(&[&one], "V");
            found.map(|edits| edits.others["deviceNodes"][0]["path"].as_str().unwrap().to_owned())
        };
        assert_eq!(first(&specs), None);
        fs::write(&file, YAML).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidiactl"));
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidiactl"));
        fs::write(&file, YAML.replace("nvidiactl", "nvidia-new")).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidia-new"));
        fs::write(dir.path().join("new"), YAML).unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidiactl"));
        fs::remove_file(&file).unwrap();
        assert_eq!(first(&specs), None);
    }

    /// A GPU is gone since, and the driver has numbered the others anew.
    #[test]
    fn a_spec_that_means_another_gpu_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("nvidia.yaml"), YAML).unwrap();
        let specs = VendorSpecs::of(vec![dir.path().to_owned()]);
        let third = Gpu { index: 2, ..gpu(3) };
        assert_eq!(specs.edits(&[&third], "NVIDIA_VISIBLE_DEVICES"), None, "2 is /dev/nvidia2, and it is /dev/nvidia3");
        let renumbered = Gpu { device_node: "/dev/nvidia0".into(), ..gpu(1) };
        assert_eq!(specs.edits(&[&renumbered], "NVIDIA_VISIBLE_DEVICES"), None);
    }
}

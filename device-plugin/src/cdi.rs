//! CDI specs of this plugin: one file per set of device IDs, named in the answer to Allocate and written before a
//! container starts, when it is known whose IDs they are. So what a container sees is decided at its start.
//!
//! The structures are JSON values of our own rather than those of the crate `container-device-interface`: of that
//! crate only the form of a spec would be used, and it brings two hundred other crates with it. NVIDIA's specs are
//! passed on as they are, with fields that nobody here knows.

pub mod vendor;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use crate::served::Served;

/// Vendor and class of this plugin's devices.
pub const KIND: &str = "gpushare.dev/gpu";

/// What the names of this plugin's devices begin with.
pub const PREFIX: &str = "gpushare.dev/gpu=";

/// What the names of its spec files begin and end with.
const FILE: (&str, &str) = ("gpushare.dev-gpu_", ".json");

/// Specs younger than this are left alone: kubelet may not have written down yet whom it answered.
const YOUNG: Duration = Duration::from_secs(60);

/// The version of specs that say no more than this plugin does.
const VERSION: &str = "0.5.0";

/// What a spec does to a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Edits {
    /// Version of the specs that they come from, if not ours.
    pub version: Option<String>,
    /// Variables.
    pub env: BTreeMap<String, String>,
    /// Device nodes on the host, by their path in the container.
    pub device_nodes: Vec<(PathBuf, PathBuf)>,
    /// Everything else, as CDI writes it: lists by name.
    pub others: BTreeMap<String, Vec<Value>>,
}

/// The device that stands for these IDs of a resource, whoever they are given to.
pub fn device_name(resource: Served, ids: &[String]) -> String {
    let mut ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    ids.sort_unstable();
    // Two hashes of 64 bits: kubelet hands out thousands of sets at most.
    let text = format!("{resource:?}\n{}", ids.join("\n"));
    let backwards: String = text.chars().rev().collect();
    format!("{:016x}{:016x}", fnv1a(&text), fnv1a(&backwards))
}

/// FNV-1a with 64 bits: the same in every version of this program.
pub fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The text of the spec of one device.
pub fn spec(name: &str, edits: &Edits) -> String {
    let mut fields: Map<String, Value> = edits.others.iter().map(|(name, list)| (name.clone(), Value::from(list.clone()))).collect();
    let env: Vec<String> = edits.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if !env.is_empty() {
        fields.insert("env".to_owned(), json!(env));
    }
    let node = |(path, host): &(PathBuf, PathBuf)| json!({"path": path, "hostPath": host, "permissions": "rw"});
    let own = edits.device_nodes.iter().map(node);
    let nodes: Vec<Value> = edits.others.get("deviceNodes").cloned().unwrap_or_default().into_iter().chain(own).collect();
    if !nodes.is_empty() {
        fields.insert("deviceNodes".to_owned(), json!(nodes));
    }
    let version = edits.version.as_deref().unwrap_or(VERSION);
    let device = json!({"name": name, "containerEdits": fields});
    format!("{:#}\n", json!({"cdiVersion": version, "kind": KIND, "devices": [device]}))
}

/// Writes the spec of a device unless it is there already; whether there was another one.
///
/// Whoever reads it sees the old text or the new, as long as the machine runs. After a power cut nothing may be left of it, or
/// half of it where the directory is on a disk: no container has outlived that, and each start holds the text against what it
/// must say before the runtime reads it. So nobody waits for a disk here.
///
/// # Errors
/// The directory cannot be written.
pub fn write(dir: &Path, name: &str, edits: &Edits) -> io::Result<bool> {
    let path = path(dir, name);
    let text = spec(name, edits);
    let before = fs::read_to_string(&path).ok();
    if before.as_ref() == Some(&text) {
        return Ok(false);
    }
    // A name that no runtime takes for a spec.
    let temporary = dir.join(format!(".{}{name}.tmp", FILE.0));
    let mut written = fs::write(&temporary, &text);
    if written.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        fs::create_dir_all(dir)?;
        written = fs::write(&temporary, &text);
    }
    let written = written.and_then(|()| fs::rename(&temporary, &path));
    if written.is_err() {
        // On a full disk it would only take more room.
        let _ = fs::remove_file(&temporary);
    }
    written.map(|()| before.is_some())
}

/// Whether there is a spec of the device.
pub fn exists(dir: &Path, name: &str) -> bool {
    path(dir, name).exists()
}

/// The variables that the spec of a device sets, if there is one that this plugin wrote.
pub fn env(dir: &Path, name: &str) -> Option<HashMap<String, String>> {
    let spec: Value = serde_json::from_str(&fs::read_to_string(path(dir, name)).ok()?).ok()?;
    let pairs = spec.pointer("/devices/0/containerEdits/env")?.as_array()?.iter();
    Some(pairs.filter_map(|pair| pair.as_str()?.split_once('=')).map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// Removes specs of devices that are not among `kept`, except young ones; how many.
///
/// # Errors
/// The directory cannot be read.
pub fn clean(dir: &Path, kept: &BTreeSet<String>, now: SystemTime) -> io::Result<usize> {
    let mut n_removed = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let file = entry.file_name().to_string_lossy().into_owned();
        let name = file.strip_prefix(FILE.0).and_then(|rest| rest.strip_suffix(FILE.1));
        let is_left_over = file.strip_prefix('.').is_some_and(|rest| rest.starts_with(FILE.0));
        let is_old =
            || entry.metadata().and_then(|found| found.modified()).is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > YOUNG));
        if (is_left_over || name.is_some_and(|name| !kept.contains(name))) && is_old() && fs::remove_file(entry.path()).is_ok() {
            n_removed += 1;
        }
    }
    Ok(n_removed)
}

/// Whether specs can be written there.
pub fn is_writable(dir: &Path) -> bool {
    let probe = dir.join(format!(".{}probe.tmp", FILE.0));
    let is_written = fs::create_dir_all(dir).and_then(|()| fs::write(&probe, b"")).is_ok();
    is_written && fs::remove_file(&probe).is_ok()
}

fn path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{}{name}{}", FILE.0, FILE.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(ids: &[&str]) -> Vec<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn names_depend_on_the_set_and_the_resource_alone() {
        let name = device_name(Served::Memory, &ids(&["a-1", "a-2"]));
        assert_eq!(name, device_name(Served::Memory, &ids(&["a-2", "a-1"])));
        assert_ne!(name, device_name(Served::Shared, &ids(&["a-1", "a-2"])));
        assert_ne!(name, device_name(Served::Memory, &ids(&["a-1"])));
        assert_eq!(name.len(), 32);
    }

    #[test]
    fn a_spec_in_full() {
        let edits = Edits {
            env: [("NVIDIA_VISIBLE_DEVICES".to_owned(), "GPU-a".to_owned())].into(),
            device_nodes: vec![("/dev/nvidia0".into(), "/dev/nvidia0".into())],
            ..Edits::default()
        };
        insta::assert_snapshot!(spec("0123", &edits), @r#"
        {
          "cdiVersion": "0.5.0",
          "devices": [
            {
              "containerEdits": {
                "deviceNodes": [
                  {
                    "hostPath": "/dev/nvidia0",
                    "path": "/dev/nvidia0",
                    "permissions": "rw"
                  }
                ],
                "env": [
                  "NVIDIA_VISIBLE_DEVICES=GPU-a"
                ]
              },
              "name": "0123"
            }
          ],
          "kind": "gpushare.dev/gpu"
        }
        "#);
    }

    #[test]
    fn written_again_only_if_it_differs_and_removed_when_old() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("made/on/the/way");
        let edits = |value: &str| Edits { env: [("V".to_owned(), value.to_owned())].into(), ..Edits::default() };
        assert!(is_writable(&dir));
        assert!(!write(&dir, "one", &edits("a")).unwrap());
        assert!(!write(&dir, "one", &edits("a")).unwrap());
        assert!(write(&dir, "one", &edits("b")).unwrap(), "another one was there");
        let torn = path(&dir, "one");
        let whole = fs::read_to_string(&torn).unwrap();
        for left in ["", &whole[..whole.len() / 2]] {
            fs::write(&torn, left).unwrap();
            assert!(write(&dir, "one", &edits("b")).unwrap(), "what a power cut has left is no spec");
            assert_eq!(fs::read_to_string(&torn).unwrap(), whole);
        }
        write(&dir, "two", &edits("a")).unwrap();
        fs::write(dir.join("nvidia.json"), "{}").unwrap();
        let kept = BTreeSet::from(["two".to_owned()]);
        assert_eq!(clean(&dir, &kept, SystemTime::now()).unwrap(), 0, "it is young");
        assert_eq!(clean(&dir, &kept, SystemTime::now() + 2 * YOUNG).unwrap(), 1);
        let mut left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["gpushare.dev-gpu_two.json", "nvidia.json"]);
    }
}

//! NVIDIA's own CDI specs on this node: a container's edits for the driver, and the device nodes of each GPU.
//!
//! The plugin reads the specs again when they change: the vendor's tools rewrite them with each driver. It leaves out files that
//! do not parse, with a warning.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use proto::record::VISIBLE_DEVICES;
use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::warn;

use crate::devices::inventory::Gpu;
use crate::file_version::FileVersion;

use super::dir::OWN_PREFIX;
use super::{Edits, variables};

/// Length of the longest spec that the plugin reads, in bytes.
const MAX_BYTES: u64 = 4 << 20;

/// The driver's device nodes that belong to no GPU. The driver's CDI device gets no others: some specs list nodes of every GPU.
const CONTROL_NODES: [&str; 5] = [
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
    "/dev/dxg",
];

/// Libraries of the driver whose file name ends with the driver's version.
const VERSIONED_LIBRARIES: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

/// The command of NVIDIA's hook that has the driver limit a container's memory.
const LIMIT_HOOK: &str = "apply-cuda-memory-limits";

const GPU_ID: &str = "--gpu-id";

/// The tool that wrote a spec; the tools whose specs say most about a GPU come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VendorKind {
    /// nvidia-ctk or `nvidia-cdi-refresh.service`.
    Toolkit,
    DevicePlugin,
    /// GPU Operator, for its own pods; its spec has all GPUs as one device.
    Management,
}

impl VendorKind {
    pub(crate) const ALL: [Self; 3] = [Self::Toolkit, Self::DevicePlugin, Self::Management];

    /// The kind of such specs, in CDI's form `vendor/class`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Toolkit => "nvidia.com/gpu",
            Self::DevicePlugin => "k8s.device-plugin.nvidia.com/gpu",
            Self::Management => "management.nvidia.com/gpu",
        }
    }
}

/// A CDI spec, as far as this plugin reads it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecFile {
    cdi_version: String,
    kind: String,
    #[serde(default)]
    devices: Vec<SpecDevice>,
    #[serde(default)]
    container_edits: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: Map<String, Value>,
}

impl SpecDevice {
    fn nodes(&self) -> impl Iterator<Item = &Value> {
        list(&self.container_edits, "deviceNodes")
    }

    /// Returns true if the device brings no node of another GPU: an old spec may mean another GPU by this name or index.
    fn is_of_gpu(&self, gpu: &Gpu) -> bool {
        for path in self.nodes().filter_map(path_of) {
            // Other nodes, such as /dev/nvidiactl, belong to no single GPU.
            let number = path.strip_prefix("/dev/nvidia").unwrap_or_default();
            if number.parse::<u32>().is_ok() && gpu.device_node != Path::new(path) {
                return false;
            }
        }
        true
    }
}

#[derive(Debug)]
struct VendorSpec {
    kind: VendorKind,
    path: PathBuf,
    file: SpecFile,
}

/// NVIDIA's hook that has the driver limit a container's memory on one GPU.
pub(crate) struct LimitHook {
    /// CDI version of the spec that the hook comes from.
    pub(crate) cdi_version: String,
    pub(crate) hook: Value,
}

/// NVIDIA's specs in some directories, of which later ones override earlier ones. Clones share the parsed files.
#[derive(Clone, Debug, Default)]
pub struct VendorSpecs {
    dirs: Vec<PathBuf>,
    /// The last content of each file; `None` if it does not parse or its kind is no [`VendorKind`].
    parsed: Arc<Mutex<ParsedFiles>>,
}

type ParsedFiles = HashMap<PathBuf, (FileVersion, Option<Arc<VendorSpec>>)>;

impl VendorSpecs {
    pub(crate) fn new(dirs: Vec<PathBuf>) -> Self {
        Self {
            dirs,
            parsed: Arc::default(),
        }
    }

    /// Returns a container's edits for the driver, from the first kind that has a spec for the driver that runs on the node, or
    /// the reason that no spec can be used. `running_driver` is the version of that driver, if NVML reports it.
    pub(crate) fn driver(&self, running_driver: Option<&str>) -> Result<(VendorKind, Edits), String> {
        let mut specs = self.read();
        // A stable sort, so that of one kind the spec of the later directory stays first.
        specs.sort_by_key(|spec| spec.kind);
        let mut stale = None;
        for spec in specs {
            let edits = driver_edits(&spec.file);
            match (library_version(&edits), running_driver) {
                (Some(found), Some(running)) if found != running => {
                    stale.get_or_insert(format!(
                        "the CDI spec {} is of driver {found}, and the node runs {running}: generate it again, for example by \
                         restarting nvidia-cdi-refresh.service",
                        spec.path.display()
                    ));
                }
                // The versions are equal, or one of them is not known.
                _ => return Ok((spec.kind, edits)),
            }
        }
        if let Some(stale) = stale {
            return Err(stale);
        }
        let dirs: Vec<_> = self.dirs.iter().map(|dir| dir.to_string_lossy()).collect();
        let dirs = dirs.join(", ");
        Err(format!(
            "no CDI spec of the NVIDIA driver is in {dirs}: enable nvidia-cdi-refresh.service or CDI in GPU Operator, or run \
             `nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml` on the node"
        ))
    }

    /// The device nodes of a GPU as a vendor's spec lists them: for its UUID or index, else its own node from the device `all`.
    pub(crate) fn nodes(&self, gpu: &Gpu) -> Option<Vec<Value>> {
        let (specs, index) = (self.read(), gpu.index.to_string());
        for name in [gpu.uuid.as_str(), &index] {
            // Only the first spec with the device counts, as runtimes resolve the name by that spec too.
            if let Some(device) = devices_named(&specs, name).first()
                && device.is_of_gpu(gpu)
                && device.nodes().next().is_some()
            {
                return Some(device.nodes().cloned().collect());
            }
        }
        for device in devices_named(&specs, "all") {
            for node in device.nodes() {
                if path_of(node) == gpu.device_node.to_str() {
                    return Some(vec![node.clone()]);
                }
            }
        }
        None
    }

    /// NVIDIA's hook that has the driver limit the memory of a container on this GPU; `None` if no spec has it.
    pub(crate) fn limit_hook(&self, gpu: &Gpu) -> Option<LimitHook> {
        for spec in self.read() {
            for device in &spec.file.devices {
                let mut hooks = list(&device.container_edits, "hooks");
                if let Some(hook) = hooks.find(|hook| is_limit_hook(hook, gpu.uuid.as_str())) {
                    return Some(LimitHook {
                        cdi_version: spec.file.cdi_version.clone(),
                        hook: hook.clone(),
                    });
                }
            }
        }
        None
    }

    /// Returns true if a spec of this kind has a device with one of these names.
    pub(crate) fn names_any<'a>(&self, kind: VendorKind, devices: impl IntoIterator<Item = &'a str>) -> bool {
        let mut specs = self.read();
        specs.retain(|spec| spec.kind == kind);
        let mut devices = devices.into_iter();
        devices.any(|device| !devices_named(&specs, device).is_empty())
    }

    pub(crate) fn has(&self, kind: VendorKind) -> bool {
        self.read().iter().any(|spec| spec.kind == kind)
    }

    /// The parsed specs, those that override others first. Only changed files are parsed again.
    fn read(&self) -> Vec<Arc<VendorSpec>> {
        // A panic elsewhere leaves a whole map behind, since the map is replaced in one step.
        let mut known = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = HashMap::new();
        let mut specs = Vec::new();
        // Of specs that name the same device, runtimes take that of the later directory.
        for path in self.dirs.iter().rev().flat_map(|dir| spec_files(dir)) {
            let Ok(file) = fs::metadata(&path) else { continue };
            if file.len() > MAX_BYTES {
                continue;
            }
            let version = FileVersion::from(&file);
            // Each start of a container calls this: a spec of NVIDIA's is long, and parsing it takes milliseconds.
            let spec = match known.remove(&path) {
                Some((known_version, spec)) if known_version == version => spec,
                _ => parse(&path),
            };
            specs.extend(spec.clone());
            found.insert(path, (version, spec));
        }
        *known = found;
        specs
    }
}

fn devices_named<'a>(specs: &'a [Arc<VendorSpec>], name: &str) -> Vec<&'a SpecDevice> {
    let devices = specs.iter().flat_map(|spec| &spec.file.devices);
    devices.filter(|device| device.name == name).collect()
}

/// Returns the edits that a spec has for all its devices; of device nodes only the control nodes, also from a device `all`.
fn driver_edits(file: &SpecFile) -> Edits {
    let mut edits = Edits {
        version: Some(file.cdi_version.clone()),
        ..Edits::default()
    };
    for (field, value) in &file.container_edits {
        match (field.as_str(), value.as_array()) {
            ("env", Some(list)) => {
                edits.env.extend(variables(list));
                // The plugin gives the variable a value of its own.
                edits.env.remove(VISIBLE_DEVICES);
            }
            // Only the control nodes among them count, which the loops below collect.
            ("deviceNodes", _) => {}
            _ => drop(edits.others.insert(field.clone(), value.clone())),
        }
    }
    let mut nodes: Vec<&Value> = list(&file.container_edits, "deviceNodes").collect();
    for device in &file.devices {
        // GPU Operator lists the control nodes among those of its only device.
        if device.name == "all" {
            nodes.extend(device.nodes());
        }
    }
    for node in nodes {
        let is_control = CONTROL_NODES.contains(&path_of(node).unwrap_or_default());
        if is_control && !edits.device_nodes.contains(node) {
            edits.device_nodes.push(node.clone());
        }
    }
    edits
}

/// The version of the driver whose libraries the edits mount, if a file name contains it.
fn library_version(edits: &Edits) -> Option<String> {
    for mount in list(&edits.others, "mounts") {
        let path = mount.get("containerPath").and_then(Value::as_str);
        let file = path.unwrap_or_default().rsplit('/').next().unwrap_or_default();
        for library in VERSIONED_LIBRARIES {
            // libcuda.so.1 is a link, whose name does not say the version of the driver.
            if let Some(version) = file.strip_prefix(library)
                && version.contains('.')
                && version.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit())
            {
                return Some(version.to_owned());
            }
        }
    }
    None
}

/// The items of a list field of CDI's container edits.
fn list<'a>(edits: &'a Map<String, Value>, field: &str) -> impl Iterator<Item = &'a Value> {
    edits.get(field).and_then(Value::as_array).into_iter().flatten()
}

/// True if this is NVIDIA's hook that limits memory, for the GPU with this UUID and no other.
fn is_limit_hook(hook: &Value, uuid: &str) -> bool {
    let items = hook.get("args").and_then(Value::as_array);
    let args: Vec<&str> = items.into_iter().flatten().filter_map(Value::as_str).collect();
    // The flag may be repeated. The hook of a device with several GPUs would limit the container on GPUs that it does not get.
    let mut gpus = Vec::new();
    for (at, arg) in args.iter().enumerate() {
        match arg.strip_prefix(GPU_ID) {
            Some("") => gpus.extend(args.get(at + 1).copied()),
            Some(rest) => gpus.extend(rest.strip_prefix('=')),
            None => {}
        }
    }
    args.contains(&LIMIT_HOOK) && gpus == [uuid]
}

fn path_of(node: &Value) -> Option<&str> {
    node.get("path").and_then(Value::as_str)
}

/// The files of a directory that may be specs of a vendor, in the order of their names, as runtimes read them.
fn spec_files(dir: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_spec = path.extension().is_some_and(|end| end == "json" || end == "yaml");
        // Most files of the directory are this plugin's, one for each container.
        let name = entry.file_name();
        let is_own = name.as_encoded_bytes().starts_with(OWN_PREFIX.as_bytes());
        if is_spec && !is_own {
            paths.push(path);
        }
    }
    paths.sort();
    paths
}

/// Parses a spec file; `None`, with a warning, if it does not parse, or `None` if its kind is no [`VendorKind`].
fn parse(path: &Path) -> Option<Arc<VendorSpec>> {
    let text = fs::read_to_string(path).ok()?;
    // JSON is YAML, so one parser does for both.
    let file: SpecFile = serde_yaml_ng::from_str(&text)
        .inspect_err(|error| warn!(file = %path.display(), %error, "a CDI spec does not parse"))
        .ok()?;
    let mut kinds = VendorKind::ALL.into_iter();
    let kind = kinds.find(|kind| kind.as_str() == file.kind)?;
    let path = path.to_owned();
    Some(Arc::new(VendorSpec { kind, path, file }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::tests::builders::gpu;

    /// As nvidia-ctk 1.20 writes it, cut down.
    const TOOLKIT: &str = "
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void, A=b]
  deviceNodes: [{path: /dev/nvidiactl}, {path: /dev/nvidia-uvm}]
  hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, update-ldcache]}]
  mounts: [{hostPath: /usr/lib/libcuda.so.570.1, containerPath: /usr/lib/libcuda.so.570.1, options: [ro]}]
  additionalGids: [44]
devices:
- name: GPU-00000001-aaaa-bbbb-cccc-000000000001
  containerEdits: {deviceNodes: [{path: /dev/nvidia1, hostPath: /run/nvidia/driver/dev/nvidia1}, {path: /dev/dri/card1}]}
- name: '2'
  containerEdits: {deviceNodes: [{path: /dev/nvidia2}]}
- name: all
  containerEdits: {deviceNodes: [{path: /dev/nvidia1}, {path: /dev/nvidia2}]}
";

    /// As GPU Operator writes it: its only device has the nodes of every GPU.
    const MANAGEMENT: &str = "
cdiVersion: 0.5.0
kind: management.nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  mounts: [{hostPath: /run/nvidia/driver/usr/lib/libnvidia-ml.so.570.1, containerPath: /usr/lib/libnvidia-ml.so.570.1}]
devices:
- name: all
  containerEdits:
    deviceNodes:
    - {path: /dev/nvidia0, hostPath: /run/nvidia/driver/dev/nvidia0}
    - {path: /dev/nvidia1, hostPath: /run/nvidia/driver/dev/nvidia1}
    - {path: /dev/nvidiactl}
    - {path: /dev/nvidia-caps/nvidia-cap1}
";

    fn specs(files: &[(&str, &str)]) -> (tempfile::TempDir, VendorSpecs) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let specs = VendorSpecs::new(vec![PathBuf::from("/does/not/exist"), dir.path().to_owned()]);
        (dir, specs)
    }

    fn paths(nodes: &[Value]) -> Vec<&str> {
        nodes.iter().filter_map(path_of).collect()
    }

    #[test]
    fn the_edits_of_the_driver_are_those_that_all_devices_share() {
        let (_dir, specs) = specs(&[
            ("nvidia.yaml", TOOLKIT),
            ("broken.json", "{"),
            ("other.json", r#"{"kind": "x/y"}"#),
        ]);
        let (kind, edits) = specs.driver(Some("570.1")).unwrap();
        assert_eq!(
            (kind, edits.version.as_deref()),
            (VendorKind::Toolkit, Some("0.5.0"))
        );
        assert_eq!(edits.env, [("A".to_owned(), "b".to_owned())].into());
        assert_eq!(paths(&edits.device_nodes), ["/dev/nvidiactl", "/dev/nvidia-uvm"]);
        assert_eq!(
            edits.others.keys().collect::<Vec<_>>(),
            ["additionalGids", "hooks", "mounts"]
        );
    }

    /// GPU Operator's spec must not hand over GPUs beside the libraries.
    #[test]
    fn the_spec_of_the_gpu_operator_gives_the_driver_and_no_gpu() {
        let (_dir, specs) = specs(&[("management.nvidia.com-gpu.yaml", MANAGEMENT)]);
        let (kind, edits) = specs.driver(Some("570.1")).unwrap();
        assert_eq!(
            (kind, paths(&edits.device_nodes)),
            (VendorKind::Management, vec!["/dev/nvidiactl"])
        );
        let own = specs.nodes(&gpu(1)).unwrap();
        assert_eq!(
            (own.len(), &own[0]["hostPath"]),
            (1, &Value::from("/run/nvidia/driver/dev/nvidia1"))
        );
        assert_eq!(specs.nodes(&gpu(2)), None, "it is not among all");
        assert!(specs.names_any(VendorKind::Management, ["all"]) && !specs.has(VendorKind::Toolkit));
    }

    #[rstest]
    #[case::the_toolkits_first(&[("a.yaml", MANAGEMENT), ("b.yaml", TOOLKIT)], Some("570.1"), "nvidia.com/gpu")]
    #[case::of_another_driver(&[("a.yaml", TOOLKIT)], Some("580.2"), "is of driver 570.1, and the node runs 580.2")]
    #[case::the_driver_is_not_known(&[("a.yaml", TOOLKIT)], None, "nvidia.com/gpu")]
    #[case::none(&[], Some("570.1"), "no CDI spec of the NVIDIA driver is in /does/not/exist, ")]
    fn the_toolkits_spec_of_the_running_driver_is_used(
        #[case] files: &[(&str, &str)],
        #[case] running: Option<&str>,
        #[case] expected: &str,
    ) {
        let (_dir, specs) = specs(files);
        let found = specs
            .driver(running)
            .map_or_else(|why| why, |(kind, _)| kind.as_str().to_owned());
        assert!(found.contains(expected), "{found}");
    }

    /// One spec is old, another kind's is not.
    #[test]
    fn a_spec_of_another_driver_version_is_skipped() {
        let (_dir, specs) = specs(&[
            ("a.yaml", TOOLKIT),
            ("b.yaml", &MANAGEMENT.replace("570.1", "580.2")),
        ]);
        assert_eq!(specs.driver(Some("580.2")).unwrap().0, VendorKind::Management);
    }

    #[test]
    fn the_device_nodes_of_a_gpu_are_found_by_uuid_or_index() {
        let (_dir, specs) = specs(&[("nvidia.yaml", TOOLKIT)]);
        let found = |minor: u32| specs.nodes(&gpu(minor)).map(|nodes| paths(&nodes).join(" "));
        assert_eq!(found(1).as_deref(), Some("/dev/nvidia1 /dev/dri/card1"));
        assert_eq!(found(2).as_deref(), Some("/dev/nvidia2"));
        assert_eq!(found(3), None);
        assert_eq!(
            specs.nodes(&gpu(1)).unwrap()[0]["hostPath"],
            "/run/nvidia/driver/dev/nvidia1"
        );
    }

    /// A GPU is gone since, and the driver has numbered the others differently.
    #[test]
    fn a_spec_whose_index_names_another_gpu_is_ignored() {
        let (_dir, specs) = specs(&[("nvidia.yaml", TOOLKIT)]);
        assert_eq!(
            specs.nodes(&Gpu { index: 2, ..gpu(3) }),
            None,
            "2 is /dev/nvidia2, and it is /dev/nvidia3"
        );
        assert_eq!(
            specs.nodes(&Gpu {
                device_node: "/dev/nvidia0".into(),
                ..gpu(1)
            }),
            None
        );
        let renumbered = specs
            .nodes(&Gpu {
                device_node: "/dev/nvidia2".into(),
                ..gpu(1)
            })
            .unwrap();
        assert_eq!(paths(&renumbered), ["/dev/nvidia2"], "its own among all");
    }

    /// The driver changes, in place or by another file, and this process gets no event.
    #[test]
    fn a_changed_file_is_read_again() {
        let (dir, specs) = specs(&[]);
        let file = dir.path().join("nvidia.yaml");
        let first = |specs: &VendorSpecs| {
            specs
                .driver(None)
                .ok()
                .map(|(_, edits)| paths(&edits.device_nodes)[0].to_owned())
        };
        assert_eq!(first(&specs), None);
        fs::write(&file, TOOLKIT).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidiactl"));
        fs::write(&file, TOOLKIT.replace("{path: /dev/nvidiactl}, ", "")).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidia-uvm"));
        fs::write(dir.path().join("new"), TOOLKIT).unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        assert_eq!(first(&specs).as_deref(), Some("/dev/nvidiactl"));
        fs::remove_file(&file).unwrap();
        assert_eq!(first(&specs), None);
    }

    /// As nvidia-ctk 1.20.1 writes it: the hook is the device's.
    const LIMITING: &str = "
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: '1'
  containerEdits:
    deviceNodes: [{path: /dev/nvidia1}]
    hooks:
    - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, chmod, --gpu-id, GPU-00000001-aaaa-bbbb-cccc-000000000001]}
    - hookName: createRuntime
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, apply-cuda-memory-limits, --driver-root, /, --gpu-id, GPU-00000001-aaaa-bbbb-cccc-000000000001]
      env: [NVIDIA_CTK_DEBUG=false]
- name: all
  containerEdits:
    hooks:
    - hookName: createRuntime
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, apply-cuda-memory-limits, --gpu-id=GPU-00000002-aaaa-bbbb-cccc-000000000002, --gpu-id, GPU-00000003-aaaa-bbbb-cccc-000000000003]
    - hookName: createRuntime
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, apply-cuda-memory-limits, --gpu-id=GPU-00000004-aaaa-bbbb-cccc-000000000004]
";

    /// A hook that names several GPUs would limit the container on others than its own.
    #[test]
    fn the_hook_that_limits_memory_on_one_gpu() {
        let (_dir, found) = specs(&[("nvidia.yaml", LIMITING), ("other.yaml", TOOLKIT)]);
        let has_hook = |minor| found.limit_hook(&gpu(minor)).is_some();
        assert_eq!([0, 1, 2, 3, 4].map(has_hook), [false, true, false, false, true]);
        let found = found.limit_hook(&gpu(1)).unwrap();
        assert_eq!(found.cdi_version, "0.5.0");
        assert_eq!(found.hook["env"][0], "NVIDIA_CTK_DEBUG=false");
        assert_eq!(found.hook["hookName"], "createRuntime");
    }

    proptest! {
        #![proptest_config(fuzz::config(300))]

        #[test]
        fn no_spec_makes_the_reader_panic(
            spec in fuzz::damaged_json([TOOLKIT, MANAGEMENT].map(|text| serde_yaml_ng::from_str(text).unwrap()).to_vec()),
            text in fuzz::damaged([TOOLKIT, MANAGEMENT].map(|text| text.as_bytes().to_vec()).to_vec()),
        ) {
            for text in [spec.to_string(), String::from_utf8_lossy(&text).into_owned()] {
                let (_dir, specs) = specs(&[("nvidia.yaml", &text)]);
                let _ = specs.driver(Some("570.1"));
            }
        }
    }
}

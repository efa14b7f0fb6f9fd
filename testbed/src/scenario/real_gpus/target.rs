//! The GPU that the scenarios use, and the sizes of their pods, from the objects of the cluster. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use proto::device::{Device, GPU_DRIVER_LABEL, GPU_MODEL_LABEL, SIMULATED_LABEL};
use proto::resource::GPU_MEM;
use serde::Serialize;

use super::GpuOptions;
use kit::invariants::{self, GpuUse};
use kit::observer::ClusterSnapshot;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;

/// More than a CUDA context takes of its pod's share: 520 MiB on an H200.
const CONTEXT: u64 = 544 * MIB;

/// A GPU with its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TargetGpu {
    pub(super) node: String,
    pub(super) uuid: String,
    pub(super) minor: i32,
    /// Bytes that the node offers of it.
    pub(super) total: u64,
    /// Bytes that no pod holds.
    pub(super) free: u64,
    /// Bytes of a memory unit.
    pub(super) unit: u64,
}

/// The versions of a node's software, as its status and its Device object show them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeVersions {
    /// Name of the node.
    pub node: String,
    /// Model of its GPUs.
    pub gpu: String,
    /// Version of the GPU driver.
    pub driver: String,
    /// Container runtime.
    pub container_runtime: String,
    /// kubelet.
    pub kubernetes: String,
    /// Kernel.
    pub kernel: String,
    /// The device plugin, by its metrics, or else its image.
    pub gpushare: String,
}

impl TargetGpu {
    /// The healthy GPU with the most free memory, on the node of the options if they name one; real, unless they accept others.
    ///
    /// # Errors
    /// The reason for which there is none.
    pub(super) fn find(snapshot: &ClusterSnapshot, options: &GpuOptions) -> Result<Self, String> {
        let mut devices = snapshot.devices.clone();
        devices.retain(|node, _| options.node.as_ref().is_none_or(|chosen| chosen == node));
        if devices.is_empty() {
            let node = options.node.as_ref();
            let node = node.map_or("no node".to_owned(), |node| format!("no node {node:?}"));
            return Err(format!(
                "there is {node} with a Device object, which gpushare's device plugin writes"
            ));
        }
        let free = |gpu: &GpuUse| gpu.total.saturating_sub(gpu.used());
        let mut real = invariants::held_amounts(snapshot, &invariants::NONE_EXCUSED).gpus;
        real.retain(|_, gpu| {
            let device = devices.get(&gpu.node);
            device.is_some_and(|device| options.simulated || is_of_driver(device, &gpu.uuid))
        });
        if real.is_empty() {
            let nodes: Vec<&str> = devices.keys().map(String::as_str).collect();
            return Err(format!(
                "no GPU of {} is real: the labels or UUIDs in the Device objects are those of simulated GPUs",
                nodes.join(", ")
            ));
        }
        real.retain(|_, gpu| gpu.healthy);
        let found = real.values().max_by_key(|gpu| free(gpu));
        let found = found.ok_or("no real GPU is healthy")?;
        Ok(Self {
            node: found.node.clone(),
            uuid: found.uuid.clone(),
            minor: found.minor,
            total: found.total,
            free: free(found),
            unit: invariants::memory_unit(snapshot, &found.node),
        })
    }

    /// The fewest memory units that have at least these bytes.
    pub(super) fn units(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.unit)
    }

    /// The free memory divided by `parts`, in bytes of whole GiB: at least one GiB.
    pub(super) fn part(&self, parts: u64) -> u64 {
        (self.free / parts / GIB).max(1) * GIB
    }
}

/// The bytes that a program allocates of its pod's share: nine tenths, or less where its context needs more than the rest.
pub(super) fn usable(share: u64) -> u64 {
    let besides_context = share.saturating_sub(CONTEXT);
    (share / 10 * 9).min(besides_context).max(16 * MIB)
}

/// The program's command that allocates so much.
pub(super) fn allocate_most(share: u64) -> String {
    format!("allocate={}", usable(share))
}

/// Returns true if the Device object has no label of simulated GPUs, and the GPU's UUID has the form of NVIDIA's driver.
/// Plugins of earlier versions set no such label; the GPUs of `deploy/components/simulated` have UUIDs of node name and number.
fn is_of_driver(device: &Device, uuid: &str) -> bool {
    let groups = uuid.strip_prefix("GPU-").unwrap_or_default().split('-');
    let lengths: Vec<usize> = groups.map(str::len).collect();
    let is_hex = uuid
        .bytes()
        .skip("GPU-".len())
        .all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    let is_simulated = device.labels().contains_key(SIMULATED_LABEL);
    lengths == [8, 4, 4, 4, 12] && is_hex && device.labels().contains_key(GPU_DRIVER_LABEL) && !is_simulated
}

impl NodeVersions {
    /// All versions of a node but that of gpushare, which stays empty.
    pub(super) fn of(node: &str, snapshot: &ClusterSnapshot) -> Self {
        let status = snapshot.nodes.get(node).and_then(|node| node.status.as_ref());
        let info = status
            .and_then(|status| status.node_info.clone())
            .unwrap_or_default();
        let device = snapshot.devices.get(node);
        let label = |key: &str| {
            let label = device.and_then(|device| device.labels().get(key));
            label.cloned().unwrap_or_default()
        };
        Self {
            node: node.to_owned(),
            gpu: label(GPU_MODEL_LABEL),
            driver: label(GPU_DRIVER_LABEL),
            container_runtime: info.container_runtime_version,
            kubernetes: info.kubelet_version,
            kernel: info.kernel_version,
            gpushare: String::new(),
        }
    }
}

impl std::fmt::Display for NodeVersions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = [
            &self.gpu,
            &self.driver,
            &self.container_runtime,
            &self.kubernetes,
            &self.kernel,
            &self.gpushare,
        ];
        let [gpu, driver, runtime, kubelet, kernel, gpushare] =
            known.map(|text| if text.is_empty() { "unknown" } else { text });
        write!(
            f,
            "Node {}: GPU {gpu}, driver {driver}, container runtime {runtime}, kubelet {kubelet}, kernel {kernel}, gpushare {gpushare}",
            self.node
        )
    }
}

/// The amounts of gpushare's and Koordinator's resources that a node offers.
pub(super) fn offered(node: &Node) -> BTreeMap<String, String> {
    let amounts = node.status.as_ref().and_then(|status| status.allocatable.clone());
    let mut offered = BTreeMap::new();
    for (name, amount) in amounts.unwrap_or_default() {
        if name == GPU_MEM || name.starts_with("koordinator.sh/gpu") {
            offered.insert(name, amount.0);
        }
    }
    offered
}

#[cfg(test)]
mod tests {
    use proto::device::{DeviceInfo, DeviceSpec, TYPE_GPU};
    use proto::quantity::Quantity;
    use proto::resource::GPU_MEMORY;
    use rstest::rstest;

    use super::*;

    const REAL: &str = "GPU-5d1ca1c6-5f1b-4b1a-9c1e-0123456789ab";

    fn cluster(gpus: &[(&str, u64, bool)], mark: &str) -> ClusterSnapshot {
        let mut spec = DeviceSpec::default();
        for (minor, (uuid, gib, health)) in (0..).zip(gpus) {
            let amounts = [(GPU_MEMORY.to_owned(), Quantity::from_unsigned(gib * GIB))];
            spec.devices.push(DeviceInfo {
                device_type: TYPE_GPU.to_owned(),
                id: (*uuid).to_owned(),
                minor: Some(minor),
                health: *health,
                resources: amounts.into(),
                ..DeviceInfo::default()
            });
        }
        let mut device = Device::new("n", spec);
        let mut labels = vec![(GPU_MODEL_LABEL, "H200"), (GPU_DRIVER_LABEL, "580.159.04")];
        labels.extend((!mark.is_empty()).then_some((mark, "true")));
        device.metadata.labels = Some(
            labels
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        );
        let mut snapshot = ClusterSnapshot::default();
        snapshot.devices.insert("n".to_owned(), device);
        snapshot
    }

    #[rstest]
    #[case::real(&[(REAL, 16, true)], "", Ok(0))]
    #[case::more_free(&[(REAL, 16, true), ("GPU-5d1ca1c6-5f1b-4b1a-9c1e-0123456789ac", 32, true)], "", Ok(1))]
    #[case::sick(&[(REAL, 16, true), ("GPU-5d1ca1c6-5f1b-4b1a-9c1e-0123456789ac", 32, false)], "", Ok(0))]
    #[case::all_sick(&[(REAL, 16, false)], "", Err("no real GPU is healthy"))]
    #[case::simulated_by_an_earlier_version(&[("GPU-n-0", 16, true)], "", Err("no GPU of n is real"))]
    #[case::simulated(&[(REAL, 16, true)], SIMULATED_LABEL, Err("no GPU of n is real"))]
    #[case::no_gpu(&[], "", Err("no GPU of n is real"))]
    fn the_freest_healthy_real_gpu_is_used(
        #[case] gpus: &[(&str, u64, bool)],
        #[case] mark: &str,
        #[case] expected: Result<i32, &str>,
    ) {
        let found = TargetGpu::find(&cluster(gpus, mark), &options(None)).map(|gpu| gpu.minor);
        match (&found, expected) {
            (Ok(minor), Ok(expected)) => assert_eq!(*minor, expected),
            (Err(reason), Err(words)) => assert!(reason.contains(words), "{reason}"),
            _ => panic!("{found:?}"),
        }
    }

    fn options(node: Option<&str>) -> GpuOptions {
        GpuOptions::of_real_gpus(node.map(str::to_owned), String::new())
    }

    #[rstest]
    #[case::empty_cluster(&ClusterSnapshot::default(), None, "there is no node with a Device object")]
    #[case::another_node(&cluster(&[(REAL, 16, true)], ""), Some("m"), r#"there is no node "m" with"#)]
    fn a_cluster_without_device_objects_has_no_gpu(
        #[case] snapshot: &ClusterSnapshot,
        #[case] node: Option<&str>,
        #[case] words: &str,
    ) {
        let reason = TargetGpu::find(snapshot, &options(node)).unwrap_err();
        assert!(reason.starts_with(words), "{reason}");
    }

    /// The issue of an H200 and of a small GPU: shares, units of them, and what a program allocates.
    #[rstest]
    #[case::h200(139, GIB, 16, 8, 8, 7372)]
    #[case::t4(15, GIB, 16, 1, 1, 480)]
    #[case::units_of_mib(15, MIB, 7, 2, 2048, 1504)]
    fn sizes_follow_from_the_gpu(
        #[case] free_gib: u64,
        #[case] unit: u64,
        #[case] parts: u64,
        #[case] share_gib: u64,
        #[case] units: u64,
        #[case] usable_mib: u64,
    ) {
        let gpu = TargetGpu {
            node: "n".to_owned(),
            uuid: REAL.to_owned(),
            minor: 0,
            total: free_gib * GIB,
            free: free_gib * GIB,
            unit,
        };
        let share = gpu.part(parts);
        assert_eq!(
            (share / GIB, gpu.units(share), usable(share) / MIB),
            (share_gib, units, usable_mib)
        );
    }
}

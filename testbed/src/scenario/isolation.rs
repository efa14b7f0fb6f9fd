//! The limits that a container's environment carries for an isolation provider, a library in the container that
//! enforces them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::device::TYPE_GPU;
use proto::record::GPU_DEVICES;
use proto::resource::{
    GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, HAMI_CORE, ISOLATION_PROVIDER,
};
use serde_json::json;

use super::{Scenario, World};
use kit::invariants;
use kit::pods::{Limits, PodBuilder};

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs nothing, on [Plain, Webhooks]:
    "isolation-limits" => isolation_limits,
        "a pod for HAMi-core finds the limits of each of its devices in its environment, other pods none";
};

/// The variables by which HAMi-core reads its limits; the first is followed by the index of the device.
const MEMORY_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT_";
const CORE_LIMIT: &str = "CUDA_DEVICE_SM_LIMIT";

/// Sets or removes the label of a node that names its isolation provider.
async fn label(world: &World, node: &str, provider: Option<&str>) -> Result<()> {
    let nodes: Api<Node> = Api::all(world.client());
    let patch = Patch::Merge(json!({"metadata": {"labels": {ISOLATION_PROVIDER: provider}}}));
    let labelled = nodes.patch(node, &PatchParams::default(), &patch).await;
    labelled.map(drop).context("cannot label a node")
}

/// Pods that demand an isolation provider wait until a node has its label, and then carry their limits.
async fn isolation_limits(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10")];
    let words = "lacks the label koordinator.sh/gpu-isolation-provider";
    world
        .create_refused(limited("waits", &limits, &node.name), words)
        .await?;
    label(world, &node.name, Some(HAMI_CORE)).await?;
    let tried = try_pods(world, &node.name, node.units.len()).await;
    label(world, &node.name, None).await?;
    tried
}

/// A pod on this node that demands HAMi-core as its isolation provider.
fn limited(name: &str, limits: &Limits<'_>, node: &str) -> PodBuilder {
    PodBuilder::new(name, limits)
        .on(node)
        .labelled(ISOLATION_PROVIDER, HAMI_CORE)
}

/// Starts pods of several request forms and checks the limits in their environment.
async fn try_pods(world: &World, node: &str, n_gpus: usize) -> Result<()> {
    world.until_running(&["waits"]).await?;
    check_limits(world, "waits", node, |total| total / 10, None).await?;
    let (shares, half) = (n_gpus.to_string(), (n_gpus * 50).to_string());
    let limits = [
        (GPU_SHARED, shares.as_str()),
        (GPU_MEMORY_RATIO, half.as_str()),
        (GPU_CORE, half.as_str()),
    ];
    world.start(limited("half-of-each", &limits, node)).await?;
    check_limits(world, "half-of-each", node, |total| total / 2, Some(50)).await?;
    let limits = [(GPU_SHARED, "2"), (GPU_MEMORY, "2Gi"), (GPU_CORE, "20")];
    world.start(limited("bytes", &limits, node)).await?;
    check_limits(world, "bytes", node, |_| 1 << 30, Some(10)).await?;
    world.start(limited("units", &[(GPU_MEM, "1")], node)).await?;
    let unit = invariants::memory_unit(&world.observer.now(), node);
    check_limits(world, "units", node, |_| unit, None).await?;
    world.start_units("free", "1", node).await?;
    let found = environment(world, "free").await?;
    let is_limited = found.keys().any(|name| is_limit(name));
    ensure!(!is_limited, "a pod without the label is limited: {found:?}");
    world.verify().await
}

fn is_limit(variable: &str) -> bool {
    variable.starts_with(MEMORY_LIMIT) || variable == CORE_LIMIT
}

/// The environment of a pod's container `main`, which it prints to its log.
async fn environment(world: &World, pod: &str) -> Result<BTreeMap<String, String>> {
    let log = world.log(pod, "main").await?;
    let mut found = BTreeMap::new();
    for (name, value) in log.lines().filter_map(|line| line.split_once('=')) {
        found.insert(name.to_owned(), value.to_owned());
    }
    Ok(found)
}

/// Checks the limits in a pod's environment. For each device that the pod sees, `bytes_of` returns the memory limit from the
/// device's memory; `core` is the limit of computing power in percent, `None` if the pod has none.
async fn check_limits(
    world: &World,
    pod: &str,
    node: &str,
    bytes_of: impl Fn(u64) -> u64,
    core: Option<u64>,
) -> Result<()> {
    let mut found = environment(world, pod).await?;
    let device = world.device(node)?;
    let sees = found.get(GPU_DEVICES).cloned().unwrap_or_default();
    let mut wanted = BTreeMap::new();
    for (at, uuid) in sees.split(',').enumerate() {
        let mut gpus = device
            .spec
            .devices
            .iter()
            .filter(|info| info.device_type == TYPE_GPU);
        let gpu = gpus.find(|info| info.id == uuid);
        let total = gpu.and_then(|info| info.resources.get(GPU_MEMORY)?.unsigned());
        let total = total.with_context(|| format!("{pod} sees {uuid:?}, which {node} has not"))?;
        wanted.insert(
            format!("{MEMORY_LIMIT}{at}"),
            format!("{}m", bytes_of(total) >> 20),
        );
    }
    wanted.extend(core.map(|percent| (CORE_LIMIT.to_owned(), percent.to_string())));
    found.retain(|name, _| is_limit(name));
    ensure!(
        found == wanted,
        "{pod} has the limits {found:?} and should have {wanted:?}"
    );
    Ok(())
}

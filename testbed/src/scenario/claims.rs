//! GPUs that a DRA driver has allocated to `ResourceClaims`, on a node whose GPUs gpushare's pods share.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use proto::kubelet_allocations::KubeletAllocations;
use serde_json::{Value, json};

use super::vendors::share;
use super::{ScenarioEntry, World};
use kit::kubelet::PreparedDevice;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "claims" => claims_counted,
        "a GPU that a DRA driver's claim has is shared no further until the claim's pod has gone";
    "claims-unknown" => unknown_devices,
        "a claimed device that is no known GPU holds all GPUs of the node; a monitor's claim holds none";
};

/// Node whose GPUs a DRA driver serves too.
pub(super) const CLAIMED: &str = "claimed";

const DRIVER: &str = "gpu.nvidia.com";

/// The GPU of a claim counts as used: sharing pods avoid it while the claim's pod exists, and a pod on a claimed GPU gets
/// an event.
async fn claims_counted(world: &mut World) -> Result<()> {
    start_claiming(world, "first", &["gpu-0"]).await?;
    until_claimed(world, &[0]).await?;
    world.start(share("share-0", "60", CLAIMED)).await?;
    world.start(share("share-1", "60", CLAIMED)).await?;
    ensure!(
        recorded_minors(world, &["share-0", "share-1"])? == [1, 2].into(),
        "a pod shares the GPU of a claim"
    );
    world.create(share("share-2", "60", CLAIMED)).await?;
    world.until_refused("share-2", "nodes are available").await?;
    world.delete("first").await?;
    world.until_running(&["share-2"]).await?;
    ensure!(
        recorded_minors(world, &["share-2"])? == [0].into(),
        "only GPU 0 had room"
    );
    world.verify().await?;
    // A DRA driver knows nothing of pods that share, so it may claim a GPU that they hold.
    start_claiming(world, "second", &["gpu-0"]).await?;
    until_claimed(world, &[0]).await?;
    world
        .until_event(&world.namespace, "share-2", "GPUClaimed", "ResourceClaim")
        .await?;
    world.start(share("small-0", "30", CLAIMED)).await?;
    world.start(share("small-1", "30", CLAIMED)).await?;
    ensure!(
        recorded_minors(world, &["small-0", "small-1"])? == [1, 2].into(),
        "another pod joins on the GPU of a claim"
    );
    world.create(share("small-2", "30", CLAIMED)).await?;
    world.until_refused("small-2", "nodes are available").await?;
    world.delete("second").await?;
    world.until_running(&["small-2"]).await
}

/// A claim of a device that the plugin does not know makes all GPUs count as used; a claim for administration uses none.
async fn unknown_devices(world: &mut World) -> Result<()> {
    start_claiming(world, "passthrough", &["gpu-vfio-0"]).await?;
    until_claimed(world, &[0, 1, 2]).await?;
    // Events about a Node are in the namespace `default`, as a Node has none.
    let (reason, device) = ("ClaimedDeviceUnknown", "gpu-vfio-0");
    world.until_event("default", CLAIMED, reason, device).await?;
    world.create(share("share-0", "10", CLAIMED)).await?;
    world.until_refused("share-0", "nodes are available").await?;
    world.delete("passthrough").await?;
    world.until_running(&["share-0"]).await?;
    world.delete("share-0").await?;

    let all = ["gpu-0", "gpu-1", "gpu-2"];
    let uid = create_claim_for_administration(world, "monitor", &all).await?;
    prepare(world, "monitor", &uid, &all)?;
    world
        .start(PodBuilder::new("monitor", &[]).claiming("monitor").on(CLAIMED))
        .await?;
    // The plugin reads claims in order: once this one counts, the monitor's claim has been read too, and counts for nothing.
    start_claiming(world, "one", &["gpu-1"]).await?;
    until_claimed(world, &[1]).await?;
    world.start(share("share-1", "60", CLAIMED)).await?;
    world.start(share("share-2", "60", CLAIMED)).await?;
    ensure!(
        recorded_minors(world, &["share-1", "share-2"])? == [0, 2].into(),
        "GPUs 0 and 2 were free"
    );
    Ok(())
}

/// Starts a pod whose claim, of the same name, has these devices.
async fn start_claiming(world: &mut World, name: &str, devices: &[&str]) -> Result<()> {
    prepare(world, name, &format!("uid-of-{name}"), devices)?;
    world
        .start(PodBuilder::new(name, &[]).claiming(name).on(CLAIMED))
        .await?;
    Ok(())
}

/// Makes kubelet treat these devices as prepared for a claim, with the CDI names that NVIDIA's driver returns.
fn prepare(world: &mut World, claim: &str, uid: &str, devices: &[&str]) -> Result<()> {
    let namespace = world.namespace.clone();
    let prepared = |device: &&str| PreparedDevice {
        driver: DRIVER.to_owned(),
        pool: CLAIMED.to_owned(),
        name: (*device).to_owned(),
        cdi_names: vec![format!("k8s.{DRIVER}/claim={uid}-{device}")],
    };
    world
        .node(CLAIMED)?
        .kubelet()
        .prepare_claim(&namespace, claim, devices.iter().map(prepared).collect());
    Ok(())
}

/// Creates a claim that is allocated with `adminAccess`, which reserves nothing; returns its UID.
async fn create_claim_for_administration(world: &World, name: &str, devices: &[&str]) -> Result<String> {
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"),
        "resourceclaims",
    );
    let api: Api<DynamicObject> = Api::namespaced_with(world.client.0.clone(), &world.namespace, &resource);
    let exactly = json!({"deviceClassName": DRIVER, "allocationMode": "All", "adminAccess": true});
    let object = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}},
    });
    let created = api
        .create(&PostParams::default(), &serde_json::from_value(object)?)
        .await
        .context("cannot create the claim")?;
    let result = |device: &&str| json!({"request": "gpus", "driver": DRIVER, "pool": CLAIMED, "device": device, "adminAccess": true});
    let results: Vec<Value> = devices.iter().map(result).collect();
    let status = json!({"status": {"allocation": {"devices": {"results": results}}}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .context("cannot allocate the claim")?;
    created.uid().context("the claim has no UID")
}

/// Waits until the Device object names exactly the GPUs of these minor numbers as used, all by pods' claims of the DRA driver.
async fn until_claimed(world: &mut World, minors: &[u32]) -> Result<()> {
    let gpus = world.node(CLAIMED)?.gpus();
    let expected: BTreeSet<String> = gpus
        .iter()
        .filter(|gpu| minors.contains(&gpu.minor))
        .map(|gpu| gpu.uuid.clone())
        .collect();
    let counted = |snapshot: &kit::observer::ClusterSnapshot| {
        let allocations = KubeletAllocations::read(snapshot.devices.get(CLAIMED)?.annotations()).ok()??;
        let is_drivers = allocations
            .entries
            .iter()
            .all(|entry| entry.resource_name == DRIVER && !entry.pod_uid.is_empty());
        let uuids: BTreeSet<String> = allocations
            .entries
            .into_iter()
            .flat_map(|entry| entry.device_ids)
            .collect();
        (is_drivers && uuids == expected).then_some(())
    };
    world
        .until(&format!("GPUs {minors:?} to be counted for claims"), counted)
        .await
}

/// The minor numbers that the records of these pods name.
fn recorded_minors(world: &World, names: &[&str]) -> Result<BTreeSet<i32>> {
    let mut minors = BTreeSet::new();
    for name in names {
        minors.extend(world.minors(name)?);
    }
    Ok(minors)
}

//! GPUs that a DRA driver has allocated to `ResourceClaims`, on a node whose GPUs gpushare's pods share.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use proto::device::Device;
use proto::kubelet_allocations::KubeletAllocations;
use serde_json::{Value, json};

use super::vendors::share;
use super::{Scenario, World};
use kit::kubelet::PreparedDevice;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "claims" => claims_counted,
        "a GPU that a DRA driver's claim has is shared no further until the claim's pod has gone";
    "claims-unknown" => unknown_devices,
        "a claimed device that is no known GPU holds all GPUs of the node; a monitor's claim holds none";
};

/// Node whose GPUs a DRA driver serves too.
pub(super) const CLAIMED: &str = "claimed";

const DRIVER: &str = "gpu.nvidia.com";

async fn claims_counted(world: &mut World) -> Result<()> {
    start_claiming(world, "first", &["gpu-0"]).await?;
    until_claimed(world, &[0]).await?;
    world.start(share("share-0", "60", CLAIMED)).await?;
    world.start(share("share-1", "60", CLAIMED)).await?;
    ensure_minors(
        world,
        &["share-0", "share-1"],
        &[1, 2],
        "a pod shares the GPU of a claim",
    )?;
    world.create_waiting(share("share-2", "60", CLAIMED)).await?;
    world.delete_for("first", "share-2").await?;
    ensure_minors(world, &["share-2"], &[0], "only GPU 0 had room")?;
    world.verify().await?;
    // A DRA driver knows nothing of pods that share, so it may claim a GPU that they hold.
    start_claiming(world, "second", &["gpu-0"]).await?;
    until_claimed(world, &[0]).await?;
    world
        .until_pod_event("share-2", "GPUClaimed", "ResourceClaim")
        .await?;
    world.start(share("small-0", "30", CLAIMED)).await?;
    world.start(share("small-1", "30", CLAIMED)).await?;
    ensure_minors(
        world,
        &["small-0", "small-1"],
        &[1, 2],
        "another pod joins on the GPU of a claim",
    )?;
    world.create_waiting(share("small-2", "30", CLAIMED)).await?;
    world.delete_for("second", "small-2").await
}

async fn unknown_devices(world: &mut World) -> Result<()> {
    start_claiming(world, "passthrough", &["gpu-vfio-0"]).await?;
    until_claimed(world, &[0, 1, 2]).await?;
    // Events about a Node are in the namespace `default`, as a Node has none.
    let (reason, device) = ("ClaimedDeviceUnknown", "gpu-vfio-0");
    world.until_event("default", CLAIMED, reason, device).await?;
    world.create_waiting(share("share-0", "10", CLAIMED)).await?;
    world.delete_for("passthrough", "share-0").await?;
    world.delete("share-0").await?;

    let all = ["gpu-0", "gpu-1", "gpu-2"];
    let uid = create_claim_for_administration(world, "monitor", &all).await?;
    prepare(world, "monitor", &uid, &all)?;
    start_claimant(world, "monitor").await?;
    // The plugin reads claims in order: once this one counts, the monitor's claim has been read too, and counts for nothing.
    start_claiming(world, "one", &["gpu-1"]).await?;
    until_claimed(world, &[1]).await?;
    world.start(share("share-1", "60", CLAIMED)).await?;
    world.start(share("share-2", "60", CLAIMED)).await?;
    ensure_minors(world, &["share-1", "share-2"], &[0, 2], "GPUs 0 and 2 were free")?;
    Ok(())
}

/// Starts a pod whose claim, of the same name, has these devices.
async fn start_claiming(world: &mut World, name: &str, devices: &[&str]) -> Result<()> {
    prepare(world, name, &format!("uid-of-{name}"), devices)?;
    start_claimant(world, name).await
}

/// Starts a pod with the claim of the same name.
async fn start_claimant(world: &World, name: &str) -> Result<()> {
    let claimant = PodBuilder::new(name, &[]).claiming(name).on(CLAIMED);
    world.start(claimant).await.map(drop)
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
    let kubelet = world.node(CLAIMED)?.kubelet();
    kubelet.prepare_claim(&namespace, claim, devices.iter().map(prepared).collect());
    Ok(())
}

/// Creates a claim that is allocated with `adminAccess`, which reserves nothing; returns its UID.
async fn create_claim_for_administration(world: &World, name: &str, devices: &[&str]) -> Result<String> {
    let resource = ApiResource::from_gvk_with_plural(
        &GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceClaim"),
        "resourceclaims",
    );
    let api: Api<DynamicObject> = Api::namespaced_with(world.client(), &world.namespace, &resource);
    let exactly = json!({"deviceClassName": DRIVER, "allocationMode": "All", "adminAccess": true});
    let object = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": exactly}]}},
    });
    let object = serde_json::from_value(object)?;
    let created = api.create(&PostParams::default(), &object).await;
    let created = created.context("cannot create the claim")?;
    let result = |device: &&str| json!({"request": "gpus", "driver": DRIVER, "pool": CLAIMED, "device": device, "adminAccess": true});
    let results: Vec<Value> = devices.iter().map(result).collect();
    let status = Patch::Merge(json!({"status": {"allocation": {"devices": {"results": results}}}}));
    let allocated = api.patch_status(name, &PatchParams::default(), &status).await;
    allocated.context("cannot allocate the claim")?;
    created.uid().context("the claim has no UID")
}

/// Waits until the Device object names exactly the GPUs of these minor numbers as used, all by pods' claims of the DRA driver.
async fn until_claimed(world: &mut World, minors: &[u32]) -> Result<()> {
    let gpus = world.node(CLAIMED)?.gpus().iter();
    let claimed = gpus.filter(|gpu| minors.contains(&gpu.minor));
    let expected: BTreeSet<String> = claimed.map(|gpu| gpu.uuid.clone()).collect();
    let counted = |device: &Device| {
        let mut uuids = BTreeSet::new();
        for entry in KubeletAllocations::read(device.annotations()).ok()??.entries {
            if entry.resource_name != DRIVER || entry.pod_uid.is_empty() {
                return None;
            }
            uuids.extend(entry.device_ids);
        }
        (uuids == expected).then_some(())
    };
    let what = format!("GPUs {minors:?} to be counted for claims");
    world.until_device(CLAIMED, &what, counted).await
}

/// Checks that the records of these pods together name these GPUs.
fn ensure_minors(world: &World, names: &[&str], expected: &[i32], else_said: &str) -> Result<()> {
    let mut minors = Vec::new();
    for name in names {
        minors.extend(world.minors(name)?);
    }
    minors.sort_unstable();
    ensure!(minors == expected, "{else_said}: {minors:?}");
    Ok(())
}

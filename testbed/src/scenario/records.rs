//! Records that the scheduler did not write, and pods that it did not place: the room they take, and the right to write
//! them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use proto::device::Device;
use proto::plugin_reports::PODS_WITHOUT_DEVICES;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use proto::resource::GPU_CORE;
use serde_json::{Value, json};

use super::breaking::until_registered;
use super::{Scenario, World};
use kit::cluster::user_client;
use kit::manifests;
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;

// The shipped policy would refuse the forged records before the daemons see them.
pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "no policy that guards records", on [Faults]:
    "records-forged" => records_forged,
        "records of pods that ask for nothing, and pods bound without the scheduler, take no GPU from others";
    "records-removed" => records_removed,
        "the removed record of a running pod is written again, also by a plugin that has started since";
    "records-guarded" => records_guarded,
        "records are written by the scheduler and the plugin, and pods that have some stay changeable";
};

/// The admission policy that guards records, and its file in `deploy/`.
const POLICY: &str = "gpushare-records";
const POLICY_FILE: &str = "base/record-admission.yaml";
/// The policy's words.
const REFUSAL: &str = "says which devices a pod holds";
/// Longest time until a record that was removed is there again, on a busy machine.
const AGAIN: Duration = Duration::from_secs(20);

/// A record by which a pod holds 80 GiB, and all computing power, of each of these GPUs.
fn forged_record(minors: &[u32]) -> String {
    let gpu = |minor: &u32| json!({"minor": minor, "resources": {"koordinator.sh/gpu-memory": "80Gi", "koordinator.sh/gpu-core": 100}});
    let gpus: Vec<Value> = minors.iter().map(gpu).collect();
    json!({"gpu": gpus}).to_string()
}

/// Binds a pod past the scheduler, as its author can with `nodeName`; the checks skip it. Returns its UID.
async fn bind_by_hand(world: &mut World, spec: PodBuilder, node: &str) -> Result<String> {
    let pod = world.bind_by_hand(spec, node).await?;
    world.excused.insert(world.key(&pod.name_any()));
    Ok(pod.uid().unwrap_or_default())
}

async fn records_forged(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let minors: Vec<u32> = (0..).take(node.units.len()).collect();
    let mut without_devices = Vec::new();
    for (name, minors) in [("names-nothing-there", &[99][..]), ("names-all", &minors)] {
        let spec =
            PodBuilder::new(name, &[("cpu", "1m")]).annotation(DEVICE_ALLOCATED, &forged_record(minors));
        without_devices.push(bind_by_hand(world, spec, &node.name).await?);
    }
    let core_alone = PodBuilder::new("core-alone", &[(GPU_CORE, "50")]);
    without_devices.push(bind_by_hand(world, core_alone, &node.name).await?);
    let names = ["names-nothing-there", "names-all", "core-alone"];
    world.until_running(&names).await?;
    until_reported(world, &node.name, &without_devices).await?;
    let largest_first = node.largest_first();
    for (idx, units) in largest_first.iter().enumerate() {
        let name = format!("full-{idx}");
        world.start_units(&name, units, &node.name).await?;
    }
    for idx in 0..largest_first.len() {
        world.delete(&format!("full-{idx}")).await?;
    }
    counted_once(
        world,
        &node.name,
        largest_first.first().copied().unwrap_or_default(),
    )
    .await?;
    for name in names {
        world.delete(name).await?;
    }
    world.excused.clear();
    Ok(())
}

/// Checks that the scheduler charges a pod whose GPU it does not know to one GPU only, so that the others stay free.
async fn counted_once(world: &mut World, node: &str, units: u64) -> Result<()> {
    bind_by_hand(world, PodBuilder::units("direct", 1), node).await?;
    // The pod is charged to the GPU with the most room.
    let others = world.gpu_node(2)?.largest_first();
    let is_first = others.first() == Some(&units);
    let next = others.get(usize::from(is_first)).copied().unwrap_or_default();
    world.create(PodBuilder::units("beside", next).on(node)).await?;
    // It is placed beside one whose device is not known.
    world.until_bound("beside").await?;
    for name in ["beside", "direct"] {
        world.pods.delete_now(name).await?;
    }
    Ok(())
}

/// Waits until the Device object of a node lists these pods as pods to which kubelet has given no device.
async fn until_reported(world: &mut World, node: &str, uids: &[String]) -> Result<()> {
    let reported = |device: &Device| {
        let text = device.annotations().get(PODS_WITHOUT_DEVICES)?;
        uids.iter().all(|uid| text.contains(uid.as_str())).then_some(())
    };
    let what = "the plugin to report pods without devices";
    world.until_device(node, what, reported).await
}

/// The annotations of a pod that record its devices.
fn record_annotations(pod: &Pod) -> BTreeMap<String, String> {
    let keys = [
        DEVICE_ALLOCATED,
        BIND_TIMESTAMP,
        GPU_MINORS,
        MEM_IDX,
        MEM_POD,
        MEM_DEV,
        MEM_ASSIGNED,
        MEM_ASSUME_TIME,
    ];
    let mut record = pod.annotations().clone();
    record.retain(|key, _| keys.contains(&key.as_str()));
    record
}

/// Removes the annotations with this prefix from a pod's record; returns the pod's resource version without
/// them.
async fn remove(world: &World, name: &str, prefix: &str) -> Result<u64> {
    let record = record_annotations(&world.pod(name)?);
    let keys = record.keys().filter(|key| key.starts_with(prefix));
    let none: BTreeMap<&String, Value> = keys.map(|key| (key, Value::Null)).collect();
    let patch = Patch::Merge(json!({"metadata": {"annotations": none}}));
    let api = world.pods.api();
    let removed = api.patch(name, &PatchParams::default(), &patch).await;
    let removed = removed.context("cannot remove annotations")?;
    version(&removed).context("the pod has no version")
}

/// The resource version of a pod as a number, which grows with each change.
fn version(pod: &Pod) -> Option<u64> {
    pod.resource_version()?.parse().ok()
}

/// Waits until a pod, in a later version than `removed`, has all annotations of its record again, for the same GPU; returns them.
async fn until_whole(
    world: &World,
    name: &str,
    before: &BTreeMap<String, String>,
    removed: u64,
) -> Result<BTreeMap<String, String>> {
    let key = world.key(name);
    let is_whole = |snapshot: &ClusterSnapshot| {
        let pod = snapshot.pods.get(&key)?;
        let again = record_annotations(pod);
        let is_same = |key: &str| again.get(key) == before.get(key);
        let is_whole = again.len() == before.len() && is_same(MEM_IDX) && is_same(MEM_ASSIGNED);
        (is_whole && version(pod) > Some(removed)).then_some(again)
    };
    let what = format!("the record of {name} to be whole again");
    world.until_within(AGAIN, &what, is_whole).await
}

async fn records_removed(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?.name;
    world.start_units("held", "2", &node).await?;
    world.until_assigned("held").await?;
    let before = record_annotations(&world.pod("held")?);
    for prefix in ["", "scheduling.koordinator.sh/", "ALIYUN_COM_GPU_MEM_"] {
        let version = remove(world, "held", prefix).await?;
        let again = until_whole(world, "held", &before, version).await?;
        ensure!(
            again == before,
            "without {prefix}* the record was {before:?}, and is {again:?}"
        );
    }
    // A plugin that has never seen the record finds it out from the devices of the running container.
    world.node(&node)?.remove_plugin().await;
    let version = remove(world, "held", "").await?;
    world.node(&node)?.start_plugin(&[])?;
    until_whole(world, "held", &before, version).await?;
    // Without a registered plugin kubelet would fail the pod for want of devices, and the plugin would never check it.
    until_registered(world, &node).await?;
    bind_by_hand(world, PodBuilder::units("bound-by-hand", 1), &node).await?;
    let words = "was not placed by gpushare-scheduler";
    let name = "bound-by-hand";
    world.until_pod_event(name, "GPUNotPlaced", words).await?;
    world.verify().await?;
    ensure!(
        record_annotations(&world.pod("bound-by-hand")?).is_empty(),
        "a pod that was bound by hand has a record"
    );
    world.delete("bound-by-hand").await?;
    world.excused.clear();
    Ok(())
}

async fn records_guarded(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    let forged = |name: &str| {
        PodBuilder::new(name, &[("cpu", "1m")]).annotation(DEVICE_ALLOCATED, &forged_record(&[0]))
    };
    bind_by_hand(world, forged("before"), &node.name).await?;
    world.until_running(&["before"]).await?;
    let cluster = world.cluster()?;
    let path = cluster.deploy().join(POLICY_FILE);
    manifests::apply_file(cluster.client(), &path).await?;
    let alice = user_client(cluster.api(), cluster.dir(), "alice", &[]).await?;
    let tried = try_accounts(world, &alice, &forged("forged").pod()?).await;
    let api = world.cluster()?.api().objects().clone();
    for plural in ["validatingadmissionpolicybindings", "validatingadmissionpolicies"] {
        api.delete(plural, "", POLICY, None)?;
    }
    world.delete("before").await?;
    world.excused.clear();
    tried
}

/// The ordinary user `alice` can neither create, change nor remove a record; she can change other annotations, and the
/// scheduler's pods still get their records.
async fn try_accounts(world: &mut World, alice: &Client, forged: &Pod) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(alice.clone(), &world.namespace);
    let refused = |what: &str, outcome: kube::Result<Pod>| match outcome {
        Err(kube::Error::Api(status)) if status.code == 403 && status.message.contains(REFUSAL) => Ok(()),
        other => bail!("{what}: {other:?}"),
    };
    refused(
        "a pod with a record",
        pods.create(&PostParams::default(), forged).await,
    )?;
    let params = PatchParams::default();
    let change = |annotations: Value| Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    for (what, record) in [("changed", json!("{}")), ("removed", Value::Null)] {
        let patched = pods
            .patch("before", &params, &change(json!({DEVICE_ALLOCATED: record})))
            .await;
        refused(&format!("a record that is {what}"), patched)?;
    }
    let patched = pods
        .patch_status("before", &params, &change(json!({MEM_IDX: "1"})))
        .await;
    refused("a record by way of status", patched)?;
    pods.patch("before", &params, &change(json!({"note": "anything"})))
        .await
        .context("a pod with a record is no longer changeable")?;
    let served = world.start(PodBuilder::units("served", 2)).await?;
    ensure!(
        served.annotations().contains_key(DEVICE_ALLOCATED),
        "the scheduler wrote no record"
    );
    world.until_assigned("served").await
}

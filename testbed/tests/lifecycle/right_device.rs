//! The checks of the node's plugin before a start, and its repairs, on a cluster of the real daemons.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kit::cluster::{GpuFault, LocalCluster, NodeSetup};
use kit::invariants;
use kit::kubelet::RunState;
use kit::pods::{NamespacePods, PodBuilder};
use kube::api::{Patch, PatchParams};
use proto::pod::ALL_DEVICES;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_SHARED};
use serde_json::{Value, json};

use super::{DEADLINE, cluster_of, node_of, run, until_event, until_run, verify};

/// A node of two GPUs of 16 GiB, whose plugin is started with these arguments.
async fn cluster(plugin_args: &[&str]) -> Result<(LocalCluster, NamespacePods)> {
    let plugin_args = plugin_args.iter().map(|arg| (*arg).to_owned()).collect();
    cluster_of(NodeSetup {
        plugin_args,
        ..node_of(2)
    })
    .await
}

/// The annotations of a pod that was placed on a GPU of the node by hand.
fn record(minor: u32, units: u64, nanos: u64) -> BTreeMap<String, String> {
    let device = json!({"minor": minor, "id": format!("GPU-n1-{minor}"), "resources": {"koordinator.sh/gpu-memory": format!("{units}Gi")}});
    let text = |key: &str, text: String| (key.to_owned(), text);
    BTreeMap::from([
        text(DEVICE_ALLOCATED, json!({"gpu": [device]}).to_string()),
        text(GPU_MINORS, minor.to_string()),
        text(BIND_TIMESTAMP, nanos.to_string()),
        text(MEM_IDX, minor.to_string()),
        text(MEM_POD, units.to_string()),
        text(MEM_DEV, "16".to_owned()),
        text(MEM_ASSIGNED, "false".to_owned()),
        text(MEM_ASSUME_TIME, nanos.to_string()),
    ])
}

/// The same pod with a variable of its own.
fn setting(mut pod: Pod, name: &str, value: &str) -> Result<Pod> {
    let container = pod
        .spec
        .as_mut()
        .and_then(|spec| spec.containers.first_mut())
        .context("no container")?;
    // The API server leaves out an empty value.
    let variable = if value.is_empty() {
        json!({"name": name})
    } else {
        json!({"name": name, "value": value})
    };
    container.env = Some(vec![serde_json::from_value(variable)?]);
    Ok(pod)
}

/// A pod that is bound without the scheduler.
fn stray(name: &str, units: u64, annotations: &BTreeMap<String, String>) -> Result<Pod> {
    let container = json!({"name": "c", "image": "x", "resources": {"limits": {GPU_MEM: units.to_string()}}});
    Ok(serde_json::from_value(
        json!({"metadata": {"name": name, "annotations": annotations}, "spec": {"nodeName": "n1", "containers": [container]}}),
    )?)
}

async fn create(pods: &NamespacePods, pod: &Pod) -> Result<()> {
    pods.api().create(&kube::api::PostParams::default(), pod).await?;
    Ok(())
}

/// The minor of the GPU in a pod's record.
fn minor_of(cluster: &LocalCluster, name: &str) -> Result<i32> {
    let snapshot = cluster.observer().now();
    let record = invariants::record(snapshot.pod(name).context("no pod")?).map_err(anyhow::Error::msg)?;
    Ok(record.first().context("no device")?.0)
}

/// The minors in a pod's own annotations, once they are these.
async fn until_recorded(cluster: &LocalCluster, name: &str, minors: &[i32]) -> Result<()> {
    let is_so = |snapshot: &kit::observer::ClusterSnapshot| {
        let record = invariants::record(snapshot.pod(name)?).ok()?;
        (record.iter().map(|(minor, _)| *minor).collect::<Vec<_>>() == minors).then_some(())
    };
    cluster
        .until(&format!("{name} to be recorded on {minors:?}"), DEADLINE, is_so)
        .await
}

async fn annotate(pods: &NamespacePods, name: &str, annotations: &Value) -> Result<()> {
    let patch = json!({"metadata": {"annotations": annotations}});
    pods.api()
        .patch(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await?;
    Ok(())
}

fn is_started(cluster: &mut LocalCluster, name: &str) -> Result<bool> {
    let container = cluster.node("n1")?.kubelet().container("default", name, "c");
    Ok(container.is_some_and(|container| matches!(container.state, RunState::Running { .. })))
}

/// The record of a running pod is edited: the scheduler would free a GPU in use.
#[tokio::test(flavor = "multi_thread")]
async fn an_edited_record_of_a_running_pod_is_corrected() -> Result<()> {
    let (mut cluster, pods) = cluster(&[]).await?;
    run(&cluster, &pods, "a", 4).await?;
    let minor = minor_of(&cluster, "a")?;
    let other = u32::try_from(1 - minor)?;
    let edited = record(other, 4, 1);
    annotate(
        &pods,
        "a",
        &json!({DEVICE_ALLOCATED: edited.get(DEVICE_ALLOCATED), GPU_MINORS: edited.get(GPU_MINORS), MEM_IDX: edited.get(MEM_IDX)}),
    )
    .await?;
    until_recorded(&cluster, "a", &[1 - minor]).await?;
    cluster.node("n1")?.restart_kubelet().await?;
    until_recorded(&cluster, "a", &[minor]).await?;
    let words = "its record now names the devices that it has";
    until_event(&cluster, "a", "GPUMismatch", words).await?;
    verify(&cluster).await
}

/// Pods bound without the scheduler: adopted where they fit, held with the reason where they do not, and started once they do.
#[tokio::test(flavor = "multi_thread")]
async fn pods_bound_without_the_scheduler_are_adopted_where_they_fit() -> Result<()> {
    let (mut cluster, pods) = cluster(&["--unplaced", "adopt"]).await?;
    for name in ["one", "two", "three"] {
        create(&pods, &stray(name, 10, &BTreeMap::new())?).await?;
        if name != "three" {
            until_run(&cluster, &[name]).await?;
        }
    }
    until_event(&cluster, "three", "GPUNotPlaced", "").await?;
    ensure!(
        !is_started(&mut cluster, "three")?,
        "it has started on GPUs that are full"
    );
    for name in ["one", "two"] {
        pods.delete_now(name).await?;
    }
    until_run(&cluster, &["three"]).await?;
    verify(&cluster).await
}

/// Two records that do not fit on one GPU, as two schedulers might write them: the second waits for the first to end.
#[tokio::test(flavor = "multi_thread")]
async fn records_that_do_not_fit_together_start_one_after_the_other() -> Result<()> {
    let (mut cluster, pods) = cluster(&[]).await?;
    create(&pods, &stray("first", 10, &record(0, 10, 1))?).await?;
    until_run(&cluster, &["first"]).await?;
    create(&pods, &stray("second", 10, &record(0, 10, 2))?).await?;
    until_event(&cluster, "second", "GPUOvercommitted", "has no room for it").await?;
    ensure!(!is_started(&mut cluster, "second")?, "both run on one GPU");
    pods.delete_now("first").await?;
    until_run(&cluster, &["second"]).await?;
    verify(&cluster).await
}

/// A manifest that was copied from a running pod brings its flag along.
#[tokio::test(flavor = "multi_thread")]
async fn a_copied_assigned_annotation_does_not_block_a_pod() -> Result<()> {
    let (cluster, pods) = cluster(&[]).await?;
    let copied = PodBuilder::units("a", 4).annotated(&[(MEM_ASSIGNED.to_owned(), "true".to_owned())].into());
    pods.create(&copied).await?;
    until_run(&cluster, &["a"]).await?;
    verify(&cluster).await
}

/// Node and pod show a GPU that falls sick, and its return.
#[tokio::test(flavor = "multi_thread")]
async fn an_unhealthy_gpu_is_reported_on_node_and_pod() -> Result<()> {
    let (mut cluster, pods) = cluster(&[]).await?;
    run(&cluster, &pods, "a", 4).await?;
    let minor = u32::try_from(minor_of(&cluster, "a")?)?;
    cluster.node("n1")?.set_health(minor, GpuFault::Xid(79))?;
    until_event(&cluster, "n1", "GPUUnhealthy", "XID 79").await?;
    until_event(&cluster, "a", "GPUUnhealthy", "which this pod holds").await?;
    cluster.node("n1")?.set_health(minor, GpuFault::Healthy)?;
    until_event(&cluster, "n1", "GPUHealthy", "").await?;
    until_run(&cluster, &["a"]).await?;
    // A request that is doubtful and valid is reported once the pod starts.
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY, "8192")];
    let tiny = PodBuilder::new("tiny", &limits).annotation("gpushare/group-domain", "rack");
    pods.create(&tiny).await?;
    until_event(&cluster, "tiny", "GPUMemoryTiny", "did you mean 8192Mi?").await?;
    let words = "\"rack\" is none of any, node, link";
    until_event(&cluster, "tiny", "GPUGroupDomainUnknown", words).await
}

/// A user who may create pods may write the mark for all GPUs, and a record beside it, and bind the pod past the scheduler.
#[tokio::test(flavor = "multi_thread")]
async fn a_forged_all_devices_annotation_shows_no_gpu() -> Result<()> {
    let forged = |name: &str, minors: &[u32]| -> Result<Pod> {
        let gpus: Vec<Value> = minors
            .iter()
            .map(|minor| json!({"minor": minor, "id": format!("GPU-n1-{minor}"), "resources": {}}))
            .collect();
        let annotations = json!({ALL_DEVICES: "true", DEVICE_ALLOCATED: json!({"gpu": gpus}).to_string(), BIND_TIMESTAMP: "1"});
        let container = json!({"name": "c", "image": "x", "resources": {"limits": {GPU_SHARED: "1"}}});
        Ok(serde_json::from_value(
            json!({"metadata": {"name": name, "annotations": annotations}, "spec": {"nodeName": "n1", "containers": [container]}}),
        )?)
    };
    for (args, minors, reason, words) in [
        (
            &[][..],
            &[0, 1][..],
            "GPUAllDevicesForbidden",
            "runs without --allow-all-devices",
        ),
        (
            &["--allow-all-devices"],
            &[1],
            "GPUMismatch",
            "counts only where the record names every healthy GPU of the node",
        ),
    ] {
        let (mut cluster, pods) = cluster(args).await?;
        create(&pods, &forged("forged", minors)?).await?;
        until_event(&cluster, "forged", reason, words).await?;
        ensure!(!is_started(&mut cluster, "forged")?, "it has started");
        // The pod's own watch and the plugin's report arrive in any order.
        let is_counted = |node: &Value| node.to_string().contains(r#""name":"forged""#);
        cluster
            .until_scheduler_shows("n1", "the forged pod", DEADLINE, is_counted)
            .await?;
        pods.create(&PodBuilder::units("honest", 4)).await?;
        pods.delete("forged").await?;
        until_run(&cluster, &["honest"]).await?;
        verify(&cluster).await?;
    }
    Ok(())
}

/// By variable a pod's own value would win over what was counted for it; by CDI it does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_cannot_choose_its_gpus_by_variable() -> Result<()> {
    for inject in ["envvar", "cdi"] {
        let (mut cluster, pods) = cluster_of(NodeSetup { inject, ..node_of(2) }).await?;
        let with = |name: &str, value: &str| {
            setting(
                stray(name, 4, &record(0, 4, 1))?,
                invariants::VISIBLE_DEVICES,
                value,
            )
        };
        create(&pods, &with("same", "GPU-n1-0")?).await?;
        if inject == "cdi" {
            let words = "this node's runtime has not been seen reading CDI specs yet";
            until_event(&cluster, "same", "GPUMismatch", words).await?;
            create(&pods, &with("empty", "")?).await?;
            until_run(&cluster, &["empty"]).await?;
        }
        until_run(&cluster, &["same"]).await?;
        create(&pods, &with("other", "GPU-n1-1")?).await?;
        create(&pods, &with("all", "all")?).await?;
        for name in ["other", "all"] {
            if inject == "cdi" {
                until_run(&cluster, &[name]).await?;
                continue;
            }
            let words = "container \"c\" sets NVIDIA_VISIBLE_DEVICES, which is not allowed in a pod that shares devices";
            until_event(&cluster, name, "GPUMismatch", words).await?;
            ensure!(!is_started(&mut cluster, name)?, "{name} has started");
        }
        verify(&cluster).await?;
    }
    Ok(())
}

//! Actions of users: requests of every form, refused requests, pods that wait for room, and pods that come and go.

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use proto::record::{MEM_CONTAINER, MEM_IDX, MEM_POD};
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use super::expected::Expected::Runs;
use super::{NO_ROOM, Scenario, World};
use kit::pods::{Limits, PodBuilder};

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs nothing, on [Plain, Webhooks]:
    "gpushare-pod" => gpushare_pod,
        "memory units on one GPU, with gpushare's variables and annotations";
    "koordinator-pod" => koordinator_pod,
        "bytes of memory on one shared GPU";
    "two-devices" => two_devices,
        "an equal share on each of two GPUs";
    "many-containers" => many_containers,
        "init container, sidecar and two containers see the same GPU";
    "ratio-and-core" => ratio_and_core,
        "thirds of a GPU: three fit, the fourth waits";
    "many-at-once" => many_at_once,
        "thirty equal pods created together";
    "many-gpus-at-once" => many_gpus_at_once,
        "equal pods created together that need every GPU of a node";
    "refusals" => refusals,
        "requests that can never work are refused with their reason";
    "coming-and-going" => coming_and_going,
        "whole GPUs taken and given back again and again leave nothing behind";
    "waiting-for-room" => waiting_for_room,
        "a pod without room waits, and runs when there is some";
};

async fn gpushare_pod(world: &mut World) -> Result<()> {
    world.start(PodBuilder::units("units", 2)).await?;
    world.until_assigned("units").await?;
    let log = world.log("units", "main").await?;
    let pod = world.pod("units")?;
    let idx = pod.annotations().get(MEM_IDX).cloned().unwrap_or_default();
    for line in [format!("{MEM_IDX}={idx}"), format!("{MEM_CONTAINER}=2")] {
        let is_there = log.lines().any(|found| found == line);
        ensure!(is_there, "{line} is not in the environment:\n{log}");
    }
    Ok(())
}

async fn koordinator_pod(world: &mut World) -> Result<()> {
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")];
    Runs(1)
        .try_pod(world, PodBuilder::new("bytes", &limits))
        .await
        .map(drop)
}

async fn two_devices(world: &mut World) -> Result<()> {
    let limits = [(GPU_SHARED, "2"), (GPU_MEMORY, "2Gi"), (GPU_CORE, "20")];
    Runs(2)
        .try_pod(world, PodBuilder::new("two", &limits))
        .await
        .map(drop)
}

/// A pod of several containers holds what its app containers and sidecars request together.
async fn many_containers(world: &mut World) -> Result<()> {
    let one: &[(&str, &str)] = &[(GPU_MEM, "1")];
    let units = PodBuilder::new("units", one)
        .container("second", &[(GPU_MEM, "2")])
        .container("without", &[])
        .sidecar("sidecar", one)
        .init("prepare", &[(GPU_MEM, "3")]);
    world.create(units).await?;
    let shared: &[(&str, &str)] = &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")];
    let bytes = PodBuilder::new("bytes", shared).init("prepare", shared);
    world.create(bytes).await?;
    world.until_running(&["units", "bytes"]).await?;
    let pod = world.pod("units")?;
    let units = pod.annotations().get(MEM_POD);
    // The init container's 3 units are not added: it has ended before the two containers and the sidecar run together.
    ensure!(
        units.is_some_and(|units| units == "4"),
        "its containers and sidecar ask for 4 units, it was given {units:?}"
    );
    Ok(())
}

async fn ratio_and_core(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    let third: &[(&str, &str)] = &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "33"), (GPU_CORE, "33")];
    let n_fit = node.units.len() * 3;
    let names: Vec<String> = (0..n_fit).map(|idx| format!("third-{idx}")).collect();
    for name in &names {
        world.create(PodBuilder::new(name, third).on(&node.name)).await?;
    }
    world.until_running(&names).await?;
    let one_more = PodBuilder::new("one-more", third).on(&node.name);
    world.create_waiting(one_more).await
}

async fn many_at_once(world: &mut World) -> Result<()> {
    world.start_many("equal", 30, 1).await.map(drop)
}

/// Equal amounts on different GPUs: only the order of admission distinguishes kubelet's calls.
async fn many_gpus_at_once(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let share = node.units.iter().min().copied().unwrap_or(0) / 4;
    let n_pods: u64 = node.units.iter().map(|units| units / share.max(1)).sum();
    let specs = (0..n_pods).map(|idx| PodBuilder::units(&format!("equal-{idx}"), share).on(&node.name));
    world.start_all(specs).await.map(drop)
}

async fn refusals(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let too_large = node.units.iter().max().copied().unwrap_or(0) + 1;
    let too_large = PodBuilder::units("too-large", too_large).on(&node.name);
    world
        .create_refused(too_large, "larger than the node's GPUs")
        .await?;
    let two_dialects = [(GPU_MEM, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")];
    let memory_twice = [(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_MEMORY_RATIO, "50")];
    let pod = |name: &str, limits: &Limits<'_>| PodBuilder::new(name, limits).on(&node.name);
    futures::try_join!(
        world.ensure_is_refused(pod("two-dialects", &two_dialects), "one dialect only"),
        world.ensure_is_refused(pod("memory-twice", &memory_twice), "exclude each other"),
    )?;
    world.start_units("sound", "1", &node.name).await.map(drop)
}

/// Pods fill the node and are deleted, four times: each round of pods finds the room of the one before.
async fn coming_and_going(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    for round in 0..4 {
        let mut names = Vec::new();
        for (idx, units) in node.units.iter().enumerate() {
            let name = format!("whole-{round}-{idx}");
            let whole = PodBuilder::units(&name, units).on(&node.name);
            names.push(world.create(whole).await?.name_any());
        }
        world.until_running(&names).await?;
        world.verify().await?;
        // No wait for the deletions: the next round's pods have to find the room of pods that are still ending.
        for name in &names {
            world.pods.delete(name).await?;
        }
    }
    world.clear().await
}

/// A pod that fits no single GPU waits although the free memory of all GPUs together suffices, and runs when a pod has gone.
async fn waiting_for_room(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    for (idx, units) in node.units.iter().enumerate() {
        let all_but_two = units.checked_sub(2).context("a GPU is too small for this")?;
        let name = format!("fill-{idx}");
        world.start_units(&name, all_but_two, &node.name).await?;
    }
    // Two units are left on each GPU: their sum passes kube-scheduler's own fit check, so that only the extender refuses the pod.
    let waits = PodBuilder::units("waits", 3).on(&node.name);
    world.create_refused(waits, NO_ROOM).await?;
    world.verify().await?;
    world.delete_for("fill-0", "waits").await
}

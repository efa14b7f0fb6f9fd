//! Actions of users: every form of request, refusals, waiting, coming and going.

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::record::{MEM_ASSIGNED, MEM_CONTAINER, MEM_IDX};
use proto::resource::{GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use super::{Body, World};
use crate::invariants;
use crate::pods::{Limits, PodBuilder};

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "gpushare-pod",
        "memory units on one GPU, with gpushare's variables and annotations",
        gpushare_pod,
    ),
    (
        "koordinator-pod",
        "bytes of memory on one shared GPU",
        koordinator_pod,
    ),
    ("two-devices", "an equal share on each of two GPUs", two_devices),
    (
        "many-containers",
        "init container, sidecar and two containers see the same GPU",
        many_containers,
    ),
    (
        "ratio-and-core",
        "thirds of a GPU: three fit, the fourth waits",
        ratio_and_core,
    ),
    ("many-at-once", "thirty equal pods created together", many_at_once),
    (
        "many-gpus-at-once",
        "equal pods created together that need every GPU of a node",
        many_gpus_at_once,
    ),
    (
        "refusals",
        "requests that can never work are refused with their reason",
        refusals,
    ),
    (
        "coming-and-going",
        "whole GPUs taken and given back again and again leave nothing behind",
        coming_and_going,
    ),
    (
        "waiting-for-room",
        "a pod without room waits, and runs when there is some",
        waiting_for_room,
    ),
];

fn gpushare_pod(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        world.start(PodBuilder::new("units", &[(GPU_MEM, "2")])).await?;
        let key = world.key("units");
        let assigned = |annotations: &std::collections::BTreeMap<String, String>| {
            annotations.get(MEM_ASSIGNED).is_some_and(|text| text == "true")
        };
        world
            .until("the pod to be marked assigned", |snapshot| {
                snapshot
                    .pods
                    .get(&key)?
                    .metadata
                    .annotations
                    .as_ref()
                    .filter(|annotations| assigned(annotations))
                    .map(|_| ())
            })
            .await?;
        let log = world.log("units", "main").await?;
        let pod = world.pod("units")?;
        let idx = pod
            .metadata
            .annotations
            .unwrap_or_default()
            .get(MEM_IDX)
            .cloned()
            .unwrap_or_default();
        for line in [format!("{MEM_IDX}={idx}"), format!("{MEM_CONTAINER}=2")] {
            ensure!(
                log.lines().any(|found| found == line),
                "{line} is not in the environment:\n{log}"
            );
        }
        Ok(())
    }
    .boxed()
}

fn koordinator_pod(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let pod = world
            .start(PodBuilder::new(
                "bytes",
                &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
            ))
            .await?;
        let devices = invariants::record(&pod).unwrap_or_default();
        ensure!(devices.len() == 1, "it has {devices:?}");
        Ok(())
    }
    .boxed()
}

fn two_devices(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let pod = world
            .start(PodBuilder::new(
                "two",
                &[(GPU_SHARED, "2"), (GPU_MEMORY, "2Gi"), (GPU_CORE, "20")],
            ))
            .await?;
        let devices = invariants::record(&pod).unwrap_or_default();
        ensure!(devices.len() == 2, "it has {devices:?}");
        Ok(())
    }
    .boxed()
}

fn many_containers(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let one: &[(&str, &str)] = &[(GPU_MEM, "1")];
        let units = PodBuilder::new("units", one)
            .container("second", &[(GPU_MEM, "2")])
            .container("without", &[]);
        world
            .create(units.sidecar("sidecar", one).init("prepare", &[(GPU_MEM, "3")]))
            .await?;
        let shared: &[(&str, &str)] = &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")];
        world
            .create(PodBuilder::new("bytes", shared).init("prepare", shared))
            .await?;
        world.until_running(&["units", "bytes"]).await?;
        let pod = world.pod("units")?;
        let units = pod
            .metadata
            .annotations
            .unwrap_or_default()
            .get("ALIYUN_COM_GPU_MEM_POD")
            .cloned();
        ensure!(
            units.as_deref() == Some("4"),
            "its containers and sidecar ask for 4 units, it was given {units:?}"
        );
        Ok(())
    }
    .boxed()
}

fn ratio_and_core(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?;
        let third: &[(&str, &str)] = &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "33"), (GPU_CORE, "33")];
        let n_fit = node.units.len() * 3;
        for idx in 0..n_fit {
            world
                .create(PodBuilder::new(&format!("third-{idx}"), third).on(&node.name))
                .await?;
        }
        world
            .until_all_run(&(0..n_fit).map(|idx| format!("third-{idx}")).collect::<Vec<_>>())
            .await?;
        world
            .create(PodBuilder::new("one-more", third).on(&node.name))
            .await?;
        world.until_refused("one-more", "nodes are available").await
    }
    .boxed()
}

fn many_at_once(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let names = world.create_many("equal", 30, &[(GPU_MEM, "1")]).await?;
        world.until_all_run(&names).await
    }
    .boxed()
}

/// Equal amounts on different GPUs: only the order of admission distinguishes kubelet's calls.
fn many_gpus_at_once(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let share = node.units.iter().min().copied().unwrap_or(0) / 4;
        let n_pods: u64 = node.units.iter().map(|units| units / share.max(1)).sum();
        let names: Vec<String> = (0..n_pods).map(|idx| format!("equal-{idx}")).collect();
        let limits = share.to_string();
        let creations = names
            .iter()
            .map(|name| world.create(PodBuilder::new(name, &[(GPU_MEM, &limits)]).on(&node.name)));
        futures::future::try_join_all(creations).await?;
        world.until_all_run(&names).await
    }
    .boxed()
}

fn refusals(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let too_large = (node.units.iter().max().copied().unwrap_or(0) + 1).to_string();
        world
            .create(PodBuilder::new("too-large", &[(GPU_MEM, &too_large)]).on(&node.name))
            .await?;
        world
            .until_refused("too-large", "larger than the node's GPUs")
            .await?;
        let pods: [(&str, &Limits<'_>, &str); 2] = [
            (
                "two-dialects",
                &[(GPU_MEM, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
                "one dialect only",
            ),
            (
                "memory-twice",
                &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_MEMORY_RATIO, "50")],
                "exclude each other",
            ),
        ];
        let tried = pods.iter().map(|(name, limits, words)| {
            world.until_breaks_rule(PodBuilder::new(name, limits).on(&node.name), words)
        });
        futures::future::try_join_all(tried).await?;
        world.start_units("sound", "1", &node.name).await.map(|_| ())
    }
    .boxed()
}

fn coming_and_going(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(1)?;
        for round in 0..4 {
            let mut names = Vec::new();
            for (idx, units) in node.units.iter().enumerate() {
                let name = format!("whole-{round}-{idx}");
                world
                    .create(PodBuilder::new(&name, &[(GPU_MEM, &units.to_string())]).on(&node.name))
                    .await?;
                names.push(name);
            }
            world.until_all_run(&names).await?;
            world.verify().await?;
            // The next round's pods are created while these still end.
            for name in &names {
                world.pods.delete(name).await?;
            }
        }
        world.clear().await
    }
    .boxed()
}

fn waiting_for_room(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        for (idx, units) in node.units.iter().enumerate() {
            let (most, rest) = (units - 2, 2.min(*units));
            world
                .start(
                    PodBuilder::new(&format!("fill-{idx}"), &[(GPU_MEM, &most.to_string())]).on(&node.name),
                )
                .await?;
            ensure!(rest == 2, "GPU {idx} of {} is too small for this", node.name);
        }
        // Two units are left on each GPU: enough in all, not enough on any one.
        world.create_units("waits", "3", &node.name).await?;
        world.until_refused("waits", "not enough free GPU memory").await?;
        world.verify().await?;
        world.delete("fill-0").await?;
        world.until_running(&["waits"]).await
    }
    .boxed()
}

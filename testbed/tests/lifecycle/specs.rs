//! No container starts with the content of a CDI spec that was not written for its start: on a node whose runtime reads changed
//! specs some time later, through everything after which kubelet starts a container.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use kit::cluster::{LocalCluster, NodeKind, NodeSetup, PLUGIN_USER};
use kit::invariants;
use kit::kubelet::{ContainerStart, Kubelet, OrderRule, RunState, RuntimeContainer, StartHook};
use kit::observer::ClusterSnapshot;
use kit::pods::{NamespacePods, PodBuilder};
use proto::record::{GPU_DEVICES, MEM_CONTAINER};
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_SHARED};

use super::{DEADLINE, cluster_of, seen, starts, starts_again, until_run, verify};

type Starts = Arc<Mutex<Vec<RuntimeContainer>>>;

struct Scene {
    cluster: LocalCluster,
    pods: NamespacePods,
    starts: Starts,
}

impl Scene {
    async fn start() -> Result<Self> {
        let starts = Starts::default();
        let hook = Arc::clone(&starts);
        let started = StartHook::new(move |start: &ContainerStart| {
            hook.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(start.container.clone());
        });
        let node = NodeSetup {
            started,
            ..NodeSetup::of_kind(NodeKind::PlainCdi, "n1", &[16384, 16384])
        };
        let (cluster, pods) = cluster_of(node).await?;
        Ok(Self {
            cluster,
            pods,
            starts,
        })
    }

    fn kubelet(&self) -> Result<&Kubelet> {
        Ok(self.cluster.nodes().next().context("no node")?.kubelet())
    }

    fn container(&self, pod: &str, container: &str) -> Result<RuntimeContainer> {
        self.kubelet()?
            .container("default", pod, container)
            .with_context(|| format!("{pod} has no container {container}"))
    }

    async fn run(&self, pod: PodBuilder, name: &str) -> Result<()> {
        self.pods.create(&pod).await?;
        until_run(&self.cluster, &[name]).await
    }

    /// Of all starts since the last call: every one is by CDI, sees the GPUs of its record, and says what its container asks for.
    async fn check(&self, what: &str, n_starts: usize) -> Result<()> {
        let started = std::mem::take(&mut *self.starts.lock().unwrap_or_else(PoisonError::into_inner));
        ensure!(started.len() >= n_starts, "{what}: {} starts", started.len());
        let snapshot = ClusterSnapshot::of(self.cluster.api().objects());
        for container in started {
            let name = format!("{what}: {}/{}", container.pod, container.name);
            let pod = snapshot.pod(&container.pod).context("a pod is gone")?;
            let recorded = invariants::should_see(pod, snapshot.devices.get("n1"), &container.name);
            let named = container
                .env
                .get(GPU_DEVICES)
                .map(|value| invariants::devices_of(value));
            ensure!(
                container.gpus == recorded && !recorded.is_empty(),
                "{name} sees {:?}, its record is {recorded:?}",
                container.gpus
            );
            ensure!(named == Some(recorded), "{name} sees {named:?}");
            ensure!(
                container.stale_devices.is_empty(),
                "{name} has stale {:?}",
                container.stale_devices
            );
            let units = container.devices.get(GPU_MEM).map(|ids| ids.len().to_string());
            ensure!(
                container.env.get(MEM_CONTAINER) == units.as_ref(),
                "{name} has {units:?} units: {:?}",
                container.env
            );
        }
        verify(&self.cluster).await
    }
}

/// Waits until the plugin offers everything to a kubelet that has just started or lost it.
async fn until_offered(kubelet: &Kubelet) -> Result<()> {
    let is_offered = |kubelet: &Kubelet| {
        let capacity = kubelet.capacity();
        [GPU_MEM, GPU_SHARED].iter().all(|name| {
            capacity
                .get(*name)
                .is_some_and(|(all, healthy)| *all > 0 && all == healthy)
        })
    };
    kubelet
        .expect_until(DEADLINE, "the plugin does not offer both resources", is_offered)
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_start_uses_the_spec_that_was_written_for_it() -> Result<()> {
    let mut scene = Scene::start().await?;
    scene.run(PodBuilder::units("first", 4), "first").await?;
    scene.check("first start", 1).await?;

    // kubelet hands the init container's IDs on, and calls Allocate for both before either starts.
    let bytes = |amount| vec![(GPU_SHARED, "1"), (GPU_MEMORY, amount)];
    scene
        .run(
            PodBuilder::units("units", 2).init("prepare", &[(GPU_MEM, "2")]),
            "units",
        )
        .await?;
    scene
        .run(
            PodBuilder::new("bytes", &bytes("4Gi")).init("prepare", &bytes("1Gi")),
            "bytes",
        )
        .await?;
    for pod in ["units", "bytes"] {
        let (init, app) = (scene.container(pod, "prepare")?, scene.container(pod, "main")?);
        ensure!(
            init.devices == app.devices,
            "{pod}: kubelet has given other IDs to the app container: nothing is tried"
        );
        ensure!(
            init.cdi_devices != app.cdi_devices,
            "{pod}: one name stands for two containers: {:?}",
            app.cdi_devices
        );
    }
    scene.check("init and app container", 4).await?;

    for name in ["first", "units", "bytes"] {
        starts_again(scene.kubelet()?, name).await?;
    }
    scene.check("container restart", 3).await?;

    scene.cluster.node("n1")?.restart_kubelet().await?;
    until_offered(scene.kubelet()?).await?;
    scene
        .kubelet()?
        .expect_until(DEADLINE, "kubelet does not go on", Kubelet::has_synced)
        .await?;
    starts_again(scene.kubelet()?, "first").await?;
    scene.check("kubelet restart", 1).await?;

    scene.kill_plugin_before_pre_start().await?;
    scene
        .check("plugin killed between Allocate and PreStart", 1)
        .await?;

    scene.reboot(&["first", "between"]).await?;
    scene.check("reboot", 2).await
}

impl Scene {
    /// The plugin knows of no new pod when kubelet asks it, so it answers, and lets nothing start.
    async fn kill_plugin_before_pre_start(&mut self) -> Result<()> {
        let held = self.cluster.api().faults().hold_watches_of(PLUGIN_USER, "pods");
        let before = self.kubelet()?.counts().allocate_calls;
        self.pods.create(&PodBuilder::units("between", 2)).await?;
        let is_refused = |kubelet: &Kubelet| {
            let container = kubelet.container("default", "between", "main");
            kubelet.counts().allocate_calls > before
                && container.is_some_and(|one| matches!(one.state, RunState::Waiting { .. }))
        };
        self.kubelet()?
            .expect_until(DEADLINE, "no start was refused", is_refused)
            .await?;
        let n_calls = self.kubelet()?.counts().allocate_calls;
        self.cluster.node("n1")?.restart_plugin().await?;
        drop(held);
        until_run(&self.cluster, &["between"]).await?;
        ensure!(
            self.kubelet()?.counts().allocate_calls == n_calls,
            "kubelet has asked again, and nothing was tried"
        );
        Ok(())
    }

    /// `/var/run/cdi` is empty, the runtime knows nothing, and kubelet keeps its answers: it asks for none again.
    async fn reboot(&mut self, names: &[&str]) -> Result<()> {
        let gpus = names
            .iter()
            .map(|name| seen(self.kubelet()?, name))
            .collect::<Result<Vec<_>>>()?;
        let devices = names
            .iter()
            .map(|name| Ok(self.container(name, "main")?.cdi_devices))
            .collect::<Result<Vec<_>>>()?;
        self.kubelet()?.hold();
        let node = self.cluster.node("n1")?;
        node.reboot().await?;
        node.start_plugin(&[])?;
        until_offered(node.kubelet()).await.with_context(|| {
            node.plugin()
                .map(kit::daemons::Daemon::log_tail)
                .unwrap_or_default()
        })?;
        node.kubelet().release(OrderRule::Creation, 0);
        for ((name, gpus), devices) in names.iter().zip(gpus).zip(devices) {
            self.kubelet()?
                .expect_until(
                    DEADLINE,
                    format!("{name} does not start after the reboot"),
                    |kubelet| starts(kubelet, name) > 0,
                )
                .await?;
            ensure!(
                seen(self.kubelet()?, name)? == gpus && self.container(name, "main")?.cdi_devices == devices,
                "{name} has other devices"
            );
        }
        ensure!(
            self.kubelet()?.counts().allocate_calls == 0,
            "kubelet has asked again, and nothing was tried"
        );
        until_run(&self.cluster, names).await
    }
}

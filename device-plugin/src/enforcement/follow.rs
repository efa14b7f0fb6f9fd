//! Observes the facts of the node that decide the enforcement level of each GPU, and decides again when they change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use proto::node::Node;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::info;

use crate::fleet::{FleetGpu, NodeFleet};
use crate::health::HealthReason;
use crate::injection::OwnContainer;
use crate::node_state::NodeState;

use super::Enforcements;
use super::decide::{Cgroup, EnforcementFacts, GpuFacts, decide, hook_route};

/// Interval at which files of the node are checked: the vendor's specs, and those of MPS and HAMi-core.
const INTERVAL: Duration = Duration::from_secs(5);

/// Time for which GPUs keep the driver's level while the hook is missing: the vendor's tools replace their specs while pods come, and a
/// start that needs the hook waits for it.
const GRACE: Duration = Duration::from_secs(15);

/// Directories in which an MPS control daemon has its pipe: the default of NVIDIA's, and those of NVIDIA's device plugin and of its
/// fractioning operator. The root directory of the node is before them.
const MPS_DIRECTORIES: [&str; 3] = ["tmp/nvidia-mps", "run/nvidia/mps", "run/nvidia-mps"];

/// The pipe of the control daemon in its directory.
const MPS_PIPE: &str = "control";

/// The operator's settings, and facts that do not change while the process runs.
#[derive(Clone, Debug)]
pub struct EnforcementSettings {
    /// True if the operator has turned the driver's limits on.
    pub is_enabled: bool,
    /// The mount point of sysfs, in which cgroups are.
    pub sysfs: PathBuf,
    /// This plugin's own container.
    pub own: OwnContainer,
    /// True if the runtime hook is on.
    pub has_nri: bool,
}

/// Decides until the task is dropped. `kubernetes_node` shows the version of the container runtime.
pub async fn follow_enforcement(
    node: Arc<NodeState>,
    settings: EnforcementSettings,
    mut kubernetes_node: watch::Receiver<Option<Node>>,
    levels: watch::Sender<Arc<Enforcements>>,
) {
    let (mut fleet, mut injection) = (node.fleet.clone(), node.injection.clone());
    let mut hook_away: Option<Instant> = None;
    loop {
        let runtime = container_runtime(kubernetes_node.borrow_and_update().as_ref());
        let is_injection_known = injection.borrow_and_update().is_some();
        // Without one of the two the level would be a guess that the next second corrects. Meanwhile a container would start without
        // limits, or get a CDI spec that has to be replaced before it can start.
        if let Some(runtime) = runtime
            && is_injection_known
        {
            let fleet = fleet.borrow_and_update().clone();
            let decided = decide_all(&node, &settings, &fleet, &runtime);
            let is_hook_away = decided.lost_spec_hook(&levels.borrow());
            hook_away = if is_hook_away {
                Some(hook_away.unwrap_or_else(Instant::now))
            } else {
                None
            };
            if hook_away.is_none_or(|since| since.elapsed() >= GRACE) {
                publish(&levels, decided);
            }
        }
        let changed = async {
            tokio::select! {
                Ok(()) = fleet.changed() => {}
                Ok(()) = injection.changed() => {}
                Ok(()) = kubernetes_node.changed() => {}
                else => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => {}
            () = sleep(INTERVAL) => {}
        }
    }
}

fn publish(levels: &watch::Sender<Arc<Enforcements>>, decided: Enforcements) {
    let before = levels.borrow().clone();
    if *before == decided {
        return;
    }
    for (gpu, found) in decided.iter() {
        if before.of(gpu).map(|before| before.reason) != Some(found.reason) {
            info!(%gpu, level = found.level.as_str(), reason = found.reason, "enforcement of memory limits: {}", found.message);
        }
    }
    levels.send_replace(Arc::new(decided));
}

/// The name and version of the container runtime; none before the Node is known.
fn container_runtime(node: Option<&Node>) -> Option<String> {
    Some(node?.status.node_info.container_runtime_version.clone())
}

fn decide_all(
    node: &NodeState,
    settings: &EnforcementSettings,
    fleet: &NodeFleet,
    runtime: &str,
) -> Enforcements {
    let injection = node.injection.borrow();
    let facts = EnforcementFacts {
        is_enabled: settings.is_enabled,
        driver: fleet.driver_version.clone(),
        cgroup: cgroup(&settings.sysfs),
        route: hook_route(injection.as_ref(), &settings.own, runtime, settings.has_nri),
        has_hami_core: node
            .settings
            .hami_core
            .as_ref()
            .is_some_and(super::HamiCore::exists),
        mps: mps_directory(&node.settings.injection.host_root),
    };
    let mut levels = Vec::new();
    for entry in &fleet.gpus {
        levels.push((entry.gpu.uuid.clone(), decide(&facts, gpu_facts(node, entry))));
    }
    levels.into_iter().collect()
}

fn gpu_facts(node: &NodeState, entry: &FleetGpu) -> GpuFacts {
    let hook = node.settings.injection.vendor_specs.limit_hook(&entry.gpu);
    GpuFacts {
        has_hook: hook.is_some(),
        // A GPU that is put into MIG mode while the plugin runs stays in the fleet as an unhealthy one.
        is_mig: entry.reason == Some(HealthReason::MigMode),
    }
}

/// The cgroup version of the node, by the files of its hierarchy.
fn cgroup(sysfs: &Path) -> Cgroup {
    let root = sysfs.join("fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        Cgroup::V2
    } else if root.join("memory").exists() || root.join("cpu").exists() {
        Cgroup::V1
    } else {
        Cgroup::Unknown
    }
}

/// The directory of the node's MPS control daemon, if its pipe exists.
fn mps_directory(root: &Path) -> Option<String> {
    let mut directories = MPS_DIRECTORIES.iter();
    let found = directories.find(|directory| root.join(directory).join(MPS_PIPE).exists())?;
    Some(format!("/{found}"))
}

#[cfg(test)]
mod tests {
    use proto::memory_unit::MemoryUnit;
    use proto::resource::ResourceNames;
    use serde_json::json;

    use super::*;
    use crate::injection::{Certainty, Injection, Mode};
    use crate::settings::NodeSettings;
    use crate::tests::builders::{fleet, pods};

    /// A process that has just started does not know the Node, and so not if the runtime replaces variables.
    #[tokio::test(start_paused = true)]
    async fn no_level_is_decided_before_the_node_is_known() {
        let settings = NodeSettings::plain(ResourceNames::default(), MemoryUnit::GIB, Duration::ZERO);
        let (_fleets, fleets) = watch::channel(Arc::new(fleet(2)));
        let (_known, known) = watch::channel(pods([]));
        let injected = Injection {
            mode: Mode::Cdi,
            certainty: Certainty::Proven,
            reason: "",
            message: String::new(),
            exposure: None,
        };
        let (_injected, injection) = watch::channel(Some(injected));
        let mut node = NodeState::new(settings, fleets, known, Path::new("/nonexistent"));
        node.injection = injection;
        let (seen, kubernetes_node) = watch::channel(None);
        let (levels, mut decided) = watch::channel(Arc::default());
        let facts = EnforcementSettings {
            is_enabled: true,
            sysfs: PathBuf::from("/nonexistent"),
            own: OwnContainer::default(),
            has_nri: false,
        };
        tokio::spawn(follow_enforcement(Arc::new(node), facts, kubernetes_node, levels));
        sleep(INTERVAL * 3).await;
        assert_eq!(decided.borrow_and_update().lowest(), None);
        let found: Node = serde_json::from_value(
            json!({"status": {"nodeInfo": {"containerRuntimeVersion": "containerd://2.4.0"}}}),
        )
        .unwrap();
        seen.send_replace(Some(found));
        decided.changed().await.unwrap();
        assert_eq!(decided.borrow().iter().count(), 2);
    }
}

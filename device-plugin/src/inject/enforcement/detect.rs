//! Detects the enforcement level of each GPU again and again, from the driver, the container runtime and files of the node.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use daemon::tick::next_tick;
use proto::node::Node;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info;

use crate::devices::fleet::NodeFleet;
use crate::devices::health::HealthReason;
use crate::inject::hami_core::HamiCore;
use crate::inject::mode::Injection;
use crate::inject::settings::NodeSettings;

use super::decide::{Cgroup, EnforcementFacts, GpuFacts, decide, hook_route};
use super::{Enforcements, lost_spec_hook};

/// Interval at which the plugin checks files of the node: the vendor's specs, and those of MPS and HAMi-core.
const INTERVAL: Duration = Duration::from_secs(6);

/// Time for which GPUs keep the level `driver` although the hook is missing: the vendor's tools rewrite their specs at any time.
const GRACE: Duration = Duration::from_secs(15);

/// Directories of the pipe of an MPS control daemon: NVIDIA's default, its device plugin's, and its fractioning operator's.
const MPS_DIRECTORIES: [&str; 3] = ["tmp/nvidia-mps", "run/nvidia/mps", "run/nvidia-mps"];

const MPS_PIPE: &str = "control";

/// Detects the levels until the task is dropped. `kubernetes_node` shows the version of the container runtime.
pub(crate) async fn detect_enforcement(
    settings: NodeSettings,
    mut fleet: watch::Receiver<Arc<NodeFleet>>,
    mut injection: watch::Receiver<Option<Injection>>,
    mut kubernetes_node: watch::Receiver<Option<Node>>,
    levels: watch::Sender<Arc<Enforcements>>,
) {
    let mut hook_missing_since: Option<Instant> = None;
    loop {
        let version = |node: &Node| node.status.node_info.container_runtime_version.clone();
        let runtime = kubernetes_node.borrow_and_update().as_ref().map(version);
        let injected = injection.borrow_and_update().clone();
        // Without the version of the runtime or the injection mode the level would be a guess that the next second corrects.
        // Meanwhile a container would start without limits, or get a CDI spec that has to be replaced before it can start.
        if let (Some(runtime), Some(injected)) = (runtime, injected) {
            let fleet = fleet.borrow_and_update().clone();
            let decided = decide_all(&settings, &fleet, &injected, &runtime);
            hook_missing_since = if lost_spec_hook(&levels.borrow(), &decided) {
                Some(hook_missing_since.unwrap_or_else(Instant::now))
            } else {
                None
            };
            if hook_missing_since.is_none_or(|since| since.elapsed() >= GRACE) {
                publish(&levels, decided);
            }
        }
        // A channel that has closed disables its branch; the files are still checked.
        tokio::select! {
            Ok(()) = fleet.changed() => {}
            Ok(()) = injection.changed() => {}
            Ok(()) = kubernetes_node.changed() => {}
            () = next_tick(INTERVAL) => {}
        }
    }
}

/// Sends levels that differ from the last ones to the readers, and logs each level that has another reason.
fn publish(levels: &watch::Sender<Arc<Enforcements>>, decided: Enforcements) {
    let before = levels.borrow().clone();
    if *before == decided {
        return;
    }
    for (gpu, found) in &decided {
        // The message names versions and directories, whose change alone needs no log line.
        if before.get(gpu).map(|before| before.reason) != Some(found.reason) {
            info!(%gpu, level = found.level.as_str(), reason = found.reason, "enforcement of memory limits: {}", found.message);
        }
    }
    levels.send_replace(Arc::new(decided));
}

/// Decides the enforcement level for each GPU from the facts of this moment.
fn decide_all(
    settings: &NodeSettings,
    fleet: &NodeFleet,
    injection: &Injection,
    runtime: &str,
) -> Enforcements {
    let (own, has_nri) = (&settings.own_container, settings.has_runtime_hook);
    let facts = EnforcementFacts {
        is_enabled: settings.driver_limits,
        driver: fleet.driver_version.clone(),
        cgroup: cgroup(&settings.sysfs_root),
        route: hook_route(injection, own, runtime, has_nri),
        has_hami_core: settings.hami_core.as_ref().is_some_and(HamiCore::exists),
        mps: mps_directory(&settings.host_root),
    };
    let mut levels = Enforcements::new();
    for entry in &fleet.gpus {
        let gpu = GpuFacts {
            has_hook: settings.vendor_specs.limit_hook(&entry.device).is_some(),
            // A GPU that is put into MIG mode while the plugin runs stays in the fleet as an unhealthy one.
            is_mig: entry.reason == Some(HealthReason::MigMode),
        };
        levels.insert(entry.device.uuid.clone(), decide(&facts, gpu));
    }
    levels
}

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

fn mps_directory(root: &Path) -> Option<String> {
    let mut directories = MPS_DIRECTORIES.iter();
    let found = directories.find(|directory| root.join(directory).join(MPS_PIPE).exists())?;
    Some(format!("/{found}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inject::enforcement::lowest_level;
    use crate::inject::mode::{Certainty, Mode};
    use crate::tests::builders::{fleet, settings};

    /// A process that has just started does not know the Node, and so not if the runtime replaces variables.
    #[tokio::test(start_paused = true)]
    async fn no_level_is_decided_before_the_node_is_known() {
        let settings = NodeSettings {
            driver_limits: true,
            ..settings()
        };
        let (_fleets, fleets) = watch::channel(Arc::new(fleet(2)));
        let injected = Injection {
            mode: Mode::Cdi,
            certainty: Certainty::Proven,
            reason: "",
            message: String::new(),
            exposure: None,
        };
        let (_injected, injection) = watch::channel(Some(injected));
        let (seen, kubernetes_node) = watch::channel(None);
        let (levels, mut decided) = watch::channel(Arc::default());
        tokio::spawn(detect_enforcement(
            settings,
            fleets,
            injection,
            kubernetes_node,
            levels,
        ));
        tokio::time::sleep(INTERVAL * 3).await;
        assert_eq!(lowest_level(&decided.borrow_and_update()), None);
        let found: Node = serde_json::from_value(
            json!({"status": {"nodeInfo": {"containerRuntimeVersion": "containerd://2.4.0"}}}),
        )
        .unwrap();
        seen.send_replace(Some(found));
        decided.changed().await.unwrap();
        assert_eq!(decided.borrow().iter().count(), 2);
    }
}

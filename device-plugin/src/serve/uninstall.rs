//! The process that removes everything that the plugin has written on its node, instead of serving devices.

use anyhow::Context;
use daemon::api_server::Connection;
use daemon::health::MetricsText;
use daemon::signals::cancel_on_signal;
use kube::Api;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tracing::info;

use crate::cdi::SpecDir;
use crate::config::Config;
use crate::pods::NodePods;
use crate::uninstall::{Removal, UninstallWhen};

use super::tasks::PluginTasks;

/// Removes everything, is ready once nothing is left, and ends with a signal.
///
/// # Errors
/// The process cannot start, or a task has ended.
pub(super) async fn run(config: Config, when: UninstallWhen) -> anyhow::Result<()> {
    let stop = cancel_on_signal().context("cannot wait for signals")?;
    let (removed, is_removed) = watch::channel(false);
    let mut tasks = PluginTasks::default();
    let readiness = move || check(*is_removed.borrow());
    tasks
        .serve_health(&config, readiness, MetricsText::new(Registry::default()))
        .await?;
    let connection = Connection::new(config.kubeconfig.as_deref()).await?;
    let (pods, pods_seen) = watch::channel(NodePods::default());
    tasks.watch_pods(&config, &connection, pods);
    let node = tasks.watch_node(&config, &connection);
    let removal = Removal {
        when,
        nodes: Api::all(connection.client),
        node_name: config.node_name.clone(),
        names: config.resource_names(),
        device_plugin_dir: config.device_plugin_dir.clone(),
        specs: SpecDir::new(config.cdi_dir.clone()),
        pods: pods_seen,
        node,
    };
    tasks.spawn("removal", removal.run(removed));
    tasks.run(stop).await?;
    info!("ended");
    Ok(())
}

fn check(is_removed: bool) -> Result<(), String> {
    if is_removed {
        return Ok(());
    }
    Err("something of the plugin is left on this node".to_owned())
}

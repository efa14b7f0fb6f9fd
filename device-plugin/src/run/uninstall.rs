//! The process that removes everything that the plugin has written on its node, instead of serving devices.

use daemon::api_server::Connection;
use daemon::health;
use daemon::metrics_text::MetricsText;
use daemon::process::Process;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::config::Config;
use crate::node::pods::NodePods;
use crate::publish::node_patches::NodeWriter;
use crate::publish::uninstall::Removal;

use super::tasks;

/// Removes everything, is ready once nothing is left, and ends with a signal. With `now` it removes even while pods hold devices.
pub(super) async fn run(config: Config, now: bool, mut process: Process) -> anyhow::Result<()> {
    let (removed, is_removed) = watch::channel(false);
    let readiness = move || check(*is_removed.borrow());
    let routes = health::router(readiness, MetricsText::new(Registry::default()));
    process.serve_health(routes).await?;
    let connection = Connection::new().await?;
    let (pods, pods_seen) = watch::channel(NodePods::default());
    tasks::watch_pods(&mut process.tasks, &config, &connection, pods);
    let node = tasks::watch_own_node(&mut process.tasks, &config, &connection);
    let removal = Removal {
        now,
        node_writer: NodeWriter::new(connection.client, config.node_name.clone()),
        names: config.resource_names(),
        device_plugin_dir: config.device_plugin_dir.clone(),
        specs: config.own_specs(),
        pods: pods_seen,
        node,
    };
    process.tasks.spawn("removal", removal.run(removed));
    // No farewell: if the pod is deleted before everything is removed, the next `uninstall` on this node removes the rest.
    process.serve_until_signal(std::future::ready(())).await
}

fn check(is_removed: bool) -> Result<(), String> {
    if is_removed {
        return Ok(());
    }
    Err("something of the plugin is left on this node".to_owned())
}

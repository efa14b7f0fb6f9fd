//! `version`: the versions of this command, of the scheduler's replicas, and of the device plugins.

use std::collections::BTreeMap;
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Pod;
use proto::plugin_reports::PLUGIN_SELECTOR;
use serde::Serialize;

use crate::connection::ClusterConnection;
use crate::doctor::replicas;
use crate::failure::{CommandFailure, CommandResult};
use crate::fields::image_tag;
use crate::format::count;
use crate::output::Screen;

/// The versions, which are also the command's JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    client: String,
    /// The number of the scheduler's ready replicas by version.
    scheduler: BTreeMap<String, u32>,
    /// The number of nodes by the image tag of the device plugin there.
    device_plugin: BTreeMap<String, u32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    unknown: Vec<String>,
}

pub(crate) async fn run(
    connection: Result<ClusterConnection, CommandFailure>,
    screen: &Screen,
) -> CommandResult {
    let mut versions = Versions {
        client: env!("CARGO_PKG_VERSION").to_owned(),
        ..Versions::default()
    };
    match connection {
        Ok(connection) => {
            versions.add_scheduler(&connection).await;
            versions.add_device_plugins(&connection).await;
        }
        Err(failure) => versions.unknown.push(failure.to_string()),
    }
    let name = versions.client.clone();
    screen.show(&versions, [name], |_| versions.render(screen))?;
    Ok(ExitCode::SUCCESS)
}

impl Versions {
    async fn add_scheduler(&mut self, connection: &ClusterConnection) {
        match replicas(connection).await {
            Ok(replicas) if replicas.is_empty() => {
                let namespace = &connection.args.gpushare_namespace;
                self.unknown.push(format!(
                    "scheduler: no replica is ready in namespace {namespace}; see `kubectl gpushare doctor`"
                ));
            }
            Ok(replicas) => {
                for replica in replicas {
                    match replica.diagnosis {
                        Ok(diagnosis) => *self.scheduler.entry(diagnosis.replica.version).or_default() += 1,
                        Err(reason) => self.unknown.push(format!("scheduler, {}: {reason}", replica.pod)),
                    }
                }
            }
            Err(reason) => self.unknown.push(format!("scheduler: {reason}")),
        }
    }

    async fn add_device_plugins(&mut self, connection: &ClusterConnection) {
        let namespace = connection.args.gpushare_namespace.as_str();
        let pods: Vec<Pod> = match connection.list(Some(namespace), Some(PLUGIN_SELECTOR)).await {
            Ok(pods) => pods,
            Err(failure) => return self.unknown.push(format!("device plugins: {failure}")),
        };
        if pods.is_empty() {
            self.unknown.push(format!(
                "device plugins: namespace {namespace} has no pod of them; see `kubectl gpushare doctor`"
            ));
        }
        for spec in pods.into_iter().filter_map(|pod| pod.spec) {
            // The plugin is the first container of its pods.
            let mut images = spec.containers.iter().filter_map(|one| one.image.as_deref());
            let tag = images.next().and_then(image_tag).unwrap_or("image without a tag");
            *self.device_plugin.entry(tag.to_owned()).or_default() += 1;
        }
    }

    fn render(&self, screen: &Screen) -> String {
        let client = &self.client;
        let mut lines = format!("Client Version: {client}\n");
        for (part, noun, versions) in [
            ("Scheduler", "replica", &self.scheduler),
            ("Device Plugin", "node", &self.device_plugin),
        ] {
            for (version, n) in versions {
                lines += &format!("{part} Version: {version} ({})\n", count(*n, noun));
            }
        }
        for reason in &self.unknown {
            lines += &screen.wrap(0, &format!("not known: {reason}\n"));
        }
        lines
    }
}

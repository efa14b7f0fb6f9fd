//! The result that a scenario expects of one pod.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::World;
use crate::invariants;
use crate::pods::PodBuilder;

/// The words of kube-scheduler about a pod that no node has room for, or no node offers the resource of.
pub(super) const NO_ROOM: &str = "nodes are available";

/// The result for a pod.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expected {
    /// It runs on this number of devices.
    Runs(usize),
    /// It is refused with these words: when it is made where there are webhooks, else by the filter.
    Refused(&'static str),
    /// It is made and stays pending with these words.
    Waits(&'static str),
    /// Kubernetes itself refuses it, with these words.
    Invalid(&'static str),
}

impl Expected {
    /// Tries a pod, and returns it if it should run.
    ///
    /// # Errors
    /// The result is another one.
    pub(super) async fn try_pod(self, world: &World, spec: PodBuilder) -> Result<Option<Pod>> {
        let name = spec.pod()?.name_any();
        match self {
            Self::Runs(n_devices) => {
                let pod = world.start(spec).await?;
                let devices = invariants::record(&pod).unwrap_or_default();
                ensure!(
                    devices.len() == n_devices,
                    "{name} should have {n_devices} devices and has {devices:?}"
                );
                return Ok(Some(pod));
            }
            Self::Refused(words) => world.until_breaks_rule(spec, words).await?,
            Self::Waits(words) => {
                world.create(spec).await?;
                world.until_refused(&name, words).await?;
            }
            Self::Invalid(words) => match world.create(spec).await {
                Ok(_) => bail!("{name} was made"),
                Err(error) => {
                    let text = format!("{error:#}");
                    ensure!(
                        text.contains(words),
                        "{name} is not refused with {words:?}: {text}"
                    );
                }
            },
        }
        Ok(None)
    }
}

//! The result that a scenario expects of one pod.

use std::collections::BTreeSet;

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::record::{DEVICE_ALLOCATED, MEM_IDX};
use serde_json::{Value, json};

use super::World;
use kit::cluster::LocalCluster;
use kit::invariants::{self, VISIBLE_DEVICES};
use kit::kubelet::RuntimeContainer;
use kit::pods::PodBuilder;

/// The result that a scenario expects for a pod.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expected {
    /// It runs on this number of GPUs; without any, its containers see no GPU.
    Runs(usize),
    /// It runs on no GPU, and a container of it sees a GPU that is not counted for it: no part of gpushare is asked on this
    /// cluster. On a real one it depends on the runtime what the container sees.
    Exposed,
    /// It is refused with these words: when it is made where there are webhooks, else by the filter.
    Refused(&'static str),
    /// It is made and stays pending with these words.
    Waits(&'static str),
    /// Kubernetes itself refuses it, with these words.
    Invalid(&'static str),
}

/// The results without webhooks and with them.
pub(super) type Results = [Expected; 2];

/// The same result, with webhooks and without.
pub(super) const fn always(expected: Expected) -> Results {
    [expected; 2]
}

/// The environment of a container that sets the variable by which NVIDIA's runtime shows GPUs.
pub(super) fn visible(value: &str) -> Value {
    json!([{"name": VISIBLE_DEVICES, "value": value}])
}

impl Expected {
    /// The result of these that this cluster should have.
    pub(super) fn here(world: &World, [without, with]: Results) -> Self {
        if world.has_webhooks { with } else { without }
    }

    /// Creates the pod and waits for this result; returns the pod if it runs.
    pub(super) async fn try_pod(self, world: &World, spec: PodBuilder) -> Result<Option<Pod>> {
        let name = spec.pod()?.name_any();
        match self {
            Self::Runs(n_gpus) => {
                let pod = started(world, spec, n_gpus).await?;
                let seen = seen_gpus(world, &name);
                let is_right = n_gpus > 0 || seen.is_empty();
                ensure!(is_right, "{name} should see no GPU and sees {seen:?}");
                return Ok(Some(pod));
            }
            Self::Exposed => {
                let pod = started(world, spec, 0).await?;
                let is_seen = world.cluster.is_none() || !seen_gpus(world, &name).is_empty();
                ensure!(is_seen, "{name} sees no GPU: nothing was tried");
                return Ok(Some(pod));
            }
            Self::Refused(words) => world.ensure_is_refused(spec, words).await?,
            Self::Waits(words) => world.create_refused(spec, words).await?,
            Self::Invalid(words) => match world.create(spec).await {
                Ok(_) => bail!("{name} was made"),
                Err(error) if format!("{error:#}").contains(words) => {}
                Err(error) => return Err(error.context(format!("{name} is not refused with {words:?}"))),
            },
        }
        Ok(None)
    }
}

/// Starts a pod and checks that its record names this number of GPUs; a pod without a record has none.
async fn started(world: &World, spec: PodBuilder, n_gpus: usize) -> Result<Pod> {
    let pod = world.start(spec).await?;
    let (name, gpus) = (pod.name_any(), recorded_gpus(&pod)?);
    ensure!(
        gpus.len() == n_gpus,
        "{name} should have {n_gpus} GPUs and has {gpus:?}"
    );
    Ok(pod)
}

/// The GPUs that a pod's record names; none without a record.
fn recorded_gpus(pod: &Pod) -> Result<Vec<(i32, String)>> {
    let keys = [DEVICE_ALLOCATED, MEM_IDX];
    if !keys.iter().any(|key| pod.annotations().contains_key(*key)) {
        return Ok(Vec::new());
    }
    invariants::record(pod).map_err(anyhow::Error::msg)
}

/// The GPUs that the containers of a pod see by the records of the testbed's container runtimes.
fn seen_gpus(world: &World, name: &str) -> BTreeSet<String> {
    let nodes = world.cluster.iter().flat_map(LocalCluster::nodes);
    let mut containers: Vec<RuntimeContainer> = nodes.flat_map(|node| node.kubelet().containers()).collect();
    containers.retain(|one| one.namespace == world.namespace && one.pod == name);
    containers.into_iter().flat_map(|one| one.gpus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_does_not_parse_is_not_one_of_no_gpu() {
        let gpus = |annotations: Value| {
            let pod = json!({"metadata": {"name": "p", "annotations": annotations}});
            recorded_gpus(&serde_json::from_value(pod).unwrap())
        };
        assert_eq!(gpus(json!({})).unwrap(), []);
        assert_eq!(gpus(json!({MEM_IDX: "1"})).unwrap(), [(1, String::new())]);
        assert!(gpus(json!({MEM_IDX: "x"})).is_err());
        assert!(gpus(json!({DEVICE_ALLOCATED: "{"})).is_err());
    }
}

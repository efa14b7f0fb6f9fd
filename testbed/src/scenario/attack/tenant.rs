//! A tenant, who may create and change pods of a namespace, and tries to see a GPU that is not counted for a pod.
//!
//! The check after a scenario compares the devices that each container sees, read back from the runtime, with the pod's record.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use super::super::{ScenarioEntry, World};
use crate::invariants::{self, VISIBLE_DEVICES};
use crate::pods::PodBuilder;

/// The scenarios of this file, for the table of all scenarios.
pub(in crate::scenario) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "tenant-sees" => tenant_sees,
        "by no field of a pod does a container see another GPU than the one that is counted for it";
    "tenant-asks" => tenant_asks,
        "numbers at every edge, a thousand containers and huge annotations are refused with their reason";
};

/// The scenarios of this file for a cluster with webhooks.
pub(in crate::scenario) const DETOURS: &[ScenarioEntry] = scenarios! {
    "tenant-detours" => tenant_detours,
        "the rules about pods hold for each way by which a pod can be made or changed";
};

/// The result of an attempt.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// Refused in these words by the webhook, or by the filter where there is none.
    Refused(&'static str),
    /// Refused in these words by Kubernetes itself.
    Invalid(&'static str),
    /// It stays pending with these words.
    Waits(&'static str),
    /// The webhook refuses it in these words. Without one it stays pending, as nodes offer too little of the resource.
    RefusedOrWaits(&'static str),
    /// It runs with this number of devices.
    Runs(usize),
    /// kube-scheduler does not ask about the pod, so that only a webhook refuses it, in these words. Without one it runs, and its
    /// containers see nothing.
    RefusedOrBlind(&'static str),
}

use Outcome::{Invalid, Refused, RefusedOrBlind, RefusedOrWaits, Runs, Waits};

/// The words of kube-scheduler about a pod that no node has room for.
const NO_ROOM: &str = "nodes are available";

fn annotated(pod: PodBuilder, key: &str, value: impl Into<String>) -> PodBuilder {
    pod.annotated(&BTreeMap::from([(key.to_owned(), value.into())]))
}

fn visible(value: &str) -> Value {
    json!([{"name": VISIBLE_DEVICES, "value": value}])
}

fn plain(name: &str) -> PodBuilder {
    PodBuilder::new(name, &[])
}

/// Attempts at a GPU that is not counted for the pod.
fn at_devices() -> Vec<(PodBuilder, Outcome)> {
    let by_reference =
        json!([{"name": VISIBLE_DEVICES, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
    let sets = "sets NVIDIA_VISIBLE_DEVICES";
    vec![
        (
            plain("variable").with("env", visible("all")),
            RefusedOrBlind(sets),
        ),
        (plain("reference").with("env", by_reference), RefusedOrBlind(sets)),
        (
            plain("init")
                .init("i", &[])
                .at("/spec/initContainers/0/env", visible("0")),
            RefusedOrBlind(sets),
        ),
        (
            plain("sidecar")
                .sidecar("s", &[])
                .at("/spec/initContainers/0/env", visible("all")),
            RefusedOrBlind(sets),
        ),
        (
            PodBuilder::units("beside", 1)
                .container("c", &[])
                .at("/spec/containers/1/env", visible("all")),
            Refused(sets),
        ),
        (
            annotated(plain("cdi"), "cdi.k8s.io/gpu", "nvidia.com/gpu=all"),
            RefusedOrBlind("annotation cdi.k8s.io/gpu is"),
        ),
        (
            annotated(plain("nri-pod"), "nvidia.cdi.k8s.io/pod", "nvidia.com/gpu=0"),
            RefusedOrBlind("annotation nvidia.cdi.k8s.io/pod is"),
        ),
        (
            annotated(
                PodBuilder::units("nri-container", 1),
                "nvidia.cdi.k8s.io/container.main",
                "nvidia.com/gpu=0",
            ),
            Refused("annotation nvidia.cdi.k8s.io/container.main is"),
        ),
        (
            annotated(PodBuilder::share("marked", 10), "gpushare/all-devices", "true"),
            Refused("gpushare/all-devices"),
        ),
    ]
}

/// Requests with extreme amounts and sizes.
fn at_amounts() -> Vec<(PodBuilder, Outcome)> {
    let hint = "scheduling.koordinator.sh/device-allocate-hint";
    let mut thousand = PodBuilder::units("thousand", 1);
    for n in 1..1000 {
        thousand = thousand.container(&format!("c{n}"), &[(GPU_MEM, "1")]);
    }
    let units = |name: &str, units: &str| PodBuilder::units(name, units);
    let shares = |name: &str, devices: &str, ratio: &str| {
        PodBuilder::new(name, &[(GPU_SHARED, devices), (GPU_MEMORY_RATIO, ratio)])
    };
    vec![
        (units("nothing", "0"), Runs(0)),
        (
            units("negative", "-1"),
            Invalid("must be greater than or equal to 0"),
        ),
        (units("half", "500m"), Invalid("must be an integer")),
        (
            units("most", "9223372036854775807"),
            RefusedOrWaits("which is not a whole number up to"),
        ),
        (
            shares("many", "4294967296", "100"),
            RefusedOrWaits("is more than 1024"),
        ),
        (
            shares("much", "1", "9223372036854775807"),
            RefusedOrWaits("koordinator.sh/gpu-memory-ratio"),
        ),
        (
            PodBuilder::new("bytes", &[(GPU_SHARED, "1"), (GPU_MEMORY, "8E")]),
            RefusedOrWaits("which is not a whole number up to"),
        ),
        (thousand, Waits(NO_ROOM)),
        (
            annotated(
                PodBuilder::share("long", 10),
                hint,
                format!("{{\"gpu\": {}}}", " ".repeat(250 << 10)),
            ),
            Refused("longer than 8192 bytes"),
        ),
        (
            annotated(
                PodBuilder::share("deep", 10),
                hint,
                format!("{{\"gpu\": {}", "[".repeat(100_000)),
            ),
            Refused("longer than 8192 bytes"),
        ),
        (
            annotated(
                PodBuilder::share("nested", 10),
                hint,
                format!("{{\"gpu\": {}", "[".repeat(8000)),
            ),
            Refused("scheduling.koordinator.sh/device-allocate-hint"),
        ),
        (
            annotated(
                PodBuilder::share("markup", 10),
                hint,
                r#"{"gpu": {"<img src=x onerror=alert(1)>": "../../etc/passwd"}}"#,
            ),
            Refused("<img src=x onerror=alert(1)>"),
        ),
    ]
}

async fn tenant_sees(world: &mut World) -> Result<()> {
    for (spec, outcome) in at_devices() {
        attempt(world, spec, outcome).await?;
    }
    if world.cluster.is_some() {
        // An image that sets the variable itself.
        attempt(
            world,
            plain("image").with("image", json!("nvidia/cuda:12.4")),
            Runs(0),
        )
        .await?;
    }
    Ok(())
}

async fn tenant_asks(world: &mut World) -> Result<()> {
    for (spec, outcome) in at_amounts() {
        attempt(world, spec, outcome).await?;
    }
    Ok(())
}

/// Makes one attempt.
async fn attempt(world: &World, spec: PodBuilder, outcome: Outcome) -> Result<()> {
    let name = spec.pod()?.name_any();
    let tried = async {
        match outcome {
            Refused(words) => world.until_breaks_rule(spec, words).await,
            RefusedOrBlind(words) | RefusedOrWaits(words) if world.has_webhooks => {
                world.until_breaks_rule(spec, words).await
            }
            RefusedOrBlind(_) => runs_with(world, spec, 0).await,
            Runs(n_devices) => runs_with(world, spec, n_devices).await,
            RefusedOrWaits(_) => {
                world.create(spec).await?;
                world.until_refused(&name, NO_ROOM).await
            }
            Waits(words) => {
                world.create(spec).await?;
                world.until_refused(&name, words).await
            }
            Invalid(words) => match world.create(spec).await {
                Ok(_) => bail!("it was made"),
                Err(error) => {
                    let text = format!("{error:#}");
                    ensure!(text.contains(words), "not refused with {words:?}: {text}");
                    Ok(())
                }
            },
        }
    };
    tried.await.with_context(|| name.clone())
}

/// Starts a pod, which has this number of devices.
async fn runs_with(world: &World, spec: PodBuilder, n_devices: usize) -> Result<()> {
    let pod = world.start(spec).await?;
    let devices = invariants::record(&pod).unwrap_or_default();
    ensure!(devices.len() == n_devices, "it has the devices {devices:?}");
    Ok(())
}

/// Each way to make a pod that shows itself all GPUs, and to change one so that it would.
async fn tenant_detours(world: &mut World) -> Result<()> {
    let api = world.pods.api();
    let forbidden = plain("forbidden").with("env", visible("all")).pod()?;
    let generated = plain("generated")
        .with("env", visible("all"))
        .at("/metadata/name", Value::Null)
        .at("/metadata/generateName", json!("generated-"));
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let mut applied = serde_json::to_value(&forbidden)?;
    crate::pods::set(&mut applied, "apiVersion", json!("v1"));
    crate::pods::set(&mut applied, "kind", json!("Pod"));
    let apply = PatchParams::apply("tenant");
    denied("dry run", api.create(&dry_run, &forbidden).await)?;
    denied(
        "server-side apply",
        api.patch("forbidden", &apply, &Patch::Apply(&applied)).await,
    )?;
    denied(
        "generateName",
        api.create(&PostParams::default(), &generated.pod()?).await,
    )?;
    // Larger than any GPU, so that it waits while it is changed.
    let waiting = world.create(PodBuilder::units("waiting", 1000)).await?;
    let annotation = json!({"metadata": {"annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=all"}}});
    let change = PatchParams::default();
    denied(
        "patch",
        api.patch("waiting", &change, &Patch::Merge(&annotation)).await,
    )?;
    denied(
        "strategic patch",
        api.patch("waiting", &change, &Patch::Strategic(&annotation))
            .await,
    )?;
    let mut replaced = waiting;
    replaced
        .annotations_mut()
        .insert("cdi.k8s.io/gpu".to_owned(), "nvidia.com/gpu=all".to_owned());
    replaced.metadata.resource_version = None;
    denied(
        "replace",
        api.replace("waiting", &PostParams::default(), &replaced).await,
    )
}

/// Fails unless a webhook has refused a request.
fn denied(way: &str, answer: kube::Result<Pod>) -> Result<()> {
    match answer {
        Ok(pod) => bail!("{way}: {} was made or changed", pod.name_any()),
        Err(error) => {
            let text = error.to_string();
            ensure!(text.contains("denied the request"), "{way}: {text}");
            Ok(())
        }
    }
}

//! A tenant, who may create and change pods of a namespace, and tries to see a GPU that is not counted for a pod.
//!
//! The check after a scenario compares the devices that each container sees, read back from the runtime, with the pod's record.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams, PostParams};
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use crate::invariants::VISIBLE_DEVICES;
use crate::pods::{PodBuilder, set};
use crate::scenario::expected::{Expected, NO_ROOM};
use crate::scenario::{ScenarioEntry, World};

use Expected::{Invalid, Refused, Runs, Waits};

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

/// A pod, and its result without webhooks and with them.
type Attempt = (PodBuilder, [Expected; 2]);

/// The same result with webhooks and without.
fn always(expected: Expected) -> [Expected; 2] {
    [expected; 2]
}

/// The result where kube-scheduler does not ask about the pod: without a webhook it runs, and its containers see nothing.
fn blind_or_refused(words: &'static str) -> [Expected; 2] {
    [Runs(0), Refused(words)]
}

/// The result where nodes offer too little of the resource: without a webhook the pod stays pending for that.
fn pending_or_refused(words: &'static str) -> [Expected; 2] {
    [Waits(NO_ROOM), Refused(words)]
}

fn visible(value: &str) -> Value {
    json!([{"name": VISIBLE_DEVICES, "value": value}])
}

fn plain(name: &str) -> PodBuilder {
    PodBuilder::new(name, &[])
}

/// Attempts at a GPU that is not counted for the pod.
fn at_devices() -> Vec<Attempt> {
    let by_reference =
        json!([{"name": VISIBLE_DEVICES, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]);
    let sets = "sets NVIDIA_VISIBLE_DEVICES";
    vec![
        (
            plain("variable").with("env", visible("all")),
            blind_or_refused(sets),
        ),
        (
            plain("reference").with("env", by_reference),
            blind_or_refused(sets),
        ),
        (
            plain("init")
                .init("i", &[])
                .at("/spec/initContainers/0/env", visible("0")),
            blind_or_refused(sets),
        ),
        (
            plain("sidecar")
                .sidecar("s", &[])
                .at("/spec/initContainers/0/env", visible("all")),
            blind_or_refused(sets),
        ),
        (
            PodBuilder::units("beside", 1)
                .container("c", &[])
                .at("/spec/containers/1/env", visible("all")),
            always(Refused(sets)),
        ),
        (
            plain("cdi").annotation("cdi.k8s.io/gpu", "nvidia.com/gpu=all"),
            blind_or_refused("annotation cdi.k8s.io/gpu is"),
        ),
        (
            plain("nri-pod").annotation("nvidia.cdi.k8s.io/pod", "nvidia.com/gpu=0"),
            blind_or_refused("annotation nvidia.cdi.k8s.io/pod is"),
        ),
        (
            PodBuilder::units("nri-container", 1)
                .annotation("nvidia.cdi.k8s.io/container.main", "nvidia.com/gpu=0"),
            always(Refused("annotation nvidia.cdi.k8s.io/container.main is")),
        ),
        (
            PodBuilder::share("marked", 10).annotation("gpushare/all-devices", "true"),
            always(Refused("gpushare/all-devices")),
        ),
    ]
}

/// Requests with extreme amounts and sizes.
fn at_amounts() -> Vec<Attempt> {
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
        (units("nothing", "0"), always(Runs(0))),
        (
            units("negative", "-1"),
            always(Invalid("must be greater than or equal to 0")),
        ),
        (units("half", "500m"), always(Invalid("must be an integer"))),
        (
            units("most", "9223372036854775807"),
            pending_or_refused("which is not a whole number up to"),
        ),
        (
            shares("many", "4294967296", "100"),
            pending_or_refused("is more than 1024"),
        ),
        (
            shares("much", "1", "9223372036854775807"),
            pending_or_refused("koordinator.sh/gpu-memory-ratio"),
        ),
        (
            PodBuilder::new("bytes", &[(GPU_SHARED, "1"), (GPU_MEMORY, "8E")]),
            pending_or_refused("which is not a whole number up to"),
        ),
        (thousand, always(Waits(NO_ROOM))),
        (
            PodBuilder::share("long", 10)
                .annotation(hint, &format!("{{\"gpu\": {}}}", " ".repeat(250 << 10))),
            always(Refused("longer than 8192 bytes")),
        ),
        (
            PodBuilder::share("deep", 10).annotation(hint, &format!("{{\"gpu\": {}", "[".repeat(100_000))),
            always(Refused("longer than 8192 bytes")),
        ),
        (
            PodBuilder::share("nested", 10).annotation(hint, &format!("{{\"gpu\": {}", "[".repeat(8000))),
            always(Refused("scheduling.koordinator.sh/device-allocate-hint")),
        ),
        (
            PodBuilder::share("markup", 10).annotation(
                hint,
                r#"{"gpu": {"<img src=x onerror=alert(1)>": "../../etc/passwd"}}"#,
            ),
            always(Refused("<img src=x onerror=alert(1)>")),
        ),
    ]
}

async fn tenant_sees(world: &mut World) -> Result<()> {
    for attempt in at_devices() {
        make(world, attempt).await?;
    }
    if world.cluster.is_some() {
        // An image that sets the variable itself.
        let image = plain("image").with("image", json!("nvidia/cuda:12.4"));
        make(world, (image, always(Runs(0)))).await?;
    }
    Ok(())
}

async fn tenant_asks(world: &mut World) -> Result<()> {
    for attempt in at_amounts() {
        make(world, attempt).await?;
    }
    Ok(())
}

/// Makes one attempt.
async fn make(world: &World, (spec, [without, with]): Attempt) -> Result<()> {
    let expected = if world.has_webhooks { with } else { without };
    expected.try_pod(world, spec).await.map(drop)
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
    set(&mut applied, "apiVersion", json!("v1"));
    set(&mut applied, "kind", json!("Pod"));
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

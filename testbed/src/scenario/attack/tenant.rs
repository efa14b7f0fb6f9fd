//! A tenant, who may create and change pods of a namespace, and tries to see a GPU that is not counted for a pod.
//!
//! The testbed's container runtime shows the GPUs that a container sees. For pods that request devices, the check after each
//! scenario compares them with the record; for other pods, the tables of this file have the expected result. `docs/security.md`
//! lists the attempts that nothing prevents.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use proto::pod::MIRROR;
use proto::record::MEM_CONTAINER;
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use crate::scenario::expected::{Expected, NO_ROOM};
use crate::scenario::runtime_hook::HOOKED;
use crate::scenario::{ScenarioEntry, World};
use kit::cluster::LocalCluster;
use kit::invariants::{self, VISIBLE_DEVICES};
use kit::observer::ClusterSnapshot;
use kit::pods::{PodBuilder, set};

use Expected::{Exposed, Invalid, Refused, Runs, Waits};

pub(in crate::scenario) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "tenant-sees" => tenant_sees,
        "by no field of a pod does a container see another GPU than the one that is counted for it";
    "tenant-asks" => tenant_asks,
        "numbers at every edge, a thousand containers and huge annotations are refused with their reason";
    "tenant-debugs" => tenant_debugs,
        "a container that is added to a pod that runs has no device, not even one of the pod's";
    "tenant-resizes" => tenant_resizes,
        "a pod that runs is resized in CPU alone, and keeps its device";
    "tenant-reuses" => tenant_reuses,
        "a pod that gets the device IDs of a deleted one gets its own amounts and nothing else";
};

/// The scenarios of this file for a cluster with webhooks.
pub(in crate::scenario) const DETOURS: &[ScenarioEntry] = scenarios! {
    "tenant-detours" => tenant_detours,
        "the rules about pods hold for each way by which a pod can be made or changed";
};

/// The scenarios of this file for a cluster that has a node with the runtime hook, and no webhooks.
pub(in crate::scenario) const ON_HOOKED: &[ScenarioEntry] = scenarios! {
    "tenant-hooked" => tenant_hooked,
        "with the runtime hook no pod that requests nothing sees a GPU, webhooks or not";
};

/// A pod, and its expected result without webhooks and with them.
type Attempt = (PodBuilder, [Expected; 2]);

/// One result, with webhooks and without.
fn always(expected: Expected) -> [Expected; 2] {
    [expected; 2]
}

/// The result where kube-scheduler does not ask about the pod, and nothing reads the field: it runs, and sees no GPU.
fn blind_or_refused(words: &'static str) -> [Expected; 2] {
    [Runs(0), Refused(words)]
}

/// The result where kube-scheduler does not ask about the pod: without a webhook and without the runtime hook it sees GPUs.
fn exposed_or_refused(words: &'static str) -> [Expected; 2] {
    [Exposed, Refused(words)]
}

/// The result where nodes offer too little of the resource: without a webhook the pod stays pending for that.
fn pending_or_refused(words: &'static str) -> [Expected; 2] {
    [Waits(NO_ROOM), Refused(words)]
}

/// The environment of a container that sets the variable by which NVIDIA's runtime shows GPUs.
fn visible(value: &str) -> Value {
    json!([{"name": VISIBLE_DEVICES, "value": value}])
}

/// The `ConfigMap` whose entries a pod takes as its environment.
const MAP: &str = "visible";

/// A pod that requests nothing.
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
            exposed_or_refused(sets),
        ),
        (
            // The value of the variable is the name of the pod.
            plain("all").with("env", by_reference),
            exposed_or_refused(sets),
        ),
        (
            plain("entry").with(
                "env",
                json!([{"name": VISIBLE_DEVICES, "valueFrom": {"configMapKeyRef": {"name": MAP, "key": VISIBLE_DEVICES}}}]),
            ),
            exposed_or_refused(sets),
        ),
        (
            plain("map").with("envFrom", json!([{"configMapRef": {"name": MAP}}])),
            always(Exposed),
        ),
        (
            plain("init")
                .init("i", &[])
                .at("/spec/initContainers/0/env", visible("0")),
            exposed_or_refused(sets),
        ),
        (
            plain("sidecar")
                .sidecar("s", &[])
                .at("/spec/initContainers/0/env", visible("all")),
            exposed_or_refused(sets),
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

/// Pods that Kubernetes itself refuses: names that could corrupt a record or a path, amounts of the whole pod, and the mirror pod
/// of a static pod that is on no node.
fn at_names() -> Vec<Attempt> {
    let label = "a lowercase RFC 1123 label";
    let units = |name: &str| PodBuilder::units(name, 1);
    vec![
        (
            units("twins").container("main", &[]),
            always(Invalid("Duplicate value: \"main\"")),
        ),
        (
            units("init-twin").init("main", &[(GPU_MEM, "1")]),
            always(Invalid("Duplicate value: \"main\"")),
        ),
        (units("path").container("../main", &[]), always(Invalid(label))),
        (
            units("tag").container("<img src=x onerror=alert(1)>", &[]),
            always(Invalid(label)),
        ),
        (
            units("key").annotation("<script>/../x", "x"),
            always(Invalid("metadata.annotations")),
        ),
        (
            plain("whole").at("/spec/resources", json!({"limits": {GPU_MEM: "1"}})),
            always(Invalid("Unsupported value")),
        ),
        (
            units("mirror").annotation(MIRROR, "x"),
            always(Invalid("must set spec.nodeName if mirror pod annotation is set")),
        ),
    ]
}

/// Pods without a request that gpushare admits: an image that sets the variable, a runtime class of NVIDIA's runtime, and
/// directories of the node, which Pod Security refuses. The testbed mounts no directories.
fn at_the_node() -> Vec<Attempt> {
    let mounting = |name: &str, path: &str| {
        plain(name)
            .at(
                "/spec/volumes",
                json!([{"name": "node", "hostPath": {"path": path}}]),
            )
            .with("volumeMounts", json!([{"name": "node", "mountPath": "/node"}]))
    };
    vec![
        (
            plain("image").with("image", json!("nvidia/cuda:12.4")),
            always(Exposed),
        ),
        (
            plain("class").at("/spec/runtimeClassName", json!("nvidia")),
            always(Runs(0)),
        ),
        (mounting("host-dev", "/dev"), always(Runs(0))),
        (mounting("host-cdi", "/var/run/cdi"), always(Runs(0))),
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

/// Tries pods that set what they see, pods with misleading names, and on the testbed also pods that use the node itself.
async fn tenant_sees(world: &mut World) -> Result<()> {
    let maps = make_map(world).await?;
    for attempt in at_devices().into_iter().chain(at_names()) {
        try_attempt(world, attempt).await?;
    }
    if world.cluster.is_some() {
        for attempt in at_the_node() {
            try_attempt(world, attempt).await?;
        }
        mirror_on_a_node(world).await?;
    }
    maps.delete(MAP, &DeleteParams::default()).await?;
    Ok(())
}

/// Makes the `ConfigMap` that pods read their environment from.
async fn make_map(world: &World) -> Result<Api<ConfigMap>> {
    let map = json!({"metadata": {"name": MAP}, "data": {VISIBLE_DEVICES: "all"}});
    let maps: Api<ConfigMap> = Api::namespaced(world.client.0.clone(), &world.namespace);
    maps.create(&PostParams::default(), &serde_json::from_value(map)?)
        .await?;
    Ok(maps)
}

/// On a node with the runtime hook no pod without a request sees a GPU, though no webhook has refused it.
async fn tenant_hooked(world: &mut World) -> Result<()> {
    let maps = make_map(world).await?;
    for (spec, [without, _]) in at_devices().into_iter().chain(at_the_node()) {
        let expected = match without {
            Exposed => Runs(0),
            expected => expected,
        };
        expected.try_pod(world, spec.on(HOOKED)).await?;
    }
    maps.delete(MAP, &DeleteParams::default()).await?;
    Ok(())
}

/// The webhooks admit a mirror pod as it is, and kubelet deletes it without starting it: the tenant has no file on the node.
async fn mirror_on_a_node(world: &mut World) -> Result<()> {
    let (node, name) = (world.gpu_node(1)?.name, "mirror-on-node");
    let mirror = PodBuilder::units(name, 1)
        .annotation(MIRROR, "x")
        .at("/spec/nodeName", json!(node))
        .with("env", visible("all"));
    world.create(mirror).await?;
    let key = world.key(name);
    let (namespace, objects) = (world.namespace.clone(), world.cluster()?.api().objects().clone());
    // The observer's watch may not have shown the pod yet.
    let is_gone = |snapshot: &ClusterSnapshot| {
        let is_deleted = objects.get("pods", &namespace, name).is_err();
        (is_deleted && !snapshot.pods.contains_key(&key)).then_some(())
    };
    world.until("the mirror pod to be gone", is_gone).await?;
    let started = world.node(&node)?.kubelet().container(&namespace, name, "main");
    ensure!(
        started.is_none(),
        "a mirror pod without a static pod has run: {started:?}"
    );
    Ok(())
}

/// Adds containers to pods that run, as `kubectl debug` does.
async fn tenant_debugs(world: &mut World) -> Result<()> {
    Runs(0).try_pod(world, plain("debugged")).await?;
    world.start(PodBuilder::units("debugged-user", 1)).await?;
    let container = |name: &str, env: Value| json!({"name": name, "image": "none", "env": env});
    for pod in ["debugged", "debugged-user"] {
        debug(world, pod, &container("harmless", json!([]))).await?;
        check_debugger(world, pod, "harmless", false).await?;
    }
    let sets = debug(world, "debugged", &container("sets", visible("all"))).await;
    if world.has_webhooks {
        denied("an ephemeral container that sets the variable", sets)?;
    } else {
        // No part of gpushare is asked here; with the runtime hook the container would see nothing.
        sets?;
        check_debugger(world, "debugged", "sets", true).await?;
    }
    let mut greedy = container("greedy", json!([]));
    set(&mut greedy, "resources", json!({"limits": {GPU_MEM: "1"}}));
    let changed = container("harmless", json!([{"name": "A", "value": "b"}]));
    for (fields, words) in [
        (greedy, "cannot be set for an Ephemeral Container"),
        (changed, "may not be changed"),
    ] {
        match debug(world, "debugged", &fields).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                ensure!(status.message.contains(words), "{words}: {status}");
            }
            other => bail!("{words}: it should have been refused with 422: {other:?}"),
        }
    }
    Ok(())
}

/// Adds an ephemeral container to a pod, or changes one.
async fn debug(world: &World, pod: &str, container: &Value) -> kube::Result<Pod> {
    let patch = Patch::Strategic(json!({"spec": {"ephemeralContainers": [container]}}));
    let api = world.pods.api();
    api.patch_subresource("ephemeralcontainers", pod, &PatchParams::default(), &patch)
        .await
}

/// Waits until an ephemeral container runs, and checks that it sees a GPU if it should, and none otherwise.
async fn check_debugger(world: &World, pod: &str, container: &str, should_see: bool) -> Result<()> {
    let key = world.key(pod);
    let runs = |snapshot: &ClusterSnapshot| {
        let status = snapshot.pods.get(&key)?.status.as_ref()?;
        let mut statuses = status.ephemeral_container_statuses.iter().flatten();
        let found = statuses.find(|status| status.name == container)?;
        found.state.as_ref()?.running.as_ref().map(drop)
    };
    world.until(&format!("{container} of {pod} to run"), runs).await?;
    let nodes = world.cluster.iter().flat_map(LocalCluster::nodes);
    let mut found = nodes.filter_map(|node| node.kubelet().container(&world.namespace, pod, container));
    let gpus = found.next().map(|found| found.gpus).unwrap_or_default();
    ensure!(
        world.cluster.is_none() || gpus.is_empty() != should_see,
        "{container} of {pod} sees {gpus:?}"
    );
    Ok(())
}

/// Resizes a pod that runs. The API server refuses other resources than CPU and memory.
async fn tenant_resizes(world: &mut World) -> Result<()> {
    let before = world.start(PodBuilder::units("resized", 1)).await?;
    let resize = async |limits: Value| {
        let patch = json!({"spec": {"containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]}});
        let api = world.pods.api();
        api.patch_subresource(
            "resize",
            "resized",
            &PatchParams::default(),
            &Patch::Strategic(patch),
        )
        .await
    };
    for limits in [
        json!({GPU_MEM: "2"}),
        json!({GPU_SHARED: "1", GPU_MEMORY_RATIO: "100"}),
    ] {
        match resize(limits.clone()).await {
            Err(kube::Error::Api(status)) if status.code == 422 => ensure!(
                status
                    .message
                    .contains("only cpu and memory resources are mutable"),
                "{limits}: {status}"
            ),
            other => bail!("a resize to {limits} should have been refused with 422: {other:?}"),
        }
    }
    resize(json!({"cpu": "1"})).await?;
    let after = world.pod("resized")?;
    ensure!(
        invariants::record(&before) == invariants::record(&after),
        "the record has changed: {:?}",
        after.annotations()
    );
    Ok(())
}

/// Takes a whole GPU, deletes the pod, and takes a part of the same device IDs with another pod of the same name.
async fn tenant_reuses(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    let all = node.units.first().copied().unwrap_or_default();
    for units in [all, 1, all] {
        world.start_units("reused", units, &node.name).await?;
        let log = world.log("reused", "main").await?;
        let amount = format!("{MEM_CONTAINER}={units}\n");
        ensure!(log.contains(&amount), "{units} units: no {amount:?} in {log}");
        world.verify().await?;
        world.delete("reused").await?;
    }
    Ok(())
}

/// Tries the requests with extreme amounts and sizes.
async fn tenant_asks(world: &mut World) -> Result<()> {
    for attempt in at_amounts() {
        try_attempt(world, attempt).await?;
    }
    Ok(())
}

/// Tries the pod of an attempt, and checks that it has the result for this cluster, with or without webhooks.
async fn try_attempt(world: &World, (spec, [without, with]): Attempt) -> Result<()> {
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

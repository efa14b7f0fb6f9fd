//! A tenant, who may create and change pods of a namespace, and tries to see a GPU that is not counted for a pod.
//!
//! The testbed's container runtime shows the GPUs that a container sees. For pods that request devices, the check after each
//! scenario compares them with the record; for other pods, the tables of this file have the expected result. `docs/security.md`
//! lists the attempts that nothing prevents.

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use proto::pod::{ALL_DEVICES, MIRROR};
use proto::record::MEM_CONTAINER;
use proto::request::hints::ALLOCATE_HINT;
use proto::resource::{GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use crate::scenario::expected::{Expected, Results, always, visible};
use crate::scenario::runtime_hook::HOOKED;
use crate::scenario::{NO_NODE, Scenario, World};
use kit::cluster::LocalCluster;
use kit::invariants::{self, VISIBLE_DEVICES};
use kit::observer::ClusterSnapshot;
use kit::pods::{PodBuilder, set};

use Expected::{Exposed, Invalid, Refused, Runs, Waits};

pub(in crate::scenario) const SCENARIOS: &[Scenario] = scenarios! { needs nothing, on [Plain, Webhooks]:
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
pub(in crate::scenario) const DETOURS: &[Scenario] = scenarios! {
    needs "the port of the webhooks", on [Webhooks]:
    "tenant-detours" => tenant_detours,
        "the rules about pods hold for each way by which a pod can be made or changed";
};

/// The scenarios of this file for a cluster that has a node with the runtime hook, and no webhooks.
pub(in crate::scenario) const ON_HOOKED: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "tenant-hooked" => tenant_hooked,
        "with the runtime hook no pod that requests nothing sees a GPU, webhooks or not";
};

/// A pod, and its expected results.
type Attempt = (PodBuilder, Results);

/// The result where kube-scheduler does not ask about the pod, and nothing reads the field: it runs, and sees no GPU.
fn blind_or_refused(words: &'static str) -> Results {
    [Runs(0), Refused(words)]
}

/// The result where kube-scheduler does not ask about the pod: without a webhook and without the runtime hook it sees GPUs.
fn exposed_or_refused(words: &'static str) -> Results {
    [Exposed, Refused(words)]
}

/// The result where nodes offer too little of the resource: without a webhook the pod stays pending for that.
fn pending_or_refused(words: &'static str) -> Results {
    [Waits(NO_NODE), Refused(words)]
}

/// The `ConfigMap` whose entries a pod takes as its environment.
const MAP: &str = "visible";

/// A pod that requests nothing.
fn plain(name: &str) -> PodBuilder {
    PodBuilder::new(name, &[])
}

/// Attempts at a GPU that is not counted for the pod.
fn at_devices() -> Vec<Attempt> {
    const SETS: &str = "sets NVIDIA_VISIBLE_DEVICES";
    const INIT_ENV: &str = "/spec/initContainers/0/env";
    let setting = || exposed_or_refused(SETS);
    let taken_from = |source: Value| json!([{"name": VISIBLE_DEVICES, "valueFrom": source}]);
    let name = json!({"fieldRef": {"fieldPath": "metadata.name"}});
    let entry = json!({"configMapKeyRef": {"name": MAP, "key": VISIBLE_DEVICES}});
    let map = json!([{"configMapRef": {"name": MAP}}]);
    let sidecar = plain("sidecar").sidecar("s", &[]);
    let beside = PodBuilder::units("beside", 1).container("c", &[]);
    let beside = beside.at("/spec/containers/1/env", visible("all"));
    let cdi = plain("cdi").annotation("cdi.k8s.io/gpu", "nvidia.com/gpu=all");
    let nri_pod = plain("nri-pod").annotation("nvidia.cdi.k8s.io/pod", "nvidia.com/gpu=0");
    let nri_container = PodBuilder::units("nri-container", 1);
    let nri_container = nri_container.annotation("nvidia.cdi.k8s.io/container.main", "nvidia.com/gpu=0");
    let marked = PodBuilder::share("marked", 10).annotation(ALL_DEVICES, "true");
    vec![
        (plain("variable").with("env", visible("all")), setting()),
        // The value of the variable is the name of the pod.
        (plain("all").with("env", taken_from(name)), setting()),
        (plain("entry").with("env", taken_from(entry)), setting()),
        (plain("map").with("envFrom", map), always(Exposed)),
        (plain("init").init("i", &[]).at(INIT_ENV, visible("0")), setting()),
        (sidecar.at(INIT_ENV, visible("all")), setting()),
        (beside, always(Refused(SETS))),
        (cdi, blind_or_refused("annotation cdi.k8s.io/gpu is")),
        (nri_pod, blind_or_refused("annotation nvidia.cdi.k8s.io/pod is")),
        (
            nri_container,
            always(Refused("annotation nvidia.cdi.k8s.io/container.main is")),
        ),
        (marked, always(Refused(ALL_DEVICES))),
    ]
}

/// Pods that Kubernetes itself refuses: names that could corrupt a record or a path, amounts of the whole pod, and the mirror pod
/// of a static pod that is on no node.
fn at_names() -> Vec<Attempt> {
    let no_label = || always(Invalid("a lowercase RFC 1123 label"));
    let twice = || always(Invalid("Duplicate value: \"main\""));
    let units = |name: &str| PodBuilder::units(name, 1);
    let twin = units("init-twin").init("main", &[(GPU_MEM, "1")]);
    let tag = units("tag").container("<img src=x onerror=alert(1)>", &[]);
    let key = units("key").annotation("<script>/../x", "x");
    let whole = plain("whole").at("/spec/resources", json!({"limits": {GPU_MEM: "1"}}));
    vec![
        (units("twins").container("main", &[]), twice()),
        (twin, twice()),
        (units("path").container("../main", &[]), no_label()),
        (tag, no_label()),
        (key, always(Invalid("metadata.annotations"))),
        (whole, always(Invalid("Unsupported value"))),
        (
            units("mirror").annotation(MIRROR, "x"),
            always(Invalid("must set spec.nodeName if mirror pod annotation is set")),
        ),
    ]
}

/// A pod that mounts a directory of the node.
fn mounting(name: &str, path: &str) -> PodBuilder {
    let volume = json!({"name": "node", "hostPath": {"path": path}});
    let mount = json!({"name": "node", "mountPath": "/node"});
    let spec = plain(name).at("/spec/volumes", json!([volume]));
    spec.with("volumeMounts", json!([mount]))
}

/// Pods without a request that gpushare admits: an image that sets the variable, a runtime class of NVIDIA's runtime, and
/// directories of the node, which Pod Security refuses. The testbed mounts no directories.
fn at_the_node() -> Vec<Attempt> {
    let image = plain("image").with("image", json!("nvidia/cuda:12.4"));
    let class = plain("class").at("/spec/runtimeClassName", json!("nvidia"));
    vec![
        (image, always(Exposed)),
        (class, always(Runs(0))),
        (mounting("host-dev", "/dev"), always(Runs(0))),
        (mounting("host-cdi", "/var/run/cdi"), always(Runs(0))),
    ]
}

/// Requests with extreme amounts and sizes.
fn at_amounts() -> Vec<Attempt> {
    let mut thousand = PodBuilder::units("thousand", 1);
    for n in 1..1000 {
        thousand = thousand.container(&format!("c{n}"), &[(GPU_MEM, "1")]);
    }
    let units = |name: &str, units: &str| PodBuilder::units(name, units);
    let shares = |name: &str, devices: &str, ratio: &str| {
        PodBuilder::new(name, &[(GPU_SHARED, devices), (GPU_MEMORY_RATIO, ratio)])
    };
    let hinted = |name: &str, value: &str| PodBuilder::share(name, 10).annotation(ALLOCATE_HINT, value);
    let nested = |depth: usize| format!("{{\"gpu\": {}", "[".repeat(depth));
    let spaces = format!("{{\"gpu\": {}}}", " ".repeat(250 << 10));
    let markup = r#"{"gpu": {"<img src=x onerror=alert(1)>": "../../etc/passwd"}}"#;
    let bytes = PodBuilder::new("bytes", &[(GPU_SHARED, "1"), (GPU_MEMORY, "8E")]);
    let negative = Invalid("must be greater than or equal to 0");
    let not_whole = || pending_or_refused("which is not a whole number up to");
    let too_long = || always(Refused("longer than 8192 bytes"));
    vec![
        (units("nothing", "0"), always(Runs(0))),
        (units("negative", "-1"), always(negative)),
        (units("half", "500m"), always(Invalid("must be an integer"))),
        (units("most", "9223372036854775807"), not_whole()),
        (
            shares("many", "4294967296", "100"),
            pending_or_refused("is more than 1024"),
        ),
        (
            shares("much", "1", "9223372036854775807"),
            pending_or_refused(GPU_MEMORY_RATIO),
        ),
        (bytes, not_whole()),
        (thousand, always(Waits(NO_NODE))),
        (hinted("long", &spaces), too_long()),
        (hinted("deep", &nested(100_000)), too_long()),
        (hinted("nested", &nested(8000)), always(Refused(ALLOCATE_HINT))),
        (
            hinted("markup", markup),
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
    let maps: Api<ConfigMap> = Api::namespaced(world.client(), &world.namespace);
    let map = serde_json::from_value(map)?;
    maps.create(&PostParams::default(), &map).await?;
    Ok(maps)
}

/// On a node with the runtime hook no pod without a request sees a GPU, though no webhook has refused it.
async fn tenant_hooked(world: &mut World) -> Result<()> {
    let maps = make_map(world).await?;
    for (spec, [without, _]) in at_devices().into_iter().chain(at_the_node()) {
        let expected = if matches!(without, Exposed) {
            Runs(0)
        } else {
            without
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
        refused_as_invalid(words, debug(world, "debugged", &fields).await)?;
    }
    Ok(())
}

/// Adds an ephemeral container to a pod, or changes one.
async fn debug(world: &World, pod: &str, container: &Value) -> kube::Result<Pod> {
    let change = json!({"ephemeralContainers": [container]});
    patch_spec(world, pod, "ephemeralcontainers", &change).await
}

/// Changes the spec of a pod by a subresource.
async fn patch_spec(world: &World, pod: &str, subresource: &str, change: &Value) -> kube::Result<Pod> {
    let (api, params) = (world.pods.api(), PatchParams::default());
    let patch = Patch::Strategic(json!({"spec": change}));
    api.patch_subresource(subresource, pod, &params, &patch).await
}

/// Fails unless the API server has refused a change in these words.
fn refused_as_invalid(words: &str, answer: kube::Result<Pod>) -> Result<()> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 422 && status.message.contains(words) => Ok(()),
        other => bail!("{words}: it should have been refused with 422: {other:?}"),
    }
}

/// Waits until an ephemeral container runs, and checks that it sees a GPU if it should, and none otherwise.
async fn check_debugger(world: &World, pod: &str, container: &str, should_see: bool) -> Result<()> {
    let runs = |found: &Pod| {
        let mut statuses = found
            .status
            .as_ref()?
            .ephemeral_container_statuses
            .iter()
            .flatten();
        let status = statuses.find(|status| status.name == container)?;
        status.state.as_ref()?.running.as_ref().map(drop)
    };
    world.until_pod(pod, &format!("to run {container}"), runs).await?;
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
        let container = json!({"name": "main", "resources": {"limits": limits, "requests": limits}});
        patch_spec(world, "resized", "resize", &json!({"containers": [container]})).await
    };
    let words = "only cpu and memory resources are mutable";
    for limits in [
        json!({GPU_MEM: "2"}),
        json!({GPU_SHARED: "1", GPU_MEMORY_RATIO: "100"}),
    ] {
        refused_as_invalid(words, resize(limits).await)?;
    }
    resize(json!({"cpu": "1"})).await?;
    let [before, after] = [before, world.pod("resized")?].map(|pod| invariants::record(&pod));
    ensure!(before == after, "the record was {before:?} and is {after:?}");
    Ok(())
}

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

async fn tenant_asks(world: &mut World) -> Result<()> {
    for attempt in at_amounts() {
        try_attempt(world, attempt).await?;
    }
    Ok(())
}

/// Tries the pod of an attempt, and checks that it has the result for this cluster, with or without webhooks.
async fn try_attempt(world: &World, (spec, results): Attempt) -> Result<()> {
    let expected = Expected::here(world, results);
    expected.try_pod(world, spec).await.map(drop)
}

async fn tenant_detours(world: &mut World) -> Result<()> {
    let api = world.pods.api();
    let seeing_all = plain("forbidden").with("env", visible("all"));
    let forbidden = seeing_all.pod()?;
    let generated = seeing_all
        .at("/metadata/name", Value::Null)
        .at("/metadata/generateName", json!("generated-"))
        .pod()?;
    let usual = PostParams::default();
    let dry_run = PostParams {
        dry_run: true,
        ..usual.clone()
    };
    let mut applied = serde_json::to_value(&forbidden)?;
    set(&mut applied, "apiVersion", json!("v1"));
    set(&mut applied, "kind", json!("Pod"));
    let (apply, applied) = (PatchParams::apply("tenant"), Patch::Apply(&applied));
    denied("dry run", api.create(&dry_run, &forbidden).await)?;
    denied(
        "server-side apply",
        api.patch("forbidden", &apply, &applied).await,
    )?;
    denied("generateName", api.create(&usual, &generated).await)?;
    // Larger than any GPU, so that it waits while it is changed.
    let mut waiting = world.create(PodBuilder::units("waiting", 1000)).await?;
    let (key, value) = ("cdi.k8s.io/gpu", "nvidia.com/gpu=all");
    let annotation = json!({"metadata": {"annotations": {key: value}}});
    let change = PatchParams::default();
    for patch in [Patch::Merge(&annotation), Patch::Strategic(&annotation)] {
        denied("patch", api.patch("waiting", &change, &patch).await)?;
    }
    waiting.annotations_mut().insert(key.to_owned(), value.to_owned());
    waiting.metadata.resource_version = None;
    denied("replace", api.replace("waiting", &usual, &waiting).await)
}

/// Fails unless a webhook has refused a request.
fn denied(way: &str, answer: kube::Result<Pod>) -> Result<()> {
    match answer {
        Ok(pod) => bail!("{way}: {} was made or changed", pod.name_any()),
        Err(error) if error.to_string().contains("denied the request") => Ok(()),
        Err(error) => bail!("{way}: {error}"),
    }
}

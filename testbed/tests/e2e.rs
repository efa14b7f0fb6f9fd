//! Every scenario, faults included, on the testbed; then what the daemons asked of the API server against `deploy/`.

#[path = "stand_in/cuda.rs"]
mod cuda;

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kit::apiserver::{Fault, Matching, UsedAccess};
use kit::cluster::{
    ClusterSpec, LocalCluster, NodeKind, NodeSetup, PLUGIN_USER, RuntimeSpec, SCHEDULER_USER, WebhookSpec,
    default_deploy,
};
use kit::console::Console;
use kit::kubelet::{PreparedDevice, ProbeProgram};
use kit::manifests;
use kit::observer::ClusterSnapshot;
use kit::parts::Commands;
use kit::pods::PodBuilder;
use kit::rbac::{self, Permission, Rbac, RbacTarget};
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::resource::{HAMI_CORE, ISOLATION_PROVIDER};
use serde_json::json;
use testbed::scenario::real_gpus::{self, GpuOptions, GpuScenario, ProgramTimes};
use testbed::scenario::{self, World};
use testbed::{e2e, replicas};

#[tokio::test(flavor = "multi_thread")]
async fn every_scenario_ends_as_it_promises() {
    let endings = e2e::on_testbed(&Console::new(true), &scenario::all(), default_deploy())
        .await
        .unwrap();
    let failures: Vec<_> = endings.iter().filter(|ending| ending.failure.is_some()).collect();
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(endings.len() >= 20);
}

/// The UUID of a GPU on which the scenarios for real GPUs run.
const PROBED: &str = "GPU-5d1ca1c6-5f1b-4b1a-9c1e-0123456789ab";

/// The commands of a cluster in which nothing ends: they try the scenario, and no fault.
const NO_FAULTS: &str = "parts: {containerd: {kill: \"true\"}, kubelet: {kill: \"true\"}}";

/// Nodes with `gpu-probe` and a stand-in for CUDA: one like that of `docs/nvidia.md#seen-on-a-gpu` with a smaller GPU, one where
/// NVIDIA's runtime is the default, and two where it has a `RuntimeClass`, of which one
/// has the runtime hook and HAMi-core's library.
fn probed_nodes(dir: &Path) -> Result<Vec<NodeSetup>, Box<dyn Error>> {
    let [program, libraries] = cuda::build(dir);
    let node = |kind, name, mib: u64| {
        let mut node = NodeSetup::of_kind(kind, name, &[mib]);
        for gpu in &mut node.gpus {
            PROBED.clone_into(&mut gpu.uuid);
        }
        node.probe = Some(ProbeProgram {
            program: program.clone(),
            libraries: libraries.clone(),
            gpu_bytes: mib << 20,
            context_bytes: 520 << 20,
        });
        node
    };
    let hami = dir.join("vgpu");
    std::fs::create_dir(&hami)?;
    for (file, text) in [
        ("libvgpu.so", ""),
        ("ld.so.preload", "/usr/local/vgpu/libvgpu.so\n"),
    ] {
        std::fs::write(hami.join(file), text)?;
    }
    let mut plain = node(NodeKind::PlainCdi, "plain", 12_288);
    plain.plugin_args.push("--measure-memory".to_owned());
    let mut hooked = node(NodeKind::RuntimeClass, "hooked", 12_288);
    hooked.runtime = RuntimeSpec::Plugins;
    hooked
        .labels
        .insert(ISOLATION_PROVIDER.to_owned(), HAMI_CORE.to_owned());
    hooked.plugin_args.push(format!("--hami-core={}", hami.display()));
    Ok(vec![
        plain,
        node(NodeKind::JitCdi, "exposed", 16_384),
        node(NodeKind::RuntimeClass, "class", 12_288),
        hooked,
    ])
}

/// The settings of a run on simulated GPUs, whose times are short.
fn gpu_options(node: &str) -> GpuOptions {
    GpuOptions {
        simulated: true,
        times: ProgramTimes {
            ready: 0,
            compute: 1,
            latest: f64::INFINITY,
            listed: 4,
        },
        ..GpuOptions::of_real_gpus(
            Some(node.to_owned()),
            "nvidia/cuda:12.4.1-base-ubuntu22.04".to_owned(),
        )
    }
}

fn gpu_scenarios(names: &[&str]) -> Vec<GpuScenario> {
    let mut scenarios = real_gpus::all();
    scenarios.retain(|scenario| names.contains(&scenario.name));
    assert_eq!(scenarios.len(), names.len(), "{names:?}");
    scenarios
}

/// Runs scenarios, of which none may count as passed; adds a line for each.
async fn run_gpu_scenarios(
    world: World,
    scenarios: &[GpuScenario],
    options: &GpuOptions,
    lines: &mut Vec<String>,
) -> Result<World, Box<dyn Error>> {
    // Times and rates differ from run to run.
    let figures = r"\d+\.\d+ s|-?\d+ % lost|\d+ (alone|for)|\b\d+, |rounds \d+ to \d+";
    let figures = regex::Regex::new(figures)?;
    let console = Console::new(true);
    let (world, report) = real_gpus::run(&console, world, scenarios, options).await?;
    assert!(!report.is_ok());
    for result in &report.results {
        let text = figures.replace_all(&result.result, "…");
        lines.push(format!("{} {:?}: {text}", result.scenario, result.outcome));
    }
    if let Some(versions) = report.versions.filter(|versions| !versions.gpushare.is_empty()) {
        assert_eq!(versions.driver, "550.54.15");
        assert_eq!(versions.gpushare, env!("CARGO_PKG_VERSION"));
    }
    Ok(world)
}

/// All that reaches containers is compared, and nothing counts as passed. Left out is the scenario that waits for the removal of
/// CDI specs, which takes a minute.
#[tokio::test(flavor = "multi_thread")]
async fn scenarios_on_real_gpus_run_up_to_cuda_on_the_testbed() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = LocalCluster::start(ClusterSpec::of(probed_nodes(dir.path()).unwrap()))
        .await
        .unwrap();
    let client = cluster.client().clone();
    let classes: Api<RuntimeClass> = Api::all(client.clone());
    for (name, handler) in [("nvidia", "nvidia"), ("other", "runc")] {
        let class = json!({"metadata": {"name": name}, "handler": handler});
        let class = serde_json::from_value(class).unwrap();
        classes.create(&PostParams::default(), &class).await.unwrap();
    }
    let mut world = World::new(client.clone(), "gpus", None, Some(cluster))
        .await
        .unwrap();
    let mut most = real_gpus::all();
    assert_eq!(most.pop().unwrap().name, "gpu-nothing-left");
    let real = GpuOptions {
        simulated: false,
        ..gpu_options("plain")
    };
    let mut lines = Vec::new();
    for (options, scenarios) in [
        (real, gpu_scenarios(&["gpu-offered"])),
        (gpu_options("plain"), most),
        (gpu_options("exposed"), gpu_scenarios(&["gpu-without-request"])),
        (gpu_options("class"), gpu_scenarios(&["gpu-runtime-classes"])),
        (
            gpu_options("hooked"),
            gpu_scenarios(&["gpu-runtime-classes", "gpu-hami-core"]),
        ),
    ] {
        world = run_gpu_scenarios(world, &scenarios, &options, &mut lines)
            .await
            .unwrap();
    }
    let cluster = world.end().await.unwrap().unwrap();
    // A client of a real cluster has its API server alone.
    let file = dir.path().join("commands.yaml");
    std::fs::write(&file, NO_FAULTS).unwrap();
    let commands = Commands::read(&file, Path::new("unused")).unwrap();
    let world = World::new(client, "gpus-by-api", None, None).await.unwrap();
    let world = world.broken_by(Some(commands));
    let scenarios = gpu_scenarios(&["gpu-measured", "gpu-runtime-killed"]);
    let world = run_gpu_scenarios(world, &scenarios, &gpu_options("plain"), &mut lines)
        .await
        .unwrap();
    world.end().await.unwrap();
    cluster.stop().await.unwrap();
    insta::assert_snapshot!(lines.join("\n"));
}

/// The plugin refuses to start its container twice, as kubelet tries again: it writes an event, and counts the same event again.
async fn hold_a_pod_bound_without_the_scheduler(cluster: &LocalCluster) -> Result<(), Box<dyn Error>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), "default");
    let container = json!({"name": "c", "image": "x", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}});
    let pod = json!({"metadata": {"name": "stray"}, "spec": {"nodeName": "n1", "containers": [container]}});
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    let is_written = |verb: &str| {
        let is_it = |access: &UsedAccess| {
            access.user == PLUGIN_USER && access.resource == "events" && access.verb == verb
        };
        cluster.api().accesses().iter().any(is_it)
    };
    let failure = "the plugin writes no event about a pod that it does not start";
    let written = || std::future::ready(is_written("create") && is_written("patch"));
    kit::polling::until(Duration::from_secs(60), failure, written).await?;
    Ok(())
}

/// kubelet lists a claim, so the plugin reads that claim to see if it is for administration only. No such claim exists.
async fn use_a_claim(cluster: &mut LocalCluster) -> Result<(), Box<dyn Error>> {
    let device = PreparedDevice {
        driver: "gpu.nvidia.com".to_owned(),
        pool: "n2".to_owned(),
        name: "gpu-0".to_owned(),
        cdi_names: vec!["k8s.gpu.nvidia.com/claim=uid-gpu-0".to_owned()],
    };
    cluster
        .node("n2")?
        .kubelet()
        .prepare_claim("default", "one", vec![device]);
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), "default");
    pods.create(
        &PostParams::default(),
        &PodBuilder::new("claimant", &[]).claiming("one").on("n2").pod()?,
    )
    .await?;
    let is_counted = |snapshot: &ClusterSnapshot| {
        let device = snapshot.devices.get("n2")?;
        device
            .annotations()
            .get(DEVICES_CHECKPOINTS)?
            .contains("gpu.nvidia.com")
            .then_some(())
    };
    Ok(cluster
        .until("the claim to be counted", Duration::from_secs(60), is_counted)
        .await?)
}

/// Installs the custom resource of the coscheduling plugin, which the scheduler finds when it starts.
async fn install_coscheduling(cluster: &mut LocalCluster) -> Result<(), Box<dyn Error>> {
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let definition = json!({
        "metadata": {"name": "podgroups.scheduling.x-k8s.io"},
        "spec": {
            "group": "scheduling.x-k8s.io", "scope": "Namespaced",
            "names": {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup", "listKind": "PodGroupList"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": schema}],
        },
    });
    let objects = cluster.api().objects();
    objects.create("customresourcedefinitions", definition)?;
    cluster.scheduler.restart().await?;
    Ok(cluster.until_scheduler_ready(Duration::from_secs(60)).await?)
}

/// Runs the scenarios by which the daemons use all their rights, on a cluster that loses the answers to some writes.
async fn use_every_right() -> Result<LocalCluster, Box<dyn Error>> {
    let mut cluster = LocalCluster::start(ClusterSpec::of(vec![
        NodeSetup::new("n1", &[16384, 16384]),
        NodeSetup::new("n2", &[16384]),
    ]))
    .await?;
    let client = cluster.client().clone();
    install_coscheduling(&mut cluster).await?;
    // After a binding without an answer the scheduler reads the pod.
    let on_bind = Matching::requests("create", "pods/binding").times(1);
    cluster.api().faults().inject(on_bind, Fault::DropReply);
    let mut world = World::new(client, "rbac", None, Some(cluster)).await?;
    let names = [
        "gpushare-pod",
        "two-devices",
        "refusals",
        "leader-killed",
        "fence-refused",
    ];
    let scenarios = scenario::all();
    for name in names {
        let scenario = scenarios.iter().find(|scenario| scenario.name == name);
        let scenario = scenario.ok_or_else(|| format!("there is no scenario {name}"))?;
        world
            .run(scenario)
            .await
            .map_err(|error| format!("{name}: {error:#}"))?;
    }
    let mut cluster = world
        .end()
        .await?
        .ok_or("the scenarios have no cluster of their own")?;
    hold_a_pod_bound_without_the_scheduler(&cluster).await?;
    use_a_claim(&mut cluster).await?;
    Ok(cluster)
}

/// The roles and bindings of the base.
fn deployed_rights(deploy: &Path) -> Result<Rbac, Box<dyn Error>> {
    let mut objects = Vec::new();
    for file in ["scheduler-rbac.yaml", "device-plugin-rbac.yaml"] {
        for object in manifests::read(&deploy.join("base").join(file))? {
            objects.push(serde_json::to_value(object)?);
        }
    }
    Ok(Rbac::of(&objects)?)
}

/// True if the roles allow the access, to every object or to one of those that belong to the daemon itself: the leader's own
/// pod and Lease, and the object by which it announces room.
fn is_allowed(rbac: &Rbac, used: &UsedAccess) -> bool {
    let access = Permission {
        group: &used.api_group,
        resource: &used.resource,
        subresource: &used.subresource,
        verb: &used.verb,
    };
    let own = ["gpushare-scheduler", "gpushare-room"].map(|name| RbacTarget {
        namespace: replicas::NAMESPACE,
        name,
    });
    rbac.allows(&used.user, access, RbacTarget::default())
        || own
            .into_iter()
            .any(|target| rbac.allows(&used.user, access, target))
}

/// True if the daemon has used this right.
fn is_used(daemon: &str, right: &Permission<'_>, accesses: &[&UsedAccess]) -> bool {
    // The API server counts a server-side apply that makes the object as a patch, but also demands `create` for it.
    let is_applied = ["devices", "csistoragecapacities"].contains(&right.resource);
    let verb = if is_applied && right.verb == "create" {
        "patch"
    } else {
        right.verb
    };
    let wanted = [right.group, right.resource, right.subresource, verb];
    accesses.iter().any(|used| {
        let found = [&used.api_group, &used.resource, &used.subresource, &used.verb];
        used.user == daemon && found.map(String::as_str) == wanted
    })
}

/// The roles of `deploy/` allow what the daemons really do, and nothing that they never do.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemons_do_only_what_their_roles_allow() {
    let cluster = use_every_right().await.unwrap();
    let mut used = cluster.api().accesses();
    for access in read_the_views_with_a_token().await.unwrap() {
        if access.resource.ends_with("reviews") {
            used.insert(access);
        }
    }
    used.retain(|access| [SCHEDULER_USER, PLUGIN_USER].contains(&access.user.as_str()));
    let used: Vec<&UsedAccess> = used.iter().collect();
    let rbac = deployed_rights(cluster.deploy()).unwrap();
    let forbidden: Vec<_> = used.iter().filter(|access| !is_allowed(&rbac, access)).collect();
    assert!(forbidden.is_empty(), "{forbidden:#?}");
    let granted = [
        (SCHEDULER_USER, rbac::SCHEDULER),
        (SCHEDULER_USER, rbac::SCHEDULER_LEADER),
        (SCHEDULER_USER, rbac::SCHEDULER_ROOM),
        (PLUGIN_USER, rbac::DEVICE_PLUGIN),
    ];
    for (daemon, rights) in granted {
        let idle: Vec<_> = rights
            .iter()
            .filter(|right| !is_used(daemon, right, &used))
            .collect();
        assert!(
            idle.is_empty(),
            "{daemon} is allowed what it never does: {idle:?}"
        );
    }
    cluster.stop().await.unwrap();
}

/// Reads the views as users do that show a token and no certificate; returns the accesses of the daemons that this takes.
async fn read_the_views_with_a_token() -> Result<Vec<UsedAccess>, Box<dyn Error>> {
    let webhooks = Some(WebhookSpec { lifetime: "90d" });
    let cluster = LocalCluster::start(ClusterSpec {
        webhooks,
        ..ClusterSpec::of(vec![NodeSetup::new("n1", &[16384])])
    })
    .await?;
    let url = format!("{}/gpushare-scheduler/inspect", cluster.scheduler_url());
    let of_user = |user: &str| {
        cluster
            .api()
            .token_of(user)
            .ok_or_else(|| format!("{user} has no token"))
    };
    let (plugin, admin) = (of_user(PLUGIN_USER)?, of_user("admin")?);
    let cases = [
        (None, 401),
        (Some("of no user".to_owned()), 401),
        (Some(plugin), 403),
        (Some(admin), 200),
    ];
    for (token, expected) in cases {
        let reader = cluster.scheduler_reader()?;
        let reader = token.map_or(reader.clone(), |token| reader.bearing(token));
        assert_eq!(reader.get(&url).await?.0.as_u16(), expected);
    }
    let used = cluster.api().accesses().into_iter().collect();
    cluster.stop().await?;
    Ok(used)
}

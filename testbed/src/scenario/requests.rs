//! Every form of request of the proposals, with webhooks and without: the same pods get the same result, except for the
//! fields that the mutating webhook fills in, and for pods that the webhook refuses at once and that wait without it.

use anyhow::{Result, bail, ensure};
use kube::ResourceExt;
use proto::resource::{GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use super::expected::{Expected, NO_ROOM};
use super::{ScenarioEntry, World};
use kit::invariants;
use kit::pods::{Limits, PodBuilder};
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "request-forms" => request_forms,
        "every form of request, with webhooks and without: it runs on the right number of devices, or is refused with its rule";
    "exact-thirds" => exact_thirds,
        "33, 33 and 34 percent fill one GPU to the last byte";
    "whole-by-ratio" => whole_by_ratio,
        "more than 100 percent is a number of whole devices";
};

use Expected::{Refused, Runs, Waits};

/// A form of request: the pod's name and limits, and its expected result without webhooks and with them.
type RequestForm = (&'static str, &'static Limits<'static>, Expected, Expected);

const UNSERVED: &str = "but not for koordinator.sh/gpu.shared";
const MEMORY_NEEDED: &str = "needs koordinator.sh/gpu-memory or koordinator.sh/gpu-memory-ratio beside it";
const EXCLUDED: &str = "exclude each other";
const MIXED: &str = "use the resources of one dialect only";
const UNEVEN: &str = "does not divide evenly over koordinator.sh/gpu.shared";

/// Every form of request with its expected results.
const FORMS: &[RequestForm] = &[
    (
        "memory",
        &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
        Runs(1),
        Runs(1),
    ),
    (
        "ratio",
        &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10")],
        Runs(1),
        Runs(1),
    ),
    (
        "memory-core",
        &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_CORE, "10")],
        Runs(1),
        Runs(1),
    ),
    (
        "ratio-core",
        &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10"), (GPU_CORE, "20")],
        Runs(1),
        Runs(1),
    ),
    (
        "two-devices-memory",
        &[(GPU_SHARED, "2"), (GPU_MEMORY, "2Gi"), (GPU_CORE, "10")],
        Runs(2),
        Runs(2),
    ),
    (
        "two-devices-ratio",
        &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "20")],
        Runs(2),
        Runs(2),
    ),
    (
        "gpu-and-shared",
        &[(GPU_SHARED, "1"), (GPU, "10")],
        Runs(1),
        Runs(1),
    ),
    ("units", &[(GPU_MEM, "1")], Runs(1), Runs(1)),
    (
        "core-only",
        &[(GPU_SHARED, "1"), (GPU_CORE, "50")],
        Refused(MEMORY_NEEDED),
        Refused(MEMORY_NEEDED),
    ),
    (
        "shared-only",
        &[(GPU_SHARED, "1")],
        Refused(MEMORY_NEEDED),
        Refused(MEMORY_NEEDED),
    ),
    (
        "memory-twice",
        &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_MEMORY_RATIO, "10")],
        Refused(EXCLUDED),
        Refused(EXCLUDED),
    ),
    (
        "uneven",
        &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "75")],
        Refused(UNEVEN),
        Refused(UNEVEN),
    ),
    (
        "units-and-shared",
        &[(GPU_MEM, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
        Refused(MIXED),
        Refused(MIXED),
    ),
    (
        "vendor-and-shared",
        &[(NVIDIA_GPU, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
        Waits(NO_ROOM),
        Refused(MIXED),
    ),
    (
        "vendor-and-units",
        &[(NVIDIA_GPU, "1"), (GPU_MEM, "1")],
        Waits(NO_ROOM),
        Refused(MIXED),
    ),
    // The fields that the mutating webhook fills in.
    ("bare-memory", &[(GPU_MEMORY, "1Gi")], Refused(UNSERVED), Runs(1)),
    (
        "bare-ratio-core",
        &[(GPU_MEMORY_RATIO, "10"), (GPU_CORE, "10")],
        Refused(UNSERVED),
        Runs(1),
    ),
    (
        "bare-core",
        &[(GPU_CORE, "50")],
        Refused(UNSERVED),
        Refused(MEMORY_NEEDED),
    ),
    ("bare-gpu", &[(GPU, "10")], Refused(UNSERVED), Runs(1)),
    // A name of Kubernetes' own domain is no extended resource: no extender is asked, and no node has it.
    (
        "old-names",
        &[
            ("kubernetes.io/gpu-core", "10"),
            ("kubernetes.io/gpu-memory-ratio", "10"),
        ],
        Waits("Insufficient kubernetes.io/"),
        Runs(1),
    ),
    (
        "old-gpu",
        &[("kubernetes.io/gpu", "10")],
        Waits("Insufficient kubernetes.io/gpu"),
        Runs(1),
    ),
];

/// Tries every form of request and compares its result with the expected one.
async fn request_forms(world: &mut World) -> Result<()> {
    // A node without room is refused for its lack of room, which would hide the expected reason: forms that run come first, and
    // leave before the forms that are refused.
    for runs in [true, false] {
        let meant = |form: &&RequestForm| matches!(expected_of(world, form), Runs(_)) == runs;
        let tried = FORMS.iter().filter(meant).map(|form| try_form(world, form));
        futures::future::try_join_all(tried).await?;
        world.verify().await?;
        world.clear().await?;
    }
    Ok(())
}

/// The expected result of a form in this cluster, which has webhooks or not.
fn expected_of(world: &World, form: &RequestForm) -> Expected {
    let (_, _, without_webhooks, with_webhooks) = *form;
    if world.has_webhooks {
        with_webhooks
    } else {
        without_webhooks
    }
}

/// Creates a pod with the limits of one form, and checks that it runs, is refused or waits as [`FORMS`] says for this cluster.
async fn try_form(world: &World, form: &RequestForm) -> Result<()> {
    let (name, limits, ..) = *form;
    let spec = PodBuilder::new(name, limits);
    match expected_of(world, form).try_pod(world, spec).await? {
        Some(pod) => check_names(&pod),
        None => Ok(()),
    }
}

/// Checks that a running pod's requests equal its limits, and that the webhook has replaced each old resource name.
fn check_names(pod: &k8s_openapi::api::core::v1::Pod) -> Result<()> {
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let resources = container.resources.clone().unwrap_or_default();
        let (limits, requests) = (
            resources.limits.unwrap_or_default(),
            resources.requests.unwrap_or_default(),
        );
        ensure!(
            limits == requests,
            "limits and requests of {} differ: {limits:?} {requests:?}",
            pod.name_any()
        );
        if let Some(old) = limits.keys().find(|name| name.starts_with("kubernetes.io/")) {
            bail!("{} asks for {old} still", pod.name_any());
        }
    }
    Ok(())
}

/// Pods of 33, 33 and 34 percent fill one GPU exactly; one percent more does not fit.
async fn exact_thirds(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    let share = |name: &str, ratio: &str| PodBuilder::share(name, ratio).on(&node.name);
    for idx in 1..node.units.len() {
        world.start(share(&format!("whole-{idx}"), "100")).await?;
    }
    for (name, ratio) in [("first", "33"), ("second", "33"), ("third", "34")] {
        world.start(share(name, ratio)).await?;
    }
    ensure!(
        world.minors("first")? == world.minors("second")?
            && world.minors("second")? == world.minors("third")?,
        "the thirds are not on one GPU"
    );
    world.create(share("one-more", "1")).await?;
    world.until_refused("one-more", "nodes are available").await
}

/// A ratio of 200 means two whole GPUs, which the pod has to itself.
async fn whole_by_ratio(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    let pair = PodBuilder::new("pair", &[(GPU_MEMORY_RATIO, "200"), (GPU_CORE, "200")]).on(&node.name);
    if world.has_webhooks {
        world.start(pair).await?;
    } else {
        world.ensure_is_refused(pair, UNSERVED).await?;
        world.delete("pair").await?;
        let limits: &Limits<'_> = &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "200"), (GPU_CORE, "200")];
        world
            .start(PodBuilder::new("pair", limits).on(&node.name))
            .await?;
    }
    let accounts = invariants::held_amounts(&world.observer.now(), &world.excused);
    let full = accounts
        .gpus
        .values()
        .filter(|gpu| gpu.pods == [world.key("pair")] && gpu.used() == gpu.total && gpu.core == 100);
    let n_full = full.count();
    ensure!(n_full == 2, "{n_full} GPUs are full of the pod, not 2");
    let whole: &Limits<'_> = &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "100")];
    let n_left = node.units.len() - 2;
    for idx in 0..n_left {
        world
            .start(PodBuilder::new(&format!("whole-{idx}"), whole).on(&node.name))
            .await?;
    }
    world
        .create(PodBuilder::new("one-more", whole).on(&node.name))
        .await?;
    world.until_refused("one-more", "nodes are available").await
}

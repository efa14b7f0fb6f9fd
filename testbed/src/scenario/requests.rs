//! Every form of request of the proposals, with webhooks and without: the same pods get the same result, except for the
//! fields that the mutating webhook fills in, and for pods that the webhook refuses at once and that wait without it.

use anyhow::{Result, ensure};
use kube::ResourceExt;
use proto::resource::{GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};

use super::expected::{Expected, Results, always};
use super::{NO_NODE, Scenario, World};
use kit::pods::{Limits, PodBuilder};
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs nothing, on [Plain, Webhooks]:
    "request-forms" => request_forms,
        "every form of request, with webhooks and without: it runs on the right number of devices, or is refused with its rule";
    "exact-thirds" => exact_thirds,
        "33, 33 and 34 percent fill one GPU to the last byte";
    "whole-by-ratio" => whole_by_ratio,
        "more than 100 percent is a number of whole devices";
};

use Expected::{Refused, Runs, Waits};

/// A form of request: the pod's name and limits, and its expected results.
type RequestForm = (&'static str, &'static Limits<'static>, Results);

const UNSERVED: &str = "but not for koordinator.sh/gpu.shared";
const MEMORY_NEEDED: &str = "needs koordinator.sh/gpu-memory or koordinator.sh/gpu-memory-ratio beside it";
const MIXED: &str = "use the resources of one dialect only";

const ON_ONE: Results = always(Runs(1));
const ON_TWO: Results = always(Runs(2));
const NO_MEMORY: Results = always(Refused(MEMORY_NEEDED));
const EXCLUDED: Results = always(Refused("exclude each other"));
const UNEVEN: Results = always(Refused("does not divide evenly over koordinator.sh/gpu.shared"));
/// The vendor's resource hides the other request from kube-scheduler.
const HIDDEN: Results = [Waits(NO_NODE), Refused(MIXED)];
/// The mutating webhook fills in the missing field.
const FILLED_IN: Results = [Refused(UNSERVED), Runs(1)];
/// A name of Kubernetes' own domain is no extended resource: no extender is asked, and no node has it.
const OLD_NAME: Results = [Waits("Insufficient kubernetes.io/gpu"), Runs(1)];

/// Every form of request with its expected results.
const FORMS: &[RequestForm] = &[
    ("memory", &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")], ON_ONE),
    ("ratio", &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10")], ON_ONE),
    (
        "memory-core",
        &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_CORE, "10")],
        ON_ONE,
    ),
    (
        "ratio-core",
        &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10"), (GPU_CORE, "20")],
        ON_ONE,
    ),
    (
        "two-devices-memory",
        &[(GPU_SHARED, "2"), (GPU_MEMORY, "2Gi"), (GPU_CORE, "10")],
        ON_TWO,
    ),
    (
        "two-devices-ratio",
        &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "20")],
        ON_TWO,
    ),
    ("gpu-and-shared", &[(GPU_SHARED, "1"), (GPU, "10")], ON_ONE),
    ("units", &[(GPU_MEM, "1")], ON_ONE),
    ("core-only", &[(GPU_SHARED, "1"), (GPU_CORE, "50")], NO_MEMORY),
    ("shared-only", &[(GPU_SHARED, "1")], NO_MEMORY),
    (
        "memory-twice",
        &[(GPU_SHARED, "1"), (GPU_MEMORY, "1Gi"), (GPU_MEMORY_RATIO, "10")],
        EXCLUDED,
    ),
    ("uneven", &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "75")], UNEVEN),
    (
        "units-and-shared",
        &[(GPU_MEM, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
        always(Refused(MIXED)),
    ),
    (
        "vendor-and-shared",
        &[(NVIDIA_GPU, "1"), (GPU_SHARED, "1"), (GPU_MEMORY, "1Gi")],
        HIDDEN,
    ),
    ("vendor-and-units", &[(NVIDIA_GPU, "1"), (GPU_MEM, "1")], HIDDEN),
    ("bare-memory", &[(GPU_MEMORY, "1Gi")], FILLED_IN),
    (
        "bare-ratio-core",
        &[(GPU_MEMORY_RATIO, "10"), (GPU_CORE, "10")],
        FILLED_IN,
    ),
    (
        "bare-core",
        &[(GPU_CORE, "50")],
        [Refused(UNSERVED), Refused(MEMORY_NEEDED)],
    ),
    ("bare-gpu", &[(GPU, "10")], FILLED_IN),
    (
        "old-names",
        &[
            ("kubernetes.io/gpu-core", "10"),
            ("kubernetes.io/gpu-memory-ratio", "10"),
        ],
        OLD_NAME,
    ),
    ("old-gpu", &[("kubernetes.io/gpu", "10")], OLD_NAME),
];

async fn request_forms(world: &mut World) -> Result<()> {
    // A node without room is refused for its lack of room, which would hide the expected reason: forms that run come first, and
    // leave before the forms that are refused.
    for runs in [true, false] {
        let meant = |form: &&RequestForm| matches!(Expected::here(world, form.2), Runs(_)) == runs;
        let tried = FORMS.iter().filter(meant).map(|form| try_form(world, form));
        futures::future::try_join_all(tried).await?;
        world.verify().await?;
        world.clear().await?;
    }
    Ok(())
}

/// Creates a pod with the limits of one form, and checks that it runs, is refused or waits as [`FORMS`] says for this cluster.
async fn try_form(world: &World, (name, limits, results): &RequestForm) -> Result<()> {
    let spec = PodBuilder::new(name, limits);
    let running = Expected::here(world, *results).try_pod(world, spec).await?;
    running.map_or(Ok(()), |pod| check_names(&pod))
}

/// Checks that a running pod's requests equal its limits, and that the webhook has replaced each old resource name.
fn check_names(pod: &k8s_openapi::api::core::v1::Pod) -> Result<()> {
    for container in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let resources = container.resources.clone().unwrap_or_default();
        let (name, limits) = (pod.name_any(), resources.limits.unwrap_or_default());
        let requests = resources.requests.unwrap_or_default();
        ensure!(
            limits == requests,
            "limits and requests of {name} differ: {limits:?} {requests:?}"
        );
        let has_old = limits.keys().any(|name| name.starts_with("kubernetes.io/"));
        ensure!(!has_old, "{name} has an old name of a resource still: {limits:?}");
    }
    Ok(())
}

async fn exact_thirds(world: &mut World) -> Result<()> {
    let node = world.gpu_node(1)?;
    let share = |name: &str, ratio: &str| PodBuilder::share(name, ratio).on(&node.name);
    for idx in 1..node.units.len() {
        world.start(share(&format!("whole-{idx}"), "100")).await?;
    }
    for (name, ratio) in [("first", "33"), ("second", "33"), ("third", "34")] {
        world.start(share(name, ratio)).await?;
    }
    let [first, second, third] = ["first", "second", "third"].map(|name| world.minors(name));
    let (first, second, third) = (first?, second?, third?);
    let are_together = first == second && second == third;
    ensure!(
        are_together,
        "the thirds are on {first:?}, {second:?} and {third:?}"
    );
    world.create_waiting(share("one-more", "1")).await
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
        let limits = [(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "200"), (GPU_CORE, "200")];
        let pair = PodBuilder::new("pair", &limits).on(&node.name);
        world.start(pair).await?;
    }
    let mut gpus = world.held_amounts().gpus;
    gpus.retain(|_, gpu| gpu.pods == [world.key("pair")] && gpu.used() == gpu.total && gpu.core == 100);
    ensure!(gpus.len() == 2, "{} GPUs are full of the pod, not 2", gpus.len());
    let whole = |name: &str| PodBuilder::share(name, 100).on(&node.name);
    for idx in 2..node.units.len() {
        world.start(whole(&format!("whole-{idx}"))).await?;
    }
    world.create_waiting(whole("one-more")).await
}

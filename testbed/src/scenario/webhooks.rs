//! Webhooks that do not answer, and certificates that are renewed under load.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use proto::pod::ALL_DEVICES;
use proto::request::hints::ALLOCATE_HINT;
use proto::resource::{GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use super::expected::visible;
use super::{DEADLINE, Scenario, World};
use kit::cluster::webhooks::{CONFIGURATION, SECRET};
use kit::kube_scheduler::SchedulingOutcome;
use kit::pods::{PodBuilder, set};
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "the port of the webhooks", on [Webhooks]:
    "webhooks-away" => webhooks_away,
        "without the scheduler pods are made at once all the same, and run when it is back unless they break a rule";
    "uncounted-refused" => uncounted_refused,
        "pods that would see GPUs which are counted for no pod are refused when they are made, with what to do";
    "certificates-renewed" => certificates_renewed,
        "certificates that last seconds are renewed under load without an error, and the authority stays";
};

/// Longest time for creating a pod while no webhook answers.
const AT_ONCE: Duration = Duration::from_secs(2);
/// The number of new certificates to wait for.
const N_RENEWALS: usize = 2;
/// The resources of both kinds of webhook configurations.
const KINDS: [&str; 2] = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];

/// Pods that the webhooks would refuse, and the words with which the filter does.
fn rule_breakers() -> [(PodBuilder, &'static str); 3] {
    let hinted = PodBuilder::share("hinted", 10).annotation(ALLOCATE_HINT, r#"{"gpu": 1}"#);
    let marked = PodBuilder::new("marked", &[(GPU_SHARED, "1")]).annotation(ALL_DEVICES, "true");
    let beside = PodBuilder::share("beside", 10)
        .container("c", &[])
        .at("/spec/containers/1/env", visible("all"));
    [
        (hinted, "expected a JSON object"),
        (marked, "not allowed in this cluster"),
        (beside, "sets NVIDIA_VISIBLE_DEVICES to \"all\""),
    ]
}

/// Without the scheduler's process its webhooks do not answer: pods are still created at once, and run later. Pods that break a
/// rule are created too; the plugin refuses the one that is bound past the scheduler, and the filter the others.
async fn webhooks_away(world: &mut World) -> Result<()> {
    world.cluster()?.scheduler.kill().await;
    for spec in [
        PodBuilder::new("ordinary", &[]),
        PodBuilder::share("gpu", 10),
        PodBuilder::units("units", 1),
    ] {
        create_within(world, AT_ONCE, spec).await?;
    }
    for (spec, _) in rule_breakers() {
        world.create(spec).await?;
    }
    let node = world.gpu_node(1)?.name;
    let direct = PodBuilder::units("direct", 1).at("/spec/nodeName", json!(node));
    world.create(direct).await?;
    world.excused.insert(world.key("direct"));
    world.until_pod_event("direct", "GPUNotPlaced", "").await?;
    world.until_running(&["ordinary"]).await?;
    world.restart_scheduler().await?;
    world.until_running(&["gpu", "units"]).await?;
    for (spec, words) in rule_breakers() {
        world.until_refused(&spec.pod()?.name_any(), words).await?;
    }
    world.delete("direct").await?;
    world.excused.clear();
    Ok(())
}

async fn uncounted_refused(world: &mut World) -> Result<()> {
    let seeing = |name: &str, value: &str| PodBuilder::new(name, &[]).with("env", visible(value));
    let whole = PodBuilder::new("whole", &[(NVIDIA_GPU, "1")]).with("env", visible("all"));
    let annotated = PodBuilder::new("annotated", &[]).annotation("nvidia.cdi.k8s.io/pod", "nvidia.com/gpu=0");
    for (spec, words) in [
        (seeing("all", "all"), "sets NVIDIA_VISIBLE_DEVICES to \"all\""),
        (
            seeing("one", "GPU-n1-0"),
            "sets NVIDIA_VISIBLE_DEVICES to \"GPU-n1-0\"",
        ),
        (whole, "wins over the GPUs that it is given for nvidia.com/gpu"),
        (
            annotated,
            "annotation nvidia.cdi.k8s.io/pod is \"nvidia.com/gpu=0\"",
        ),
    ] {
        world.ensure_is_refused(spec, words).await?;
    }
    world.start(seeing("none", "void")).await?;
    let flag = format!("--unrestricted-namespaces={}", world.namespace);
    world.add_scheduler_flags(&[&flag]).await?;
    world.start(seeing("exporter", "all")).await?;
    world.delete("exporter").await
}

/// Creates a pod, which must not take longer.
pub(super) async fn create_within(world: &World, limit: Duration, spec: PodBuilder) -> Result<()> {
    let began = Instant::now();
    let name = world.create(spec).await?.name_any();
    let took = began.elapsed();
    ensure!(took < limit, "pod {name} took {took:?} to be made");
    Ok(())
}

/// The entry `key` of the Secret with the scheduler's certificates, in base64.
fn secret_entry(world: &mut World, key: &str) -> Result<String> {
    let objects = world.cluster()?.api().objects();
    let secret = objects.get("secrets", "gpushare-system", SECRET)?;
    let data = secret.get("data").and_then(|data| data.get(key));
    Ok(data.and_then(Value::as_str).unwrap_or_default().to_owned())
}

/// The authorities (`caBundle`) by which the API server trusts each webhook.
fn ca_bundles(world: &mut World) -> Result<Vec<Value>> {
    let mut bundles = Vec::new();
    for kind in KINDS {
        let configuration = world.cluster()?.api().objects().get(kind, "", CONFIGURATION)?;
        let webhooks = configuration.get("webhooks").and_then(Value::as_array);
        for webhook in webhooks.into_iter().flatten() {
            bundles.push(
                webhook
                    .pointer("/clientConfig/caBundle")
                    .cloned()
                    .unwrap_or_default(),
            );
        }
    }
    let are_there = bundles.len() >= 2 && bundles.iter().all(Value::is_string);
    ensure!(
        are_there,
        "the API server does not know whom to trust: {bundles:?}"
    );
    Ok(bundles)
}

/// Sets `failurePolicy` of every webhook: `Fail` makes a webhook that cannot be reached an error.
fn set_failure_policy(world: &mut World, policy: &str) -> Result<()> {
    for kind in KINDS {
        let api = world.cluster()?.api().objects().clone();
        let mut configuration = Value::clone(&*api.get(kind, "", CONFIGURATION)?);
        if let Some(Value::Array(webhooks)) = configuration.get_mut("webhooks") {
            for webhook in webhooks {
                set(webhook, "failurePolicy", json!(policy));
            }
        }
        api.update(kind, configuration)?;
    }
    Ok(())
}

async fn certificates_renewed(world: &mut World) -> Result<()> {
    set_failure_policy(world, "Fail")?;
    let loaded = load_while_renewed(world).await;
    set_failure_policy(world, "Ignore")?;
    loaded
}

/// Creates and deletes pods, and asks the extender over new connections, until there were [`N_RENEWALS`] new certificates.
async fn load_while_renewed(world: &mut World) -> Result<()> {
    let (authority, trusted) = (secret_entry(world, "ca.crt")?, ca_bundles(world)?);
    let mut certificate = secret_entry(world, "tls.crt")?;
    let small = |name: &str| PodBuilder::new(name, &[(GPU_MEMORY_RATIO, "1")]);
    // A scheduler that an earlier scenario started again waits out its predecessor's binds first.
    world.start(small("before")).await?;
    world.pods.delete("before").await?;
    world.cluster()?.past_attempts();
    let (mut n_renewals, mut n_pods) = (0, 0);
    let began = Instant::now();
    while n_renewals < N_RENEWALS || n_pods < 10 {
        ensure!(
            began.elapsed() < DEADLINE,
            "{n_renewals} renewals in {DEADLINE:?}"
        );
        let name = format!("load-{n_pods}");
        let created = world.create(small(&name)).await;
        created.context("while certificates change")?;
        let cluster = world.cluster()?;
        let url = format!("{}/gpushare-scheduler/inspect", cluster.scheduler_url());
        let answered = cluster.scheduler_client()?.get(&url).await;
        answered.context("while certificates change")?;
        world.until_running(&[&name]).await?;
        world.pods.delete(&name).await?;
        n_pods += 1;
        let now = secret_entry(world, "tls.crt")?;
        n_renewals += usize::from(now != certificate);
        certificate = now;
    }
    let mut attempts = world.cluster()?.past_attempts();
    attempts.retain(|attempt| matches!(attempt.outcome, SchedulingOutcome::Error(_)));
    ensure!(attempts.is_empty(), "kube-scheduler met errors: {attempts:?}");
    let is_same = secret_entry(world, "ca.crt")? == authority;
    ensure!(is_same, "the authority has changed");
    let is_trusted = ca_bundles(world)? == trusted;
    ensure!(is_trusted, "the API server trusts other authorities");
    Ok(())
}

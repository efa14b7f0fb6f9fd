//! Webhooks that do not answer, and certificates that are renewed under load.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kube::ResourceExt;
use proto::pod::ALL_DEVICES;
use proto::resource::{GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use super::{DEADLINE, ScenarioEntry, World};
use kit::cluster::webhooks::{CONFIGURATION, SECRET};
use kit::kube_scheduler::SchedulingOutcome;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
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
    let hint = "scheduling.koordinator.sh/device-allocate-hint";
    let sees_all = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    let beside = PodBuilder::share("beside", 10)
        .container("c", &[])
        .at("/spec/containers/1/env", sees_all);
    [
        (
            PodBuilder::share("hinted", 10).annotation(hint, r#"{"gpu": 1}"#),
            "expected a JSON object",
        ),
        (
            PodBuilder::new("marked", &[(GPU_SHARED, "1")]).annotation(ALL_DEVICES, "true"),
            "not allowed in this cluster",
        ),
        (beside, "sets NVIDIA_VISIBLE_DEVICES to \"all\""),
    ]
}

/// Without the scheduler's process its webhooks do not answer: pods are still created at once, and run later. Pods that break a
/// rule are created too; the plugin refuses the one that is bound past the scheduler, and the filter the others.
async fn webhooks_away(world: &mut World) -> Result<()> {
    world.cluster()?.scheduler.kill().await;
    for (name, spec) in [
        ("ordinary", PodBuilder::new("ordinary", &[])),
        ("gpu", PodBuilder::share("gpu", 10)),
        ("units", PodBuilder::units("units", 1)),
    ] {
        let began = Instant::now();
        world.create(spec).await?;
        ensure!(
            began.elapsed() < AT_ONCE,
            "pod {name} took {:?} to be made",
            began.elapsed()
        );
    }
    for (spec, _) in rule_breakers() {
        world.create(spec).await?;
    }
    let node = world.gpu_node(1)?.name;
    let direct = PodBuilder::units("direct", 1).at("/spec/nodeName", json!(node));
    world.create(direct).await?;
    world.excused.insert(world.key("direct"));
    world
        .until_event(&world.namespace, "direct", "GPUNotPlaced", "")
        .await?;
    world.until_running(&["ordinary"]).await?;
    world.cluster()?.scheduler.restart().await?;
    world.cluster()?.until_scheduler_ready(DEADLINE).await?;
    world.until_running(&["gpu", "units"]).await?;
    for (spec, words) in rule_breakers() {
        world.until_refused(&spec.pod()?.name_any(), words).await?;
    }
    world.delete("direct").await?;
    world.excused.clear();
    Ok(())
}

/// Pods that would see GPUs without being charged for them are refused.
async fn uncounted_refused(world: &mut World) -> Result<()> {
    let visible = |value: &str| json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": value}]);
    let (whole, annotation) = ([("nvidia.com/gpu", "1")], "nvidia.cdi.k8s.io/pod");
    let annotated = BTreeMap::from([(annotation.to_owned(), "nvidia.com/gpu=0".to_owned())]);
    for (spec, words) in [
        (
            PodBuilder::new("all", &[]).with("env", visible("all")),
            "sets NVIDIA_VISIBLE_DEVICES to \"all\"",
        ),
        (
            PodBuilder::new("one", &[]).with("env", visible("GPU-n1-0")),
            "sets NVIDIA_VISIBLE_DEVICES to \"GPU-n1-0\"",
        ),
        (
            PodBuilder::new("whole", &whole).with("env", visible("all")),
            "wins over the GPUs that it is given for nvidia.com/gpu",
        ),
        (
            PodBuilder::new("annotated", &[]).annotated(&annotated),
            "annotation nvidia.cdi.k8s.io/pod is \"nvidia.com/gpu=0\"",
        ),
    ] {
        world.ensure_is_refused(spec, words).await?;
    }
    world
        .start(PodBuilder::new("none", &[]).with("env", visible("void")))
        .await?;
    let flag = format!("--unrestricted-namespaces={}", world.namespace);
    world.add_scheduler_flags(&[&flag]).await?;
    world
        .start(PodBuilder::new("exporter", &[]).with("env", visible("all")))
        .await?;
    world.delete("exporter").await
}

/// The entry `key` of the Secret with the scheduler's certificates, in base64.
fn secret_entry(world: &mut World, key: &str) -> Result<String> {
    let secret = world
        .cluster()?
        .api()
        .objects()
        .get("secrets", "gpushare-system", SECRET)?;
    Ok(secret
        .pointer("/data")
        .and_then(|data| data.get(key))
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned())
}

/// The authorities (`caBundle`) by which the API server trusts each webhook.
fn ca_bundles(world: &mut World) -> Result<Vec<Value>> {
    let mut bundles = Vec::new();
    for kind in KINDS {
        let configuration = world.cluster()?.api().objects().get(kind, "", CONFIGURATION)?;
        let webhooks = configuration
            .get("webhooks")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        bundles.extend(webhooks.iter().map(|webhook| {
            webhook
                .pointer("/clientConfig/caBundle")
                .cloned()
                .unwrap_or_default()
        }));
    }
    ensure!(
        bundles.len() >= 2 && bundles.iter().all(Value::is_string),
        "the API server does not know whom to trust: {bundles:?}"
    );
    Ok(bundles)
}

/// Sets `failurePolicy` of every webhook: `Fail` makes a webhook that cannot be reached an error.
fn set_failure_policy(world: &mut World, policy: &str) -> Result<()> {
    for kind in KINDS {
        let api = world.cluster()?.api().objects().clone();
        let mut configuration = Value::clone(&*api.get(kind, "", CONFIGURATION)?);
        for webhook in configuration
            .get_mut("webhooks")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            kit::pods::set(webhook, "failurePolicy", json!(policy));
        }
        api.update(kind, configuration)?;
    }
    Ok(())
}

/// The webhooks' certificates are renewed while pods are created: no creation fails.
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
    // A scheduler that an earlier scenario started again waits out its predecessor's binds first.
    world
        .start(PodBuilder::new("before", &[(GPU_MEMORY_RATIO, "1")]))
        .await?;
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
        world
            .create(PodBuilder::new(&name, &[(GPU_MEMORY_RATIO, "1")]))
            .await
            .context("while certificates change")?;
        let url = format!("{}/gpushare-scheduler/inspect", world.cluster()?.scheduler_url());
        world
            .cluster()?
            .scheduler_client()?
            .get(&url)
            .await
            .context("while certificates change")?;
        world.until_running(&[&name]).await?;
        world.pods.delete(&name).await?;
        n_pods += 1;
        let now = secret_entry(world, "tls.crt")?;
        n_renewals += usize::from(now != certificate);
        certificate = now;
    }
    let failed = world
        .cluster()?
        .past_attempts()
        .into_iter()
        .filter(|attempt| matches!(attempt.outcome, SchedulingOutcome::Error(_)));
    let failed: Vec<_> = failed.collect();
    ensure!(failed.is_empty(), "kube-scheduler met errors: {failed:?}");
    ensure!(
        secret_entry(world, "ca.crt")? == authority,
        "the authority has changed"
    );
    ensure!(
        ca_bundles(world)? == trusted,
        "the API server trusts other authorities"
    );
    Ok(())
}

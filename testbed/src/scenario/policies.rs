//! Rules that an administrator may switch on, and rules about annotations: the same messages with webhooks and without.

use std::collections::BTreeMap;

use anyhow::Result;
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::{GPU_MEM, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::{Body, DEADLINE, World};
use crate::pods::PodBuilder;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[(
    "overrides-denied",
    "pods that decide what they see, or whose hints cannot be read, are refused in the same words with webhooks and without",
    denied,
)];

fn share(name: &str) -> PodBuilder {
    PodBuilder::new(name, &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "10")])
}

fn denied(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let hint = BTreeMap::from([(
            "scheduling.koordinator.sh/device-allocate-hint".to_owned(),
            r#"{"gpu": 1}"#.to_owned(),
        )]);
        world
            .until_breaks_rule(share("hinted").annotated(&hint), "expected a JSON object")
            .await?;
        let usual = world.cluster()?.scheduler.invocation().clone();
        let mut strict = usual.clone();
        strict.args.push("--deny-overrides".to_owned());
        world.cluster()?.scheduler.restart_as(strict).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        let tried = try_pods(world).await;
        world.cluster()?.scheduler.restart_as(usual).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        tried
    }
    .boxed()
}

async fn try_pods(world: &World) -> Result<()> {
    let sees_all = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    world
        .until_breaks_rule(
            share("sees-all").with("env", sees_all),
            "container \"main\" sets NVIDIA_VISIBLE_DEVICES",
        )
        .await?;
    let privileged =
        PodBuilder::new("privileged", &[(GPU_MEM, "1")]).with("securityContext", json!({"privileged": true}));
    world
        .until_breaks_rule(privileged, "container \"main\" is privileged")
        .await?;
    world.start(share("modest")).await.map(|_| ())
}

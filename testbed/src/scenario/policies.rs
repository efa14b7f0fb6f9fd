//! Rules that an administrator may switch on, and rules about annotations: the same messages with webhooks and without.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::json;

use super::{ScenarioEntry, World};
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "overrides-denied" => overrides_denied,
        "pods that decide what they see, or whose hints cannot be read, are refused in the same words with webhooks and without";
};

/// Hints that do not parse are refused, and with `--deny-overrides` pods that would see all GPUs, by a variable or as privileged; an
/// ordinary one runs.
async fn overrides_denied(world: &mut World) -> Result<()> {
    let hint = BTreeMap::from([(
        "scheduling.koordinator.sh/device-allocate-hint".to_owned(),
        r#"{"gpu": 1}"#.to_owned(),
    )]);
    world
        .ensure_is_refused(
            PodBuilder::share("hinted", 10).annotated(&hint),
            "expected a JSON object",
        )
        .await?;
    world.add_scheduler_flags(&["--deny-overrides"]).await?;
    let sees_all = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]);
    world
        .ensure_is_refused(
            PodBuilder::share("sees-all", 10).with("env", sees_all),
            "container \"main\" sets NVIDIA_VISIBLE_DEVICES",
        )
        .await?;
    let privileged = PodBuilder::units("privileged", 1).with("securityContext", json!({"privileged": true}));
    world
        .ensure_is_refused(privileged, "container \"main\" is privileged")
        .await?;
    world.start(PodBuilder::share("modest", 10)).await.map(|_| ())
}

//! Rules that an administrator may switch on, and rules about annotations: the same messages with webhooks and without.

use anyhow::Result;
use proto::request::hints::ALLOCATE_HINT;
use serde_json::json;

use super::expected::visible;
use super::{Scenario, World};
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "daemons with other flags", on [Faults, Webhooks]:
    "overrides-denied" => overrides_denied,
        "pods that decide what they see, or whose hints cannot be read, are refused in the same words with webhooks and without";
};

async fn overrides_denied(world: &mut World) -> Result<()> {
    let hinted = PodBuilder::share("hinted", 10).annotation(ALLOCATE_HINT, r#"{"gpu": 1}"#);
    world.ensure_is_refused(hinted, "expected a JSON object").await?;
    world.add_scheduler_flags(&["--deny-overrides"]).await?;
    let sees_all = PodBuilder::share("sees-all", 10).with("env", visible("all"));
    let privileged = PodBuilder::units("privileged", 1).with("securityContext", json!({"privileged": true}));
    for (spec, words) in [
        (sees_all, "container \"main\" sets NVIDIA_VISIBLE_DEVICES"),
        (privileged, "container \"main\" is privileged"),
    ] {
        world.ensure_is_refused(spec, words).await?;
    }
    world.start(PodBuilder::share("modest", 10)).await.map(drop)
}

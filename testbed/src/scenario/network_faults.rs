//! An API server that misbehaves, and an extender that is sent nonsense.

use std::time::Duration;

use anyhow::{Result, ensure};
use http::StatusCode;
use serde_json::Value;

use super::{Scenario, World};
use kit::apiserver::{Fault, Injected, Matching, object};
use kit::observer::ClusterSnapshot;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "an API server that fails on command", on [Faults]:
    "bind-errors" => bind_errors,
        "409, 429, 500 and timeouts of the binding are retried until the pods run";
    "bind-reply-lost" => bind_reply_lost,
        "a binding that was written but not answered is no failure";
    "watches-dropped" => watches_dropped,
        "dropped watches and 410 Gone lose no pod";
    "patch-errors" => patch_errors,
        "the plugin retries what the API server refuses";
    "bad-bodies" => bad_bodies,
        "malformed and oversized bodies are refused and change nothing";
};

/// Fails unless each of these faults was met.
pub(super) fn ensure_met(injected: &[Injected]) -> Result<()> {
    let hits: Vec<u64> = injected.iter().map(Injected::hits).collect();
    ensure!(!hits.contains(&0), "not every fault was met: {hits:?}");
    Ok(())
}

/// The five faults meet the first ten bindings in turn; further pods show that binding goes on afterwards.
async fn bind_errors(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let kinds = [
        Fault::Refuse(409),
        // With a Retry-After of 1 second.
        Fault::RefuseUntil(429, 1),
        Fault::Refuse(500),
        Fault::DropConnection,
        Fault::Delay(Duration::from_secs(6)),
    ];
    let binds = || Matching::requests("create", "pods/binding").times(2);
    let injected = kinds.map(|fault| faults.inject(binds(), fault));
    world.start_many("pod", 16, 1).await?;
    ensure_met(&injected)?;
    faults.clear();
    Ok(())
}

async fn bind_reply_lost(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let on_bind = Matching::requests("create", "pods/binding").times(6);
    let injected = faults.inject(on_bind, Fault::DropReply);
    world.start_many("pod", 12, 1).await?;
    ensure_met(&[injected])?;
    faults.clear();
    Ok(())
}

async fn watches_dropped(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let first = world.create_many("first", 6, 1).await?;
    faults.drop_watches_of("", "");
    let second = world.create_many("second", 6, 1).await?;
    // A watch that starts from before this gets 410 and has to list again.
    world.cluster()?.api().objects().compact();
    let gone = faults.inject(Matching::requests("watch", "*").times(4), Fault::Refuse(410));
    faults.drop_watches_of("", "");
    world.until_running(&first).await?;
    world.until_running(&second).await?;
    ensure_met(&[gone])?;
    faults.clear();
    deletions_need_no_watch(world).await
}

/// The deletion of all pods also finds pods that no watch has shown yet, so that no scenario leaves pods to the next.
async fn deletions_need_no_watch(world: &mut World) -> Result<()> {
    let late = world.cluster()?.api().faults().hold_watches_of("", "pods");
    world.create_many("unseen", 2, 1).await?;
    world.pods.delete_all().await?;
    let mut left = ClusterSnapshot::of(world.cluster()?.api().objects()).pods;
    left.retain(|key, pod| key.starts_with(&world.key("")) && pod.metadata.deletion_timestamp.is_none());
    drop(late);
    ensure!(left.is_empty(), "not deleted: {:?}", left.keys());
    Ok(())
}

async fn patch_errors(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let kinds = [Fault::Refuse(500), Fault::Refuse(409), Fault::DropReply];
    let injected = kinds.map(|fault| faults.inject(Matching::requests("patch", "pods").times(2), fault));
    for name in &world.start_many("pod", 6, 1).await? {
        world.until_assigned(name).await?;
    }
    ensure_met(&injected)?;
    faults.clear();
    Ok(())
}

async fn bad_bodies(world: &mut World) -> Result<()> {
    let url = world.cluster()?.scheduler_url();
    let huge = format!("{{\"Pod\":{{}},\"NodeNames\":[\"{}\"]}}", "n".repeat(40 << 20));
    for verb in ["filter", "prioritize", "bind"] {
        let url = format!("{url}/gpushare-scheduler/{verb}");
        // The scheduler may close a connection after a body that it has not read.
        let client = world.cluster()?.scheduler_client()?;
        for body in ["", "{", "[]", "null", "{\"Pod\":7}", "{\"PodName\":1}", "\u{0}"] {
            let (status, answer) = client.post(&url, body.to_owned()).await?;
            ensure!(
                is_error(status, &answer),
                "{verb} answers {status} to {body:?}: {}",
                String::from_utf8_lossy(&answer)
            );
        }
        if let Ok((status, _)) = client.post(&url, huge.clone()).await {
            ensure!(
                status == StatusCode::PAYLOAD_TOO_LARGE,
                "{verb} answers {status} to a body of 40 MiB"
            );
        }
    }
    world.start_many("sound", 2, 1).await.map(drop)
}

/// True for a client error, or an answer whose field `Error` is not empty.
fn is_error(status: StatusCode, answer: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(answer).unwrap_or_default();
    status.is_client_error() || !object::text(&answer, "/Error").is_empty()
}

//! An API server that refuses requests of the daemons at random, or whose watches end, send bookmarks only or are late, while
//! pods fill every GPU, and some of them are deleted and replaced.
//!
//! The records are checked at every change of an object, so that a GPU that is oversubscribed for a moment only is found too.

use std::time::Duration;

use anyhow::{Result, anyhow, bail, ensure};
use tokio::time::sleep;

use super::network_faults::ensure_met;
use super::world::all_run;
use super::{NO_ROOM, Scenario, World, breaking};
use kit::apiserver::{Fault, Faults, Matching};
use kit::cluster::{PLUGIN_USER, SCHEDULER_USER};
use kit::invariants::{self, NONE_EXCUSED};
use kit::observer::ClusterSnapshot;
use kit::parts::ClusterPart;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "an API server that fails on command", on [Plugins]:
    "requests-refused" => requests_refused,
        "every third request of both daemons gets 429, 500 or 504, their starts included: all pods run, no GPU is overfull";
    "watches-cut" => watches_cut,
        "every watch of both daemons ends after a second: all pods run, no GPU is overfull";
    "bookmarks-only" => bookmarks_only,
        "watches that send bookmarks only end in no wrong decision, and once they are cut all pods run";
    "watches-late" => watches_late,
        "watches that are seconds late end in no wrong decision, and all pods run";
};

/// Memory units of each pod: they divide the memory of each GPU, so that pods can fill every GPU to its last unit.
const UNITS: u64 = 8;
/// Pods that are deleted and replaced while the API server is unreliable.
const N_REPLACED: usize = 4;
/// The lifetime of each watch.
const LIFETIME: Duration = Duration::from_secs(1);
/// The longest delay of an event.
const LATE: Duration = Duration::from_secs(3);
/// The time in which a late watch sends what it has held back.
const CATCH_UP: Duration = Duration::from_millis(50);
/// The users whose requests and watches meet the faults.
const DAEMONS: [&str; 2] = [SCHEDULER_USER, PLUGIN_USER];

async fn requests_refused(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let mut injected = Vec::new();
    for user in DAEMONS {
        // Three faults of 13 % each meet a third of the requests together. The 429 has a Retry-After of 1 second.
        for fault in [Fault::RefuseUntil(429, 1), Fault::Refuse(500), Fault::Refuse(504)] {
            let some = Matching::anything().user(user).percent(13);
            injected.push(faults.inject(some, fault));
        }
    }
    fill_and_replace(world).await?;
    let node = world.gpu_node(2)?.name;
    breaking::restart(world, ClusterPart::Scheduler, "").await?;
    breaking::restart(world, ClusterPart::Plugin, &node).await?;
    breaking::until_ready(world).await?;
    world.clear().await?;
    fill_and_replace(world).await?;
    faults.clear();
    ensure_met(&injected)
}

async fn watches_cut(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let n_cut = faults.n_cut();
    let again = async {
        loop {
            sleep(LIFETIME).await;
            cut(&faults);
        }
    };
    let twice = async {
        fill_and_replace(world).await?;
        world.clear().await?;
        fill_and_replace(world).await
    };
    done_while(twice, again).await?;
    ensure!(faults.n_cut() > n_cut, "no watch was cut");
    Ok(())
}

async fn watches_late(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let n_late = faults.n_late();
    let again = async {
        loop {
            let held = DAEMONS.map(|user| faults.hold_watches_of(user, ""));
            sleep(LATE).await;
            drop(held);
            sleep(CATCH_UP).await;
        }
    };
    done_while(fill_and_replace(world), again).await?;
    ensure!(faults.n_late() > n_late, "no watch was late");
    Ok(())
}

/// Runs `doing` to its end while `misbehaviour`, a loop without an end, makes the API server fail.
async fn done_while(
    doing: impl Future<Output = Result<()>> + Send,
    misbehaviour: impl Future<Output = ()> + Send,
) -> Result<()> {
    tokio::select! {
        done = doing => done,
        () = misbehaviour => bail!("the API server behaves again"),
    }
}

/// Watches send bookmarks, but no change of an object: pods that wait for a change stay pending, and none is placed wrongly.
async fn bookmarks_only(world: &mut World) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let names = fill(world, "old").await?;
    for user in DAEMONS {
        faults.mute_watches_of(user, "");
    }
    let (gone, kept) = names.split_at(N_REPLACED);
    for name in gone {
        world.delete(name).await?;
    }
    // The scheduler does not see that these pods have ended, so there is no room for others.
    let new = world.create_many("new", N_REPLACED, UNITS).await?;
    for name in &new {
        world.until_refused(name, NO_ROOM).await?;
    }
    cut(&faults);
    // kube-scheduler saw the earlier deletions before it was refused. After another one it tries all pods again; without one the
    // leader would announce the room 15 s later.
    let Some((last, kept)) = kept.split_last() else {
        bail!("no pod is left");
    };
    world.delete(last).await?;
    until_run(world, &[kept, new.as_slice()].concat()).await
}

/// Cuts all watches of the daemons.
fn cut(faults: &Faults) {
    for user in DAEMONS {
        faults.drop_watches_of(user, "");
    }
}

/// Fills every GPU with pods, then deletes some and creates as many that wait for their room, until all run.
async fn fill_and_replace(world: &mut World) -> Result<()> {
    let old = fill(world, "old").await?;
    let (gone, kept) = old.split_at(N_REPLACED);
    let new = world.create_many("new", N_REPLACED, UNITS).await?;
    for name in gone {
        world.pods.delete(name).await?;
    }
    until_run(world, &[kept, new.as_slice()].concat()).await
}

/// Fills every GPU with pods, and returns their names.
async fn fill(world: &mut World, prefix: &str) -> Result<Vec<String>> {
    let snapshot = world.observer.now();
    let mut n_pods = 0;
    for gpu in invariants::held_amounts(&snapshot, &NONE_EXCUSED).gpus.values() {
        n_pods += gpu.total / invariants::memory_unit(&snapshot, &gpu.node) / UNITS;
    }
    let names = world.create_many(prefix, usize::try_from(n_pods)?, UNITS).await?;
    until_run(world, &names).await?;
    Ok(names)
}

/// Waits until pods run. A pod that fails, or records that oversubscribe a GPU at any change on the way, are an error.
async fn until_run(world: &mut World, names: &[String]) -> Result<()> {
    let api = world.cluster()?.api().objects().clone();
    let keys: Vec<String> = names.iter().map(|name| world.key(name)).collect();
    let run = |_: &ClusterSnapshot| {
        // The observer's watches are not in step with each other, and these are the objects of one moment.
        let now = ClusterSnapshot::of(&api);
        let violations = invariants::held_amounts(&now, &NONE_EXCUSED).violations;
        if !violations.is_empty() {
            return Some(Err(anyhow!("{}", violations.join("; "))));
        }
        all_run(&now, &keys)
    };
    world.until(&format!("{} pods to run", names.len()), run).await?
}

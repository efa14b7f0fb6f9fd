//! Actions of users, and faults, as scenarios against a cluster that runs gpushare.
//!
//! A scenario speaks to the Kubernetes API and reads pod logs. Those that break something break it on the testbed's own
//! cluster, or on a real one by the commands of a file; a few need the testbed's cluster for something that no real one has.

use std::time::Duration;

use anyhow::Result;
use futures::future::BoxFuture;

pub use needs::Needs;
pub use stage::Stage;
pub use world::World;

use world::GpuNode;

mod all_devices;
mod breaking;
mod claims;
mod daemon_faults;
mod gangs;
mod isolation;
mod kubelet_accounting;
mod migration;
mod needs;
mod network_faults;
mod node_faults;
mod nonsense;
mod old_nodes;
mod openings;
mod other_types;
mod plugin_alone;
mod plugin_away;
mod policies;
mod preemption;
mod records;
mod replicas;
mod requests;
mod runtime_hook;
mod sampling;
mod second_scheduler;
mod sharing;
mod slow;
mod stage;
mod topology;
mod vendors;
mod waits;
pub mod waves;
mod webhooks;
mod world;

/// Longest wait for one thing.
const DEADLINE: Duration = Duration::from_secs(60);

/// A body of a scenario.
type Body = for<'a> fn(&'a mut World) -> BoxFuture<'a, Result<()>>;

/// Something that is tried and checked.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name for `--scenario`.
    pub name: &'static str,
    /// The expected result.
    pub about: &'static str,
    /// Its needs beside the API of its cluster.
    pub needs: Needs,
    /// The testbed that it runs on.
    pub stages: &'static [Stage],
    body: Body,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Name, promise, body.
type ScenarioEntry = (&'static str, &'static str, Body);

/// Every scenario, harmless ones first.
pub fn all() -> Vec<Scenario> {
    let harmless: [&[ScenarioEntry]; 3] = [sharing::SCENARIOS, requests::SCENARIOS, isolation::SCENARIOS];
    let mixed: [&[ScenarioEntry]; 6] = [
        vendors::SCENARIOS,
        claims::SCENARIOS,
        runtime_hook::SCENARIOS,
        migration::SCENARIOS,
        nonsense::SCENARIOS,
        other_types::SCENARIOS,
    ];
    let groups = [
        group(&harmless, Needs::Commands(&[]), &[Stage::Plain, Stage::Webhooks]),
        group(
            &[daemon_faults::SCENARIOS],
            Needs::Testbed("its processes"),
            &[Stage::Faults],
        ),
        group(
            &[daemon_faults::OF_REAL_CLUSTERS],
            Needs::Testbed("its processes"),
            &[],
        ),
        group(
            &[node_faults::SCENARIOS, kubelet_accounting::SCENARIOS],
            Needs::Testbed("GPUs that fall sick on command"),
            &[Stage::Faults],
        ),
        group(
            &[network_faults::SCENARIOS],
            Needs::Testbed("an API server that fails on command"),
            &[Stage::Faults],
        ),
        group(
            &[old_nodes::SCENARIOS],
            Needs::Testbed("a node without kubelet"),
            &[Stage::Faults],
        ),
        group(
            &[records::SCENARIOS],
            Needs::Testbed("no policy that guards records"),
            &[Stage::Faults],
        ),
        group(
            &[waits::SCENARIOS],
            Needs::Testbed("a kube-scheduler that waits on command"),
            &[Stage::Waiting],
        ),
        group(
            &[openings::SCENARIOS],
            Needs::Testbed("a scheduler with other flags, at a known address"),
            &[Stage::Waiting],
        ),
        group(
            &[all_devices::SCENARIOS, policies::SCENARIOS],
            Needs::Testbed("daemons with other flags"),
            &[Stage::Faults, Stage::Webhooks],
        ),
        group(
            &[preemption::SCENARIOS],
            Needs::Testbed("a watch that is late on command"),
            &[Stage::Waiting],
        ),
        group(
            &[gangs::SCENARIOS],
            Needs::Testbed("two nodes, with five GPUs"),
            &[Stage::Waiting],
        ),
        group(
            &[webhooks::SCENARIOS, slow::SCENARIOS],
            Needs::Testbed("the port of the webhooks"),
            &[Stage::Webhooks],
        ),
        group(
            &[plugin_alone::SCENARIOS],
            Needs::Testbed("an API server that fails on command"),
            &[Stage::Plugins],
        ),
        group(
            &[plugin_away::SCENARIOS],
            Needs::Testbed("plugins that it starts itself"),
            &[Stage::Faults],
        ),
        group(
            &[replicas::SCENARIOS],
            Needs::Testbed("replicas that it starts itself"),
            &[Stage::Replicas],
        ),
        group(
            &[second_scheduler::SCENARIOS],
            Needs::Testbed("replicas that it starts itself"),
            &[Stage::Second],
        ),
        group(
            &[sampling::SCENARIOS],
            Needs::Testbed("nodes that are objects only"),
            &[Stage::Second],
        ),
        group(&mixed, Needs::Testbed("nodes of other kinds"), &[Stage::Mixed]),
        group(
            &topology::SCENARIOS,
            Needs::Testbed("machines of known topologies"),
            &[Stage::Topology],
        ),
    ];
    groups.into_iter().flatten().collect()
}

fn group(lists: &[&'static [ScenarioEntry]], usually: Needs, stages: &'static [Stage]) -> Vec<Scenario> {
    let entries = lists.iter().flat_map(|list| list.iter());
    entries
        .map(|(name, about, body)| Scenario {
            name,
            about,
            needs: needs::of(name, usually),
            stages,
            body: *body,
        })
        .collect()
}

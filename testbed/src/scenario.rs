//! Scenarios: what users do and what breaks, tried against a cluster that runs gpushare.
//!
//! A scenario uses the Kubernetes API and reads pod logs, so that it runs on a real cluster too. Faults are
//! injected into the testbed's own cluster, or into a real one by the commands of a file. Scenarios that need
//! something that no real cluster has run on the testbed only ([`Needs::Testbed`]).

use std::time::Duration;

use anyhow::Result;
use futures::future::BoxFuture;

pub use needs::Needs;
pub use stage::ScenarioStage;
pub use world::World;

use world::GpuNode;

/// Lists scenarios, each as `"name" => function, "promise";`, after the needs and the testbed clusters of all of them. A scenario
/// that runs on a real cluster although the others do not has `needs [commands]` behind its name. The promise documents the
/// function too, which has a comment for what it adds alone.
///
/// A scenario has a function pointer, and no async function is a pointer to one that returns a boxed future: the macro writes the
/// adapter between the two. `within set_up(world, parts):` runs each scenario inside a function that sets up and cleans up.
macro_rules! scenarios {
    (needs $needs:tt, on $stages:tt, within $set_up:ident $parts:tt: $($list:tt)*) => {
        scenarios!(@list $needs $stages [$set_up $parts] $($list)*)
    };
    (needs $needs:tt, on $stages:tt: $($list:tt)*) => { scenarios!(@list $needs $stages [] $($list)*) };
    (on a GPU: $($name:literal $(needs $own:tt)? => $body:path, $about:literal;)*) => {
        &[$(crate::scenario::real_gpus::GpuScenario {
            name: $name,
            about: $about,
            needs: scenarios!(@needs nothing $($own)?),
            body: scenarios!(@adapter [] $body),
        }),*]
    };
    (@list $needs:tt $stages:tt $set_up:tt $($name:literal $(needs $own:tt)? => $body:path, $about:literal;)*) => {
        &[$(crate::scenario::Scenario {
            name: $name,
            about: $about,
            needs: scenarios!(@needs $needs $($own)?),
            stages: scenarios!(@stages $stages),
            body: scenarios!(@adapter $set_up $body),
        }),*]
    };
    (@needs nothing) => { crate::scenario::Needs::Commands(&[]) };
    (@needs $what:literal) => { crate::scenario::Needs::Testbed($what) };
    (@needs $usual:tt $own:tt) => { crate::scenario::Needs::Commands(&$own) };
    (@stages [$($stage:ident),*]) => { &[$(crate::scenario::ScenarioStage::$stage),*] };
    (@adapter [] $body:path) => { |world| futures::FutureExt::boxed($body(world)) };
    (@adapter [$set_up:ident ($($part:ident),*)] $body:path) => {
        |world| futures::FutureExt::boxed($set_up(world, |$($part),*| futures::FutureExt::boxed($body($($part),*))))
    };
}

mod all_devices;
mod attack;
mod breaking;
mod claims;
mod daemon_faults;
mod expected;
mod gangs;
mod isolation;
mod kubelet_accounting;
mod making_room;
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
pub mod real_gpus;
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
mod unreliable_api_server;
mod vendors;
mod waits;
pub mod waves;
mod webhooks;
mod world;

/// Longest wait for one condition. Busy machines need most of it; a quiet one needs seconds.
const DEADLINE: Duration = Duration::from_secs(60);

/// The resource of Device objects in the testbed's API server.
const DEVICES: &str = "devices.scheduling.koordinator.sh";

/// The filter's reason for a pod for which no GPU has room.
const NO_ROOM: &str = "not enough free GPU memory on any one GPU";

/// The words of kube-scheduler about a pod that no node has room for, or no node offers the resource of.
const NO_NODE: &str = "nodes are available";

/// The function of a scenario.
type Body = for<'a> fn(&'a mut World) -> BoxFuture<'a, Result<()>>;

/// A scenario with its needs and the testbed clusters that it runs on.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name for `--scenario`.
    pub name: &'static str,
    /// The behaviour that the scenario checks, as a sentence.
    pub about: &'static str,
    /// Its needs beside the API of its cluster.
    pub needs: Needs,
    /// The testbed clusters that it runs on; none if it needs a real cluster.
    pub stages: &'static [ScenarioStage],
    body: Body,
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The scenarios of each file, harmless ones first.
const LISTS: [&[Scenario]; 40] = [
    sharing::SCENARIOS,
    requests::SCENARIOS,
    isolation::SCENARIOS,
    attack::tenant::SCENARIOS,
    daemon_faults::SCENARIOS,
    daemon_faults::OF_REAL_CLUSTERS,
    node_faults::SCENARIOS,
    network_faults::SCENARIOS,
    old_nodes::SCENARIOS,
    records::SCENARIOS,
    waits::SCENARIOS,
    openings::SCENARIOS,
    making_room::SCENARIOS,
    making_room::WITH_BUDGET,
    all_devices::SCENARIOS,
    policies::SCENARIOS,
    preemption::SCENARIOS,
    gangs::SCENARIOS,
    webhooks::SCENARIOS,
    slow::SCENARIOS,
    attack::network::SCENARIOS,
    attack::tenant::DETOURS,
    kubelet_accounting::SCENARIOS,
    unreliable_api_server::SCENARIOS,
    plugin_alone::SCENARIOS,
    attack::network::OF_PLUGIN,
    plugin_away::SCENARIOS,
    replicas::SCENARIOS,
    second_scheduler::SCENARIOS,
    sampling::SCENARIOS,
    vendors::SCENARIOS,
    claims::SCENARIOS,
    runtime_hook::SCENARIOS,
    attack::tenant::ON_HOOKED,
    migration::SCENARIOS,
    nonsense::SCENARIOS,
    other_types::SCENARIOS,
    topology::joint::SCENARIOS,
    topology::hints::SCENARIOS,
    topology::partitions::SCENARIOS,
];

/// Every scenario, harmless ones first.
pub fn all() -> Vec<Scenario> {
    LISTS.concat()
}

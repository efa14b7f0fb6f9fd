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

/// Lists scenarios, each as `"name" => function, "promise";`.
///
/// A table holds function pointers, and no async function is a pointer to one that returns a boxed future: the macro writes the
/// adapter between the two. `within set_up(world, parts):` runs each scenario inside a function that sets up and cleans up.
macro_rules! scenarios {
    ($($name:literal => $body:path, $about:literal;)*) => {
        &[$(($name, $about, |world| futures::FutureExt::boxed($body(world)))),*]
    };
    (within $set_up:ident $parts:tt: $($name:literal => $body:path, $about:literal;)*) => {
        &[$(($name, $about, scenarios!(@adapter $set_up, $body, $parts))),*]
    };
    (@adapter $set_up:ident, $body:path, ($($part:ident),*)) => {
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

/// Name for `--scenario`, the behaviour that the scenario checks, and its function.
type ScenarioEntry = (&'static str, &'static str, Body);

/// Files of scenarios with the same needs, for the same testbed clusters.
struct Group {
    lists: &'static [&'static [ScenarioEntry]],
    /// The needs of the scenarios that [`needs::of`] does not name.
    needs: Needs,
    stages: &'static [ScenarioStage],
}

/// Every scenario, harmless ones first.
const GROUPS: &[Group] = &[
    Group {
        lists: &[
            sharing::SCENARIOS,
            requests::SCENARIOS,
            isolation::SCENARIOS,
            attack::tenant::SCENARIOS,
        ],
        needs: Needs::Commands(&[]),
        stages: &[ScenarioStage::Plain, ScenarioStage::Webhooks],
    },
    Group {
        lists: &[daemon_faults::SCENARIOS],
        needs: Needs::Testbed("its processes"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[daemon_faults::OF_REAL_CLUSTERS],
        needs: Needs::Testbed("its processes"),
        stages: &[],
    },
    Group {
        lists: &[node_faults::SCENARIOS],
        needs: Needs::Testbed("GPUs that fall sick on command"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[network_faults::SCENARIOS],
        needs: Needs::Testbed("an API server that fails on command"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[old_nodes::SCENARIOS],
        needs: Needs::Testbed("a node without kubelet"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[records::SCENARIOS],
        // The shipped policy would refuse the forged records before the daemons see them.
        needs: Needs::Testbed("no policy that guards records"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[waits::SCENARIOS],
        needs: Needs::Testbed("a kube-scheduler that waits on command"),
        stages: &[ScenarioStage::Waiting],
    },
    Group {
        lists: &[openings::SCENARIOS],
        needs: Needs::Testbed("a scheduler with other flags, at a known address"),
        stages: &[ScenarioStage::Waiting],
    },
    Group {
        lists: &[making_room::SCENARIOS],
        needs: Needs::Testbed("a scheduler with other flags, at a known address"),
        stages: &[ScenarioStage::MakingRoom],
    },
    Group {
        lists: &[all_devices::SCENARIOS, policies::SCENARIOS],
        needs: Needs::Testbed("daemons with other flags"),
        stages: &[ScenarioStage::Faults, ScenarioStage::Webhooks],
    },
    Group {
        lists: &[preemption::SCENARIOS],
        needs: Needs::Testbed("a watch that is late on command"),
        stages: &[ScenarioStage::Waiting],
    },
    Group {
        lists: &[gangs::SCENARIOS],
        needs: Needs::Testbed("two nodes, with five GPUs"),
        stages: &[ScenarioStage::Waiting],
    },
    Group {
        lists: &[
            webhooks::SCENARIOS,
            slow::SCENARIOS,
            attack::network::SCENARIOS,
            attack::tenant::DETOURS,
        ],
        needs: Needs::Testbed("the port of the webhooks"),
        stages: &[ScenarioStage::Webhooks],
    },
    Group {
        lists: &[kubelet_accounting::SCENARIOS],
        needs: Needs::Testbed("GPUs that fall sick on command"),
        stages: &[ScenarioStage::Plugins],
    },
    Group {
        lists: &[unreliable_api_server::SCENARIOS],
        needs: Needs::Testbed("an API server that fails on command"),
        stages: &[ScenarioStage::Plugins],
    },
    Group {
        lists: &[plugin_alone::SCENARIOS, attack::network::OF_PLUGIN],
        needs: Needs::Testbed("an API server that fails on command"),
        stages: &[ScenarioStage::PluginAlone],
    },
    Group {
        lists: &[plugin_away::SCENARIOS],
        needs: Needs::Testbed("plugins that it starts itself"),
        stages: &[ScenarioStage::Faults],
    },
    Group {
        lists: &[replicas::SCENARIOS],
        needs: Needs::Testbed("replicas that it starts itself"),
        stages: &[ScenarioStage::Replicas],
    },
    Group {
        lists: &[second_scheduler::SCENARIOS],
        needs: Needs::Testbed("replicas that it starts itself"),
        stages: &[ScenarioStage::Second],
    },
    Group {
        lists: &[sampling::SCENARIOS],
        needs: Needs::Testbed("nodes that are objects only"),
        stages: &[ScenarioStage::Second],
    },
    Group {
        lists: &[
            vendors::SCENARIOS,
            claims::SCENARIOS,
            runtime_hook::SCENARIOS,
            attack::tenant::ON_HOOKED,
            migration::SCENARIOS,
            nonsense::SCENARIOS,
            other_types::SCENARIOS,
        ],
        needs: Needs::Testbed("nodes of other kinds"),
        stages: &[ScenarioStage::Mixed],
    },
    Group {
        lists: &topology::SCENARIOS,
        needs: Needs::Testbed("machines of known topologies"),
        stages: &[ScenarioStage::Topology],
    },
];

/// Every scenario, harmless ones first.
pub fn all() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for group in GROUPS {
        for (name, about, body) in group.lists.iter().copied().flatten() {
            scenarios.push(Scenario {
                name,
                about,
                needs: needs::of(name, group.needs),
                stages: group.stages,
                body: *body,
            });
        }
    }
    scenarios
}

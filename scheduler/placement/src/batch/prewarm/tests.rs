//! Prewarming evaluates the current requests under the next model, whatever changes meanwhile.

use crate::data::amounts::HostAmounts;
use crate::data::device::Device;
use crate::data::holding::{HeldPart, Hints, Holdings};
use crate::data::inventory::Inventory;
use crate::data::policy::Policies;
use crate::data::request::{NodeRequest, RequestedGpus, RequestedMemory, ShareRequest};
use crate::data::workload::PodProfile;
use crate::fleet::Fleet;
use crate::state::nodes::NodeVersion;

/// More nodes than one step evaluates, one of which is removed.
const N_NODES: usize = 150;

fn fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for node in 0..N_NODES {
        let gpu = |minor| Device {
            memory_bytes: 1000,
            core: 100,
            slots: 10,
            ..Device::new(format!("GPU-{node}-{minor}"), minor)
        };
        fleet.set_inventory(
            &format!("n{node}"),
            Inventory {
                gpus: vec![gpu(0), gpu(1)],
                ..Inventory::default()
            },
        );
    }
    fleet.remove_inventory("n70");
    fleet
}

fn share(percent: u32) -> PodProfile {
    let request = ShareRequest {
        devices: 1,
        memory: RequestedMemory::Ratio(percent),
        core: 0,
        slots: 1,
    };
    PodProfile {
        gpus: RequestedGpus::Share(request),
        host: HostAmounts::default(),
    }
}

fn request(percent: u32) -> NodeRequest<'static> {
    NodeRequest {
        gpus: share(percent).gpus,
        ..NodeRequest::default()
    }
}

/// Number of nodes with a cached result.
fn n_cached(fleet: &Fleet, percent: u32) -> usize {
    let scores = fleet.cache.scores(
        &request(percent),
        Policies::default(),
        fleet.model.number(),
        fleet.nodes.slots.len(),
    );
    let is_known = |(index, version): &(u32, &NodeVersion)| scores.get(*index, version.number).is_some();
    (0..).zip(&fleet.nodes.versions).filter(is_known).count()
}

fn evaluate(fleet: &Fleet, percent: u32) {
    let mut evaluation = fleet.evaluation(request(percent), Hints::Respect);
    for node in fleet.nodes() {
        evaluation.evaluate(node.id(), Policies::default()).unwrap();
    }
}

#[test]
fn current_requests_are_cached_when_the_model_takes_effect() {
    let mut fleet = fleet();
    evaluate(&fleet, 30);
    evaluate(&fleet, 60);
    fleet.workload_mut().add(share(40));
    assert!(fleet.begin_workload_refresh());
    let mut prewarm = fleet.prewarm().unwrap();
    let mut n_steps = 1;
    while fleet.prewarm_step(&mut prewarm) {
        n_steps += 1;
    }
    assert_eq!(n_steps, 6, "two requests, three steps each");
    assert_eq!(
        (n_cached(&fleet, 30), n_cached(&fleet, 60)),
        (N_NODES - 1, N_NODES - 1),
        "the model in effect has not changed"
    );
    fleet.hold(
        &"late".into(),
        "n3",
        Holdings::from(vec![HeldPart::from(&ShareRequest {
            devices: 1,
            memory: RequestedMemory::Ratio(10),
            core: 0,
            slots: 1,
        })]),
    );
    fleet.finish_workload_refresh();
    let counts = [30, 60, 90].map(|percent| n_cached(&fleet, percent));
    assert_eq!(
        counts,
        [N_NODES - 2, N_NODES - 2, 0],
        "except for the node that has changed since"
    );
    assert!(fleet.prewarm().is_none() && !fleet.is_refreshing_workload());
}

#[test]
fn another_model_ends_a_prewarm() {
    let mut fleet = fleet();
    evaluate(&fleet, 30);
    fleet.workload_mut().add(share(40));
    assert!(fleet.begin_workload_refresh());
    let mut prewarm = fleet.prewarm().unwrap();
    assert!(fleet.prewarm_step(&mut prewarm));
    fleet.workload_mut().add(share(50));
    assert!(fleet.begin_workload_refresh());
    assert!(
        !fleet.prewarm_step(&mut prewarm),
        "it is for a model that was replaced"
    );
    fleet.finish_workload_refresh();
    assert_eq!(n_cached(&fleet, 30), 0);
    assert!(!fleet.refresh_workload_model(), "nothing new");
}

/// Nodes cache values under a model and its successor by the last bit of its number, whichever models are dropped between.
#[test]
fn numbers_of_successive_models_differ_by_an_odd_number() {
    let mut fleet = fleet();
    for percent in 1..20 {
        fleet.workload_mut().add(share(percent));
        fleet.begin_workload_refresh();
        if let Some(next) = &fleet.next_model {
            assert!(
                next.number() > fleet.model.number()
                    && !(next.number() - fleet.model.number()).is_multiple_of(2)
            );
        }
        if percent % 3 == 0 {
            fleet.finish_workload_refresh();
        }
    }
}

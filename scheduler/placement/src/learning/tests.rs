use crate::asking::Asking;
use crate::fit::Hints;
use crate::fleet::Fleet;
use crate::gpu::{Gpu, Inventory};
use crate::host::HostAmounts;
use crate::policy::Policies;
use crate::request::{Ask, GpuAsk, MemoryAsk, Request};
use crate::traits::Traits;
use crate::workload::Spec;

/// More nodes than one stretch has, with a hole among them.
const N_NODES: usize = 150;

fn fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for node in 0..N_NODES {
        let gpu = |minor| Gpu {
            uuid: format!("GPU-{node}-{minor}").as_str().into(),
            minor,
            memory_bytes: 1000,
            core: 100,
            slots: 10,
            healthy: true,
            sharing: true,
            traits: Traits::default(),
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

fn share(percent: u32) -> Spec {
    let request = Request {
        devices: 1,
        memory: MemoryAsk::Ratio(percent),
        core: 0,
        slots: 1,
    };
    Spec {
        gpus: GpuAsk::Share(request),
        host: HostAmounts::default(),
    }
}

fn ask(percent: u32) -> Ask<'static> {
    Ask {
        gpus: share(percent).gpus,
        ..Ask::default()
    }
}

/// Of how many nodes it is remembered what came of a question.
fn n_remembered(fleet: &Fleet, percent: u32) -> usize {
    let ranking = fleet.rankings.of(
        &ask(percent),
        Policies::default(),
        fleet.forecasts.number(),
        fleet.slots.len(),
    );
    let is_known = |(index, version): &(u32, &u64)| ranking.get(*index, **version).is_some();
    (0..).zip(&fleet.versions).filter(is_known).count()
}

fn put(fleet: &Fleet, percent: u32) {
    let mut asking = Asking::new(fleet, ask(percent), Hints::Respect);
    for node in fleet.nodes() {
        asking.verdict(node.id(), Policies::default()).unwrap();
    }
}

#[test]
fn questions_of_the_day_are_answered_when_it_counts() {
    let mut fleet = fleet();
    put(&fleet, 30);
    put(&fleet, 60);
    fleet.workload_mut().add(share(40));
    assert!(fleet.begin_learning());
    let mut rehearsal = fleet.rehearsal().unwrap();
    let mut n_stretches = 1;
    while fleet.rehearse(&mut rehearsal) {
        n_stretches += 1;
    }
    assert_eq!(n_stretches, 6, "two questions, three stretches each");
    assert_eq!(
        (n_remembered(&fleet, 30), n_remembered(&fleet, 60)),
        (N_NODES - 1, N_NODES - 1),
        "what counts has not changed"
    );
    fleet.hold(
        &"late".into(),
        "n3",
        crate::holding::Holding::Anywhere(Request {
            devices: 1,
            memory: MemoryAsk::Ratio(10),
            core: 0,
            slots: 1,
        }),
    );
    fleet.end_learning();
    let counts = [30, 60, 90].map(|percent| n_remembered(&fleet, percent));
    assert_eq!(
        counts,
        [N_NODES - 2, N_NODES - 2, 0],
        "but for the node that has changed since"
    );
    assert!(fleet.rehearsal().is_none() && !fleet.is_learning());
}

#[test]
fn what_is_learnt_anew_meanwhile_ends_a_rehearsal() {
    let mut fleet = fleet();
    put(&fleet, 30);
    fleet.workload_mut().add(share(40));
    assert!(fleet.begin_learning());
    let mut rehearsal = fleet.rehearsal().unwrap();
    assert!(fleet.rehearse(&mut rehearsal));
    fleet.workload_mut().add(share(50));
    assert!(fleet.begin_learning());
    assert!(!fleet.rehearse(&mut rehearsal), "of another time");
    fleet.end_learning();
    assert_eq!(n_remembered(&fleet, 30), 0);
    assert!(!fleet.learn(), "nothing new");
}

/// Forecasts that count and those that will next are remembered side by side for every node, whatever is thrown away between.
#[test]
fn numbers_differ_by_an_odd_number() {
    let mut fleet = fleet();
    for percent in 1..20 {
        fleet.workload_mut().add(share(percent));
        fleet.begin_learning();
        if let Some(next) = &fleet.next {
            assert!(
                next.number() > fleet.forecasts.number()
                    && !(next.number() - fleet.forecasts.number()).is_multiple_of(2)
            );
        }
        if percent % 3 == 0 {
            fleet.end_learning();
        }
    }
}

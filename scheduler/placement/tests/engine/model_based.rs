//! Model-based tests: random sequences of steps, after each of which the check finds no violation and the engine agrees
//! with the naive model.

use std::collections::BTreeMap;

use placement::{
    Device, DevicePolicy, DeviceRef, DeviceType, Fleet, HeldMemory, HeldPart, Hints, Holdings, HostAmounts,
    Inventory, Memory, NodePolicy, NodeRequest, OwnerId, Placement, PodProfile, Policies, Reason,
    RequestedMemory, ShareRequest, Violation,
};
use proptest::prelude::*;
use proptest::sample::select;

use crate::model::{Model, total_of};

const NODES: [&str; 3] = ["n0", "n1", "n2"];
const OWNERS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
const HINTS: [Hints<'_>; 3] = [Hints::Respect, Hints::Ignore, Hints::RespectOthers("a")];

/// One step.
#[derive(Clone, Debug)]
enum Step {
    Inventory(&'static str, Inventory),
    Remove(&'static str),
    Hold(&'static str, &'static str, Holdings),
    Release(&'static str),
    /// Choose by this policy, and reserve.
    Place(&'static str, &'static str, ShareRequest, DevicePolicy),
    /// Reserve a placement that was chosen for another node, or whose room is gone.
    Misplace(&'static str, &'static str, Placement),
    Hint(&'static str, &'static str, ShareRequest),
    Unhint(&'static str),
    /// CPU and memory: the total of a node, the use of an owner, and its end.
    Host(&'static str, Option<HostAmounts>),
    SetHostUse(&'static str, &'static str, HostAmounts),
    ClearHostUse(&'static str),
    /// Adds a pod of this kind, and refreshes the workload model.
    Refresh(ShareRequest, HostAmounts),
}

/// A fleet and its naive model, which take the same steps.
#[derive(Default)]
struct Pair {
    fleet: Fleet,
    model: Model,
    /// CPU and memory of nodes, and the nodes that owners use.
    hosts: BTreeMap<String, HostAmounts>,
    running: BTreeMap<String, String>,
}

impl Pair {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Inventory(node, inventory) => {
                assert!(self.fleet.set_inventory(node, inventory.clone()).is_empty());
                self.model
                    .inventories
                    .insert((*node).to_owned(), inventory.clone());
            }
            Step::Remove(node) => {
                self.fleet.remove_inventory(node);
                self.model.inventories.remove(*node);
            }
            Step::Hold(owner, node, holding) => {
                self.fleet.hold(&OwnerId::from(*owner), node, holding.clone());
                self.model.hints.remove(*owner);
                self.model
                    .holdings
                    .insert((*owner).to_owned(), ((*node).to_owned(), holding.clone()));
            }
            Step::Release(owner) => {
                self.model.hints.remove(*owner);
                assert_eq!(
                    self.fleet.release(owner),
                    self.model.holdings.remove(*owner).is_some()
                );
            }
            Step::Place(owner, node, request, policy) => self.place(owner, node, request, *policy),
            Step::Misplace(owner, node, placement) => self.reserve(owner, node, placement),
            Step::Hint(owner, node, request) => self.hint(owner, node, request),
            Step::Unhint(owner) => assert_eq!(
                self.fleet.unhint(owner),
                self.model.hints.remove(*owner).is_some()
            ),
            Step::Host(node, host) => {
                self.fleet.set_host(node, *host);
                match host {
                    Some(host) => self.hosts.insert((*node).to_owned(), *host),
                    None => self.hosts.remove(*node),
                };
            }
            Step::SetHostUse(owner, node, host) => {
                self.fleet
                    .set_host_use(&OwnerId::from(*owner), node, *host, false);
                self.running.insert((*owner).to_owned(), (*node).to_owned());
            }
            Step::ClearHostUse(owner) => {
                self.fleet.clear_host_use(owner);
                self.running.remove(*owner);
            }
            Step::Refresh(request, host) => {
                self.fleet.workload_mut().add(PodProfile {
                    gpus: request.into(),
                    host: *host,
                });
                self.fleet.refresh_workload_model();
            }
        }
    }

    fn place(&mut self, owner: &str, node: &str, request: &ShareRequest, policy: DevicePolicy) {
        let Some(id) = self.fleet.node_id(node) else {
            return;
        };
        let hints = Hints::RespectOthers(owner);
        let choice = self.fleet.choose_devices(id, request, policy, hints);
        assert_eq!(
            choice.as_ref().map(drop).map_err(|reason| *reason),
            self.model.fit(node, request, hints)
        );
        let Ok(placement) = choice else { return };
        // The look-ahead has a naive model of its own, in the tests of the simulation.
        if policy != DevicePolicy::Fill {
            let minors: Vec<u32> = placement.gpus().map(|share| share.minor).collect();
            assert_eq!(
                Some(minors),
                self.model.choose_devices(node, request, policy, hints)
            );
        }
        self.reserve(owner, node, &placement);
    }

    fn reserve(&mut self, owner: &str, node: &str, placement: &Placement) {
        let Some(id) = self.fleet.node_id(node) else {
            return;
        };
        let reserved = self.fleet.reserve(&owner.into(), id, placement);
        // An owner that holds something already gets nothing else.
        let is_free = !self.model.holdings.contains_key(owner);
        assert_eq!(
            reserved.is_ok(),
            is_free && self.model.admits(owner, node, placement),
            "{reserved:?}"
        );
        if reserved.is_ok() {
            self.model.hints.remove(owner);
            self.model
                .holdings
                .insert(owner.to_owned(), (node.to_owned(), Holdings::from(placement)));
        }
    }

    fn hint(&mut self, owner: &str, node: &str, request: &ShareRequest) {
        let Some(id) = self.fleet.node_id(node) else {
            return;
        };
        let Ok(placement) = self
            .fleet
            .choose_devices(id, request, DevicePolicy::Binpack, Hints::Respect)
        else {
            return;
        };
        let noted = self.fleet.hint(&owner.into(), id, &placement);
        assert_eq!(noted, !self.model.holdings.contains_key(owner));
        self.model.hints.remove(owner);
        if noted {
            self.model
                .hints
                .insert(owner.to_owned(), (node.to_owned(), placement));
        }
    }

    /// Compares all queries.
    fn agree(&self, request: &ShareRequest) {
        for node in NODES {
            let id = self.fleet.node_id(node);
            let is_mentioned = self.model.inventories.contains_key(node)
                || self.model.holdings.values().any(|(at, _)| at == node)
                || self.model.hints.values().any(|(at, _)| at == node)
                || self.hosts.contains_key(node)
                || self.running.values().any(|at| at == node);
            assert_eq!(id.is_some(), is_mentioned, "{node}");
            let Some(id) = id else { continue };
            for hints in HINTS {
                let fit = self.model.fit(node, request, hints);
                assert_eq!(
                    self.fleet.fit(id, request, hints),
                    fit,
                    "{node} {request:?} {hints:?}"
                );
                self.explanation_agrees(node, request, hints, fit);
                for device in [DevicePolicy::Binpack, DevicePolicy::Spread] {
                    let chosen = self.fleet.choose_devices(id, request, device, hints).ok();
                    let minors = chosen
                        .map(|placement| placement.gpus().map(|share| share.minor).collect::<Vec<u32>>());
                    assert_eq!(minors, self.model.choose_devices(node, request, device, hints));
                    for policies in
                        [NodePolicy::Binpack, NodePolicy::Spread].map(|node| Policies { node, device })
                    {
                        let score = self.fleet.score(id, request, policies, hints);
                        assert_eq!(
                            i128::from(score.parts_per_million()),
                            self.model.score(node, request, policies, hints)
                        );
                    }
                }
            }
            self.views_agree(node);
        }
        self.cache_agrees(request);
    }

    /// Cached results equal computed ones.
    fn cache_agrees(&self, request: &ShareRequest) {
        let host = HostAmounts {
            cpu_milli: 1000,
            memory: 1,
        };
        let ask = NodeRequest {
            host,
            ..request.into()
        };
        for hints in HINTS {
            for policies in [
                Policies::default(),
                Policies {
                    node: NodePolicy::Spread,
                    device: DevicePolicy::Binpack,
                },
            ] {
                let mut evaluation = self.fleet.evaluation(ask, policies, hints);
                for id in NODES.iter().filter_map(|node| self.fleet.node_id(node)) {
                    let fresh = self
                        .fleet
                        .fit(id, ask, hints)
                        .map(|()| self.fleet.score(id, ask, policies, hints));
                    assert_eq!(
                        evaluation.evaluate(id),
                        fresh,
                        "{request:?} {hints:?} {policies:?}"
                    );
                    assert_eq!(evaluation.evaluate(id), fresh, "evaluated again");
                }
            }
        }
    }

    fn explanation_agrees(
        &self,
        node: &str,
        request: &ShareRequest,
        hints: Hints<'_>,
        fit: Result<(), Reason>,
    ) {
        let fits = match self
            .fleet
            .explain(self.fleet.node_id(node).unwrap(), request, hints)
        {
            Ok(fits) => fits,
            Err(reason) => return assert_eq!(fit, Err(reason)),
        };
        let n_fitting = fits.iter().filter(|fit_of_gpu| fit_of_gpu.fit.is_ok()).count();
        assert_eq!(n_fitting >= request.devices as usize, fit.is_ok());
        let reasons = [Reason::Memory, Reason::Core, Reason::Slots];
        if let Some(reason) = fit.err().filter(|reason| reasons.contains(reason)) {
            assert!(fits.iter().any(|fit_of_gpu| fit_of_gpu.fit == Err(reason)));
        }
    }

    fn views_agree(&self, node: &str) {
        let view = self.fleet.view(self.fleet.node_id(node).unwrap()).unwrap();
        let triple = |amounts: placement::Amounts| {
            [
                amounts.memory.hundredths().into(),
                amounts.core.into(),
                amounts.slots.into(),
            ]
        };
        let seen: Vec<_> = view
            .gpus()
            .iter()
            .map(|gpu| (gpu.device.clone(), triple(gpu.used), triple(gpu.suspect)))
            .collect();
        assert_eq!(seen, self.model.used(node));
    }

    /// Oversubscription by the model, as (node, uuid, dimension).
    fn oversubscribed(&self) -> Vec<(String, String, usize)> {
        let mut found = Vec::new();
        for node in NODES {
            for (gpu, certain, _) in self.model.used(node) {
                let dimensions = (0..3).filter(|at| certain[*at] > total_of(&gpu)[*at]);
                found.extend(dimensions.map(|at| (node.to_owned(), gpu.id.to_string(), at)));
            }
        }
        found.sort();
        found
    }
}

fn memory_ask() -> impl Strategy<Value = RequestedMemory> {
    prop_oneof![
        (0_u64..60).prop_map(RequestedMemory::Bytes),
        (0_u64..12).prop_map(RequestedMemory::Units),
        prop_oneof![0_u32..110, select(vec![25, 33, 34, 50, 100])].prop_map(RequestedMemory::Ratio),
    ]
}

fn request() -> impl Strategy<Value = ShareRequest> {
    let core = prop_oneof![3 => Just(0_u32), 2 => 0_u32..110];
    let slots = prop_oneof![4 => Just(1_u32), 1 => 0_u32..5];
    (0_u32..5, memory_ask(), core, slots).prop_map(|(devices, memory, core, slots)| ShareRequest {
        devices,
        memory,
        core,
        slots,
    })
}

/// Up to four small GPUs of a node, by rising minor, perhaps of one size.
fn inventory(node: &'static str, may_be_unhealthy: bool) -> impl Strategy<Value = Inventory> {
    // Healthy, and closed.
    let state = if may_be_unhealthy {
        prop_oneof![5 => Just((true, false)), 1 => Just((false, false)), 1 => any::<bool>().prop_map(|healthy| (healthy, true))]
            .boxed()
    } else {
        Just((true, false)).boxed()
    };
    let gpu = (1_u64..60, select(vec![50_u32, 100]), 1_u32..5, state);
    let minors = proptest::sample::subsequence(vec![0_u32, 1, 2, 3, 5], 0..=4);
    let unit = prop_oneof![4 => (1_u64..8).prop_map(Some), 1 => Just(None)];
    (minors, proptest::collection::vec(gpu, 5), unit, any::<bool>()).prop_map(
        move |(minors, gpus, unit_bytes, alike)| {
            let gpu = |(at, minor): (usize, u32)| {
                let (memory_bytes, core, slots, (healthy, closed)) = gpus[if alike { 0 } else { at }];
                Device {
                    memory_bytes,
                    core,
                    slots,
                    healthy,
                    closed,
                    ..Device::new(format!("{node}-{minor}"), minor)
                }
            };
            Inventory {
                gpus: minors.into_iter().enumerate().map(gpu).collect(),
                unit_bytes,
                ..Inventory::default()
            }
        },
    )
}

fn held_share(node: &'static str) -> impl Strategy<Value = HeldPart> {
    let gpu = prop_oneof![
        (0_u32..7).prop_map(move |minor| DeviceRef::Id(format!("{node}-{minor}").into())),
        (0_u32..7).prop_map(DeviceRef::Minor),
    ];
    let memory = prop_oneof![
        (0_u64..6000).prop_map(|hundredths| HeldMemory::Exact(Memory::from_hundredths(hundredths))),
        memory_ask().prop_map(HeldMemory::Requested),
    ];
    (gpu, memory, 0_u32..60, 0_u32..3, any::<bool>()).prop_map(|(gpu, memory, core, slots, trusted)| {
        HeldPart {
            memory,
            core,
            slots,
            trusted,
            ..HeldPart::new(DeviceType::Gpu, gpu)
        }
    })
}

fn holding(node: &'static str) -> impl Strategy<Value = Holdings> {
    prop_oneof![
        3 => proptest::collection::vec(held_share(node), 0..3).prop_map(Holdings::from),
        1 => request().prop_map(|request| Holdings::from(vec![HeldPart::from(&request)])),
        1 => request().prop_map(Holdings::pending),
    ]
}

fn misplacement(node: &'static str) -> impl Strategy<Value = Placement> {
    let amounts = (1_u64..4000, 0_u32..60, 0_u32..3);
    let share = (0_u32..6, amounts).prop_map(move |(minor, (memory, core, slots))| placement::Share {
        id: format!("{node}-{minor}").into(),
        minor,
        amounts: placement::Amounts {
            memory: Memory::from_hundredths(memory),
            core,
            slots,
        },
        kind: DeviceType::Gpu,
        resources: [].into(),
        virtual_functions: Vec::new(),
    });
    proptest::collection::vec(share, 1..3).prop_map(|shares| Placement {
        shares,
        ..Placement::default()
    })
}

fn policy() -> impl Strategy<Value = DevicePolicy> {
    select(vec![
        DevicePolicy::Binpack,
        DevicePolicy::Spread,
        DevicePolicy::Fill,
    ])
}

fn host() -> impl Strategy<Value = HostAmounts> {
    (0_u64..4000, 0_u64..4).prop_map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory })
}

/// Steps that the scheduler itself decides.
fn decision() -> impl Strategy<Value = Step> {
    let node = || select(NODES.to_vec());
    let owner = || select(OWNERS.to_vec());
    prop_oneof![
        5 => (owner(), node(), request(), policy()).prop_map(|(owner, node, request, policy)| Step::Place(owner, node, request, policy)),
        1 => (owner(), node()).prop_flat_map(|(owner, node)| misplacement(node).prop_map(move |placed| Step::Misplace(owner, node, placed))),
        2 => owner().prop_map(Step::Release),
        2 => (owner(), node(), request()).prop_map(|(owner, node, request)| Step::Hint(owner, node, request)),
        1 => owner().prop_map(Step::Unhint),
        1 => (owner(), node(), host()).prop_map(|(owner, node, host)| Step::SetHostUse(owner, node, host)),
        1 => owner().prop_map(Step::ClearHostUse),
        2 => (request(), host()).prop_map(|(request, host)| Step::Refresh(request, host)),
    ]
}

/// Steps that may happen in a cluster.
fn event() -> impl Strategy<Value = Step> {
    let node = || select(NODES.to_vec());
    let owner = || select(OWNERS.to_vec());
    prop_oneof![
        6 => decision(),
        2 => node().prop_flat_map(|node| inventory(node, true).prop_map(move |inventory| Step::Inventory(node, inventory))),
        1 => node().prop_map(Step::Remove),
        1 => (node(), proptest::option::of(host())).prop_map(|(node, host)| Step::Host(node, host)),
        3 => (owner(), node()).prop_flat_map(|(owner, node)| holding(node).prop_map(move |holding| Step::Hold(owner, node, holding))),
    ]
}

fn first_inventories() -> impl Strategy<Value = Vec<Step>> {
    let of = |node| inventory(node, false).prop_map(move |inventory| Step::Inventory(node, inventory));
    NODES.map(of).into_iter().collect::<Vec<_>>()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Decisions alone never oversubscribe a device and never violate an invariant.
    #[test]
    fn no_decision_violates_an_invariant(
        start in first_inventories(),
        steps in proptest::collection::vec((decision(), request()), 1..40),
    ) {
        let mut pair = Pair::default();
        for step in &start {
            pair.take(step);
        }
        for (step, request) in &steps {
            pair.take(step);
            prop_assert_eq!(pair.fleet.check(), vec![], "after {:?}", step);
            pair.agree(request);
        }
    }

    /// After any steps the engine counts as the model does, and only facts and changed inventories oversubscribe.
    #[test]
    fn holdings_are_counted_as_the_model_counts_them(steps in proptest::collection::vec((event(), request()), 1..40)) {
        let mut pair = Pair::default();
        for (step, request) in &steps {
            pair.take(step);
            let mut oversubscribed = Vec::new();
            for violation in pair.fleet.check() {
                match violation {
                    Violation::Oversubscribed { node, id, resource, .. } => {
                        let at = ["memory", "core", "slots"].iter().position(|name| *name == resource.as_str());
                        oversubscribed.push((node, id.to_string(), at.unwrap_or(usize::MAX)));
                    }
                    Violation::MissingGpu(_) | Violation::SameGpuTwice(_) => {}
                    other => prop_assert!(false, "{:?} after {:?}", other, step),
                }
            }
            oversubscribed.sort();
            prop_assert_eq!(oversubscribed, pair.oversubscribed());
            pair.agree(request);
        }
    }

    /// The state is a function of the current facts, not of the order in which they arrived.
    #[test]
    fn the_order_of_events_does_not_matter(
        (facts, shuffled) in proptest::collection::vec(event(), 1..30).prop_flat_map(|events| {
            let facts = last_of_each(&events);
            (Just(facts.clone()), Just(facts).prop_shuffle())
        }),
        request in request(),
    ) {
        let [one, other] = [facts, shuffled].map(|steps| {
            let mut pair = Pair::default();
            for step in &steps {
                pair.take(step);
            }
            pair.fleet
        });
        for node in NODES {
            let [(one, one_id), (other, other_id)] = [&one, &other].map(|fleet| (fleet, fleet.node_id(node)));
            prop_assert_eq!(one_id.is_some(), other_id.is_some());
            let (Some(one_id), Some(other_id)) = (one_id, other_id) else { continue };
            prop_assert_eq!(one.choose_devices(one_id, &request, DevicePolicy::Binpack, Hints::Respect), other.choose_devices(other_id, &request, DevicePolicy::Binpack, Hints::Respect));
            let [one, other] = [one.view(one_id).unwrap(), other.view(other_id).unwrap()];
            prop_assert_eq!(format!("{:?}", one.gpus()), format!("{:?}", other.gpus()));
        }
    }
}

/// The last inventory of each node and the last fact of each owner.
fn last_of_each(events: &[Step]) -> Vec<Step> {
    let mut last = BTreeMap::new();
    for event in events {
        match event {
            Step::Inventory(name, _) | Step::Hold(name, ..) => last.insert(*name, event.clone()),
            _ => continue,
        };
    }
    last.into_values().collect()
}

//! Cached results are those of each node by itself, whatever has changed since the last request of the kind.

use placement::RequestedMemory::Units;
use placement::{Fleet, Hints, HostAmounts, NextModel, NodePolicy, PodProfile, Policies, ShareRequest};
use proptest::prelude::*;

use crate::build::{hold, inventory, on_minor, ratio, units};

const N_NODES: u32 = 6;

/// A change of a fleet, or a request.
#[derive(Clone, Debug)]
enum Step {
    /// A pod holds units of a GPU of a node.
    Hold(u32, u32, u64),
    Release(u32),
    /// A node has one GPU of this many units in place of its others: a model of GPU that no other node has.
    Replace(u32, u64),
    /// Room is kept for a pod on a node, this often: the changes that the fleet remembers are about 4,000.
    Hint(u32, u32, u32),
    Unhint(u32),
    /// The workload model is computed again, with one more pod that asks for this much of a GPU in percent.
    Refresh(u32),
    /// The same, but the model takes effect with the step `TakeEffect`, after results by it have been computed.
    BeginModel(u32),
    Prepare,
    TakeEffect,
    /// A request of one of the kinds by a pod, under a policy.
    Ask(usize, u32, NodePolicy),
}

fn step() -> impl Strategy<Value = Step> {
    let (pod, node) = (0..4_u32, 0..N_NODES);
    prop_oneof![
        (pod.clone(), node.clone(), 1..90_u64).prop_map(|(pod, node, n)| Step::Hold(pod, node, n)),
        pod.clone().prop_map(Step::Release),
        (node.clone(), 101..120_u64).prop_map(|(node, units)| Step::Replace(node, units)),
        (pod.clone(), node, prop_oneof![9 => Just(1_u32), 1 => Just(3000)])
            .prop_map(|(pod, node, n)| Step::Hint(pod, node, n)),
        pod.clone().prop_map(Step::Unhint),
        (10..100_u32).prop_map(Step::Refresh),
        (10..100_u32).prop_map(Step::BeginModel),
        Just(Step::Prepare),
        Just(Step::TakeEffect),
        (
            0..3_usize,
            pod,
            prop_oneof![Just(NodePolicy::Fill), Just(NodePolicy::Binpack)]
        )
            .prop_map(|(kind, pod, policy)| Step::Ask(kind, pod, policy)),
    ]
}

fn name(node: u32) -> String {
    format!("n{node}")
}

/// A fleet, and the workload model that takes effect there next.
struct Changed {
    fleet: Fleet,
    next: Option<NextModel>,
}

impl Changed {
    fn new() -> Self {
        let mut fleet = Fleet::new();
        for node in 0..N_NODES {
            let inventory = inventory(&name(node), &[100, 60 + 10 * u64::from(node)]);
            fleet.set_inventory(&name(node), inventory);
        }
        Self { fleet, next: None }
    }

    /// Takes a step that changes the fleet.
    fn take(&mut self, step: &Step) {
        let fleet = &mut self.fleet;
        match *step {
            Step::Hold(pod, node, n) => hold(fleet, &format!("p{pod}"), &name(node), on_minor(0, Units(n))),
            Step::Release(pod) => {
                fleet.release(&format!("p{pod}"));
            }
            Step::Replace(node, units) => {
                fleet.set_inventory(&name(node), inventory(&name(node), &[units]));
            }
            Step::Hint(pod, node, n) => {
                let id = fleet.node_id(&name(node)).unwrap();
                let owner = format!("p{pod}").as_str().into();
                let chosen = fleet.choose_devices(id, &units(20), Policies::default().device, Hints::Respect);
                for _ in 0..n {
                    if let Ok(placement) = &chosen {
                        fleet.hint(&owner, id, placement);
                    }
                }
            }
            Step::Unhint(pod) => {
                fleet.unhint(&format!("p{pod}"));
            }
            Step::Refresh(percent) => {
                self.count(percent);
                self.fleet.refresh_workload_model();
                self.next = None;
            }
            Step::BeginModel(percent) => {
                self.count(percent);
                self.next = self.fleet.next_model();
            }
            Step::TakeEffect => {
                if let Some(mut next) = self.next.take() {
                    fleet.set_model(&mut next);
                }
            }
            Step::Prepare | Step::Ask(..) => {}
        }
    }

    /// Counts one more pod that asks for this much of a GPU in percent.
    fn count(&mut self, percent: u32) {
        let gpus = (&ratio(percent)).into();
        let host = HostAmounts::default();
        self.fleet.workload_mut().add(PodProfile { gpus, host });
    }
}

proptest! {
    #[test]
    fn cached_results_are_right(steps in prop::collection::vec(step(), 1..80)) {
        // The second fleet computes nothing by a model before it takes effect.
        let mut fleets = [Changed::new(), Changed::new()];
        let kinds: [ShareRequest; 3] = [units(30), units(70), ratio(100)];
        for step in steps {
            for fleet in &mut fleets {
                fleet.take(&step);
            }
            match step {
                Step::Prepare => if let Some(next) = &mut fleets[0].next { next.prepare(&fleets[0].fleet); }
                Step::Ask(kind, pod, node) => {
                    let (uid, policies) = (format!("p{pod}"), Policies { node, ..Policies::default() });
                    let (request, hints) = (&kinds[kind], Hints::RespectOthers(&uid));
                    let [fleet, plain] = fleets.each_ref().map(|changed| &changed.fleet);
                    let mut batch = fleet.evaluation(request, policies, hints);
                    for id in fleet.nodes().map(placement::NodeView::id) {
                        let expected = plain.fit(id, request, hints).map(|()| plain.score(id, request, policies, hints));
                        prop_assert_eq!(batch.evaluate(id), expected);
                    }
                }
                _ => {}
            }
        }
    }
}

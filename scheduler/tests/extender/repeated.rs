//! Repeated requests: verdicts that the engine remembers change no result.

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::objects::{device, node, placed_by_old_extender, units};
use crate::world::{HINT, World};

/// Neither sorted nor of equal length.
const NODES: [&str; 7] = ["node-b", "c", "a", "node-aa", "node-a", "d", "bare"];
/// A node without devices.
const BARE: usize = 6;
/// The memory of each of a node's two GPUs, in MiB.
const MIB: u64 = 100;

/// An event.
#[derive(Clone, Debug)]
enum Step {
    /// A pod is bound to a GPU of a node.
    Place {
        node: usize,
        gpu: u64,
        mib: u64,
    },
    /// The first bound pod is deleted.
    Leave,
    NodeGone(usize),
    /// A node is created or changed, with or without a `PreferNoSchedule` taint.
    Node {
        at: usize,
        is_avoided: bool,
    },
    /// A filter for a pod, with these nodes.
    Ask {
        mib: u64,
        order: Vec<usize>,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let mib = prop_oneof![Just(10_u64), Just(40), Just(100), Just(150)];
    let order = Just((0..NODES.len()).collect::<Vec<_>>()).prop_shuffle();
    let order = (order, 1..=NODES.len()).prop_map(|(order, n)| order.into_iter().take(n).collect());
    let step = prop_oneof![
        4 => (0..NODES.len(), 0..2_u64, 1..60_u64).prop_map(|(node, gpu, mib)| Step::Place { node, gpu, mib }),
        1 => Just(Step::Leave),
        1 => (0..NODES.len()).prop_map(Step::NodeGone),
        1 => (0..NODES.len(), any::<bool>()).prop_map(|(at, is_avoided)| Step::Node { at, is_avoided }),
        6 => (mib, order).prop_map(|(mib, order)| Step::Ask { mib, order }),
    ];
    vec(step, 1..40)
}

fn some_node(at: usize, is_avoided: bool) -> Value {
    let mut node = node(NODES[at], "MiB");
    if is_avoided {
        node["spec"]["taints"] = json!([{"key": "spot", "value": "yes", "effect": "PreferNoSchedule"}]);
    }
    if at == BARE {
        node["status"] = json!({});
    }
    node
}

/// A scheduler, and the state of the cluster.
struct Run {
    world: World,
    nodes: Vec<Value>,
    gone: BTreeSet<usize>,
    /// Bound pods, each with its node, its GPU and its MiB.
    placed: Vec<(Value, usize, u64, u64)>,
    n_pods: usize,
}

impl Run {
    fn new() -> Self {
        let world = World::new();
        let nodes: Vec<Value> = (0..NODES.len()).map(|at| some_node(at, false)).collect();
        for node in &nodes {
            world.apply_node(node);
        }
        for name in &NODES[..BARE] {
            world.apply_device(&device(name, &[MIB, MIB]));
        }
        Self {
            world,
            nodes,
            gone: BTreeSet::new(),
            placed: Vec::new(),
            n_pods: 0,
        }
    }

    fn pod(&mut self, mib: u64) -> Value {
        self.n_pods += 1;
        units(&format!("p{}", self.n_pods), mib)
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Place { node, gpu, mib } => {
                let there = self
                    .placed
                    .iter()
                    .filter(|(_, at, on, _)| (*at, *on) == (node, gpu));
                if there.map(|(.., held)| held).sum::<u64>() + mib <= MIB {
                    let pod = placed_by_old_extender(self.pod(mib), NODES[node], gpu, mib, MIB);
                    self.world.apply_pod(&pod);
                    self.placed.push((pod, node, gpu, mib));
                }
            }
            Step::Leave if self.placed.is_empty() => {}
            Step::Leave => self.world.delete_pod(&self.placed.remove(0).0),
            Step::NodeGone(at) => {
                self.gone.insert(at);
                self.world.delete_node(&self.nodes[at]);
            }
            Step::Node { at, is_avoided } => {
                self.gone.remove(&at);
                self.nodes[at] = some_node(at, is_avoided);
                self.world.apply_node(&self.nodes[at]);
            }
            Step::Ask { mib, order } => self.compare(mib, &order).await,
        }
    }

    /// Filters by names, again by names, and by whole nodes if all of them exist.
    async fn compare(&mut self, mib: u64, order: &[usize]) {
        let forms = if order.iter().any(|at| self.gone.contains(at)) {
            vec![true, true]
        } else {
            vec![true, true, false]
        };
        let names: Vec<&str> = order.iter().map(|at| NODES[*at]).collect();
        let whole: Vec<Value> = order.iter().map(|at| self.nodes[*at].clone()).collect();
        let mut answers = Vec::new();
        for by_names in forms {
            let pod = self.pod(mib);
            let mut answer = if by_names {
                self.world.filter(&pod, &names).await
            } else {
                self.world.filter_whole(&pod, &whole).await
            };
            if !by_names {
                let names = answer["Nodes"]["items"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|node| node["metadata"]["name"].clone());
                answer["NodeNames"] = names.collect();
                answer["Nodes"] = Value::Null;
            }
            answers.push(answer);
            // The hint of the pod expires. No watch shows the pod, since a pod that is seen changes the workload model.
            tokio::time::advance(2 * HINT).await;
        }
        assert!(
            answers.windows(2).all(|pair| pair[0] == pair[1]),
            "by names, by names again, by whole nodes: {answers:#?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn cached_evaluations_change_no_result(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut run = Run::new();
            for step in steps {
                run.step(step).await;
            }
        });
    }
}

/// A node that no watch has shown yet may have room, so every result reports it as resolvable.
#[tokio::test(start_paused = true)]
async fn unknown_nodes_are_resolvable_each_time() {
    let world = World::new().with_node("known", &[MIB, MIB]);
    world.apply_pod(&placed_by_old_extender(units("holder", 10), "new", 0, 10, MIB));
    for nth in 0..3 {
        let answer = world
            .filter(&units(&format!("large-{nth}"), 150), &["known", "new"])
            .await;
        let keys = |field: &str| {
            answer[field]
                .as_object()
                .unwrap()
                .keys()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (keys("FailedNodes"), keys("FailedAndUnresolvableNodes")),
            (vec!["new".to_owned()], vec!["known".to_owned()])
        );
    }
}

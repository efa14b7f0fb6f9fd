//! Model-based tests: in every sequence of watch events and binds the engine's invariants hold, and a restarted scheduler
//! and sees the final objects only holds the same as one that saw it all.

use std::collections::BTreeMap;

use placement::Violation;
use proptest::collection::vec;
use proptest::prelude::*;
use proto::node::Node;
use proto::pod::Pod;
use scheduler::bind::{PodBinding, PodId};
use scheduler::index::{Assumed, Index, RawDevice};
use scheduler::metrics::AllocationSnapshot;
use scheduler::offline;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use crate::objects::{
    annotated, device, gpu, node, old_node, on, phase, placed_by_old_extender, pod, shared, units,
};

pub(crate) const N_NODES: usize = 3;
const N_PODS: usize = 6;

/// One thing that happens.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// A node is put or changed: which of some forms it takes.
    Node(usize, usize),
    NodeGone(usize),
    Device(usize, usize),
    DeviceGone(usize),
    /// A pod is created: what it asks for.
    Create(usize, usize),
    /// This scheduler decides a pod's devices, if there is room.
    Assume(usize, usize),
    /// The decision is written.
    Write(usize),
    /// The API server refuses the decision.
    Lose(usize),
    /// The watch shows the pod.
    See(usize),
    /// Another scheduler binds a pod, with a record of this form.
    Foreign(usize, usize, usize),
    End(usize),
    Delete(usize),
    /// Watches list all objects again.
    Relist,
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => (0..N_NODES, 0..4_usize).prop_map(|(node, form)| Step::Node(node, form)),
        1 => (0..N_NODES).prop_map(Step::NodeGone),
        2 => (0..N_NODES, 0..4_usize).prop_map(|(node, form)| Step::Device(node, form)),
        1 => (0..N_NODES).prop_map(Step::DeviceGone),
        4 => (0..N_PODS, 0..6_usize).prop_map(|(pod, form)| Step::Create(pod, form)),
        6 => (0..N_PODS, 0..N_NODES).prop_map(|(pod, node)| Step::Assume(pod, node)),
        4 => (0..N_PODS).prop_map(Step::Write),
        1 => (0..N_PODS).prop_map(Step::Lose),
        3 => (0..N_PODS).prop_map(Step::See),
        2 => (0..N_PODS, 0..N_NODES, 0..5_usize).prop_map(|(pod, node, form)| Step::Foreign(pod, node, form)),
        1 => (0..N_PODS).prop_map(Step::End),
        1 => (0..N_PODS).prop_map(Step::Delete),
        1 => Just(Step::Relist),
    ];
    vec(step, 1..60)
}

pub(crate) fn node_name(at: usize) -> String {
    format!("n{at}")
}

fn some_node(at: usize, form: usize) -> Value {
    let name = node_name(at);
    match form {
        0 => node(&name, "MiB"),
        1 => node(&name, "256Mi"),
        2 => node(&name, "Mib"),
        _ => old_node(&name, 2, 200),
    }
}

fn some_device(at: usize, form: usize) -> Value {
    let name = node_name(at);
    match form {
        0 => device(&name, &[1000, 1000]),
        1 => device(&name, &[1000, 2000, 500]),
        2 => {
            json!({"metadata": {"name": name}, "spec": {"devices": [gpu(&name, 1, 1000), {"type": "gpu", "id": 7}]}})
        }
        _ => json!({"metadata": {"name": name}, "spec": {"devices": "none"}}),
    }
}

fn some_pod(at: usize, generation: usize, form: usize) -> Value {
    let name = format!("p{at}");
    let mut created = match form {
        0 => units(&name, 100),
        1 => units(&name, 600),
        2 => shared(&name, 2, 900),
        3 => pod(
            &name,
            &json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": "33", "koordinator.sh/gpu-core": "60"}),
        ),
        4 => pod(&name, &json!({"koordinator.sh/gpu-memory": "1Gi"})),
        _ => pod(&name, &json!({"cpu": "1"})),
    };
    created["metadata"]["uid"] = format!("uid-{at}-{generation}").into();
    created
}

fn bound_by_others(pod: Value, node: &str, form: usize) -> Value {
    match form {
        0 => on(pod, node),
        1 => placed_by_old_extender(pod, node, 1, 100, 1000),
        2 => annotated(on(pod, node), "scheduling.koordinator.sh/device-allocated", "{"),
        3 => placed_by_old_extender(pod, node, 9, 100, 1000),
        _ => annotated(
            on(pod, node),
            "scheduling.koordinator.sh/device-allocated",
            r#"{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-memory":"300Mi"},"id":"GPU-n0-0"}]}"#,
        ),
    }
}

/// The objects of the API server, and a scheduler that watches them.
pub(crate) struct Run {
    nodes: BTreeMap<usize, Value>,
    devices: BTreeMap<usize, Value>,
    pub(crate) pods: BTreeMap<usize, Value>,
    n_created: usize,
    /// Decisions that the watch has not shown yet.
    open: BTreeMap<usize, Decision>,
    pub(crate) index: Index,
}

/// The decision for a pod.
struct Decision {
    order: PodBinding,
    assumed_at: u64,
    written: bool,
}

fn object<K: serde::de::DeserializeOwned>(object: &Value) -> K {
    serde_json::from_value(object.clone()).unwrap()
}

impl Run {
    pub(crate) fn new() -> Self {
        let none = std::iter::empty::<Value>;
        let index = offline::index(none(), none(), none());
        Self {
            nodes: BTreeMap::new(),
            devices: BTreeMap::new(),
            pods: BTreeMap::new(),
            n_created: 0,
            open: BTreeMap::new(),
            index,
        }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        match *step {
            Step::Node(at, form) => {
                self.nodes.insert(at, some_node(at, form));
                self.index.apply(object::<Node>(&self.nodes[&at]));
            }
            Step::NodeGone(at) => self
                .nodes
                .remove(&at)
                .iter()
                .for_each(|gone| self.index.delete(&object::<Node>(gone))),
            Step::Device(at, form) => {
                self.devices.insert(at, some_device(at, form));
                self.index.apply(object::<RawDevice>(&self.devices[&at]));
            }
            Step::DeviceGone(at) => self
                .devices
                .remove(&at)
                .iter()
                .for_each(|gone| self.index.delete(&object::<RawDevice>(gone))),
            Step::Create(at, form) => {
                self.delete(at);
                self.n_created += 1;
                self.pods.insert(at, some_pod(at, self.n_created, form));
                self.show(at);
            }
            Step::Assume(at, node) => self.assume(at, &node_name(node)),
            Step::Write(at) => self.write(at),
            Step::Lose(at) => self.lose(at),
            Step::See(at) => self.show(at),
            Step::Foreign(at, node, form) => {
                let Some(pod) = self
                    .pods
                    .get_mut(&at)
                    .filter(|pod| pod["spec"]["nodeName"].is_null())
                else {
                    return;
                };
                *pod = bound_by_others(pod.clone(), &node_name(node), form);
                self.show(at);
            }
            Step::End(at) => {
                let Some(pod) = self.pods.get_mut(&at) else { return };
                *pod = phase(pod.clone(), "Succeeded");
                self.show(at);
            }
            Step::Delete(at) => self.delete(at),
            Step::Relist => self.relist(),
        }
    }

    fn show(&mut self, at: usize) {
        let Some(pod) = self.pods.get(&at) else { return };
        self.index.apply(object::<Pod>(pod));
        if !pod["spec"]["nodeName"].is_null() || pod["status"]["phase"] != "Pending" {
            self.open.remove(&at);
        }
    }

    fn delete(&mut self, at: usize) {
        if let Some(gone) = self.pods.remove(&at) {
            self.open.remove(&at);
            self.index.delete(&object::<Pod>(&gone));
        }
    }

    fn assume(&mut self, at: usize, node: &str) {
        let Some(pod) = self
            .pods
            .get(&at)
            .filter(|pod| pod["status"]["phase"] == "Pending")
        else {
            return;
        };
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let Some(facts) = self.index.pod(&uid).cloned() else {
            return;
        };
        let id = PodId {
            namespace: "default".to_owned(),
            name: facts.name.to_string(),
            uid,
        };
        let now = std::time::Instant::now();
        let Ok(Assumed::Write {
            binding: order,
            assumed_at,
            ..
        }) = self.index.assume(&id, &facts, node, 1, now)
        else {
            return;
        };
        self.open.entry(at).or_insert(Decision {
            order,
            assumed_at,
            written: false,
        });
    }

    fn write(&mut self, at: usize) {
        let Some(decision) = self.open.get_mut(&at).filter(|decision| !decision.written) else {
            return;
        };
        decision.written = true;
        let uid = &decision.order.pod.uid;
        self.index
            .confirm(uid, decision.assumed_at, std::time::Instant::now());
        write_to(self.pods.get_mut(&at).unwrap(), &decision.order);
    }

    fn lose(&mut self, at: usize) {
        if let Some(decision) = self.open.get(&at).filter(|decision| !decision.written) {
            let uid = &decision.order.pod.uid;
            self.index.forget(uid, decision.assumed_at);
            self.open.remove(&at);
        }
    }

    fn bind(&mut self, at: usize, node: usize) {
        for step in [Step::Assume(at, node), Step::Write(at), Step::See(at)] {
            self.step(&step);
        }
    }

    fn relist(&mut self) {
        relist::<Node>(&mut self.index, &self.nodes);
        relist::<RawDevice>(&mut self.index, &self.devices);
        relist::<Pod>(&mut self.index, &self.pods);
        self.open.retain(|_, decision| !decision.written);
    }

    /// Broken invariants, except that a device is oversubscribed: another scheduler or a smaller inventory may cause that.
    fn violations(&self) -> Vec<Violation> {
        let ours = |violation: &Violation| !matches!(violation, Violation::Oversubscribed { .. });
        self.index.fleet().check().into_iter().filter(ours).collect()
    }

    /// A scheduler that starts once everything is written that was decided.
    fn restarted(&self) -> Index {
        let all =
            |objects: &BTreeMap<usize, Value>| objects.values().cloned().collect::<Vec<_>>().into_iter();
        let mut pods = self.pods.clone();
        for (at, decision) in &self.open {
            write_to(pods.get_mut(at).unwrap(), &decision.order);
        }
        offline::index(all(&self.nodes), all(&self.devices), all(&pods))
    }
}

fn write_to(pod: &mut Value, order: &PodBinding) {
    pod["spec"]["nodeName"] = order.node.as_str().into();
    pod["metadata"]["annotations"] = json!(order.annotations);
}

fn relist<K: serde::de::DeserializeOwned>(index: &mut Index, objects: &BTreeMap<usize, Value>)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    for value in objects.values() {
        index.apply(object::<K>(value));
    }
    ObjectStore::<K>::end_list(index);
}

/// An index's GPUs without stranded memory, which depends on the pods that this process has seen come.
fn counted(index: &Index) -> AllocationSnapshot {
    let mut snapshot = AllocationSnapshot::of(index);
    for gpu in &mut snapshot.gpus {
        gpu.stranded = 0;
    }
    snapshot
}

/// Everything that an index shows of its state.
fn picture(index: &Index) -> impl PartialEq + std::fmt::Debug + use<> {
    let nodes: Vec<_> = (0..N_NODES).map(|at| index.show_node(&node_name(at))).collect();
    (index.snapshot(), counted(index), nodes)
}

fn ensure_restart_counts_the_same(steps: &[Step]) -> Result<(), TestCaseError> {
    let mut run = Run::new();
    for step in steps {
        run.step(step);
        prop_assert_eq!(run.violations(), Vec::new());
        let restarted = run.restarted();
        prop_assert_eq!(
            counted(&run.index).gpus,
            counted(&restarted).gpus,
            "a decision is charged as its written record is"
        );
        if run.open.is_empty() {
            prop_assert_eq!(picture(&run.index), picture(&restarted));
        }
    }
    Ok(())
}

/// Without a node there is no inventory that the record, which names a GPU of another node, contradicts.
#[test]
fn a_pod_with_a_record_of_another_node_is_charged_again_when_its_node_goes() {
    ensure_restart_counts_the_same(&[
        Step::Node(1, 3),
        Step::Create(3, 5),
        Step::Foreign(3, 1, 4),
        Step::NodeGone(1),
    ])
    .unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_restarted_scheduler_counts_the_same(steps in steps()) {
        ensure_restart_counts_the_same(&steps)?;
    }

        #[test]
    fn own_binds_never_oversubscribe(asks in vec((0..4_usize, 0..2_usize), 1..40)) {
        let mut run = Run::new();
        run.step(&Step::Node(0, 0));
        run.step(&Step::Device(0, 1));
        run.step(&Step::Node(1, 1));
        run.step(&Step::Device(1, 0));
        for (at, (form, node)) in asks.into_iter().enumerate() {
            run.step(&Step::Create(at, form));
            run.bind(at, node);
            prop_assert_eq!(run.index.fleet().check(), Vec::new());
            for gpu in AllocationSnapshot::of(&run.index).gpus {
                prop_assert!(gpu.used <= gpu.total, "{gpu:?}");
            }
        }
    }
}

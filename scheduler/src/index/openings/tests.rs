use std::time::{Duration, Instant};

use placement::Policies;
use proto::node::Node;
use proto::pod::Pod;
use proto::resource::{ISOLATION_PROVIDER, ResourceNames};
use rstest::rstest;
use serde_json::{Value, json};

use super::super::{Assumed, Attempt, Index, RawDevice, hints};
use super::Openings;
use crate::accounting::PodFacts;
use crate::bind::{PodId, PodLookup};
use crate::watch::ObjectStore;

const HINT: Duration = Duration::from_secs(30);

/// One node with one GPU of 100 MiB, and the time at which a test begins.
struct World {
    index: Index,
    began: Instant,
}

/// An object from JSON.
fn of<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn node() -> Node {
    let amounts = json!({"aliyun.com/gpu-mem": "100", "aliyun.com/gpu-count": "1"});
    let metadata = json!({"name": "n1", "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}});
    of(json!({"metadata": metadata, "status": {"capacity": amounts, "allocatable": amounts}}))
}

/// The node with an isolation provider in its label.
fn isolating_node(provider: &str) -> Node {
    let mut node = node();
    let labels = node.metadata.labels.get_or_insert_default();
    labels.insert(ISOLATION_PROVIDER.to_owned(), provider.to_owned());
    node
}

fn device(health: bool) -> RawDevice {
    let resources = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "100Mi", "koordinator.sh/gpu-memory-ratio": "100"});
    let gpu = json!({"type": "gpu", "id": "GPU-0", "minor": 0, "health": health, "resources": resources});
    of(json!({"metadata": {"name": "n1"}, "spec": {"devices": [gpu]}}))
}

fn pod(name: &str, more: &Value) -> Value {
    let containers = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "80"}}}]);
    let mut pod = json!({"metadata": {"name": name, "namespace": "d", "uid": name, "resourceVersion": "5"}, "spec": {"containers": containers}});
    let (Some(fields), Some(more)) = (pod.as_object_mut(), more.as_object()) else {
        panic!("{more}")
    };
    fields.extend(more.clone());
    pod
}

/// The pod bound to this node, with a record for GPU 0.
fn on(name: &str, node: &str) -> Pod {
    let mut pod = pod(name, &json!({}));
    pod["spec"]["nodeName"] = node.into();
    pod["metadata"]["annotations"] = json!({"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "80"});
    of(pod)
}

impl World {
    fn new() -> Self {
        let mut index = Index::new(ResourceNames::default(), Policies::default(), HINT);
        list::<Node>(&mut index, vec![node()]);
        list::<RawDevice>(&mut index, vec![device(true)]);
        list::<Pod>(&mut index, Vec::new());
        Self {
            index,
            began: Instant::now(),
        }
    }

    /// Keeps room for a pod, as a filter that answers one node does.
    fn hint(&mut self, name: &str) {
        let pod: Pod = of(pod(name, &json!({})));
        let facts = PodFacts::of(&pod, self.index.names()).unwrap();
        let ask = self.index.demand(name, &facts).unwrap().unwrap();
        let (node, attempt) = (self.index.fleet().node_id("n1").unwrap(), Attempt::of(&pod));
        hints::hint(&mut self.index, node, &ask, &attempt, self.began);
    }

    fn assume(&mut self, name: &str) -> u64 {
        let facts = PodFacts::of(&of(pod(name, &json!({}))), self.index.names()).unwrap();
        let id = PodId {
            namespace: "d".to_owned(),
            name: name.to_owned(),
            uid: name.to_owned(),
        };
        match self.index.assume(&id, &facts, "n1", 1, self.began).unwrap() {
            Assumed::Write { assumed_at, .. } => assumed_at,
            Assumed::AlreadyBound => panic!("not bound yet"),
        }
    }

    fn settle(&mut self, name: &str, found: &PodLookup) {
        let state = self.index.assumption_state(name).unwrap();
        assert!(self.index.settle(name, state, found, self.began + HINT * 10));
    }
}

fn list<K>(index: &mut Index, objects: Vec<K>)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    for object in objects {
        index.apply(object);
    }
    ObjectStore::<K>::end_list(index);
}

type Act = fn(&mut World);

fn nothing(_: &mut World) {}

/// Room is kept for pod `p`.
fn kept(world: &mut World) {
    world.hint("p");
}

/// Pod `p` is bound and holds the GPU.
fn held(world: &mut World) {
    world.index.apply(on("p", "n1"));
}

/// Pod `p` is assumed, and its binding is written.
fn assumed(world: &mut World) {
    let assumed_at = world.assume("p");
    world.index.confirm("p", assumed_at, world.began);
}

/// Each way in which room opens, after the state that `before` makes. It opens silently if kube-scheduler sees no event of it.
#[rstest]
#[case::a_hint_runs_out(kept, |world: &mut World| world.index.tick(world.began + HINT), true)]
#[case::a_rest_ends(|world: &mut World| { kept(world); world.index.tick(world.began + HINT) }, |world: &mut World| world.index.tick(world.began + HINT * 2), true)]
#[case::an_attempt_fails(kept, |world: &mut World| {
    let conditions = json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulerError", "message": "m"}]);
    let mut failed = pod("p", &json!({"status": {"conditions": conditions}}));
    failed["metadata"]["resourceVersion"] = "6".into();
    world.index.apply(of::<Pod>(failed));
}, true)]
#[case::a_filter_answers_otherwise(kept, |world: &mut World| world.index.unhint("p"), true)]
#[case::a_pod_with_a_hint_is_deleted(
    |world: &mut World| { world.index.apply(of::<Pod>(pod("p", &json!({})))); kept(world) },
    |world: &mut World| world.index.delete(&of::<Pod>(pod("p", &json!({})))), true)]
#[case::it_is_bound_elsewhere(kept, |world: &mut World| world.index.apply(on("p", "n2")), true)]
#[case::a_binding_was_not_written(assumed, |world: &mut World| world.settle("p", &PodLookup::Unbound), true)]
#[case::its_pod_is_gone(assumed, |world: &mut World| world.settle("p", &PodLookup::Gone), true)]
#[case::a_device_is_healthy_again(|world: &mut World| world.index.apply(device(false)), |world: &mut World| world.index.apply(device(true)), true)]
#[case::a_list_leaves_a_pod_out(held, |world: &mut World| list::<Pod>(&mut world.index, Vec::new()), true)]
#[case::a_bound_pod_is_deleted(held, |world: &mut World| world.index.delete(&on("p", "n1")), false)]
#[case::a_node_comes(|world: &mut World| world.index.delete(&node()), |world: &mut World| world.index.apply(node()), false)]
#[case::a_node_gets_an_isolation_provider(nothing, |world: &mut World| world.index.apply(isolating_node("HAMi-core")), false)]
#[case::it_gets_another(|world: &mut World| world.index.apply(isolating_node("other")), |world: &mut World| world.index.apply(isolating_node("HAMi-core")), false)]
fn room_opens(#[case] before: Act, #[case] act: Act, #[case] is_silent: bool) {
    let mut world = World::new();
    before(&mut world);
    let Openings { all, silent } = world.index.openings();
    act(&mut world);
    let after = world.index.openings();
    assert!(after.all > all, "{after:?}");
    assert_eq!(after.silent > silent, is_silent, "{after:?}");
}

/// Changes that open no room, or none that kube-scheduler misses.
#[rstest]
#[case::a_pod_is_bound_where_room_was_kept(kept, |world: &mut World| world.index.apply(on("p", "n1")))]
#[case::and_assumed_there(kept, |world: &mut World| { world.assume("p"); })]
#[case::the_same_device_again(nothing, |world: &mut World| world.index.apply(device(true)))]
#[case::a_list_shows_what_was_there(held, |world: &mut World| list::<Pod>(&mut world.index, vec![on("p", "n1")]))]
#[case::a_hint_lasts(kept, |world: &mut World| world.index.tick(world.began + HINT / 2))]
#[case::a_binding_was_written(assumed, |world: &mut World| {
    let annotations = world.index.cluster.pods["p"].assumption.as_ref().unwrap().binding.annotations.clone();
    world.settle("p", &PodLookup::Bound { node: "n1".to_owned(), annotations });
})]
fn no_room_opens_silently(#[case] before: Act, #[case] act: Act) {
    let mut world = World::new();
    before(&mut world);
    let before = world.index.openings().silent;
    act(&mut world);
    assert_eq!(world.index.openings().silent, before);
}

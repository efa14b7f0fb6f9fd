//! GPUs that are gone from their node, or replaced by others, while a pod's record names them: the pod's amount stays counted.
//!
//! On a node whose plugin checks starts, no container starts on a GPU without room: the amount counts once. Elsewhere the pod
//! may be on any GPU, and its amount counts on all.

use proto::read_api::Node;
use rstest::rstest;
use scheduler::read_api::{explain, state_of};
use serde_json::{Value, json};

use crate::objects::{annotated, device, gpu, node, on, placed_by_old_extender, shared, units};
use crate::world::World;

const RECORD: &str = "scheduling.koordinator.sh/device-allocated";

/// A node without the GPUs of the records below, as far as `gpus` lacks them.
fn reported(gpus: &[Value], checks_starts: bool) -> Value {
    let mut object = device("n1", &[]);
    object["spec"]["devices"] = gpus.into();
    if checks_starts {
        object["metadata"]["annotations"]["gpushare/pods-without-devices"] = "[]".into();
    }
    object
}

/// Minors 0 to 2 with 1,000 MiB each.
fn three() -> [Value; 3] {
    [0, 1, 2].map(|minor| gpu("n1", minor, 1000))
}

/// Another GPU with the minor number 1.
fn replacement() -> Value {
    let mut other = gpu("n1", 1, 1000);
    other["id"] = "GPU-new".into();
    other
}

/// A Koordinator pod with 600 MiB on each of these GPUs.
fn by_uuid(minors: &[usize]) -> Value {
    let part = |minor: &usize| json!({"minor": minor, "id": format!("GPU-n1-{minor}"), "resources": {"koordinator.sh/gpu-memory": "600Mi"}});
    let parts: Vec<Value> = minors.iter().map(part).collect();
    let n = u64::try_from(minors.len()).unwrap();
    let pod = on(shared("p", n, 600 * n), "n1");
    annotated(pod, RECORD, &json!({ "gpu": parts }).to_string())
}

/// A pod of the old extender with 600 MiB, whose record has the minor alone.
fn by_minor(minor: u64) -> Value {
    placed_by_old_extender(units("p", 600), "n1", minor, 600, 1000)
}

/// A pod of ours with 600 MiB: its record has the UUID, and the minor for tools of the old extender.
fn by_both(minor: u64) -> Value {
    let record = json!({"gpu": [{"minor": minor, "id": format!("GPU-n1-{minor}"), "resources": {"koordinator.sh/gpu-memory": "600Mi"}}]});
    annotated(by_minor(minor), RECORD, &record.to_string())
}

async fn shown(world: &World) -> Node {
    state_of(world.index.clone()).await.nodes.remove(0)
}

/// The counted MiB of each GPU, and the GPUs that its holders' records name in vain.
fn counted(node: &Node) -> (Vec<u64>, Vec<String>) {
    let mut gone: Vec<String> = Vec::new();
    for gpu in &node.gpus {
        gone.extend(gpu.holders.iter().flat_map(|holder| holder.gone.clone()));
    }
    gone.dedup();
    (
        node.gpus.iter().map(|gpu| gpu.memory.allocated >> 20).collect(),
        gone,
    )
}

#[rstest]
// Gone, and nothing in its place.
#[case::gone_by_uuid(by_uuid(&[1]), &[0, 2], false, ([600, 0], [600, 600]), &["GPU-n1-1"])]
#[case::gone_by_both(by_both(1), &[0, 2], false, ([600, 0], [600, 600]), &["GPU-n1-1"])]
#[case::gone_by_minor(by_minor(1), &[0, 2], false, ([600, 0], [600, 600]), &["minor 1"])]
// Another GPU has its minor: a UUID is not mistaken for it, and a record that has the minor alone means the new one.
#[case::replaced_by_uuid(by_uuid(&[1]), &[0], true, ([600, 0], [600, 600]), &["GPU-n1-1"])]
#[case::replaced_by_both(by_both(1), &[0], true, ([600, 0], [600, 600]), &["GPU-n1-1"])]
#[case::replaced_by_minor(by_minor(1), &[0], true, ([0, 600], [0, 600]), &[])]
// Of two GPUs the one that is left stays charged: the container still has it.
#[case::one_of_two(by_uuid(&[1, 2]), &[0, 2], false, ([600, 600], [600, 1200]), &["GPU-n1-1"])]
#[tokio::test]
async fn the_amount_of_a_gpu_that_is_gone_stays_counted(
    #[case] pod: Value,
    #[case] left: &[usize],
    #[case] is_replaced: bool,
    #[case] (checked, unchecked): ([u64; 2], [u64; 2]),
    #[case] gone: &[&str],
) {
    for (checks_starts, expected) in [(true, checked), (false, unchecked)] {
        let world = World::new();
        world.apply_node(&node("n1", "MiB"));
        world.apply_device(&reported(&three(), checks_starts));
        world.apply_pod(&pod);
        assert_eq!(
            counted(&shown(&world).await).1,
            [""; 0],
            "all of its GPUs are there"
        );
        let mut gpus: Vec<Value> = left.iter().map(|minor| gpu("n1", *minor, 1000)).collect();
        gpus.extend(is_replaced.then(replacement));
        world.apply_device(&reported(&gpus, checks_starts));
        let (mib, found) = counted(&shown(&world).await);
        assert_eq!(
            (mib, found),
            (expected.to_vec(), gone.iter().map(ToString::to_string).collect())
        );
        let explained = explain(&world.index, "default", "p", false).unwrap();
        assert_eq!(explained.gone, gone, "explain agrees");
        let on_gpus = explained.counted_on.values().sum::<u64>() >> 20;
        assert_eq!(on_gpus, if gone.is_empty() { 0 } else { expected.iter().sum() });
        // The GPU is back: nothing of the doubt is left.
        world.apply_device(&reported(&three(), checks_starts));
        assert_eq!(counted(&shown(&world).await).1, [""; 0]);
    }
}

/// The GPU that a running container still has must not look free: the pending part goes where the most room is, and that may be
/// elsewhere.
#[tokio::test]
async fn a_gpu_that_is_left_to_a_pod_is_offered_to_no_other() {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    let four: Vec<Value> = (0..4).map(|minor| gpu("n1", minor, 1000)).collect();
    world.apply_device(&reported(&four, true));
    world.apply_pod(&by_uuid(&[0, 1]));
    // A second pod on GPU 0, so that the other GPUs have more room.
    let beside = on(shared("beside", 1, 300), "n1");
    let record =
        json!({"gpu": [{"minor": 0, "id": "GPU-n1-0", "resources": {"koordinator.sh/gpu-memory": "300Mi"}}]});
    world.apply_pod(&annotated(beside, RECORD, &record.to_string()));
    world.apply_device(&reported(
        &[four[0].clone(), four[2].clone(), four[3].clone()],
        true,
    ));
    assert_eq!(counted(&shown(&world).await).0, [900, 600, 0]);
    assert_eq!(world.fitting(&shared("new", 3, 600), &["n1"]).await, [""; 0]);
}

/// The same for whole GPUs of the vendor's resource that our plugin serves.
#[tokio::test]
async fn whole_gpus_that_are_left_stay_whole() {
    let served = |gpus: &[Value]| {
        let mut object = reported(gpus, true);
        object["metadata"]["labels"]["gpushare/serves-vendor"] = "true".into();
        object
    };
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    world.apply_device(&served(&three()));
    let part = |minor: u64| json!({"minor": minor, "id": format!("GPU-n1-{minor}"), "resources": {"koordinator.sh/gpu-memory-ratio": "100"}});
    let pod = on(crate::objects::pod("p", &json!({"nvidia.com/gpu": "2"})), "n1");
    let record = json!({"gpu": [part(0), part(1)]});
    world.apply_pod(&annotated(pod, RECORD, &record.to_string()));
    assert_eq!(counted(&shown(&world).await), (vec![1000, 1000, 0], vec![]));
    let [first, _, last] = three();
    world.apply_device(&served(&[first, last]));
    assert_eq!(
        counted(&shown(&world).await),
        (vec![1000, 1000], vec!["GPU-n1-1".to_owned()])
    );
}

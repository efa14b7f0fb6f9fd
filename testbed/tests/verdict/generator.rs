//! Random clusters: few values, so that pods and nodes meet often.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use super::cluster::{Case, OURS, World, name};

mod nodes;
mod pods;

/// Random decisions.
struct Dice<'a> {
    rng: &'a mut StdRng,
    /// True if the API server has to accept the objects.
    is_real: bool,
}

impl Dice<'_> {
    /// True with this probability in percent.
    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100) < percent
    }

    /// From 0 to `most`.
    fn up_to(&mut self, most: u64) -> u64 {
        self.rng.random_range(0..=most)
    }

    fn pick<T: Copy>(&mut self, choice: &[T]) -> T {
        *choice.choose(self.rng).unwrap()
    }
}

/// A random cluster.
pub(crate) fn case(rng: &mut StdRng, is_real: bool) -> Case {
    let mut dice = Dice { rng, is_real };
    let (mut nodes, mut devices) = (Vec::new(), Vec::new());
    for number in 0..=dice.up_to(5) {
        let (node, device) = nodes::node(&mut dice, &format!("n{number}"));
        nodes.push(node);
        devices.extend(device);
    }
    if dice.chance(5) {
        // A node that is gone, while its Device object is not.
        devices.extend(nodes::node(&mut dice, "gone").1);
    }
    let mut case = Case {
        objects: json!({"nodes": nodes, "devices": devices, "pods": []}),
        replicas: u32::try_from(1 + dice.up_to(11)).unwrap(),
    };
    let mut bound = bound_pods(&mut dice, &case);
    for number in 0..=dice.up_to(2) {
        let mut pod = pods::pod(&mut dice, &format!("waiting-{number}"));
        let scheduler = if dice.chance(90) {
            OURS
        } else {
            "another-scheduler"
        };
        pod["spec"]["schedulerName"] = scheduler.into();
        bound.push(pod);
    }
    case.objects["pods"] = bound.into();
    case
}

/// Pods that are on nodes: placed by the extender, by other schedulers or by an old extender, and with records that are wrong.
fn bound_pods(dice: &mut Dice<'_>, case: &Case) -> Vec<Value> {
    let mut world = World::of(case);
    let mut bound = Vec::new();
    let n_pods = dice.up_to(4 * u64::try_from(case.list("nodes").len()).unwrap());
    for number in 0..n_pods {
        let mut pod = pods::pod(dice, &format!("p{number}"));
        let node = dice.pick(&case.list("nodes").iter().map(name).collect::<Vec<_>>());
        pod["status"]["phase"] = dice.pick(&["Running", "Running", "Pending"]).into();
        let kind = dice.up_to(99);
        let placed = match kind {
            0..70 => {
                world.show(&pod);
                world.bind(&pod, node)
            }
            _ => Ok(placed_by_others(dice, pod.clone(), node, kind)),
        };
        // A pod that does not fit is often one of another node.
        let Ok(mut placed) = placed else { continue };
        if dice.chance(8) {
            placed["status"]["phase"] = dice.pick(&["Succeeded", "Failed"]).into();
        }
        if dice.chance(4) && !dice.is_real {
            placed["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        world.show(&placed);
        bound.push(placed);
    }
    bound
}

/// The pod on a node, with the record that another program has left.
fn placed_by_others(dice: &mut Dice<'_>, mut pod: Value, node: &str, kind: u64) -> Value {
    pod["spec"]["nodeName"] = node.into();
    let minor = dice.up_to(3);
    let annotations = &mut pod["metadata"]["annotations"];
    let record = |id: String| {
        let resources = json!({"koordinator.sh/gpu-memory": "4Gi", "koordinator.sh/gpu-core": "20"});
        json!({"gpu": [{"minor": minor, "id": id, "resources": resources}]}).to_string()
    };
    match kind {
        70..80 => {
            annotations["ALIYUN_COM_GPU_MEM_IDX"] = minor.to_string().into();
            annotations["ALIYUN_COM_GPU_MEM_POD"] = "4".into();
            annotations["ALIYUN_COM_GPU_MEM_DEV"] = "16".into();
            annotations["ALIYUN_COM_GPU_MEM_ASSIGNED"] = "true".into();
            annotations["ALIYUN_COM_GPU_MEM_ASSUME_TIME"] = "1690000000000000000".into();
        }
        80..84 => annotations["scheduling.koordinator.sh/device-allocated"] = "{".into(),
        84..88 => {
            let gone = record("GPU-gone".to_owned());
            annotations["scheduling.koordinator.sh/device-allocated"] = gone.into();
        }
        88..94 => {
            let there = record(nodes::uuid(node, minor));
            annotations["scheduling.koordinator.sh/device-allocated"] = there.into();
        }
        _ => {}
    }
    pod
}

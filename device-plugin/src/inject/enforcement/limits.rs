//! The variables that carry a container's limits: those of NVIDIA's hook, by which the driver limits it, and those of HAMi-core.
//!
//! A limit is the container's own part of a device, rounded down to whole MiB, so that the containers of a pod together never get
//! more than the pod is counted for.

use std::collections::BTreeMap;

use proto::memory_unit::MemoryUnit;
use proto::record::{DRIVER_MEMORY_LIMIT, DRIVER_MEMORY_REQUEST};
use proto::request::ContainerRequest;

use crate::devices::inventory::Gpu;
use crate::node::pods::{NodePod, Placement, RecordedAmounts};

use super::{Enforcements, are_by_driver};

/// The driver reserves no memory for a container: the reservation of a removed container would stay with the cgroups above it.
const NO_RESERVATION: &str = "0";

/// HAMi-core's variable for the memory limit of a device; `_` and the device's position in the container follow.
const HAMI_MEMORY_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";

/// HAMi-core's variable for the limit of computing power.
const HAMI_CORE_LIMIT: &str = "CUDA_DEVICE_SM_LIMIT";

/// The container that an answer to Allocate or a CDI spec is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recipient<'a> {
    pub(crate) pod: &'a NodePod,
    pub(crate) container: &'a ContainerRequest,
    /// The pod's record, which names the devices of the container.
    pub(crate) placement: Option<&'a Placement>,
    pub(crate) enforcements: &'a Enforcements,
}

pub(crate) fn is_limit(name: &str) -> bool {
    is_of_driver(name) || is_of_hami_core(name)
}

/// True if HAMi-core reads the variable.
pub(crate) fn is_of_hami_core(name: &str) -> bool {
    name.starts_with(HAMI_MEMORY_LIMIT) || name == HAMI_CORE_LIMIT
}

/// True if NVIDIA's hook reads the variable.
pub(crate) fn is_of_driver(name: &str) -> bool {
    name == DRIVER_MEMORY_REQUEST || name == DRIVER_MEMORY_LIMIT
}

/// The limits of a container on these GPUs: for the driver if it enforces them, and for HAMi-core if the pod asks for that.
pub(crate) fn limits(unit: MemoryUnit, recipient: &Recipient<'_>, gpus: &[&Gpu]) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let Some(placement) = recipient.placement else {
        return env;
    };
    let mut memory = Vec::new();
    for gpu in gpus {
        memory.push(memory_limit(unit, recipient, placement, gpu, gpus.len()));
    }
    if are_by_driver(recipient.enforcements, gpus)
        // NVIDIA's hook takes one limit for all GPUs of a container: the smallest one exceeds the container's part of no GPU.
        && let Some(mib) = memory.iter().flatten().min()
    {
        env.insert(DRIVER_MEMORY_REQUEST.to_owned(), NO_RESERVATION.to_owned());
        env.insert(DRIVER_MEMORY_LIMIT.to_owned(), mib.to_string());
    }
    // HAMi-core numbers the GPUs in the order in which the container sees them, which is that of `gpus`.
    if recipient.pod.is_limited {
        for (at, mib) in memory.iter().enumerate() {
            if let Some(mib) = mib {
                env.insert(format!("{HAMI_MEMORY_LIMIT}_{at}"), format!("{mib}m"));
            }
        }
        if let Some(percent) = core_limit(recipient, placement, gpus) {
            env.insert(HAMI_CORE_LIMIT.to_owned(), percent.to_string());
        }
    }
    env
}

/// The bytes of one of the pod's `n_gpus` GPUs that a container is given; `None` if neither request nor record names an amount.
pub(crate) fn given_memory(
    unit: MemoryUnit,
    container: &ContainerRequest,
    placement: &Placement,
    gpu: &Gpu,
    n_gpus: usize,
) -> Option<u64> {
    let own = container.memory_share(n_gpus as u64, gpu.memory_bytes, unit);
    let recorded = recorded_amounts(placement, gpu).and_then(|held| held.bytes_of(gpu.memory_bytes));
    // A record of another scheduler may say less than the container requests. A container that requests no amounts
    // is given the amount of the record.
    match (own, recorded) {
        (Some(own), Some(recorded)) => Some(own.min(recorded)),
        (Some(own), None) => Some(own),
        // A record of computing power alone may name 0 bytes, which is no limit.
        (None, recorded) => recorded.filter(|bytes| *bytes > 0),
    }
}

/// The container's part of a GPU's memory, in whole MiB; `None` if it is the whole GPU, or not known.
fn memory_limit(
    unit: MemoryUnit,
    recipient: &Recipient<'_>,
    placement: &Placement,
    gpu: &Gpu,
    n_gpus: usize,
) -> Option<u64> {
    let bytes = given_memory(unit, recipient.container, placement, gpu, n_gpus)?;
    if recipient.pod.sees_all || bytes >= gpu.memory_bytes {
        return None;
    }
    // HAMi-core takes 0 for no limit, so the least is 1 MiB, in which no program runs.
    Some((bytes >> 20).max(1))
}

/// The container's part of the computing power of each GPU, in percent; `None` if it is all of it, or was not requested.
fn core_limit(recipient: &Recipient<'_>, placement: &Placement, gpus: &[&Gpu]) -> Option<u64> {
    // HAMi-core has one variable for all GPUs of a container, so the record of the first one counts.
    let recorded = recorded_amounts(placement, gpus.first()?)?.core;
    let container = recipient.container;
    let n_gpus = gpus.len() as u64;
    let percent = if container.core > 0 || container.whole > 0 {
        // HAMi-core takes 0 for no limit, so the least is 1 percent, even if the record names no computing power.
        container.core_share(n_gpus).clamp(1, recorded.max(1))
    } else if container.requests_memory() {
        // The container requests memory and no computing power, so nothing limits its computing power.
        return None;
    } else {
        recorded
    };
    (1..100).contains(&percent).then_some(percent)
}

/// The amounts of a GPU that the record gives the pod; none if the record does not name the GPU.
fn recorded_amounts<'a>(placement: &'a Placement, gpu: &Gpu) -> Option<&'a RecordedAmounts> {
    let at = placement.gpus.iter().position(|name| name.names(gpu))?;
    placement.held.get(at)
}

#[cfg(test)]
mod tests {
    use proto::pod::Pod;
    use proto::resource::ResourceNames;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::inject::enforcement::{Enforcements, Level, same_level};
    use crate::node::pods::NodePod;
    use crate::tests::builders::{gpu, pod, shares, units};

    fn enforced(level: Level, minors: &[u32]) -> Enforcements {
        same_level(level, minors.iter().map(|minor| gpu(*minor)))
    }

    /// The variables of each container, as words.
    fn of_each(pod: &NodePod, enforcements: &Enforcements, gpus: &[Gpu]) -> Vec<String> {
        let gpus: Vec<&Gpu> = gpus.iter().collect();
        let mut all = Vec::new();
        for container in &pod.containers {
            let recipient = Recipient {
                pod,
                container,
                placement: pod.placement.as_ref().ok(),
                enforcements,
            };
            let env = limits(MemoryUnit::GIB, &recipient, &gpus);
            let words: Vec<String> = env
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            all.push(words.join(" "));
        }
        all
    }

    /// A pod of Koordinator's names on the GPUs from 0 on, of which it holds `bytes` each.
    fn holding(bytes: u64, n_gpus: u32, containers: Vec<ContainerRequest>) -> NodePod {
        let mut pod = pod("a", 1, containers).on(0..n_gpus);
        let held = RecordedAmounts {
            bytes: Some(bytes),
            ratio: None,
            core: 0,
        };
        pod.placement.as_mut().unwrap().held = vec![held; n_gpus as usize];
        pod
    }

    fn bytes(bytes: u64) -> ContainerRequest {
        ContainerRequest {
            memory_bytes: bytes,
            ..shares(1)
        }
    }

    #[test]
    fn each_container_has_its_own_part() {
        let pod = holding(6 << 30, 1, vec![bytes(4 << 30), bytes(2 << 30)]);
        assert_eq!(
            of_each(&pod, &enforced(Level::Driver, &[0]), &[gpu(0)]),
            [
                "NVIDIA_GPU_MEMORY_LIMIT=4096 NVIDIA_GPU_MEMORY_REQUEST=0",
                "NVIDIA_GPU_MEMORY_LIMIT=2048 NVIDIA_GPU_MEMORY_REQUEST=0",
            ]
        );
    }

    #[rstest]
    #[case::of_units(pod("a", 1, [units(3)]), "3072")]
    #[case::rounded_down(holding((3 << 20) - 1, 1, vec![bytes((3 << 20) - 1)]), "2")]
    #[case::below_a_mib(holding(1000, 1, vec![bytes(1000)]), "1")]
    #[case::divided_over_its_gpus(holding(3 << 30, 2, vec![bytes(6 << 30)]), "3072")]
    #[case::no_more_than_the_record(holding(2 << 30, 1, vec![bytes(4 << 30)]), "2048")]
    #[case::the_record_where_the_container_says_nothing(holding(2 << 30, 1, vec![shares(1)]), "2048")]
    #[case::the_whole_gpu(holding(16 << 30, 1, vec![bytes(16 << 30)]), "")]
    #[case::half_of_a_pod_s_whole_gpu(holding(16 << 30, 1, vec![ContainerRequest { memory_ratio: 50, ..shares(1) }; 2]), "8192")]
    fn limits_of_the_driver(#[case] pod: NodePod, #[case] mib: &str) {
        let n_gpus = u32::try_from(pod.placement.as_ref().unwrap().gpus.len()).unwrap();
        let gpus: Vec<Gpu> = (0..n_gpus).map(gpu).collect();
        let expected = match mib {
            "" => String::new(),
            mib => format!("NVIDIA_GPU_MEMORY_LIMIT={mib} NVIDIA_GPU_MEMORY_REQUEST=0"),
        };
        assert_eq!(
            of_each(&pod, &enforced(Level::Driver, &[0, 1]), &gpus)[0],
            expected
        );
        for level in [Level::None, Level::HamiCore] {
            assert_eq!(of_each(&pod, &enforced(level, &[0, 1]), &gpus)[0], "");
        }
        let one_of_two = of_each(&pod, &enforced(Level::Driver, &[1]), &gpus);
        assert_eq!(one_of_two[0], "", "the driver does not enforce it on GPU 0");
    }

    #[test]
    fn the_smallest_part_of_gpus_that_differ() {
        let ratio = ContainerRequest {
            memory_ratio: 100,
            ..shares(2)
        };
        let mut pod = holding(0, 2, vec![ratio]);
        let half = RecordedAmounts {
            ratio: Some(50),
            ..RecordedAmounts::default()
        };
        pod.placement.as_mut().unwrap().held = vec![half; 2];
        let small = Gpu {
            memory_bytes: 8 << 30,
            ..gpu(1)
        };
        assert_eq!(
            of_each(&pod, &enforced(Level::Driver, &[0, 1]), &[gpu(0), small]),
            ["NVIDIA_GPU_MEMORY_LIMIT=4096 NVIDIA_GPU_MEMORY_REQUEST=0"]
        );
    }

    #[test]
    fn a_pod_that_sees_all_gpus_has_no_limit() {
        let pod = NodePod {
            sees_all: true,
            ..holding(0, 1, vec![shares(1)])
        };
        assert_eq!(of_each(&pod, &enforced(Level::Driver, &[0]), &[gpu(0)]), [""]);
    }

    /// A pod as its author wrote it: the sidecar runs beside the others, the init container alone with it.
    #[test]
    fn init_containers_and_sidecars_have_their_own_parts_too() {
        let container = |name: &str, ratio: u64, restart: Value| {
            json!({"name": name, "restartPolicy": restart, "resources": {"limits":
                {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": ratio}}})
        };
        let written: Pod = serde_json::from_value(json!({
            "metadata": {"name": "a", "uid": "u", "annotations": {
                "scheduling.koordinator.sh/device-allocated":
                    "{\"gpu\": [{\"minor\": 0, \"resources\": {\"koordinator.sh/gpu-memory-ratio\": \"35\"}}]}",
                "scheduling.koordinator.sh/bind-timestamp": "1",
            }},
            "spec": {
                "nodeName": "n",
                "initContainers": [container("first", 20, Value::Null), container("proxy", 10, json!("Always"))],
                "containers": [container("main", 25, Value::Null)],
            },
        }))
        .unwrap();
        let pod = NodePod::from_pod(&written, "n", &ResourceNames::default()).unwrap();
        let found = of_each(&pod, &enforced(Level::Driver, &[0]), &[gpu(0)]);
        let limits: Vec<&str> = found.iter().filter_map(|env| env.split(' ').next()).collect();
        assert_eq!(
            limits,
            [
                "NVIDIA_GPU_MEMORY_LIMIT=3276",
                "NVIDIA_GPU_MEMORY_LIMIT=1638",
                "NVIDIA_GPU_MEMORY_LIMIT=4096",
            ]
        );
    }
}

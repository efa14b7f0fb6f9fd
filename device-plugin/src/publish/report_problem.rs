//! Problems of this node's report, the Device object: a partition table that cannot be read, or a GPU that the node does not have
//! in the partition table, the links, or the devices that kubelet allocated for other plugins.
//!
//! The problem is in the condition `ReportValid` of the GPUs, from which the scheduler takes the reason of a refusal, and in one
//! event on the node.

use proto::device::{
    CONDITION_REPORT_VALID, DeviceCondition, DeviceSpec, PARTITIONS_OF_OTHER_NODE, PARTITIONS_UNREADABLE,
};
use proto::kubelet_allocations::{GPU_CHECKPOINTS, KubeletAllocations};

use crate::devices::fleet::NodeFleet;

use super::node_overrides::NodeOverrides;
use super::partitions::{missing_gpu, table};

pub(super) const EVENT: &str = "GPUReportInvalid";

/// The reason of the condition if a GPU that kubelet has allocated is not one of the node's.
const ALLOCATION_OF_MISSING: &str = "AllocationOfMissingGPU";

/// The reason for links that name a GPU which the node does not have.
const LINKS_OF_MISSING: &str = "LinksOfMissingGPU";

/// The problems of a node's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportProblem {
    /// The reason in the condition: that of the first problem.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// False if the report may be valid: the operator's table is taken to be that of another kind of node.
    pub(crate) is_certain: bool,
}

impl ReportProblem {
    /// The problems of the report on these devices; none if there are none. `noted` are the allocations in an annotation that
    /// another program has written, if they count.
    pub(super) fn find(
        fleet: &NodeFleet,
        overrides: &NodeOverrides,
        allocations: Option<&KubeletAllocations>,
        noted: Option<&KubeletAllocations>,
    ) -> Option<Self> {
        let mut problems: Vec<(&'static str, String)> = Vec::new();
        let in_force = table(fleet, overrides);
        if let Some(problem) = &overrides.partitions_problem {
            problems.push(match &in_force {
                None => (PARTITIONS_UNREADABLE, format!("--gpu-partitions: {problem}")),
                Some(_) => (
                    "PartitionsOutdated",
                    format!("--gpu-partitions: {problem}; its last valid content is in force"),
                ),
            });
        }
        if let Some(minor) = in_force.and_then(|table| missing_gpu(fleet, &table)) {
            let text = format!(
                "the partition table names minor {minor}, which no GPU of the node has; its sets with missing GPUs do not count"
            );
            problems.push(("PartitionsOfMissingGPU", text));
        }
        if let Some(minor) = missing_linked_gpu(fleet) {
            let text = format!("the links between GPUs name minor {minor}, which no GPU of the node has");
            problems.push((LINKS_OF_MISSING, text));
        }
        let is_listed = |id: &str| fleet.gpus.iter().any(|entry| entry.device.uuid.as_str() == id);
        if let Some(id) = allocations.and_then(|allocations| allocations.unlisted_gpu(is_listed)) {
            let text = format!("kubelet has allocated GPU {id:?} to a pod, and the node does not have it");
            problems.push((ALLOCATION_OF_MISSING, text));
        }
        if let Some(id) = noted.and_then(|noted| noted.unlisted_gpu(is_listed)) {
            let text =
                format!("annotation {GPU_CHECKPOINTS} names GPU {id:?}, and the node does not have it");
            problems.push((ALLOCATION_OF_MISSING, text));
        }
        if let Some((reason, _)) = problems.first() {
            let texts: Vec<&str> = problems.iter().map(|(_, text)| text.as_str()).collect();
            return Some(Self {
                reason,
                message: texts.join("; "),
                is_certain: true,
            });
        }
        let minor = missing_gpu(fleet, overrides.partitions.as_ref()?)?;
        Some(Self {
            reason: PARTITIONS_OF_OTHER_NODE,
            message: format!(
                "every set of --gpu-partitions has a GPU that the node does not have, such as minor {minor}, so that its table is \
                 taken to be that of another kind of node"
            ),
            is_certain: false,
        })
    }
}

fn missing_linked_gpu(fleet: &NodeFleet) -> Option<u32> {
    let mut minors = fleet.links.iter().flat_map(|group| &group.minors);
    let is_missing = |minor: &&u32| fleet.gpus.iter().all(|entry| entry.device.minor != **minor);
    minors.find(is_missing).copied()
}

/// The text of the event about the problem of a written Device object; none if the object `before` that write had the same.
pub(super) fn event(before: Option<&DeviceSpec>, written: &DeviceSpec) -> Option<String> {
    let problem = problem_in(written)?;
    let known = before.and_then(problem_in).map(|known| &known.message);
    // The object outlives the process, so that a restart of the plugin makes no second event.
    (known != Some(&problem.message)).then(|| format!("{}. {}", problem.message, step(&problem.reason)))
}

/// The step that ends a problem with this reason.
fn step(reason: &str) -> &'static str {
    match reason {
        ALLOCATION_OF_MISSING => "Delete the pod that holds it, if there is one, and create it again",
        LINKS_OF_MISSING => {
            "Restart the device plugin of the node; if that does not help, compare `nvidia-smi topo -m`"
        }
        _ => "Correct the file of --gpu-partitions, or the source of the node's table",
    }
}

/// The condition of a Device object that has a problem which is certain.
fn problem_in(spec: &DeviceSpec) -> Option<&DeviceCondition> {
    let mut conditions = spec.devices.iter().flat_map(|device| &device.conditions);
    conditions
        .find(|condition| condition.condition_type == CONDITION_REPORT_VALID && condition.status == "False")
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;
    use proto::kubelet_allocations::KubeletAllocation;
    use proto::node::Node;
    use proto::topology::{GpuLinks, GpuPartition, GpuPartitionTable};
    use rstest::rstest;

    use super::*;
    use crate::publish::device_object::DeviceObjectInputs;
    use crate::tests::builders;

    fn of_minor(minor: u32) -> GpuPartitionTable {
        let minors = vec![minor];
        let partition = GpuPartition {
            minors,
            ..GpuPartition::default()
        };
        GpuPartitionTable::from([(1, vec![partition])])
    }

    fn overrides(partitions: Option<GpuPartitionTable>, problem: Option<&str>) -> NodeOverrides {
        NodeOverrides {
            partitions,
            partitions_problem: problem.map(str::to_owned),
            ..NodeOverrides::default()
        }
    }

    fn allocated(id: &str) -> KubeletAllocations {
        KubeletAllocations {
            entries: vec![KubeletAllocation {
                resource_name: "nvidia.com/gpu".to_owned(),
                device_ids: vec![id.to_owned()],
                ..KubeletAllocation::default()
            }],
        }
    }

    #[rstest]
    #[case::no_file(overrides(None, None), None, None)]
    #[case::valid(overrides(Some(of_minor(1)), None), None, None)]
    #[case::unreadable(
        overrides(None, Some("p.json: a mistake")), None,
        Some((PARTITIONS_UNREADABLE, true, "--gpu-partitions: p.json: a mistake"))
    )]
    #[case::unreadable_while_it_runs(
        overrides(Some(of_minor(1)), Some("p.json: a mistake")), None,
        Some(("PartitionsOutdated", true, "--gpu-partitions: p.json: a mistake; its last valid content is in force"))
    )]
    #[case::of_another_node(
        overrides(Some(of_minor(9)), None), None,
        Some((PARTITIONS_OF_OTHER_NODE, false, "every set of --gpu-partitions has a GPU that the node does not have, such as \
            minor 9, so that its table is taken to be that of another kind of node"))
    )]
    #[case::allocated(
        overrides(None, None),
        Some(allocated("GPU-00000000-aaaa-bbbb-cccc-000000000000")),
        None
    )]
    #[case::allocated_and_gone(
        overrides(None, None), Some(allocated("GPU-old")),
        Some(("AllocationOfMissingGPU", true, "kubelet has allocated GPU \"GPU-old\" to a pod, and the node does not have it"))
    )]
    fn problems_of_files_and_allocations(
        #[case] overrides: NodeOverrides,
        #[case] allocations: Option<KubeletAllocations>,
        #[case] expected: Option<(&str, bool, &str)>,
    ) {
        let found = ReportProblem::find(&builders::fleet(2), &overrides, allocations.as_ref(), None);
        let found = found.as_ref();
        let found = found.map(|found| (found.reason, found.is_certain, found.message.as_str()));
        assert_eq!(found, expected);
    }

    #[test]
    fn tables_and_links_of_missing_gpus_are_one_problem() {
        let mut fleet = builders::fleet(2);
        fleet.partitions = Some(of_minor(2));
        fleet.links = vec![GpuLinks {
            minors: vec![1, 3],
            links: 4,
        }];
        let found = ReportProblem::find(&fleet, &NodeOverrides::default(), None, None).unwrap();
        assert_eq!(found.reason, "PartitionsOfMissingGPU");
        assert_eq!(
            found.message,
            "the partition table names minor 2, which no GPU of the node has; its sets with missing GPUs do not count; the links \
             between GPUs name minor 3, which no GPU of the node has"
        );
    }

    /// Another program's annotation is read by the scheduler where this plugin writes none.
    #[test]
    fn allocations_that_another_program_has_noted_are_checked() {
        let fleet = builders::fleet(2);
        let found = |noted: &KubeletAllocations| {
            let found = ReportProblem::find(&fleet, &NodeOverrides::default(), None, Some(noted));
            found.map(|found| (found.reason, found.is_certain, found.message))
        };
        assert_eq!(
            found(&allocated("GPU-00000000-aaaa-bbbb-cccc-000000000000")),
            None
        );
        let text = "annotation node.koordinator.sh/gpu-checkpoints names GPU \"GPU-old\", and the node does not have it";
        let expected = (ALLOCATION_OF_MISSING, true, text.to_owned());
        assert_eq!(found(&allocated("GPU-old")), Some(expected));
    }

    /// One event for each problem, whatever process of the plugin writes the object; none for a node of another kind.
    #[test]
    fn an_event_follows_a_new_problem_only() {
        let fleet = builders::fleet(2);
        let spec = |overrides: NodeOverrides, before: Option<&DeviceSpec>| {
            let inputs = DeviceObjectInputs {
                report_problem: ReportProblem::find(&fleet, &overrides, None, None),
                ..DeviceObjectInputs::default()
            };
            let now = DateTime::from_timestamp(0, 0).unwrap();
            inputs.device(&fleet, &Node::default(), before, now).spec
        };
        let sound = spec(overrides(None, None), None);
        assert_eq!(event(None, &sound), None);
        let broken = spec(overrides(None, Some("a mistake")), Some(&sound));
        let message = "--gpu-partitions: a mistake. Correct the file of --gpu-partitions, or the source of the node's table";
        assert_eq!(event(Some(&sound), &broken).as_deref(), Some(message));
        assert_eq!(event(None, &broken).as_deref(), Some(message));
        assert_eq!(event(Some(&broken), &broken), None);
        let mended = spec(overrides(None, None), Some(&broken));
        assert_eq!(event(Some(&broken), &mended), None);
        let conditions = |spec: &DeviceSpec| {
            let mut found = Vec::new();
            for condition in spec.devices.iter().flat_map(|device| &device.conditions) {
                found.push(format!(
                    "{} {} {}",
                    condition.condition_type, condition.status, condition.reason
                ));
            }
            found
        };
        assert_eq!(conditions(&broken), ["ReportValid False PartitionsUnreadable"; 2]);
        assert_eq!(conditions(&mended), ["ReportValid True Valid"; 2]);
        let other = spec(overrides(Some(of_minor(9)), None), None);
        assert_eq!(
            conditions(&other),
            ["ReportValid Unknown PartitionsOfOtherNode"; 2]
        );
        assert_eq!(event(None, &other), None);
    }
}

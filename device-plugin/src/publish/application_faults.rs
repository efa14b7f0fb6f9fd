//! Events about XIDs that an application causes by its own fault: on the pod of which a process ended then, else on the node.
//!
//! NVML names no process with an XID. The kernel log does, but an unprivileged container cannot read it, so the task compares the
//! processes on the GPU before and after. Without measured processes (`--measure-memory`) every event is on the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use daemon::events::{EventType, Recorder};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout, timeout_at};

use crate::devices::fleet::NodeFleet;
use crate::devices::health::ApplicationFault;
use crate::devices::inventory::PhysicalId;
use crate::node::pods::{NodePod, NodePods, PodStage, until_known};
use crate::publish::memory_use::MeasuredMemory;
use crate::start::node_state::NodeState;

const REASON: &str = "GPUApplicationFault";

/// Time in which the faulty process should end; all faults of a GPU in this time make one event.
const SETTLE: Duration = Duration::from_secs(5);

/// Longest wait for the measurement of memory that the task requests after [`SETTLE`].
const LIMIT: Duration = Duration::from_secs(15);

const MAX_NAMED: usize = 10;

/// The pods of this node and the processes on its GPUs at one moment.
#[derive(Clone, Debug)]
struct Moment {
    pods: NodePods,
    /// None if the processes are not known.
    measured: Option<Arc<MeasuredMemory>>,
}

impl Moment {
    /// The pod and container whose processes on the GPU have ended by `after`, and their PIDs; none if no process has, or
    /// processes outside of one container have.
    fn ended<'p>(&self, after: &'p Self, gpu: &PhysicalId) -> Option<(&'p NodePod, &str, BTreeSet<u32>)> {
        let ended = self.measured.as_ref()?.ended(after.measured.as_ref()?, gpu)?;
        let owners: BTreeSet<_> = ended.iter().map(|process| process.container.as_ref()).collect();
        let mut owners = owners.into_iter();
        let (Some(Some((uid, container))), None) = (owners.next(), owners.next()) else {
            return None;
        };
        // The processes of a pod that is deleted end without a fault.
        let pod = after.pods.get(uid).filter(|pod| !pod.deleting)?;
        Some((pod, container, ended.iter().map(|process| process.pid).collect()))
    }

    /// The words of an event about the running pods with a share of a GPU.
    fn holders(&self, gpu: &PhysicalId, fleet: &NodeFleet) -> String {
        let mut names = Vec::new();
        for pod in self.pods.iter() {
            let Ok(placement) = &pod.placement else { continue };
            // A pod that does not run yet cannot have caused the fault.
            if pod.stage == PodStage::Running && fleet.gpu(gpu).is_some_and(|gpu| placement.has_gpu(gpu)) {
                names.push(format!("{}/{}", pod.namespace, pod.name));
            }
        }
        names.sort_unstable();
        let n_more = names.len().saturating_sub(MAX_NAMED);
        names.truncate(MAX_NAMED);
        if names.is_empty() {
            return "no running pod has a share of that GPU".to_owned();
        }
        let more = (n_more > 0).then(|| format!(" and {n_more} more"));
        format!(
            "running pods with a share of that GPU: {}{}",
            names.join(", "),
            more.unwrap_or_default()
        )
    }
}

/// The event about faults on a GPU: its pod, none for an event on the node, and its message.
fn event<'p>(
    (gpu, xids): (&PhysicalId, &BTreeSet<u64>),
    before: &Moment,
    after: &'p Moment,
    fleet: &NodeFleet,
) -> (Option<&'p NodePod>, String) {
    let reported = format!(
        "the driver reported {} on GPU {gpu}, which an application causes by a fault of its own and which leaves the GPU healthy",
        numbered("XID", "XIDs", xids)
    );
    let Some((pod, container, pids)) = before.ended(after, gpu) else {
        let holders = before.holders(gpu, fleet);
        let advice = "the process is not known: look for \"NVRM: Xid\" in the node's kernel log";
        return (None, format!("{reported}; {advice}; {holders}"));
    };
    let processes = numbered("process", "processes", &pids);
    let message = format!(
        "{reported}; of all processes on that GPU only {processes} of container {container} ended then: read the container's log"
    );
    (Some(pod), message)
}

/// Numbers after their noun, such as "XIDs 13, 31".
fn numbered<T: ToString>(one: &str, several: &str, numbers: &BTreeSet<T>) -> String {
    let texts: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    let noun = if texts.len() == 1 { one } else { several };
    format!("{noun} {}", texts.join(", "))
}

/// Writes an event for each GPU with application faults, until the task is dropped.
pub(crate) async fn report_application_faults(
    node: Arc<NodeState>,
    mut faults: mpsc::Receiver<ApplicationFault>,
    mut measured: watch::Receiver<Option<Arc<MeasuredMemory>>>,
    recorder: Recorder,
) {
    until_known(&mut node.pods.clone()).await;
    while let Some(first) = faults.recv().await {
        let due = Instant::now() + SETTLE;
        let before = Moment {
            pods: node.pods.borrow().clone(),
            measured: measured.borrow().clone(),
        };
        let mut by_gpu = BTreeMap::<PhysicalId, BTreeSet<u64>>::new();
        by_gpu.entry(first.uuid).or_default().insert(first.xid);
        while let Ok(Some(fault)) = timeout_at(due, faults.recv()).await {
            by_gpu.entry(fault.uuid).or_default().insert(fault.xid);
        }
        let mut after = None;
        if before.measured.is_some() {
            measured.mark_unchanged();
            node.measure_again.notify_one();
            if let Ok(Ok(())) = timeout(LIMIT, measured.changed()).await {
                after.clone_from(&measured.borrow());
            }
        }
        let after = Moment {
            pods: node.pods.borrow().clone(),
            measured: after,
        };
        let fleet = node.fleet.borrow().clone();
        for (gpu, xids) in &by_gpu {
            match event((gpu, xids), &before, &after, &fleet) {
                (Some(pod), message) => recorder.warn(pod, REASON, message),
                (None, message) => recorder.node(EventType::Warning, REASON, message),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::pods::PodUid;
    use crate::publish::memory_use::GpuProcess;
    use crate::tests::api_server::ApiServer;
    use crate::tests::builders::{fleet, gpu, node_state, pod, pods, units};

    fn running(name: &str) -> NodePod {
        pod(name, 1, [units(2)]).at(PodStage::Running)
    }

    /// A measurement of processes on the first GPU: PID and pod, or no pod.
    fn measured(processes: &[(u32, &str)]) -> Arc<MeasuredMemory> {
        let process = |(pid, pod): &(u32, &str)| GpuProcess {
            gpu: gpu(0).uuid,
            pid: *pid,
            container: (!pod.is_empty()).then(|| (PodUid::from(*pod), "main".to_owned())),
        };
        let measured = MeasuredMemory {
            processes: processes.iter().map(process).collect(),
            unattributed: Some(BTreeMap::new()),
            ..MeasuredMemory::default()
        };
        Arc::new(measured)
    }

    /// The subject and the message of the event about XID 31 on the first GPU.
    fn found(before: &Moment, after: &Moment) -> (String, String) {
        let gpu = gpu(0).uuid;
        let (pod, message) = event((&gpu, &[31].into()), before, after, &fleet(2));
        let subject = pod.map_or("node", |pod| pod.name.as_str()).to_owned();
        (subject, message.replace(gpu.as_str(), "GPU-0"))
    }

    #[test]
    fn the_pod_of_the_only_process_that_ended_has_the_event() {
        let here = pods([
            running("a"),
            running("b"),
            running("other").on([1]),
            pod("waiting", 2, [units(2)]),
        ]);
        let moment = |measured| Moment {
            pods: here.clone(),
            measured,
        };
        let before = moment(Some(measured(&[(1, "a"), (2, "a"), (3, "b"), (4, "")])));
        let (subject, message) = found(&before, &moment(Some(measured(&[(3, "b"), (4, ""), (5, "b")]))));
        assert_eq!(subject, "a");
        assert_eq!(
            message,
            "the driver reported XID 31 on GPU GPU-0, which an application causes by a fault of its own and which leaves the GPU \
             healthy; of all processes on that GPU only processes 1, 2 of container main ended then: read the container's log"
        );
        let in_doubt = [
            (
                "all go on",
                Some(measured(&[(1, "a"), (2, "a"), (3, "b"), (4, "")])),
            ),
            ("two containers", Some(measured(&[(2, "a"), (4, "")]))),
            ("one without a pod", Some(measured(&[(2, "a"), (3, "b")]))),
            ("not measured", None),
            ("processes not measured", Some(Arc::default())),
        ];
        for (case, after) in in_doubt {
            assert_eq!(
                found(&before, &moment(after)),
                (
                    "node".to_owned(),
                    "the driver reported XID 31 on GPU GPU-0, which an application causes by a fault of its own and which leaves \
                     the GPU healthy; the process is not known: look for \"NVRM: Xid\" in the node's kernel log; running pods with \
                     a share of that GPU: default/a, default/b"
                        .to_owned()
                ),
                "{case}"
            );
        }
        let deleted = Moment {
            pods: pods([
                NodePod {
                    deleting: true,
                    ..running("a")
                },
                running("b"),
            ]),
            measured: Some(measured(&[(3, "b"), (4, "")])),
        };
        assert_eq!(found(&before, &deleted).0, "node");
    }

    #[test]
    fn an_event_on_the_node_names_ten_pods() {
        let moment = |all: Vec<NodePod>| Moment {
            pods: pods(all),
            measured: None,
        };
        let many = moment((10..22).map(|n| running(&format!("p{n}"))).collect());
        let (_, message) = found(&many, &many);
        assert!(
            message.ends_with("default/p18, default/p19 and 2 more"),
            "{message}"
        );
        let none = moment(Vec::new());
        let (_, message) = found(&none, &none);
        assert!(
            message.ends_with("; no running pod has a share of that GPU"),
            "{message}"
        );
    }

    /// Reports that come together make one event, after a measurement that comes early.
    #[tokio::test(start_paused = true)]
    async fn one_event_is_written_after_another_measurement() {
        let (client, mut server) = ApiServer::new();
        let connection = client.into();
        let (recorder, writer) = daemon::events::recorder(&connection, "test", Some("n1".to_owned()));
        tokio::spawn(writer.run());
        let node = Arc::new(node_state(fleet(1), pods([running("a")])));
        let (sender, measurements) = watch::channel(Some(measured(&[(1, "a")])));
        let (faults, received) = mpsc::channel(4);
        tokio::spawn(report_application_faults(
            Arc::clone(&node),
            received,
            measurements,
            recorder,
        ));
        for xid in [31, 43, 31] {
            let uuid = gpu(0).uuid;
            faults.send(ApplicationFault { uuid, xid }).await.unwrap();
        }
        let began = Instant::now();
        node.measure_again.notified().await;
        assert!(began.elapsed() >= SETTLE);
        sender.send_replace(Some(measured(&[])));
        let (_, written, _answer) = server.next().await;
        assert_eq!(written["involvedObject"]["name"], "a");
        assert!(
            written["message"].as_str().unwrap().contains("XIDs 31, 43 on"),
            "{written}"
        );
    }
}

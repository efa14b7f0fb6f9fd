//! The report on pods of this node that have no device although their allocation records or requests name some: the scheduler
//! counts such pods until it reads the report.
//!
//! kubelet allocates devices at admission, and then reports the pod's status: from then on the pod's devices do not change. A pod
//! that requests an extended resource of this plugin is never reported: it does not start before it has a record.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use proto::plugin_reports;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::info;

use crate::inject::runtime_hook::seen::SeenGpus;
use crate::logged_error::LoggedError;
use crate::node::kubelet_checkpoint;
use crate::node::pods::{NodePods, PodStage, PodUid, until_known};

/// Changes within this time are reported together.
const SETTLE: Duration = Duration::from_millis(200);

/// Delay before the plugin reads kubelet's checkpoint again after an error.
const RETRY: Duration = Duration::from_secs(5);

/// The pods to report: kubelet has admitted them and allocated them nothing, and no runtime has shown their containers a GPU.
pub fn report(pods: &NodePods, allocated: &BTreeSet<PodUid>, seen: &SeenGpus) -> String {
    let mut candidates = Vec::new();
    for pod in pods.iter() {
        // It requests only amounts of node status, such as `koordinator.sh/gpu-core`, and nothing that kubelet allocates.
        if pod.containers.is_empty() && pod.placement.is_err() {
            candidates.push((&pod.uid, pod.stage));
        }
    }
    candidates.extend(pods.recorded_without_requests());
    let mut reported = Vec::new();
    for (uid, stage) in candidates {
        let is_admitted = matches!(stage, PodStage::Admitted | PodStage::Running);
        let has_device = allocated.contains(uid) || seen.has_pod(uid) || pods.claimant(uid).is_some();
        if is_admitted && !has_device {
            reported.push(uid.as_str());
        }
    }
    plugin_reports::write_pods_without_devices(reported)
}

/// Keeps the report up to date until the task is dropped; it stays as it is while kubelet's checkpoint cannot be read.
pub(crate) async fn watch_pods_without_devices(
    device_plugin_dir: PathBuf,
    mut pods: watch::Receiver<NodePods>,
    mut seen: watch::Receiver<SeenGpus>,
    sender: watch::Sender<Option<String>>,
) {
    until_known(&mut pods).await;
    let mut logged = LoggedError::default();
    loop {
        // Read after the pods, the checkpoint has the devices of each admitted one: kubelet writes it before the pod's status.
        let (known, seen_now) = (pods.borrow_and_update().clone(), seen.borrow_and_update().clone());
        let limit = match kubelet_checkpoint::read(&device_plugin_dir) {
            Ok(entries) => {
                logged.clear();
                let mut allocated = BTreeSet::new();
                for entry in entries.iter().filter(|entry| !entry.device_ids.is_empty()) {
                    allocated.insert(PodUid::from(entry.pod_uid.as_str()));
                }
                publish(report(&known, &allocated, &seen_now), &sender);
                Duration::MAX
            }
            Err(error) => {
                logged.warn(&error, "cannot read which pods kubelet has allocated devices");
                RETRY
            }
        };
        tokio::select! {
            Ok(()) = pods.changed() => {}
            Ok(()) = seen.changed() => {}
            () = sleep(limit) => {}
        }
        sleep(SETTLE).await;
    }
}

/// Passes on and logs the report of pods that name devices and have none, if it has changed.
fn publish(report: String, sender: &watch::Sender<Option<String>>) {
    if sender.borrow().as_ref() != Some(&report) {
        info!(pods = report, "pods that name devices and have none");
        sender.send_replace(Some(report));
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;
    use tokio::time::timeout;

    use super::*;
    use crate::node::pods::{NodePod, Requests};
    use crate::tests::builders::{pod, pods, units};

    /// Asks for computing power and for nothing that kubelet allocates.
    fn core_alone(stage: PodStage) -> NodePod {
        let spec = json!({"containers": [{"name": "c", "resources": {"limits": {"koordinator.sh/gpu-core": "50"}}}]});
        let requests = Requests::from_spec(&serde_json::from_value(spec).unwrap());
        assert!(!requests.is_empty());
        NodePod {
            requests,
            ..pod("core", 0, []).unplaced().at(stage)
        }
    }

    fn reported(pods: &NodePods, allocated: &[&str]) -> String {
        report(
            pods,
            &allocated.iter().map(|uid| PodUid::from(*uid)).collect(),
            &SeenGpus::default(),
        )
    }

    #[rstest]
    #[case::bound(PodStage::Bound, &[], "[]")]
    #[case::admitted(PodStage::Admitted, &[], "[\"core\"]")]
    #[case::running(PodStage::Running, &[], "[\"core\"]")]
    #[case::ended(PodStage::Terminal, &[], "[]")]
    #[case::kubelet_gave_it_something(PodStage::Running, &["core"], "[]")]
    fn pods_that_ask_for_amounts_that_kubelet_does_not_allocate(
        #[case] stage: PodStage,
        #[case] allocated: &[&str],
        #[case] expected: &str,
    ) {
        assert_eq!(reported(&pods([core_alone(stage)]), allocated), expected);
        let mut none = pods([]);
        none.note_without_requests("core".into(), Some(stage));
        assert_eq!(
            reported(&none, allocated),
            expected,
            "one that asks for nothing and bears a record"
        );
    }

    #[test]
    fn pods_that_may_still_get_devices_are_not_reported() {
        let unplaced = pod("u", 0, [units(2)]).unplaced().at(PodStage::Running);
        let placed = pod("p", 1, []).at(PodStage::Running);
        let mut known = pods([unplaced, placed]);
        known.note_without_requests("idle".into(), None);
        assert_eq!(reported(&known, &[]), "[]");
    }

    /// A file that cannot be read says nothing; one that is empty says that nothing was allocated.
    #[tokio::test(start_paused = true)]
    async fn no_pod_is_reported_before_the_checkpoint_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mut report) = watch::channel(None);
        let (pods, receiver) = watch::channel(pods([core_alone(PodStage::Running)]));
        let (_seen, seen) = watch::channel(SeenGpus::default());
        let task = tokio::spawn(watch_pods_without_devices(
            dir.path().to_owned(),
            receiver,
            seen,
            sender,
        ));
        assert!(timeout(Duration::from_secs(60), report.changed()).await.is_err());
        kubelet_checkpoint::tests::write(dir.path(), &json!(null), &json!({}));
        timeout(Duration::from_secs(60), report.changed())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(report.borrow_and_update().as_deref(), Some("[\"core\"]"));
        pods.send_modify(|pods| pods.delete(&"core".into()));
        timeout(Duration::from_secs(60), report.changed())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(report.borrow().as_deref(), Some("[]"));
        task.abort();
    }
}

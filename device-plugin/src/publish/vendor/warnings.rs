//! Events about resource claims: devices that are no known GPU, and GPUs that the allocation records of other pods name.

use std::collections::BTreeSet;

use daemon::events::{EventType, Recorder};

use crate::devices::fleet::NodeFleet;
use crate::node::pods::{NodePod, NodePods, PodUid};

use super::allocation::{Allocation, Claim, PodKey};

/// The event reason for a claim whose device is no known GPU.
const UNKNOWN_DEVICE: &str = "ClaimedDeviceUnknown";

/// The event reason for a claim whose GPU the allocation record of a pod names.
const RECORDED_GPU: &str = "GPUClaimed";

/// The UID of the pod that gets the event, or `None` for an event on the node; and the message of the event.
type Warning = (Option<PodUid>, String);

/// The warnings of the last update. Each makes one event, when it starts to hold.
#[derive(Debug, Default)]
pub(super) struct Warnings(BTreeSet<Warning>);

impl Warnings {
    /// Writes an event for each warning that was not there at the last update.
    pub(super) fn update(
        &mut self,
        allocations: &[Allocation],
        pods: &NodePods,
        fleet: &NodeFleet,
        recorder: &Recorder,
    ) {
        let now = warnings(allocations, pods, fleet);
        for (uid, message) in now.difference(&self.0) {
            match uid.as_ref().and_then(|uid| pods.get(uid)) {
                Some(pod) => recorder.warn(pod, RECORDED_GPU, message.clone()),
                None => recorder.node(EventType::Warning, UNKNOWN_DEVICE, message.clone()),
            }
        }
        self.0 = now;
    }
}

fn warnings(allocations: &[Allocation], pods: &NodePods, fleet: &NodeFleet) -> BTreeSet<Warning> {
    let mut warnings = BTreeSet::new();
    for allocation in allocations {
        let Some(claim) = &allocation.claim else { continue };
        // kubelet lists a pod for a while after its end.
        if allocation.has_ended(pods) {
            continue;
        }
        // If the device is no known GPU, every GPU counts as used, and a warning to each pod on them would name the wrong cause.
        if !claim.is_mapped {
            warnings.insert((None, unknown_device_message(allocation, claim)));
            continue;
        }
        let own = allocation.pod.uid(pods);
        for pod in pods.live() {
            if Some(&pod.uid) != own && has_recorded(pod, &allocation.device_ids, fleet) {
                warnings.insert((Some(pod.uid.clone()), recorded_gpu_message(allocation, claim)));
            }
        }
    }
    warnings
}

fn has_recorded(pod: &NodePod, uuids: &[String], fleet: &NodeFleet) -> bool {
    let Ok(placement) = &pod.placement else {
        return false;
    };
    for entry in &fleet.gpus {
        let is_claimed = uuids.iter().any(|uuid| uuid == entry.device.uuid.as_str());
        if is_claimed && placement.has_gpu(&entry.device) {
            return true;
        }
    }
    false
}

fn unknown_device_message(allocation: &Allocation, claim: &Claim) -> String {
    format!(
        "{} has device {:?}, which is no GPU that this plugin knows by its name: all {} GPUs of the node count as used until the pod \
         has ended. If the driver's devices are no GPUs of this node, leave it out of --dra-drivers",
        claim_text(allocation, claim),
        claim.device.name,
        allocation.device_ids.len()
    )
}

fn recorded_gpu_message(allocation: &Allocation, claim: &Claim) -> String {
    format!(
        "{} has {}, which the record of this pod names too: no other pod is placed there until one of the two has ended. To keep GPUs \
         for claims, name the others in --shared-devices",
        claim_text(allocation, claim),
        allocation.device_ids.join(", ")
    )
}

/// The claim with its pod and driver, as both messages begin.
fn claim_text(allocation: &Allocation, claim: &Claim) -> String {
    let pod = match &allocation.pod {
        PodKey::Named { namespace, name } => format!("{namespace}/{name}"),
        PodKey::Uid(uid) => uid.as_str().to_owned(),
    };
    format!(
        "ResourceClaim {} of pod {pod} (DRA driver {})",
        claim.name, claim.device.driver
    )
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::node::pods::{Claimant, PodStage};
    use crate::publish::vendor::claims::allocation;
    use crate::publish::vendor::claims::tests::claimed;
    use crate::tests::builders::{fleet, pod, pods, shares};

    fn now(devices: &[&str], stage: PodStage) -> BTreeSet<Warning> {
        let mut known = pods([
            pod("shares-0", 1, [shares(1)]).on([0]),
            pod("shares-1", 2, [shares(1)]).on([1]),
        ]);
        known.note_claimant(Claimant {
            uid: "train".into(),
            namespace: "team".to_owned(),
            name: "train".to_owned(),
            stage,
        });
        let allocations: Vec<Allocation> = devices
            .iter()
            .filter_map(|device| allocation(claimed(device), &fleet(3)))
            .collect();
        warnings(&allocations, &known, &fleet(3))
    }

    fn text(warnings: &BTreeSet<Warning>) -> String {
        let line =
            |(uid, message): &Warning| format!("{}: {message}", uid.as_ref().map_or("node", PodUid::as_str));
        warnings.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_claim_without_a_gpu_is_an_event_of_the_node() {
        assert_snapshot!(text(&now(&["gpu-vfio-0"], PodStage::Running)), @r#"node: ResourceClaim team/one-gpu of pod team/train (DRA driver gpu.nvidia.com) has device "gpu-vfio-0", which is no GPU that this plugin knows by its name: all 3 GPUs of the node count as used until the pod has ended. If the driver's devices are no GPUs of this node, leave it out of --dra-drivers"#);
    }

    #[test]
    fn a_claimed_gpu_is_an_event_of_the_pods_on_it() {
        assert_snapshot!(text(&now(&["gpu-1", "gpu-2"], PodStage::Running)), @"shares-1: ResourceClaim team/one-gpu of pod team/train (DRA driver gpu.nvidia.com) has GPU-00000001-aaaa-bbbb-cccc-000000000001, which the record of this pod names too: no other pod is placed there until one of the two has ended. To keep GPUs for claims, name the others in --shared-devices");
    }

    #[test]
    fn pods_that_have_ended_cause_no_event() {
        assert_eq!(now(&["gpu-vfio-0", "gpu-1"], PodStage::Terminal), BTreeSet::new());
    }
}

//! The part of the pre-start check that only answers by variable need: such an answer fixes the devices of a container before it
//! is certain for which pod kubelet allocates.

use tracing::info;

use crate::node::pods::PodUid;
use crate::start::blocked::StartBlocked;
use crate::start::node_state::NodeState;
use crate::start::swap::RecordSwaps;
use crate::start::verify::owner::KubeletSnapshot;
use crate::start::verify::{CheckedStart, StartEvidence, verify_start};

use super::environment::check_environment;
use super::partners::{Verification, pod_in_need, swap_or_refusal};

/// Most swaps of a pod while one start of it is decided.
const MAX_SWAPS: usize = 16;

/// Settles a start by the devices that containers see: checks the container's environment, and swaps records if kubelet gave the
/// pod the devices of an equal pod, or the reverse. `checked` is then verified by the record that the pod has after that.
///
/// Returns another pod if only another snapshot can show which of the two has the devices. It is the starting pod itself if its
/// record has changed too often to decide by this snapshot.
pub(crate) async fn settle<'a>(
    checked: &mut CheckedStart<'a>,
    snapshot: &'a KubeletSnapshot,
    node: &NodeState,
    swaps: &mut RecordSwaps,
) -> Result<Option<PodUid>, StartBlocked> {
    let (resource, ids) = (checked.starting.resource, checked.starting.ids);
    let uid = checked.starting.pod.uid.clone();
    for _ in 0..MAX_SWAPS {
        let partner = match verification(checked, snapshot, node) {
            Verification::Passed => return Ok(None),
            Verification::Refused(refusal) => {
                checked.verified = Err(refusal);
                return Ok(None);
            }
            Verification::LookAgain(other) => return Ok(Some(other)),
            Verification::Swap(partner) => partner,
        };
        let pod = checked.starting.pod.display_name();
        let other = node.pods.borrow().display_name(&partner);
        match swaps.swap(node, &uid, &partner).await {
            Ok(true) => info!(
                pod,
                other, "kubelet admitted these equal pods in another order: swapped their records"
            ),
            // The Device object had changed. Its records are loaded now, and the pod may have another one all the same.
            Ok(false) => {}
            Err(source) => return Err(StartBlocked::NotSwapped { pod, other, source }),
        }
        *checked = verify_start(node, snapshot, resource, ids, &uid)?;
    }
    Ok(Some(uid))
}

/// Completes a verification: if it has passed, checks the container's environment, else looks for a pod to swap records with.
pub(crate) fn verification(
    checked: &CheckedStart<'_>,
    snapshot: &KubeletSnapshot,
    node: &NodeState,
) -> Verification {
    let starting = &checked.starting;
    let pods = node.pods.borrow();
    let log = node.log();
    let fleet = node.fleet.borrow();
    let unit = node.settings.memory_unit;
    let evidence = StartEvidence {
        is_checkpoint_known: snapshot.allocated.is_some(),
        is_young: node.is_young(),
        ..StartEvidence::new(&pods, &fleet, &log, snapshot.entries(), unit)
    };
    match &checked.verified {
        Ok(()) if checked.is_by_spec => match pod_in_need(&evidence, &starting.pod) {
            Some(other) => Verification::Swap(other),
            None => Verification::Passed,
        },
        Ok(()) => match check_environment(starting, &node.enforcements.borrow(), &node.settings, &fleet) {
            Ok(()) => Verification::Passed,
            Err(refusal) => Verification::Refused(refusal),
        },
        // Also for a container with a CDI spec: an answer by variable to another container of its pod may name other devices.
        Err(refusal) => swap_or_refusal(&evidence, &starting.pod, &checked.seen, refusal.clone()),
    }
}

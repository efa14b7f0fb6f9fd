//! The part of the pre-start check that only answers by variable need: such an answer fixes the devices of a container before it is
//! certain for which pod kubelet allocates.
//!
//! `settle` is the one step of the pre-start check in this folder; it has nothing to add for a verified container whose CDI spec the
//! plugin writes. The check also loads records that an earlier swap left in the Device object (`swap`), in either injection mode.

use tracing::info;

use crate::start::node_state::NodeState;
use crate::start::verify::owner::KubeletSnapshot;
use crate::start::verify::{CheckedStart, StartEvidence};

use super::environment::check_environment;
use super::partners::{Verification, swap_or_refusal};
use super::swap::{RecordSwaps, SwapError};

/// Two pods could not swap their records.
#[derive(Debug, thiserror::Error)]
#[error("kubelet allocated the devices of pod {other} to pod {pod}, and their records could not be swapped")]
pub struct NotSwapped {
    pod: String,
    /// The pod whose record names the devices.
    other: String,
    source: SwapError,
}

/// Settles a start that was verified by the devices that the pod's containers see: checks the container's environment, and swaps
/// records if kubelet gave the pod the devices of an equal pod. After [`Verification::Swap`] the pod has another record, by which its
/// start has to be verified again.
///
/// # Errors
/// The records could not be swapped.
pub(crate) async fn settle(
    checked: &CheckedStart<'_>,
    snapshot: &KubeletSnapshot,
    node: &NodeState,
    swaps: &mut RecordSwaps,
) -> Result<Verification, NotSwapped> {
    let starting = &checked.starting;
    let verification = verification(checked, snapshot, node);
    let Verification::Swap(partner) = &verification else {
        return Ok(verification);
    };
    let pod = starting.pod.display_name();
    let other = node.pods.borrow().display_name(partner);
    match swaps.swap(node, &starting.pod.uid, partner).await {
        Ok(true) => info!(
            pod,
            other, "kubelet admitted these equal pods in another order: swapped their records"
        ),
        // The Device object had changed. Its records are loaded now, and the pod may have another one all the same.
        Ok(false) => {}
        Err(source) => return Err(NotSwapped { pod, other, source }),
    }
    Ok(verification)
}

/// Completes a verification: checks the container's environment after a success, and looks for a pod to swap records with after a
/// refusal.
pub(crate) fn verification(
    checked: &CheckedStart<'_>,
    snapshot: &KubeletSnapshot,
    node: &NodeState,
) -> Verification {
    let starting = &checked.starting;
    // Every function that locks both locks the pods before the log of Allocate calls, so that no two tasks wait for each other.
    let pods = node.pods.borrow();
    let log = node.log();
    let fleet = node.fleet.borrow();
    let refusal = match &checked.verified {
        // The spec follows the pod's record, and the plugin writes what it sets.
        Ok(()) if checked.is_by_spec => return Verification::Passed,
        Ok(()) => {
            return match check_environment(starting, &node.enforcements.borrow(), &node.settings, &fleet) {
                Ok(()) => Verification::Passed,
                Err(refusal) => Verification::Refused(refusal),
            };
        }
        // Also of a container with a spec: an answer by variable to another container of the pod may name another record's devices.
        Err(refusal) => refusal.clone(),
    };
    let evidence = StartEvidence {
        pods: &pods,
        fleet: &fleet,
        log: &log,
        allocated: snapshot.entries(),
        is_checkpoint_known: snapshot.allocated.is_some(),
        is_young: node.is_young(),
        unit: node.settings.memory_unit,
    };
    swap_or_refusal(&evidence, &starting.pod, &checked.seen, refusal)
}

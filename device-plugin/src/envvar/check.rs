//! The part of the pre-start check that only answers by variable need: such an answer fixes the devices of a container before it is
//! certain for which pod kubelet allocates.
//!
//! `settle` is the one step of the pre-start check in this folder, left out for a container whose CDI spec the plugin writes. The
//! check also loads records that an earlier swap left in the Device object (`swap`), in either injection mode.

use tracing::info;

use crate::node_state::NodeState;
use crate::pods::PodUid;
use crate::verify::container::StartingContainer;
use crate::verify::owner::KubeletSnapshot;
use crate::verify::{StartEvidence, StartRefusal, VisibleByType};

use super::environment::check_environment;
use super::partners::{Verification, swap_or_refusal};
use super::swap::{RecordSwaps, SwapError};

/// A verified start after the comparison of its answer by variable with the records.
pub(crate) enum Settled {
    /// The records stay as they are, and this is the result of the verification.
    Verified(Result<(), StartRefusal>),
    /// The pod has another record now, by which its start has to be verified.
    Swapped,
    /// The start depends on this other pod, for which kubelet may have allocated since the snapshot.
    LookAgain(PodUid),
}

/// Two pods could not swap their records.
#[derive(Debug, thiserror::Error)]
#[error("kubelet allocated the devices of pod {other} to pod {pod}, and their records could not be swapped")]
pub struct NotSwapped {
    pod: String,
    /// The pod whose record names the devices.
    other: String,
    source: SwapError,
}

/// Settles a start that was `verified` by the devices that the pod's containers see: checks the container's environment, and swaps
/// records if kubelet gave the pod the devices of an equal pod.
///
/// # Errors
/// The records could not be swapped.
pub(crate) async fn settle(
    verified: Result<(), StartRefusal>,
    starting: &StartingContainer<'_>,
    seen: &VisibleByType,
    snapshot: &KubeletSnapshot,
    node: &NodeState,
    swaps: &mut RecordSwaps,
) -> Result<Settled, NotSwapped> {
    let partner = match verification(verified, starting, seen, snapshot, node) {
        Verification::Passed => return Ok(Settled::Verified(Ok(()))),
        Verification::Refused(refusal) => return Ok(Settled::Verified(Err(refusal))),
        Verification::LookAgain(other) => return Ok(Settled::LookAgain(other)),
        Verification::Swap(partner) => partner,
    };
    let pod = starting.pod.display_name();
    let other = node.pods.borrow().display_name(&partner);
    match swaps.swap(node, &starting.pod.uid, &partner).await {
        Ok(is_written) => {
            if is_written {
                info!(
                    pod,
                    other, "kubelet admitted these equal pods in another order: swapped their records"
                );
            }
            // If the Device object had changed, its records are loaded now, and the pod may have another one all the same.
            Ok(Settled::Swapped)
        }
        Err(source) => Err(NotSwapped { pod, other, source }),
    }
}

/// Completes a verification: checks the container's environment after a success, and looks for a pod to swap records with after a
/// refusal.
pub(crate) fn verification(
    verified: Result<(), StartRefusal>,
    starting: &StartingContainer<'_>,
    seen: &VisibleByType,
    snapshot: &KubeletSnapshot,
    node: &NodeState,
) -> Verification {
    // Every function that locks both locks the pods before the log of Allocate calls, so that no two tasks wait for each other.
    let pods = node.pods.borrow();
    let log = node.log();
    let fleet = node.fleet.borrow();
    let Err(refusal) = verified else {
        return match check_environment(starting, &node.enforcements.borrow(), &node.settings, &fleet) {
            Ok(()) => Verification::Passed,
            Err(refusal) => Verification::Refused(refusal),
        };
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
    swap_or_refusal(&evidence, &starting.pod, seen, refusal)
}

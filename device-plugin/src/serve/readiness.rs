//! The conditions under which this daemon is ready.

use tokio::sync::watch;

use crate::pods::Pods;

/// The conditions.
#[derive(Clone, Debug)]
pub(super) struct Readiness {
    /// One for each resource that this node has: true while it is registered with kubelet.
    pub(super) registered: Vec<watch::Receiver<bool>>,
    /// The pods of this node.
    pub(super) pods: watch::Receiver<Pods>,
}

impl Readiness {
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.pods.borrow().is_synced() {
            return Err("the pods of this node are not known yet".to_owned());
        }
        let is_registered = self
            .registered
            .iter()
            .all(|is_registered| *is_registered.borrow());
        if !is_registered {
            return Err("not registered with kubelet".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing_yet(false, [false, false], false)]
    #[case::kubelet_knows_one(true, [true, false], false)]
    #[case::pods_unknown(false, [true, true], false)]
    #[case::all_there(true, [true, true], true)]
    fn ready_when_pods_are_known_and_all_resources_registered(
        #[case] is_synced: bool,
        #[case] registered: [bool; 2],
        #[case] expected: bool,
    ) {
        let mut known = Pods::default();
        if is_synced {
            known.reset([]);
        }
        let (_pods, pods) = watch::channel(known);
        let senders = registered.map(watch::Sender::new);
        let readiness = Readiness {
            registered: senders.iter().map(watch::Sender::subscribe).collect(),
            pods,
        };
        assert_eq!(readiness.check().is_ok(), expected);
    }
}

//! The conditions under which the plugin is ready.

use tokio::sync::watch;

use crate::devices::extended_resource::Registrations;
use crate::node::pods::NodePods;
use crate::publish::node_patches::Absence;

/// Returns an error with the reason if the plugin is not ready.
pub(super) fn check(
    pods: &watch::Receiver<NodePods>,
    registered: &watch::Receiver<Registrations>,
    absence: &watch::Receiver<Option<Absence>>,
) -> Result<(), String> {
    if let Some(absence) = &*absence.borrow() {
        return Err(format!("no devices to share: {}", absence.message));
    }
    // Until the first list of pods is complete, the plugin cannot match a call of Allocate with its pod.
    if !pods.borrow().is_synced() {
        return Err("the pods of this node are not known yet".to_owned());
    }
    if registered.borrow().values().any(|is_registered| !is_registered) {
        return Err("not registered with kubelet".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::devices::extended_resource::ExtendedResource;

    #[rstest]
    #[case::nothing_yet(false, [false, false], None, false)]
    #[case::kubelet_knows_one(true, [true, false], None, false)]
    #[case::pods_unknown(false, [true, true], None, false)]
    #[case::all_there(true, [true, true], None, true)]
    #[case::no_driver(true, [true, true], Some(Absence::default()), false)]
    fn ready_when_pods_are_known_and_all_resources_registered(
        #[case] is_synced: bool,
        #[case] registered: [bool; 2],
        #[case] absence: Option<Absence>,
        #[case] expected: bool,
    ) {
        let mut known = NodePods::default();
        if is_synced {
            known.reset([]);
        }
        let (_pods, pods) = watch::channel(known);
        let registered = [ExtendedResource::Shared, ExtendedResource::Memory]
            .into_iter()
            .zip(registered);
        let (_registered, registered) = watch::channel(registered.collect());
        let absence = watch::channel(absence).1;
        assert_eq!(check(&pods, &registered, &absence).is_ok(), expected);
    }
}

//! Tests of the choice of devices against a naive model.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proto::kubelet::deviceplugin::{ContainerAllocateResponse, Device};

use super::{DeviceManagerState, ResourceRequest};
use crate::dice::dice;
use crate::kubelet::devices::{DeviceHolder, DeviceId};

const RESOURCE: &str = "x.io/y";

fn list(healthy: &[usize], unhealthy: &[usize]) -> Vec<Device> {
    let of = |ids: &[usize], health: &str| -> Vec<Device> {
        ids.iter()
            .map(|id| Device {
                id: id.to_string(),
                health: health.to_owned(),
                topology: None,
            })
            .collect()
    };
    [of(healthy, "Healthy"), of(unhealthy, "Unhealthy")].concat()
}

fn holder(pod: usize) -> DeviceHolder {
    DeviceHolder {
        pod: pod.to_string(),
        container: "main".to_owned(),
    }
}

/// Allocates as kubelet does between the calls to the plugin.
fn allocate(
    devices: &mut DeviceManagerState,
    pod: usize,
    required: usize,
    reusable: &BTreeSet<DeviceId>,
) -> anyhow::Result<BTreeSet<DeviceId>> {
    let holder = holder(pod);
    let request = ResourceRequest {
        holder: &holder,
        resource: RESOURCE,
        required,
        skips_allocation: false,
    };
    let mut rng = dice(1, &["test"]);
    let Some(choice) = devices.begin_choice(&request, reusable, &mut rng)? else {
        return Ok(BTreeSet::new());
    };
    let chosen = devices.finish_choice(RESOURCE, choice, &[], &mut rng);
    devices.grant(&request, &chosen, ContainerAllocateResponse::default());
    Ok(chosen)
}

#[test]
fn a_list_during_an_allocation_forgets_the_devices_being_allocated() {
    // This is kubelet's race, kept on purpose: see devices.rs.
    let mut devices = DeviceManagerState::default();
    devices.update(RESOURCE, list(&[0, 1], &[]));
    allocate(&mut devices, 1, 1, &BTreeSet::new()).unwrap();
    let holder = holder(2);
    let request = ResourceRequest {
        holder: &holder,
        resource: RESOURCE,
        required: 1,
        skips_allocation: false,
    };
    let mut rng = dice(1, &["test"]);
    let choice = devices
        .begin_choice(&request, &BTreeSet::new(), &mut rng)
        .unwrap()
        .expect("one is free");
    let in_flight = devices.finish_choice(RESOURCE, choice, &[], &mut rng);
    devices.free_ended(&["2".to_owned()].into());
    assert!(devices.available(RESOURCE).is_superset(&in_flight));
}

#[test]
fn a_changed_request_and_unhealthy_held_devices_are_refused() {
    let mut devices = DeviceManagerState::default();
    let refusal = |devices: &mut DeviceManagerState, required| {
        allocate(devices, 1, required, &BTreeSet::new())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refusal(&mut devices, 1),
        "cannot allocate unregistered device x.io/y"
    );
    devices.update(RESOURCE, list(&[0, 1, 2], &[]));
    let held = allocate(&mut devices, 1, 2, &BTreeSet::new()).unwrap();
    assert_eq!(
        refusal(&mut devices, 3),
        r#"pod "1" container "main" changed request for resource "x.io/y" from 2 to 3"#
    );
    let broken: Vec<usize> = held.iter().map(|id| id.parse().unwrap()).collect();
    let rest: Vec<usize> = (0..3).filter(|id| !broken.contains(id)).collect();
    devices.update(RESOURCE, list(&rest, &broken));
    assert_eq!(
        refusal(&mut devices, 2),
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices x.io/y"
    );
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(usize),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![3 => (0..7usize).prop_map(Step::Allocate), 1 => (0..20usize).prop_map(Step::End)];
    prop::collection::vec(step, 1..20)
}

proptest! {
    #[test]
    fn no_device_is_held_twice_and_refusals_are_exact(steps in steps()) {
        let mut devices = DeviceManagerState::default();
        devices.update(RESOURCE, list(&(0..10).collect::<Vec<_>>(), &[10, 11]));
        let mut model: BTreeMap<usize, BTreeSet<DeviceId>> = BTreeMap::new();
        for (pod, step) in steps.into_iter().enumerate() {
            match step {
                Step::Allocate(n) => {
                    let used: BTreeSet<DeviceId> = model.values().flatten().cloned().collect();
                    match allocate(&mut devices, pod, n, &BTreeSet::new()) {
                        Ok(chosen) => {
                            prop_assert_eq!(chosen.len(), n);
                            prop_assert!(chosen.is_disjoint(&used));
                            prop_assert!(chosen.iter().all(|id| id.parse::<usize>().unwrap() < 10));
                            model.insert(pod, chosen);
                        }
                        Err(error) => {
                            let available = 10 - used.len();
                            let numbers = format!("Requested: {n}, Available: {available}");
                            prop_assert!(error.to_string().ends_with(&numbers) && n > available, "{}", error);
                        }
                    }
                }
                Step::End(pod) => {
                    model.remove(&pod);
                    devices.free_ended(&model.keys().map(ToString::to_string).collect());
                }
            }
        }
    }
}

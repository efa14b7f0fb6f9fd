//! Parts of devices of other types than GPU, by record and spec.

use std::collections::BTreeMap;

use placement::{Class, ClassRequest, DeviceRef, HeldDevice, NamedAmounts};

use super::{Recorded, RecordedDevice, Surroundings};

/// What is held of other devices. What the spec asks for and no record places may be on any device of its type.
pub(super) fn others_held(asked: &[(String, u64)], record: &Recorded, around: Surroundings<'_>) -> (Vec<HeldDevice>, Option<String>) {
    let recorded: &[RecordedDevice] = match record {
        Recorded::Devices { others, .. } => others,
        _ => &[],
    };
    let classes = around.inventory.and_then(|inventory| inventory.classes.as_deref());
    let mut problem = None;
    let mut held: Vec<HeldDevice> = recorded.iter().map(|device| device.held(classes, &mut problem)).collect();
    for request in around.kinds.requests(asked) {
        let missing = missing(&request, &held);
        if !missing.is_empty() {
            problem = problem.or_else(|| Some(format!("its record names less of {} devices than its spec asks for", request.kind)));
            held.push(HeldDevice { kind: request.kind, device: DeviceRef::Any, amounts: missing, functions: Vec::new(), trusted: false });
        }
    }
    (held, problem)
}

impl RecordedDevice {
    /// The part that is held; of a device that the node does not have, any of its type may be meant.
    fn held(&self, classes: Option<&[Class]>, problem: &mut Option<String>) -> HeldDevice {
        let Self { kind, device, amounts } = self.clone();
        let is_absent = classes.is_some_and(|classes| classes.iter().all(|class| class.kind != kind || class.find(&device).is_none()));
        if is_absent {
            *problem = Some(format!("its record names {kind} device {}, which the node does not have", shown(&device)));
        }
        let device = if is_absent { DeviceRef::Any } else { device };
        HeldDevice { kind, device, amounts, functions: Vec::new(), trusted: !is_absent }
    }
}

fn shown(device: &DeviceRef) -> String {
    match device {
        DeviceRef::Id(id) => id.to_string(),
        DeviceRef::Minor(minor) => format!("minor {minor}"),
        DeviceRef::Any => "(unknown)".to_owned(),
    }
}

/// What is asked for and not held already.
fn missing(request: &ClassRequest, held: &[HeldDevice]) -> NamedAmounts {
    let mut sums = BTreeMap::new();
    for (resource, amount) in held.iter().filter(|held| held.kind == request.kind).flat_map(|held| &held.amounts) {
        let sum: &mut u64 = sums.entry(resource).or_default();
        *sum = sum.saturating_add(*amount);
    }
    let missing = request.amounts.iter().map(|(resource, asked)| (resource, asked.saturating_sub(*sums.get(resource).unwrap_or(&0))));
    missing.filter(|(_, amount)| *amount > 0).map(|(resource, amount)| (resource.clone(), amount)).collect()
}

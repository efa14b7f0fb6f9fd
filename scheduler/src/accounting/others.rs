//! The parts of devices of other types than GPU that a pod holds, by record and spec.

use std::collections::BTreeMap;

use placement::{
    Device, DeviceRef, DeviceRequest, DevicesOfType, Function, FunctionId, HeldDevice, NamedAmounts,
};

use super::{NodeContext, Recorded, RecordedDevice, RecordedFunction};

/// The parts that a pod holds. A requested amount that the record does not place may be on any device of its type.
pub(super) fn others_held(
    asked: &[(String, u64)],
    record: &Recorded,
    context: NodeContext<'_>,
) -> (Vec<HeldDevice>, Option<String>) {
    let recorded: &[RecordedDevice] = match record {
        Recorded::Devices { others, .. } => others,
        _ => &[],
    };
    let classes = context
        .inventory
        .and_then(|inventory| inventory.other_devices.as_deref());
    let mut problem = None;
    let mut held: Vec<HeldDevice> = recorded
        .iter()
        .map(|device| device.held(classes, &mut problem))
        .collect();
    for request in context.kinds.requests(asked) {
        let missing = missing(&request, &held);
        if !missing.is_empty() {
            problem = problem.or_else(|| {
                Some(format!(
                    "its record names less of {} devices than its spec asks for",
                    request.kind
                ))
            });
            held.push(HeldDevice {
                kind: request.kind,
                device: DeviceRef::Any,
                amounts: missing,
                functions: Vec::new(),
                trusted: false,
            });
        }
    }
    (held, problem)
}

impl RecordedDevice {
    /// The part that is held: on any device of the type if the node does not have this one.
    fn held(&self, classes: Option<&[DevicesOfType]>, problem: &mut Option<String>) -> HeldDevice {
        let Self {
            kind,
            device,
            amounts,
            functions: recorded,
        } = self.clone();
        let class = classes.and_then(|classes| classes.iter().find(|class| class.kind == kind));
        let found = class.and_then(|class| class.find(&device));
        let is_absent = classes.is_some() && found.is_none();
        if is_absent {
            *problem = Some(format!(
                "its record names {kind} device {}, which the node does not have",
                shown(&device)
            ));
        }
        let (functions, doubt) = functions_held(&recorded, found);
        let trusted = !is_absent && doubt.is_none();
        *problem = problem
            .take()
            .or(doubt.map(|doubt| format!("its record names {doubt} of {kind} device {}", shown(&device))));
        let device = if is_absent { DeviceRef::Any } else { device };
        HeldDevice {
            kind,
            device,
            amounts,
            functions,
            trusted,
        }
    }
}

/// The virtual functions that are held, and the doubt about them. One that cannot be identified may be any of the device's.
fn functions_held(
    recorded: &[RecordedFunction],
    device: Option<&Device>,
) -> (Vec<FunctionId>, Option<String>) {
    let own = || {
        device
            .into_iter()
            .flat_map(|device| &device.attributes.functions)
            .flat_map(|group| &group.functions)
    };
    let (mut held, mut doubt) = (Vec::new(), None);
    for RecordedFunction { bus_id, minor } in recorded {
        if !bus_id.is_empty() {
            let is_known = device.is_none() || own().any(|function| function.id.as_str() == &**bus_id);
            doubt =
                doubt.or_else(|| (!is_known).then(|| format!("a virtual function {bus_id}, which is none")));
            held.push(FunctionId::from(&**bus_id));
            continue;
        }
        let mut of_minor = own().filter(|function| *minor >= 0 && function.minor == *minor);
        if let (Some(Function { id, .. }), None) = (of_minor.next(), of_minor.next()) {
            held.push(id.clone());
        } else {
            held.extend(own().map(|function| function.id.clone()));
            doubt = doubt.or_else(|| Some("a virtual function, and not which,".to_owned()));
        }
    }
    held.sort();
    held.dedup();
    (held, doubt)
}

fn shown(device: &DeviceRef) -> String {
    match device {
        DeviceRef::Id(id) => id.to_string(),
        DeviceRef::Minor(minor) => format!("minor {minor}"),
        DeviceRef::Any => "(unknown)".to_owned(),
    }
}

/// The requested amounts that are not held yet.
fn missing(request: &DeviceRequest, held: &[HeldDevice]) -> NamedAmounts {
    let mut sums = BTreeMap::new();
    for (resource, amount) in held
        .iter()
        .filter(|held| held.kind == request.kind)
        .flat_map(|held| &held.amounts)
    {
        let sum: &mut u64 = sums.entry(resource).or_default();
        *sum = sum.saturating_add(*amount);
    }
    let missing = request
        .amounts
        .iter()
        .map(|(resource, asked)| (resource, asked.saturating_sub(*sums.get(resource).unwrap_or(&0))));
    missing
        .filter(|(_, amount)| *amount > 0)
        .map(|(resource, amount)| (resource.clone(), amount))
        .collect()
}

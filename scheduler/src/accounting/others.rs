//! The parts of devices of other types than GPU that a pod holds, by record and spec.

use placement::{
    Device, DeviceRef, DeviceRequest, DevicesOfType, FunctionId, HeldPart, NamedAmounts, ResourceName,
};

use super::{NodeContext, Recorded, RecordedDevice, RecordedFunction};

/// The parts that a pod holds, and the first doubt about them. A requested amount that the record does not place may be on
/// any device of its type.
pub(super) fn others_held(
    asked: &[(String, u64)],
    record: &Recorded,
    context: NodeContext<'_>,
) -> (Vec<HeldPart>, Option<String>) {
    let (mut held, mut problem) = (Vec::new(), None);
    if let Recorded::Devices { others, .. } = record {
        let inventory = context.inventory;
        let reported = inventory.and_then(|inventory| inventory.other_devices.as_deref());
        for device in others {
            let (part, doubt) = device.held(reported);
            held.push(part);
            problem = problem.or(doubt);
        }
    }
    for request in context.kinds.requests(asked) {
        let missing = missing_amounts(&request, &held);
        if missing.is_empty() {
            continue;
        }
        let kind = request.kind;
        problem = problem.or_else(|| {
            Some(format!(
                "its record names less of {kind} devices than its spec asks for"
            ))
        });
        held.push(HeldPart {
            resources: missing,
            trusted: false,
            ..HeldPart::new(kind, DeviceRef::Any)
        });
    }
    (held, problem)
}

impl RecordedDevice {
    /// The part that the pod holds of this device, and the doubt about it. If the node does not have the device, the part may be on
    /// any device of the type.
    fn held(&self, reported: Option<&[DevicesOfType]>) -> (HeldPart, Option<String>) {
        let Self {
            kind,
            device,
            amounts,
            functions,
        } = self;
        let mut types = reported.into_iter().flatten();
        let of_type = types.find(|of_type| of_type.kind == *kind);
        let found = of_type.and_then(|of_type| of_type.find(device));
        let (functions, doubt) = functions_held(functions, found);
        // As long as the node reports no devices of other types, the record cannot be wrong about them.
        let is_absent = reported.is_some() && found.is_none();
        let doubt = if is_absent {
            let shown = shown(device);
            Some(format!(
                "its record names {kind} device {shown}, which the node does not have"
            ))
        } else {
            doubt.map(|doubt| format!("its record names {doubt} of {kind} device {}", shown(device)))
        };
        let device = if is_absent { DeviceRef::Any } else { device.clone() };
        let part = HeldPart {
            resources: amounts.clone(),
            functions,
            trusted: doubt.is_none(),
            ..HeldPart::new(kind.clone(), device)
        };
        (part, doubt)
    }
}

/// The virtual functions that the pod holds of a device, and the doubt about them. If the record does not identify a function, all
/// functions of the device count as held.
fn functions_held(
    recorded: &[RecordedFunction],
    device: Option<&Device>,
) -> (Vec<FunctionId>, Option<String>) {
    let groups = device.into_iter().flat_map(|device| &device.attributes.functions);
    let own: Vec<_> = groups.flat_map(|group| &group.functions).collect();
    let (mut held, mut doubt) = (Vec::new(), None);
    for RecordedFunction { bus_id, minor } in recorded {
        if !bus_id.is_empty() {
            if device.is_some() && !own.iter().any(|function| function.id.as_str() == &**bus_id) {
                doubt = doubt.or_else(|| Some(format!("a virtual function {bus_id}, which is none")));
            }
            held.push(FunctionId::from(&**bus_id));
            continue;
        }
        let mut of_minor = own
            .iter()
            .filter(|function| *minor >= 0 && function.minor == *minor);
        // A minor identifies a function only if no other function has it.
        if let (Some(function), None) = (of_minor.next(), of_minor.next()) {
            held.push(function.id.clone());
        } else {
            held.extend(own.iter().map(|function| function.id.clone()));
            doubt = doubt.or_else(|| Some("a virtual function that it does not identify".to_owned()));
        }
    }
    held.sort();
    held.dedup();
    (held, doubt)
}

/// A device of a record, in words for a problem.
fn shown(device: &DeviceRef) -> String {
    match device {
        DeviceRef::Id(id) => id.to_string(),
        DeviceRef::Minor(minor) => format!("minor {minor}"),
        DeviceRef::Any => "(unknown)".to_owned(),
    }
}

/// The requested amounts that no part has yet.
fn missing_amounts(request: &DeviceRequest, held: &[HeldPart]) -> NamedAmounts {
    let mut missing = NamedAmounts::new();
    for (resource, asked) in &request.amounts {
        let mut left = *asked;
        for part in held.iter().filter(|part| part.kind == request.kind) {
            left = left.saturating_sub(amount_of(part, resource));
        }
        if left > 0 {
            missing.insert(resource.clone(), left);
        }
    }
    missing
}

/// The amount of a resource in a part.
fn amount_of(part: &HeldPart, resource: &ResourceName) -> u64 {
    part.resources.get(resource).copied().unwrap_or(0)
}

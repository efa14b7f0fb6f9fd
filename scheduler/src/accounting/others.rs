//! The parts of devices of other types than GPU that a pod holds, by record and spec.

use placement::{Device, DeviceRef, DeviceRequest, DeviceType, FunctionId, HeldPart, NamedAmounts};
use proto::device::VirtualFunction;

use super::{NodeContext, Recorded, RecordedPart, device_name};

/// The parts of devices of other types than GPU that a pod holds, and the first doubt about them. A requested amount that the
/// record gives to no device may be on any device of its type.
pub(super) fn others_held(
    requested: &[(String, u64)],
    record: &Recorded,
    context: NodeContext<'_>,
) -> (Vec<HeldPart>, Option<String>) {
    let (mut held, mut problem) = (Vec::new(), None);
    for part in record.parts().iter().filter(|part| part.kind != DeviceType::Gpu) {
        let (part, doubt) = held_part(part, context);
        held.push(part);
        problem = problem.or(doubt);
    }
    for request in context.kinds.requests(requested) {
        let missing = missing_amounts(&request, &held);
        if missing.is_empty() {
            continue;
        }
        let kind = request.kind;
        let doubt = format!("its record names less of {kind} devices than its spec asks for");
        problem.get_or_insert(doubt);
        held.push(HeldPart {
            resources: missing,
            trusted: false,
            ..HeldPart::new(kind, DeviceRef::Any)
        });
    }
    (held, problem)
}

/// The part that the pod holds by its record, and the doubt about it. If the node does not have the device, the part may be on
/// any device of the type.
fn held_part(recorded: &RecordedPart, context: NodeContext<'_>) -> (HeldPart, Option<String>) {
    let RecordedPart { kind, device, .. } = recorded;
    let inventory = context.inventory;
    let found = inventory.and_then(|inventory| inventory.find(kind, device));
    let (virtual_functions, doubt) = functions_held(&recorded.functions, found);
    let absent = context.absent(kind, device);
    let counted = if absent.is_some() { &DeviceRef::Any } else { device };
    let doubt = absent
        .or_else(|| doubt.map(|doubt| format!("its record names {doubt} of {}", device_name(kind, device))));
    let part = HeldPart {
        resources: recorded.resources.clone(),
        virtual_functions,
        trusted: doubt.is_none(),
        ..HeldPart::new(kind.clone(), counted.clone())
    };
    (part, doubt)
}

/// The virtual functions that the pod holds of a device, and the doubt about them. If the record does not identify a function,
/// all functions of the device count as held.
fn functions_held(
    recorded: &[VirtualFunction],
    device: Option<&Device>,
) -> (Vec<FunctionId>, Option<String>) {
    let mut of_device = Vec::new();
    if let Some(device) = device {
        of_device.extend(device.attributes.all_functions());
    }
    let (mut held, mut doubt) = (Vec::new(), None);
    for VirtualFunction { bus_id, minor } in recorded {
        if !bus_id.is_empty() {
            if device.is_some() && !of_device.iter().any(|function| function.id.as_str() == bus_id) {
                doubt.get_or_insert(format!("a virtual function {bus_id}, which is none"));
            }
            held.push(FunctionId::from(bus_id.as_str()));
            continue;
        }
        let functions = of_device.iter();
        let mut of_minor = functions.filter(|function| *minor >= 0 && function.minor == *minor);
        // A minor identifies a virtual function only if no other function of the device has it.
        if let (Some(function), None) = (of_minor.next(), of_minor.next()) {
            held.push(function.id.clone());
        } else {
            held.extend(of_device.iter().map(|function| function.id.clone()));
            doubt.get_or_insert("a virtual function that it does not identify".to_owned());
        }
    }
    // Several entries of a record may stand for one function.
    held.sort();
    held.dedup();
    (held, doubt)
}

/// The requested amounts that no part has yet.
fn missing_amounts(request: &DeviceRequest, held: &[HeldPart]) -> NamedAmounts {
    let mut missing = NamedAmounts::new();
    for (resource, asked) in &request.amounts {
        let mut left = *asked;
        for part in held.iter().filter(|part| part.kind == request.kind) {
            left = left.saturating_sub(part.resources.get(resource).copied().unwrap_or(0));
        }
        if left > 0 {
            missing.insert(resource.clone(), left);
        }
    }
    missing
}

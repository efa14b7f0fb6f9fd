//! Adds up what is held of devices of other types than GPU, device by device and resource by resource.

use crate::check::Violation;
use crate::class::{Class, Device, DeviceRef};
use crate::ident::ResourceName;
use crate::node::Node;

pub(super) fn check_node(node: &Node) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (at, class) in node.classes().iter().enumerate() {
        for (nth, device) in class.devices.iter().enumerate() {
            let kept = node.free_others.get(at).and_then(|class| class.get(nth));
            for (resource, total) in &device.resources {
                let (certain, suspect) = held(node, class, device, resource);
                if certain > u128::from(*total) {
                    violations.push(Violation::DeviceOversubscribed {
                        node: node.name.to_string(),
                        kind: class.kind.clone(),
                        id: device.id.clone(),
                        resource: resource.clone(),
                        used: certain,
                        total: *total,
                    });
                }
                let free = u128::from(*total).saturating_sub(certain + suspect);
                let kept = kept
                    .and_then(|free| free.get(resource))
                    .map(|free| u128::from(*free));
                if kept != Some(free) {
                    let detail = format!(
                        "{} {}: {kept:?} of {resource} is kept as free, not {free}",
                        class.kind, device.id
                    );
                    violations.push(Violation::RowDiffers {
                        node: node.name.to_string(),
                        detail,
                    });
                }
            }
        }
    }
    violations
}

/// What is certainly held of a device, and what may be besides.
fn held(node: &Node, class: &Class, device: &Device, resource: &ResourceName) -> (u128, u128) {
    let (mut certain, mut suspect) = (0, 0);
    let parts = node
        .held
        .iter()
        .flat_map(|held| &held.holdings.others)
        .filter(|part| part.kind == class.kind);
    for part in parts {
        let amount = u128::from(part.amounts.get(resource).copied().unwrap_or(0));
        let is_this = match &part.device {
            DeviceRef::Id(id) => device.id == *id,
            DeviceRef::Minor(minor) => device.minor == *minor,
            DeviceRef::Any => false,
        };
        let may_be_any = match &part.device {
            DeviceRef::Id(_) => false,
            DeviceRef::Minor(minor) => class.devices.iter().all(|device| device.minor != *minor),
            DeviceRef::Any => true,
        };
        if is_this && part.trusted {
            certain += amount;
        } else if is_this || may_be_any {
            suspect += amount;
        }
    }
    (certain, suspect)
}

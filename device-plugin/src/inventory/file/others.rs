//! Devices of other types than GPUs in the file of simulated devices.
//!
//! ```json
//! {"type": "rdma", "id": "0000:1f:00.0", "minor": 0, "resources": {"koordinator.sh/rdma": 100}, "labels": {"fabric": "a"},
//!  "health": "Lost", "busId": "0000:1f:00.0", "numaNode": 0, "pcieId": "0000:17:00.0", "pcieRoot": "pci0000:16",
//!  "deviceNodes": ["/dev/infiniband/uverbs0"],
//!  "vfGroups": [{"labels": {"type": "general"}, "vfs": [{"minor": 0, "busID": "0000:1f:00.2"}]}],
//!  "functionNodes": {"0000:1f:00.2": ["/dev/infiniband/uverbs4"]}}
//! ```
//!
//! `type`, `id` and `minor` must be given, and `resources` of types other than `rdma` and `fpga`, which have 100 of the resource
//! that is named for them.

use std::{collections::BTreeMap, path::PathBuf};

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::quantity::Quantity;
use proto::resource::{FPGA, RDMA, WHOLE_PERCENT};
use serde_json::Value;

use super::{Ailment, Fault, Fields, ailment, location, on_node};
use crate::inventory::{Gpu, OtherDevice};

/// One device, which must differ from the GPUs and from those `before` it.
pub(super) fn understand(
    node: &str,
    value: Value,
    gpus: &[(Gpu, Ailment)],
    before: &[(OtherDevice, Ailment)],
) -> Result<(OtherDevice, Ailment), Fault> {
    let Value::Object(object) = value else {
        return Err(Fault::new("devices", &value, &"must be an object"));
    };
    let mut fields = Fields(object);
    let device_type = device_type(fields.need("type")?)?;
    let id = on_node(node, &fields.need::<String>("id")?);
    let health = fields
        .take::<String>("health")?
        .map_or(Ok(Ailment::Healthy), |text| health(&text))?;
    let device = OtherDevice {
        id: id.parse().map_err(|error| Fault::new("id", &id, &error))?,
        minor: fields.need("minor")?,
        resources: resources(&device_type, fields.take("resources")?)?,
        labels: fields.take("labels")?.unwrap_or_default(),
        bus_id: fields.take("busId")?,
        location: location(&mut fields)?,
        vf_groups: fields.take("vfGroups")?.unwrap_or_default(),
        device_nodes: device_nodes("deviceNodes", fields.take("deviceNodes")?.unwrap_or_default())?,
        function_nodes: function_nodes(fields.take("functionNodes")?.unwrap_or_default())?,
        device_type,
    };
    fields.finish()?;
    is_distinct(&device, gpus, before)?;
    Ok((device, health))
}

fn device_type(text: String) -> Result<String, Fault> {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_bounded = !text.is_empty() && !text.starts_with('-') && !text.ends_with('-') && text.len() <= 63;
    if text == TYPE_GPU {
        return Err(Fault::new("type", &text, &"GPUs are listed in `gpus`"));
    }
    if is_bounded && text.bytes().all(is_inner) {
        Ok(text)
    } else {
        Err(Fault::new(
            "type",
            &text,
            &"must be lower-case letters, digits and `-`",
        ))
    }
}

/// An XID is something that only a GPU can have.
fn health(text: &str) -> Result<Ailment, Fault> {
    match ailment(text) {
        Ok(Ailment::Xid(_)) | Err(_) => Err(Fault::new("health", &text, &"must be `Healthy` or `Lost`")),
        Ok(other) => Ok(other),
    }
}

fn resources(
    device_type: &str,
    given: Option<BTreeMap<String, Quantity>>,
) -> Result<BTreeMap<String, Quantity>, Fault> {
    let fault = |value: &dyn ToString, problem: &str| Err(Fault::new("resources", value, &problem));
    let whole = |name: &str| BTreeMap::from([(name.to_owned(), Quantity::from_unsigned(WHOLE_PERCENT))]);
    match (given, device_type) {
        (None, TYPE_RDMA) => Ok(whole(RDMA)),
        (None, TYPE_FPGA) => Ok(whole(FPGA)),
        (None, _) => fault(&"missing", "must be given"),
        (Some(given), _) if given.is_empty() => fault(&"{}", "must name a resource"),
        (Some(given), _) => match given.iter().find(|(_, amount)| **amount < Quantity::default()) {
            Some((name, amount)) => fault(&format!("{name} {amount}"), "must not be negative"),
            None => Ok(given),
        },
    }
}

fn function_nodes(nodes: BTreeMap<String, Vec<PathBuf>>) -> Result<BTreeMap<String, Vec<PathBuf>>, Fault> {
    nodes
        .into_iter()
        .map(|(function, paths)| Ok((function, device_nodes("functionNodes", paths)?)))
        .collect()
}

fn device_nodes(field: &str, paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, Fault> {
    match paths.iter().find(|path| !path.is_absolute()) {
        Some(path) => Err(Fault::new(field, &path.display(), &"must be an absolute path")),
        None => Ok(paths),
    }
}

fn is_distinct(
    device: &OtherDevice,
    gpus: &[(Gpu, Ailment)],
    before: &[(OtherDevice, Ailment)],
) -> Result<(), Fault> {
    if gpus.iter().any(|(gpu, _)| gpu.uuid == device.id) {
        return Err(Fault::new("id", &device.id, &"is that of a GPU"));
    }
    for (other, _) in before {
        if other.id == device.id {
            return Err(Fault::new("id", &device.id, &"is that of another device already"));
        }
        if other.device_type == device.device_type && other.minor == device.minor {
            return Err(Fault::new(
                "minor",
                &device.minor,
                &format!("is that of {} already", other.id),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

//! Labels, place and virtual functions of one device, in the engine's terms.

use placement::{DeviceAttributes, DeviceLocation, Function, FunctionGroup, FunctionId, Labels, SwitchId};
use proto::device::{DeviceInfo, DeviceTopology};
use proto::topology::{NUMA_NODE, NUMA_UNKNOWN};

/// What tells a device apart. Functions without an address cannot be handed out, and are left out.
pub(super) fn attributes(info: &DeviceInfo) -> DeviceAttributes {
    let groups = info.vf_groups.iter().map(|group| FunctionGroup {
        labels: labels(&group.labels),
        functions: group
            .vfs
            .iter()
            .filter(|function| !function.bus_id.is_empty())
            .map(function)
            .collect(),
    });
    DeviceAttributes {
        labels: labels(&info.labels),
        location: info
            .topology
            .as_ref()
            .and_then(|topology| place(topology, is_numa_known(info))),
        functions: groups.filter(|group| !group.functions.is_empty()).collect(),
    }
}

fn function(function: &proto::device::VirtualFunction) -> Function {
    Function {
        id: FunctionId::from(function.bus_id.as_str()),
        minor: function.minor,
    }
}

/// Whether the NUMA node is no assumption.
fn is_numa_known(info: &DeviceInfo) -> bool {
    info.labels
        .get(NUMA_NODE)
        .is_none_or(|label| label != NUMA_UNKNOWN)
}

/// Negative numbers and empty texts say that nothing is known.
fn place(topology: &DeviceTopology, is_numa_known: bool) -> Option<DeviceLocation> {
    let numa = u32::try_from(topology.node_id).ok().filter(|_| is_numa_known);
    let switch = Some(topology.pcie_id.as_str())
        .filter(|id| !id.is_empty() && !id.starts_with('-'))
        .map(SwitchId::from);
    (numa.is_some() || switch.is_some()).then_some(DeviceLocation { numa, switch })
}

fn labels<'a>(labels: impl IntoIterator<Item = (&'a String, &'a String)>) -> Labels {
    labels
        .into_iter()
        .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
        .collect()
}

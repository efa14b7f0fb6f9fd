//! CDI specs of this plugin: one for the driver, and one per answer to Allocate.
//!
//! The spec of an answer is written before its container starts, when it is known which pod the container belongs to. It
//! holds device nodes and variables alone. Everything that a container needs of the driver (libraries, hooks, control nodes)
//! is one static device, made from the vendor's own specs ([`vendor`]), so that the runtime does not parse it once per
//! container.
//!
//! Container runtimes read the spec directory into a cache, some time after it changes. So a name is never used twice with
//! different content: each answer has a name of its own ([`container_device`]), and where the content of a name has to
//! change, [`SpecDir::write`] retires the old one first. [`readers`] sees when the runtime has read a spec.
//!
//! The structures are JSON values rather than those of the crate `container-device-interface`: only the form of a spec would be
//! used of that crate, and it brings two hundred other crates with it. NVIDIA's edits are passed on as they are, with fields that
//! this plugin does not know.

pub mod dir;
pub mod readers;
pub mod spec;
pub mod vendor;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::extended_resource::ExtendedResource;

pub use dir::{SpecDir, SpecError};
pub use spec::Edits;

/// Vendor and class of the devices that stand for answers to Allocate.
pub const CONTAINER_KIND: &str = "gpushare.dev/gpu";

/// The fully qualified name of the device that stands for the driver.
pub const DRIVER_DEVICE: &str = "gpushare.dev/driver=all";

/// The fully qualified name of a device that no other answer names: `fresh` must be another number in each call, also after a
/// restart.
pub fn container_device(resource: ExtendedResource, ids: &[String], fresh: u64) -> String {
    let mut ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    // kubelet sends the same IDs in any order.
    ids.sort_unstable();
    let set = fnv1a(&format!("{resource:?}\n{}", ids.join("\n")));
    format!("{CONTAINER_KIND}={set:016x}-{fresh:x}")
}

/// The short name in a fully qualified CDI name, if that is the name of a container's device in an answer of this plugin.
pub fn name_of(qualified: &str) -> Option<&str> {
    qualified.strip_prefix(CONTAINER_KIND)?.strip_prefix('=')
}

/// The name of this plugin's device in an answer to Allocate; none if the answer names its devices otherwise.
pub fn device_of(answer: &ContainerAllocateResponse) -> Option<&str> {
    answer.cdi_devices.iter().find_map(|device| name_of(&device.name))
}

/// FNV-1a with 64 bits: the same in every version of this program.
pub fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_to_allocate_names_another_cdi_device() {
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let device = container_device(ExtendedResource::Memory, &ids(&["a-1", "a-2"]), 17);
        assert_eq!(
            device,
            container_device(ExtendedResource::Memory, &ids(&["a-2", "a-1"]), 17),
            "the order of IDs does not matter"
        );
        for other in [
            container_device(ExtendedResource::Memory, &ids(&["a-1", "a-2"]), 18),
            container_device(ExtendedResource::Shared, &ids(&["a-1", "a-2"]), 17),
            container_device(ExtendedResource::Memory, &ids(&["a-1"]), 17),
        ] {
            assert_ne!(device, other);
        }
        assert_eq!(name_of(&device).map(str::len), Some(19));
        assert_eq!(name_of("nvidia.com/gpu=all"), None);
    }
}

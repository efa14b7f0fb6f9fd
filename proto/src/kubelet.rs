//! gRPC of kubelet's sockets, generated from `proto/kubelet/*.proto`.
//!
//! Holds no behaviour: who serves and who calls is decided by the daemons.

/// kubelet's device plugin contract, v1beta1.
pub mod deviceplugin {
    #![expect(
        missing_docs,
        unused_qualifications,
        clippy::pedantic,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    tonic::include_proto!("v1beta1");
}

/// kubelet's pod-resources contract, v1.
pub mod podresources {
    #![expect(
        missing_docs,
        unused_qualifications,
        clippy::pedantic,
        clippy::allow_attributes,
        clippy::allow_attributes_without_reason,
        reason = "generated code"
    )]
    tonic::include_proto!("v1");
}

/// The version that [`deviceplugin::RegisterRequest`] must name.
pub const DEVICE_PLUGIN_VERSION: &str = "v1beta1";

/// Health of a device that kubelet may hand out.
pub const HEALTHY: &str = "Healthy";

/// Health of a device that kubelet counts in capacity but not in allocatable.
pub const UNHEALTHY: &str = "Unhealthy";

/// Default of grpc-go, which kubelet does not raise: longer messages end the stream.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

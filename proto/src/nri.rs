//! The Node Resource Interface (NRI) of containerd and CRI-O, by which plugins change containers that the runtime creates.
//!
//! The messages are generated from `proto/nri/*.proto`; [`wire`] has their framing on the runtime's socket. The device plugin is
//! an NRI plugin, which the testbed's container runtime calls.

pub mod wire;

/// The messages of the interface.
pub mod api {
    #![expect(missing_docs, clippy::pedantic, reason = "generated code")]
    include!(concat!(env!("OUT_DIR"), "/nri.v1alpha1.rs"));
}

/// The messages of ttrpc, which wrap those of the interface.
pub mod ttrpc {
    #![expect(missing_docs, reason = "generated code")]
    include!(concat!(env!("OUT_DIR"), "/ttrpc.rs"));
}

/// Default path of the socket on which containerd and CRI-O serve NRI.
pub const SOCKET: &str = "/var/run/nri/nri.sock";

/// The ttrpc service that the runtime serves to plugins.
pub const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";

/// The ttrpc service that a plugin serves to the runtime.
pub const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The bit of [`api::ConfigureResponse::events`] for `CREATE_CONTAINER`, event 4: bit `n - 1` stands for the event `n`.
pub const CREATE_CONTAINER_EVENT: i32 = 1 << 3;

/// Status codes of gRPC that the plugin or the testbed uses.
pub mod code {
    /// The message is invalid.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// The call cannot succeed before the system's state changes.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// The service or the method does not exist.
    pub const UNIMPLEMENTED: i32 = 12;
    /// The call may succeed if it is retried.
    pub const UNAVAILABLE: i32 = 14;
}

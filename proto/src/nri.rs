//! The Node Resource Interface: how a container runtime lets plugins change the containers that it makes.
//!
//! Messages are generated from `proto/nri/*.proto`; how they lie on the runtime's socket is in [`wire`]. Holds no behaviour:
//! who calls and who answers is decided by their users.

pub mod wire;

/// The messages.
pub mod api {
    #![expect(missing_docs, clippy::pedantic, reason = "generated code")]
    include!(concat!(env!("OUT_DIR"), "/nri.v1alpha1.rs"));
}

/// The envelopes of calls and answers.
pub mod ttrpc {
    #![expect(missing_docs, reason = "generated code")]
    include!(concat!(env!("OUT_DIR"), "/ttrpc.rs"));
}

/// Where runtimes listen for plugins.
pub const SOCKET: &str = "/var/run/nri/nri.sock";

/// The service that the runtime serves.
pub const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";

/// The service that a plugin serves.
pub const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// The bit of [`api::ConfigureResponse::events`] for the making of a container.
pub const CREATE_CONTAINER_EVENT: i32 = 1 << 3;

/// gRPC's codes, as far as they are used.
pub mod code {
    /// What was sent makes no sense.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// Trying again does not help until somebody has changed something.
    pub const FAILED_PRECONDITION: i32 = 9;
    /// There is no such service or method.
    pub const UNIMPLEMENTED: i32 = 12;
    /// Trying again may help.
    pub const UNAVAILABLE: i32 = 14;
}

//! The program `gpu-probe` (`testbed/gpu-probe`) as a node has it, and its name in pods.

use std::path::PathBuf;

/// The name of the program.
pub const PROGRAM: &str = "gpu-probe";

/// The directory at which containers of the program mount the node's directory of CDI specs.
pub const SPECS_MOUNT: &str = "/cdi";

/// The program on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeProgram {
    /// Its binary.
    pub program: PathBuf,
    /// The directory of the stand-in for the driver's library.
    pub libraries: PathBuf,
    /// The memory of each GPU of the stand-in, in bytes.
    pub gpu_bytes: u64,
    /// The memory that a CUDA context of the stand-in takes, in bytes.
    pub context_bytes: u64,
}

//! Which way devices get into containers on this node: by CDI or by the vendor's environment variable, or not at all.
//!
//! Nothing is guessed from a version. [`decide()`] is a pure function of what was found on the node; [`follow`] finds it, keeps
//! the driver's CDI device in step with the vendor's specs, and reports what holds. The decision may change while the process
//! runs: each answer to Allocate says itself which way it takes.

mod decide;
pub mod follow;

use std::fmt;
use std::path::PathBuf;

use clap::ValueEnum;
use proto::device::TYPE_GPU;

use crate::cdi::SpecDir;
use crate::cdi::vendor::VendorSpecs;

pub use decide::{Cdi, Driver, Facts, OwnContainer, Variable, VariableFacts, decide, exposure, variable};

/// How containers get their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// By a variable in the answer to Allocate, which stands as long as the container lives.
    Envvar,
    /// By a CDI device whose spec is written before the container starts.
    Cdi,
}

impl Mode {
    /// The mode as flags and metrics write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::Cdi => "cdi",
        }
    }
}

/// The reason when no container can get the driver.
const NO_DRIVER_SPEC: &str = "NoDriverSpec";

/// The reason when the runtime ignores CDI devices.
const CDI_OFF: &str = "CdiOff";

/// How sure it is that a mode works here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certainty {
    /// It was seen to work.
    Proven,
    /// Nothing speaks against it.
    Assumed,
    /// It cannot work: no container gets a device.
    Impossible,
}

impl Certainty {
    /// The word as metrics write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Proven => "proven",
            Self::Assumed => "assumed",
            Self::Impossible => "impossible",
        }
    }
}

/// The pods whose containers the runtime gives all GPUs if their image says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// All of the node.
    EveryPod,
    /// Those with this `RuntimeClass`.
    RuntimeClass(String),
}

/// How containers of this node get their devices, and why so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The mode.
    pub mode: Mode,
    /// How sure that is.
    pub certainty: Certainty,
    /// One word, for a condition.
    pub reason: &'static str,
    /// The same for a person; where it is impossible, with the setting to change.
    pub message: String,
    /// Which containers that ask for no GPU see all of them if their image sets the variable; none if a runtime hook takes the
    /// variable away, or nothing tells that the runtime acts on it.
    pub exposure: Option<Exposure>,
}

impl Injection {
    /// Whether a container can get its devices.
    pub fn is_possible(&self) -> bool {
        self.certainty != Certainty::Impossible
    }

    /// Whether a container can get a device of this type: the driver is for GPUs alone.
    pub fn is_possible_for(&self, device_type: &str) -> bool {
        self.is_possible() || (self.reason == NO_DRIVER_SPEC && device_type != TYPE_GPU)
    }
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.mode.as_str(), self.certainty.as_str(), self.message)
    }
}

/// What the operator chooses, and where things are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InjectionSettings {
    /// The mode; none to find out what works on this node.
    pub mode: Option<Mode>,
    /// Where specs are written.
    pub specs: SpecDir,
    /// The vendor's specs.
    pub vendor_specs: VendorSpecs,
    /// Whether device nodes are handed over too where the variable is used.
    pub pass_device_specs: bool,
    /// Where the node's root directory is seen from here.
    pub host_root: PathBuf,
}

impl InjectionSettings {
    /// By the variable alone.
    pub fn envvar() -> Self {
        Self {
            mode: Some(Mode::Envvar),
            specs: SpecDir::new("/var/run/cdi".into()),
            vendor_specs: VendorSpecs::default(),
            pass_device_specs: false,
            host_root: "/".into(),
        }
    }
}

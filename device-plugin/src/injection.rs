//! The way in which devices get into containers on this node: by CDI or by the vendor's environment variable, or not at all.
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

/// The evidence that a mode works on this node.
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

/// The way in which containers of this node get their devices, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The mode.
    pub mode: Mode,
    /// The evidence that the mode works.
    pub certainty: Certainty,
    /// One word, for a condition.
    pub reason: &'static str,
    /// The same for a person; where it is impossible, with the setting to change.
    pub message: String,
    /// The pods whose containers see all GPUs without asking for one if their image sets the variable; none if a runtime hook
    /// takes the variable away, or the runtime is not known to act on it.
    pub exposure: Option<Exposure>,
}

impl Injection {
    /// Returns true if a container can get its devices.
    pub fn is_possible(&self) -> bool {
        self.certainty != Certainty::Impossible
    }

    /// Returns true if a container can get a device of this type: only GPUs need the driver.
    pub fn is_possible_for(&self, device_type: &str) -> bool {
        self.is_possible() || (self.reason == NO_DRIVER_SPEC && device_type != TYPE_GPU)
    }
}

impl fmt::Display for Injection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}): {}",
            self.mode.as_str(),
            self.certainty.as_str(),
            self.message
        )
    }
}

/// The operator's settings for injection, and the paths that it uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InjectionSettings {
    /// The mode; none to find out what works on this node.
    pub mode: Option<Mode>,
    /// Where specs are written.
    pub specs: SpecDir,
    /// The vendor's specs.
    pub vendor_specs: VendorSpecs,
    /// True if answers that use the variable pass device nodes too.
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

//! The injection mode of this node, and its evidence.

use proto::device::TYPE_GPU;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A variable in the answer to Allocate names the container's devices, and cannot change later.
    Envvar,
    /// A CDI device brings the devices; the plugin writes its spec before the container starts.
    Cdi,
}

impl Mode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::Cdi => "cdi",
        }
    }
}

/// The value of `NVIDIA_VISIBLE_DEVICES` with which NVIDIA's runtime gives a container nothing.
pub(crate) const VOID: &str = "void";

/// The reason of an [`Injection`] when no CDI spec can bring the driver into containers.
pub(super) const NO_DRIVER_SPEC: &str = "NoDriverSpec";

/// The reason of an [`Injection`] when the container runtime ignores CDI devices.
pub(super) const CDI_OFF: &str = "CdiOff";

/// The evidence that a mode works on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Certainty {
    Proven,
    /// Nothing has shown that the mode does not work.
    Assumed,
    /// The mode cannot work: no container gets a device.
    Impossible,
}

impl Certainty {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Proven => "proven",
            Self::Assumed => "assumed",
            Self::Impossible => "impossible",
        }
    }
}

/// The pods whose containers the runtime gives all GPUs if their image sets `NVIDIA_VISIBLE_DEVICES=all`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exposure {
    EveryPod,
    RuntimeClass(String),
    Unknown(&'static str),
}

/// The injection mode of this node, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Injection {
    pub(crate) mode: Mode,
    pub(crate) certainty: Certainty,
    /// The reason in one word, for a condition.
    pub(crate) reason: &'static str,
    /// The reason in a sentence; where injection is impossible, with the setting to change.
    pub(crate) message: String,
    /// The pods whose containers see all GPUs without a request if their image sets the variable, as far as is known.
    pub(crate) exposure: Option<Exposure>,
}

impl Injection {
    pub(crate) fn is_possible(&self) -> bool {
        self.certainty != Certainty::Impossible
    }

    /// True if a container can get a device of this type: only GPUs need the driver.
    pub(crate) fn is_possible_for(&self, device_type: &str) -> bool {
        self.is_possible() || (self.reason == NO_DRIVER_SPEC && device_type != TYPE_GPU)
    }
}

//! The kinds of nodes with NVIDIA GPUs that clusters have. Each has a container runtime, CDI specs of the vendor's tools, and
//! a way to deploy the plugin. `docs/nvidia.md` describes them for operators. Jetson, WSL2 and MIG are left out.

use std::collections::BTreeMap;

use crate::kubelet::nvidia_runtime::{Created, Modification, NvidiaRuntime, RuntimeMode, VISIBLE_DEVICES};
use crate::kubelet::{CdiSupport, RuntimeConfig};

use super::DriverSpecs;

/// The `RuntimeClass` that GPU Operator and NVIDIA's instructions make.
pub const RUNTIME_CLASS: &str = "nvidia";

/// A kind of node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeKind {
    /// NVIDIA's runtime in mode `legacy` is the default, and nothing writes CDI specs.
    Variable,
    /// NVIDIA's runtime in mode `legacy` is the default, and the toolkit's CDI spec is there.
    VariableWithSpec,
    /// NVIDIA's runtime in mode `jit-cdi` is the default.
    JitCdi,
    /// NVIDIA's runtime handles pods of a `RuntimeClass`.
    RuntimeClass,
    /// GPU Operator since 25.10 with its own settings.
    Operator,
    /// GPU Operator with its runtime as the default.
    OperatorDefaultRuntime,
    /// NVIDIA's runtime is the default, and ignores the variable of unprivileged containers.
    Hardened,
    /// No runtime of NVIDIA, and the toolkit's CDI spec.
    PlainCdi,
    /// NVIDIA's runtime is the default, and containerd drops CDI devices.
    CdiDroppedVariable,
    /// No runtime of NVIDIA, and containerd drops CDI devices.
    CdiDropped,
    /// No runtime of NVIDIA, and containerd refuses containers with CDI devices.
    CdiRefused,
    /// No runtime of NVIDIA, and no CDI spec of the driver.
    NoDriverSpec,
}

impl NodeKind {
    /// All kinds of nodes.
    pub const ALL: [Self; 12] = [
        Self::Variable,
        Self::VariableWithSpec,
        Self::JitCdi,
        Self::RuntimeClass,
        Self::Operator,
        Self::OperatorDefaultRuntime,
        Self::Hardened,
        Self::PlainCdi,
        Self::CdiDroppedVariable,
        Self::CdiDropped,
        Self::CdiRefused,
        Self::NoDriverSpec,
    ];

    /// The name in tables and of nodes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Variable => "variable",
            Self::VariableWithSpec => "variable-with-spec",
            Self::JitCdi => "jit-cdi",
            Self::RuntimeClass => "runtime-class",
            Self::Operator => "operator",
            Self::OperatorDefaultRuntime => "operator-default-runtime",
            Self::Hardened => "hardened",
            Self::PlainCdi => "plain-cdi",
            Self::CdiDroppedVariable => "cdi-dropped-variable",
            Self::CdiDropped => "cdi-dropped",
            Self::CdiRefused => "cdi-refused",
            Self::NoDriverSpec => "no-driver-spec",
        }
    }

    /// The configuration of NVIDIA's runtime on such a node, if it is installed.
    fn nvidia(self) -> Option<NvidiaRuntime> {
        match self {
            Self::Variable | Self::VariableWithSpec | Self::CdiDroppedVariable => {
                Some(NvidiaRuntime::of_mode(RuntimeMode::Legacy))
            }
            Self::JitCdi => Some(NvidiaRuntime::of_mode(RuntimeMode::JitCdi)),
            Self::RuntimeClass => Some(NvidiaRuntime::of_mode(RuntimeMode::Auto)),
            Self::Operator | Self::OperatorDefaultRuntime => Some(NvidiaRuntime::of_operator()),
            Self::Hardened => Some(NvidiaRuntime {
                accepts_unprivileged: false,
                ..NvidiaRuntime::of_mode(RuntimeMode::Legacy)
            }),
            Self::PlainCdi | Self::CdiDropped | Self::CdiRefused | Self::NoDriverSpec => None,
        }
    }

    /// Its container runtime.
    pub(crate) fn container_runtime(self) -> RuntimeConfig {
        let cdi = match self {
            Self::CdiDroppedVariable | Self::CdiDropped => CdiSupport::Dropped,
            Self::CdiRefused => CdiSupport::Refused,
            _ => CdiSupport::On,
        };
        let nvidia_class = matches!(self, Self::RuntimeClass | Self::Operator).then_some(RUNTIME_CLASS);
        RuntimeConfig {
            cdi,
            nvidia: self.nvidia(),
            nvidia_class,
            ..RuntimeConfig::default()
        }
    }

    /// The vendor's CDI specs on it.
    pub(crate) fn driver(self) -> DriverSpecs {
        match self {
            Self::Variable | Self::NoDriverSpec => DriverSpecs::Missing,
            Self::Operator | Self::OperatorDefaultRuntime => DriverSpecs::Management,
            _ => DriverSpecs::Toolkit,
        }
    }

    /// The flags that its deployment adds to the plugin's. Where no runtime of NVIDIA handles the plugin's own container, NVML
    /// comes from the driver's directory on the node.
    pub(crate) fn plugin_args(self) -> Vec<String> {
        if self == Self::Hardened || self.nvidia().is_none() {
            vec!["--driver-root=/driver-root".to_owned()]
        } else {
            Vec::new()
        }
    }

    /// The value of `NVIDIA_VISIBLE_DEVICES` in the plugin's own container there, as the runtime makes it.
    pub(crate) fn plugin_variable(self) -> &'static str {
        let created = Created {
            env: &BTreeMap::from([(VISIBLE_DEVICES.to_owned(), "all".to_owned())]),
            annotations: &BTreeMap::new(),
            is_privileged: false,
        };
        match self.nvidia().map(|nvidia| nvidia.modify(created)) {
            Some(Ok(Modification::InMemory(_) | Modification::Specs(_))) => "void",
            _ => "all",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_visible_devices_variable_in_the_plugins_container_is_that_of_the_runtime() {
        let rows = NodeKind::ALL.map(|kind| format!("{} {}", kind.name(), kind.plugin_variable()));
        insta::assert_snapshot!(rows.join("\n"), @r"
        variable all
        variable-with-spec all
        jit-cdi void
        runtime-class void
        operator void
        operator-default-runtime void
        hardened all
        plain-cdi all
        cdi-dropped-variable all
        cdi-dropped all
        cdi-refused all
        no-driver-spec all
        ");
    }
}

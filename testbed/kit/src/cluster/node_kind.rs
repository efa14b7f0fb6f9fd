//! The kinds of nodes with NVIDIA GPUs that clusters have. Each kind has a container runtime, CDI specs of the
//! vendor's tools, and a way to deploy the plugin. Pure.
//!
//! `docs/nvidia.md` describes them for operators. Jetson, WSL2 and MIG are left out.

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

/// The source of NVML in the plugin's own container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deployment {
    /// By `NVIDIA_VISIBLE_DEVICES=all`, as `deploy/base` sets it.
    Base,
    /// By `NVIDIA_VISIBLE_DEVICES=all` in a pod with [`RUNTIME_CLASS`].
    RuntimeClass,
    /// From the driver's directory on the node.
    DriverRoot,
}

impl Deployment {
    /// The flags that it adds to the plugin's.
    pub fn plugin_args(self) -> Vec<String> {
        match self {
            Self::Base | Self::RuntimeClass => Vec::new(),
            Self::DriverRoot => vec!["--driver-root=/driver-root".to_owned()],
        }
    }
}

/// The plugin's own container, as the container runtime makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginContainer {
    /// The value of `NVIDIA_VISIBLE_DEVICES` in it.
    pub variable: Option<String>,
    /// True if NVML is in it.
    pub has_nvml: bool,
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
    pub fn container_runtime(self) -> RuntimeConfig {
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
    pub fn driver(self) -> DriverSpecs {
        match self {
            Self::Variable | Self::NoDriverSpec => DriverSpecs::Missing,
            Self::Operator | Self::OperatorDefaultRuntime => DriverSpecs::Management,
            _ => DriverSpecs::Toolkit,
        }
    }

    /// The source of NVML for a plugin that is deployed on such a node.
    pub fn deployment(self) -> Deployment {
        match self {
            Self::RuntimeClass | Self::Operator => Deployment::RuntimeClass,
            Self::Hardened | Self::PlainCdi | Self::CdiDropped | Self::CdiRefused | Self::NoDriverSpec => {
                Deployment::DriverRoot
            }
            Self::Variable
            | Self::VariableWithSpec
            | Self::JitCdi
            | Self::OperatorDefaultRuntime
            | Self::CdiDroppedVariable => Deployment::Base,
        }
    }

    /// The plugin's own container there, as the runtime makes it.
    pub(crate) fn own_container(self) -> PluginContainer {
        let RuntimeConfig {
            nvidia, nvidia_class, ..
        } = self.container_runtime();
        let is_handled = nvidia_class.is_none() || self.deployment() == Deployment::RuntimeClass;
        let env = BTreeMap::from([(VISIBLE_DEVICES.to_owned(), "all".to_owned())]);
        let created = Created {
            env: &env,
            annotations: &BTreeMap::new(),
            is_privileged: false,
        };
        let modified = nvidia
            .filter(|_| is_handled)
            .and_then(|nvidia| nvidia.modify(created).ok())
            .unwrap_or(Modification::None);
        let (value, has_driver) = match &modified {
            Modification::None => ("all", false),
            Modification::Cli(_) => ("all", true),
            Modification::InMemory(_) => ("void", true),
            Modification::Specs(names) => ("void", names.iter().all(|name| self.resolves(name))),
        };
        PluginContainer {
            variable: Some(value.to_owned()),
            has_nvml: has_driver || self.deployment() == Deployment::DriverRoot,
        }
    }

    /// Returns true if a CDI spec of the node defines this device; only devices that stand for all GPUs are asked about.
    fn resolves(self, name: &str) -> bool {
        match self.driver() {
            DriverSpecs::Toolkit | DriverSpecs::LongToolkit => name == "nvidia.com/gpu=all",
            DriverSpecs::Management => name == "management.nvidia.com/gpu=all",
            DriverSpecs::NotNeeded | DriverSpecs::Missing => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elsewhere the plugin would end for want of the library, and nothing would be tried.
    #[test]
    fn the_plugin_sees_nvml_on_every_kind_of_node() {
        let without: Vec<NodeKind> = NodeKind::ALL
            .into_iter()
            .filter(|kind| !kind.own_container().has_nvml)
            .collect();
        assert_eq!(without, []);
    }

    #[test]
    fn the_visible_devices_variable_in_the_plugins_container_is_that_of_the_runtime() {
        let rows = NodeKind::ALL.map(|kind| {
            format!(
                "{} {}",
                kind.name(),
                kind.own_container().variable.unwrap_or_default()
            )
        });
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

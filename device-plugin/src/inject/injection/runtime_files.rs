//! The configuration of the node's container runtime, as far as it decides which containers NVIDIA's runtime acts on.
//!
//! The files are read line by line, as `deploy/which-node.sh` reads them: each setting that matters is a line of its own, and a
//! node has the files of one container runtime.

use std::path::Path;

use crate::root_dir::RootDir;

/// The configuration files of containerd (as distributions, k3s and RKE2, k0s, `MicroK8s` and Talos keep them) and of CRI-O.
const RUNTIME_FILES: [&str; 13] = [
    "/etc/containerd/config.toml",
    "/etc/containerd/conf.d/*.toml",
    "/etc/containerd/*/*.toml",
    "/var/lib/rancher/*/agent/etc/containerd/config.toml",
    "/var/lib/rancher/*/agent/etc/containerd/*/*.toml",
    "/etc/k0s/containerd.toml",
    "/etc/k0s/containerd.d/*.toml",
    "/run/k0s/containerd-cri.toml",
    "/var/snap/microk8s/current/args/containerd.toml",
    "/etc/cri/containerd.toml",
    "/etc/cri/conf.d/*.toml",
    "/etc/crio/crio.conf",
    "/etc/crio/crio.conf.d/*",
];

/// The configuration of NVIDIA's runtime: GPU Operator's, else the distribution's.
const TOOLKIT_FILES: [&str; 2] = [
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
    "/etc/nvidia-container-runtime/config.toml",
];

/// Hooks by which CRI-O gives GPUs to every container, without a runtime of NVIDIA's.
const HOOK_FILES: [&str; 2] = [
    "/usr/share/containers/oci/hooks.d/*.json",
    "/etc/containers/oci/hooks.d/*.json",
];

/// NVIDIA's runtime in the configuration of a node's container runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfiguredRuntime {
    Unknown,
    /// NVIDIA's runtime is not configured, or ignores the variable of containers that are not privileged.
    Inactive,
    /// NVIDIA's runtime runs the containers of pods with its `RuntimeClass`.
    OfRuntimeClass,
    /// NVIDIA's runtime is the default, or a hook of CRI-O gives GPUs to every container.
    Default,
}

impl ConfiguredRuntime {
    pub(crate) fn read(node: &RootDir) -> Self {
        let runtime = settings(node, &RUNTIME_FILES);
        let mut toolkits = TOOLKIT_FILES.iter().map(|file| settings(node, &[file]));
        let toolkit = toolkits.find(|lines| !lines.is_empty()).unwrap_or_default();
        let accepts = "accept-nvidia-visible-devices-envvar-when-unprivileged";
        // NVIDIA's runtime then acts on no container of a pod that is not privileged, whatever else is configured.
        for line in &toolkit {
            if value_of(line, accepts) == Some("false") {
                return Self::Inactive;
            }
        }
        for line in settings(node, &HOOK_FILES) {
            if line.contains("nvidia") {
                return Self::Default;
            }
        }
        let mut found = if runtime.is_empty() {
            Self::Unknown
        } else {
            Self::Inactive
        };
        for line in &runtime {
            let default = value_of(line, "default_runtime_name").or(value_of(line, "default_runtime"));
            if default.unwrap_or_default().starts_with("nvidia") {
                return Self::Default;
            }
            if line.contains("nvidia-container-runtime") {
                found = Self::OfRuntimeClass;
            }
        }
        found
    }
}

/// The lines of the files that the patterns stand for, without comments.
fn settings(node: &RootDir, patterns: &[&str]) -> Vec<String> {
    let mut lines = Vec::new();
    for pattern in patterns {
        for file in node.expand(Path::new(pattern)) {
            let bytes = node.read(&file).unwrap_or_default();
            for line in String::from_utf8_lossy(&bytes).lines() {
                let line = line.split('#').next().unwrap_or_default();
                if !line.trim().is_empty() {
                    lines.push(line.to_owned());
                }
            }
        }
    }
    lines
}

/// The value that a line of TOML sets the key to, without its quotes.
fn value_of<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (name, value) = line.split_once('=')?;
    (name.trim() == key).then(|| value.trim().trim_matches(['"', '\'']))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;
    use crate::tests::node_trees::NodeTree;

    const DEFAULT: &str =
        "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"nvidia\"\n";
    const RUNC: &str =
        "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\n  default_runtime_name = 'runc'\n";
    const HANDLER: &str =
        "[plugins.x.runtimes.nvidia.options]\n  BinaryName = \"/usr/bin/nvidia-container-runtime\"\n";
    const CONFIG: &str = "etc/containerd/config.toml";
    const TOOLKIT: &str = "etc/nvidia-container-runtime/config.toml";
    const OPERATOR_TOOLKIT: &str = "usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml";
    const HARDENED: &str = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n";

    /// The configuration as the script says it, in the words of its row.
    fn in_words(configured: ConfiguredRuntime) -> &'static str {
        match configured {
            ConfiguredRuntime::Unknown => "not known: the container runtime's configuration was not found",
            ConfiguredRuntime::Inactive => "none",
            ConfiguredRuntime::OfRuntimeClass => "with the RuntimeClass nvidia",
            ConfiguredRuntime::Default => "all",
        }
    }

    #[rstest]
    #[case::no_files(&[], &[], ConfiguredRuntime::Unknown)]
    #[case::toolkit_alone(&[(TOOLKIT, "[nvidia-container-runtime]\n")], &[], ConfiguredRuntime::Unknown)]
    #[case::runc(&[(CONFIG, RUNC)], &[], ConfiguredRuntime::Inactive)]
    #[case::runc_and_toolkit(&[(CONFIG, RUNC), (TOOLKIT, "[nvidia-container-runtime]\n")], &[], ConfiguredRuntime::Inactive)]
    #[case::default(&[(CONFIG, DEFAULT)], &[], ConfiguredRuntime::Default)]
    #[case::default_in_single_quotes(&[(CONFIG, "default_runtime_name = 'nvidia'\n")], &[], ConfiguredRuntime::Default)]
    #[case::default_of_aks(&[(CONFIG, "    default_runtime_name = \"nvidia-container-runtime\"\n")], &[], ConfiguredRuntime::Default)]
    #[case::commented_out(&[(CONFIG, "version = 2\n# default_runtime_name = \"nvidia\"\n")], &[], ConfiguredRuntime::Inactive)]
    #[case::commented_after(&[(CONFIG, "default_runtime_name = \"nvidia\" # of the toolkit\n")], &[], ConfiguredRuntime::Default)]
    #[case::in_an_import(&[(CONFIG, RUNC), ("etc/containerd/conf.d/99-nvidia.toml", DEFAULT)], &[], ConfiguredRuntime::Default)]
    #[case::handler(&[(CONFIG, RUNC), ("etc/containerd/conf.d/99-nvidia.toml", HANDLER)], &[], ConfiguredRuntime::OfRuntimeClass)]
    #[case::hardened(&[(CONFIG, DEFAULT), (TOOLKIT, HARDENED)], &[], ConfiguredRuntime::Inactive)]
    #[case::hardened_handler(&[(CONFIG, HANDLER), (TOOLKIT, HARDENED)], &[], ConfiguredRuntime::Inactive)]
    #[case::operators_toolkit_counts(
        &[(CONFIG, DEFAULT), (OPERATOR_TOOLKIT, "debug = 1\n"), (TOOLKIT, HARDENED)], &[], ConfiguredRuntime::Default
    )]
    #[case::k3s(&[("var/lib/rancher/k3s/agent/etc/containerd/config.toml", HANDLER)], &[], ConfiguredRuntime::OfRuntimeClass)]
    #[case::k0s(&[("etc/k0s/containerd.d/nvidia.toml", DEFAULT)], &[], ConfiguredRuntime::Default)]
    #[case::microk8s(
        &[("var/snap/microk8s/7/args/containerd.toml", DEFAULT)], &[("var/snap/microk8s/current", "7")], ConfiguredRuntime::Default
    )]
    #[case::talos(&[("etc/cri/conf.d/10-nvidia.toml", HANDLER)], &[], ConfiguredRuntime::OfRuntimeClass)]
    #[case::absolute_link(
        &[("etc/static/containerd/config.toml", DEFAULT)], &[("etc/containerd", "/etc/static/containerd")], ConfiguredRuntime::Default
    )]
    #[case::crio(&[("etc/crio/crio.conf.d/99-nvidia.conf", "[crio.runtime]\ndefault_runtime = \"nvidia\"\n")], &[], ConfiguredRuntime::Default)]
    #[case::crio_hook(
        &[("etc/crio/crio.conf", "[crio]\n"), ("usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{\"path\": \"/usr/bin/nvidia-container-toolkit\"}")],
        &[], ConfiguredRuntime::Default
    )]
    fn the_plugin_and_the_script_read_the_same_configuration(
        #[case] files: &[(&str, &str)],
        #[case] links: &[(&str, &str)],
        #[case] expected: ConfiguredRuntime,
    ) {
        let tree = NodeTree::new(files, links);
        assert_eq!(
            ConfiguredRuntime::read(&RootDir::new(tree.path())),
            expected,
            "the plugin"
        );
        let row = tree.ask_script().remove("pods that see GPUs without a request");
        assert_eq!(row.as_deref(), Some(in_words(expected)), "the script");
    }

    proptest! {
        #![proptest_config(fuzz::config(300))]

        /// A node with a damaged configuration has one, unless the damages leave only comments and blanks.
        #[test]
        fn no_configuration_makes_the_reader_panic(
            runtime in fuzz::damaged([DEFAULT, RUNC, HANDLER].map(|text| text.as_bytes().to_vec()).to_vec()),
            toolkit in fuzz::damaged(vec![HARDENED.as_bytes().to_vec()]),
        ) {
            let (runtime, toolkit) = (String::from_utf8_lossy(&runtime), String::from_utf8_lossy(&toolkit));
            let tree = NodeTree::new(&[(CONFIG, &runtime), (TOOLKIT, &toolkit)], &[]);
            let has_settings = runtime.lines().any(|line| !line.split('#').next().unwrap_or_default().trim().is_empty());
            let configured = ConfiguredRuntime::read(&RootDir::new(tree.path()));
            prop_assert!(!has_settings || configured != ConfiguredRuntime::Unknown);
        }
    }
}

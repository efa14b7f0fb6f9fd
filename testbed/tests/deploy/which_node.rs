//! The script that finds out which kind of NVIDIA node a node is, on the files of each kind.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::deploy;
use super::render::render_with;

const LIBRARY: (&str, &str) = ("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "");
const DEFAULT_RUNTIME: (&str, &str) = (
    "etc/containerd/config.toml",
    "[plugins.cri.containerd]\n  default_runtime_name = \"nvidia\"\n",
);
const RUNTIME_CLASS: (&str, &str) = (
    "etc/containerd/conf.d/99-nvidia.toml",
    "[plugins.runtimes.nvidia.options]\n  BinaryName = \"/usr/bin/nvidia-container-runtime\"\n",
);
const TOOLKIT_SPEC: (&str, &str) = (
    "var/run/cdi/nvidia.yaml",
    "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n",
);

/// A kind of node: its name, the version of its container runtime, its files.
type Kind = (
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
);

const KINDS: [Kind; 10] = [
    (
        "variable",
        "containerd://2.1.4",
        &[LIBRARY, DEFAULT_RUNTIME, ("etc/cdi/.keep", "")],
    ),
    (
        "runtime-class",
        "containerd://2.1.4",
        &[LIBRARY, RUNTIME_CLASS, TOOLKIT_SPEC],
    ),
    (
        "gpu-operator",
        "containerd://1.7.27",
        &[
            ("run/nvidia/driver/usr/lib64/libnvidia-ml.so.1", ""),
            RUNTIME_CLASS,
            (
                "etc/containerd/config.toml",
                "  enable_cdi = true # by the operator\n",
            ),
            (
                "var/run/cdi/management.nvidia.com-gpu.yaml",
                "kind: management.nvidia.com/gpu\n",
            ),
            ("run/nvidia/validations/driver-ready", ""),
        ],
    ),
    (
        "hardened",
        "containerd://2.1.4",
        &[
            LIBRARY,
            DEFAULT_RUNTIME,
            TOOLKIT_SPEC,
            (
                "etc/nvidia-container-runtime/config.toml",
                "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n",
            ),
        ],
    ),
    ("plain-cdi", "containerd://2.1.4", &[LIBRARY, TOOLKIT_SPEC]),
    (
        "cdi-off",
        "containerd://1.7.27",
        &[LIBRARY, RUNTIME_CLASS, TOOLKIT_SPEC],
    ),
    ("no-driver-spec", "cri-o://1.36.0", &[LIBRARY]),
    (
        "container-optimized-os",
        "containerd://2.1.4",
        &[
            ("home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1", ""),
            TOOLKIT_SPEC,
        ],
    ),
    (
        "selinux",
        "cri-o://1.36.0",
        &[LIBRARY, TOOLKIT_SPEC, ("sys/fs/selinux/enforce", "1")],
    ),
    ("no-driver", "containerd://2.1.4", &[]),
];

fn ask(root: &Path, runtime: &str, mountinfo: &str) -> String {
    let file = root.join("mountinfo");
    fs::write(&file, mountinfo.replace("ROOT", root.to_str().unwrap())).unwrap();
    let mut script = Command::new("sh");
    script
        .arg(deploy().join("which-node.sh"))
        .arg("--root")
        .arg(root)
        .args(["--runtime", runtime])
        .env("MOUNTINFO", &file);
    let output = script.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn node(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn the_script_names_the_components_of_each_kind_of_node() {
    let advices = KINDS.map(|(kind, runtime, files)| {
        let answer = ask(
            node(files).path(),
            runtime,
            "1 0 8:1 / ROOT rw - ext4 /dev/sda rw\n",
        );
        let (_, advice) = answer.split_once("\n\n").unwrap();
        format!("{kind}\n{}", advice.trim_end())
    });
    insta::assert_snapshot!(advices.join("\n\n"));
}

/// The mount of the node's files into a pod is read-only in any case; only the file system itself counts.
#[test]
fn the_script_detects_a_read_only_etc() {
    let advice = |mountinfo: &str| {
        let answer = ask(
            node(&[LIBRARY, TOOLKIT_SPEC]).path(),
            "containerd://2.1.4",
            mountinfo,
        );
        answer.contains("deploy/components/read-only-etc")
    };
    assert!(
        !advice("1 0 8:1 / ROOT ro - ext4 /dev/sda rw\n"),
        "mounted read-only"
    );
    assert!(
        advice("1 0 8:1 / ROOT ro - squashfs /dev/loop0 ro\n"),
        "as with Talos"
    );
    assert!(
        !advice("1 0 8:1 / ROOT ro - ext4 /dev/dm-0 ro\n2 1 0:9 / ROOT/etc rw - tmpfs tmpfs rw,size=1k\n"),
        "as with Bottlerocket"
    );
}

/// Each component that the script may name exists.
#[test]
fn the_script_names_existing_components_only() {
    let script = fs::read_to_string(deploy().join("which-node.sh")).unwrap();
    for component in [
        "nvidia-runtime-class",
        "driver-root",
        "gpu-operator",
        "selinux",
        "read-only-etc",
        "nri",
    ] {
        assert!(script.contains(component), "{component}");
        render_with("base", &[&format!("components/{component}")]);
    }
}

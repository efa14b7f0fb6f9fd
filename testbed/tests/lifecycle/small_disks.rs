//! The directory of CDI specs on a file system that is full, that has no inode left, or that is read-only.
//!
//! The file system is a `tmpfs` of a few KiB in a mount namespace of its own, which `unshare` of util-linux makes: by the
//! caller's rights, or in a user namespace where the kernel allows one. Elsewhere the test says that it has not run, and why.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use kit::cluster::{CdiDir, NodeSetup};
use kit::pods::PodBuilder;

use super::{cluster_of, node_of, not_run, run, starts, starts_again, until_event, until_run, verify};

/// The options of `unshare` that may give a mount namespace.
const WAYS: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];

/// The size of the file system: room for the specs of a few containers.
const SIZE: &str = "size=64k,nr_inodes=24";

fn unshare(options: &[&str], program: &Path, args: &[&str]) -> std::io::Result<Output> {
    Command::new("unshare")
        .args(options)
        .arg("--")
        .arg(program)
        .args(args)
        .output()
}

#[test]
fn containers_wait_while_the_file_system_of_cdi_specs_takes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mount = ["-t", "tmpfs", "none", dir.path().to_str().unwrap()];
    let mut reasons = Vec::new();
    for options in WAYS {
        match unshare(options, Path::new("mount"), &mount) {
            Ok(tried) if tried.status.success() => {
                let arguments = [
                    "--exact",
                    "lifecycle::small_disks::in_a_mount_namespace",
                    "--ignored",
                    "--nocapture",
                ];
                let output = unshare(options, &std::env::current_exe().unwrap(), &arguments).unwrap();
                let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success() && text.contains("1 passed"), "{text}");
                return;
            }
            Ok(tried) => reasons.push(String::from_utf8_lossy(&tried.stderr).trim().to_owned()),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    not_run(
        "small_disks",
        &format!("no mount namespace: {}", reasons.join("; ")),
    )
    .unwrap();
}

/// A file system of a few KiB.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mounted_at(path: PathBuf) -> Result<Self> {
        std::fs::create_dir(&path)?;
        let disk = Self(path);
        disk.mount(&["-t", "tmpfs", "-o", SIZE, "none"])?;
        Ok(disk)
    }

    fn mount(&self, args: &[&str]) -> Result<()> {
        let mut command = Command::new("mount");
        let done = command.args(args).arg(&self.0).output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Ok(())
    }

    /// Creates files of this size until there is no room for another.
    fn fill(&self, bytes: usize) -> Result<()> {
        for idx in 0.. {
            match std::fs::write(self.0.join(format!("ballast-{idx}")), vec![0; bytes]) {
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => break,
                written => written?,
            }
        }
        Ok(())
    }

    /// Deletes the files of [`Self::fill`].
    fn empty(&self) -> Result<()> {
        for entry in std::fs::read_dir(&self.0)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("ballast-") {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// A reason for which nothing can be written.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Full,
    NoInode,
    ReadOnly,
}

impl Fault {
    /// The name of the pod that comes meanwhile.
    fn pod(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::NoInode => "no-inode",
            Self::ReadOnly => "read-only",
        }
    }

    /// The system's words about it.
    fn words(self) -> &'static str {
        match self {
            Self::Full | Self::NoInode => "No space left on device",
            Self::ReadOnly => "Read-only file system",
        }
    }

    fn begin(self, disk: &SmallDisk) -> Result<()> {
        match self {
            Self::Full => disk.fill(4096),
            Self::NoInode => disk.fill(0),
            Self::ReadOnly => disk.mount(&["-o", "remount,ro"]),
        }
    }

    fn end(self, disk: &SmallDisk) -> Result<()> {
        match self {
            Self::Full | Self::NoInode => disk.empty(),
            Self::ReadOnly => disk.mount(&["-o", "remount,rw"]),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "mounts file systems: the test above runs it in a mount namespace"]
async fn in_a_mount_namespace() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let disk = SmallDisk::mounted_at(dir.path().join("cdi"))?;
    let node = NodeSetup {
        inject: "cdi",
        ..node_of(1)
    };
    let (mut cluster, pods) = cluster_of(node).await?;
    let kubelet = cluster.node("n1")?.kubelet();
    CdiDir::of(kubelet.config())?.replace_by(&disk.0)?;
    run(&cluster, &pods, "before", 4).await?;
    for fault in [Fault::Full, Fault::NoInode, Fault::ReadOnly] {
        fault.begin(&disk)?;
        pods.create(&PodBuilder::units(fault.pod(), 4)).await?;
        until_event(&cluster, fault.pod(), "GPUNotReady", fault.words()).await?;
        let kubelet = cluster.node("n1")?.kubelet();
        ensure!(
            starts(kubelet, fault.pod()) == 0,
            "{fault:?}: a container has started"
        );
        let seen = starts_again(kubelet, "before").await?;
        ensure!(seen == "GPU-n1-0", "{fault:?}: {seen}");
        fault.end(&disk)?;
        until_run(&cluster, &["before", fault.pod()])
            .await
            .with_context(|| format!("{fault:?}"))?;
        verify(&cluster).await?;
    }
    cluster.stop().await
}

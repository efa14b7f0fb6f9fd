//! sysfs trees of machines as short texts, unfolded into a directory with all files and links.
//!
//! A line is a device below the one that is indented less, and what is said of it:
//!
//! ```text
//! pci0000:15 numa=0
//!   0000:15:01.0
//!     0000:16:00.0 vendor=1000
//!       0000:17:00.0
//!         0000:18:00.0 gpu
//!       0000:17:01.0
//!         0000:19:00.0 nic=mlx5_0 verbs=0 mad=0
//!         0000:19:00.1 vf=0000:19:00.0/0 verbs=4
//! ```
//!
//! `numa=none` leaves the file out. Everything that follows a device below inherits its NUMA node. `gpu`, `nic` and `fpga`
//! give a class and a vendor, `nic` also a device in `/sys/class/infiniband` with the states of its ports (`nic=mlx5_0:DOWN`).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The machines that are recorded, by name.
pub(crate) const MACHINES: [(&str, &str); 9] = [
    ("four-switches", include_str!("recorded/four-switches.txt")),
    ("eight-switches", include_str!("recorded/eight-switches.txt")),
    ("one-nic", include_str!("recorded/one-nic.txt")),
    ("sr-iov", include_str!("recorded/sr-iov.txt")),
    ("unknown-numa", include_str!("recorded/unknown-numa.txt")),
    ("two-levels", include_str!("recorded/two-levels.txt")),
    ("switch-on-card", include_str!("recorded/switch-on-card.txt")),
    ("fpgas", include_str!("recorded/fpgas.txt")),
    ("cpu-only", include_str!("recorded/cpu-only.txt")),
];

/// A machine's sysfs in a directory that goes with it.
pub(crate) struct Machine {
    dir: TempDir,
}

impl Machine {
    /// The recorded machine of this name.
    pub(crate) fn recorded(name: &str) -> Self {
        let (_, text) = MACHINES.iter().find(|(other, _)| *other == name).unwrap();
        Self::of(text)
    }

    /// The machine that a text describes.
    pub(crate) fn of(text: &str) -> Self {
        let machine = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for folder in [
            "bus/pci/devices",
            "class/infiniband",
            "class/fpga_region",
            "devices",
        ] {
            fs::create_dir_all(machine.root().join(folder)).unwrap();
        }
        let mut above: Vec<(usize, PathBuf, String)> = Vec::new();
        for line in text
            .lines()
            .filter(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty())
        {
            let depth = line.len() - line.trim_start().len();
            above.retain(|(other, ..)| *other < depth);
            let parent = above
                .last()
                .map_or_else(|| machine.root().join("devices"), |(_, path, _)| path.clone());
            let inherited = above.last().map_or("none", |(.., numa)| numa.as_str());
            let mut words = line.split_whitespace();
            let path = parent.join(words.next().unwrap());
            let words: Vec<&str> = words.collect();
            let numa = words
                .iter()
                .find_map(|word| word.strip_prefix("numa="))
                .unwrap_or(inherited)
                .to_owned();
            machine.put(&path, &words, &numa);
            above.push((depth, path, numa));
        }
        machine
    }

    /// The root of its sysfs.
    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// Says what the ports of an adapter are now.
    pub(crate) fn set_ports(&self, name: &str, states: &[&str]) {
        let ports = self.root().join("class/infiniband").join(name).join("ports");
        for (number, state) in (1..).zip(states) {
            write(&ports.join(format!("{number}/state")), state);
        }
    }

    /// Takes a function out of the machine.
    pub(crate) fn pull(&self, address: &str) {
        let entry = self.root().join("bus/pci/devices").join(address);
        fs::remove_dir_all(fs::canonicalize(&entry).unwrap()).unwrap();
        fs::remove_file(entry).unwrap();
    }

    /// The addresses of all GPUs.
    pub(crate) fn gpus(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root().join("bus/pci/devices")).unwrap();
        let is_gpu = |path: &PathBuf| {
            fs::read_to_string(path.join("class"))
                .unwrap()
                .starts_with("0x0302")
        };
        let paths = entries.map(|entry| entry.unwrap().path()).filter(is_gpu);
        let mut addresses: Vec<_> = paths
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        addresses.sort();
        addresses
    }

    fn put(&self, path: &Path, words: &[&str], numa: &str) {
        let name = path.file_name().unwrap().to_str().unwrap();
        fs::create_dir_all(path).unwrap();
        if name.starts_with("pci") {
            return;
        }
        symlink(path, self.root().join("bus/pci/devices").join(name)).unwrap();
        if numa != "none" {
            write(&path.join("numa_node"), numa);
        }
        let is = |kind: &str| words.iter().any(|word| word.split('=').next() == Some(kind));
        let (class, vendor) = match () {
            () if is("gpu") => ("0x030200", "0x10de"),
            () if is("nic") || is("vf") => ("0x020000", "0x15b3"),
            () if is("fpga") => ("0x120000", "0x10ee"),
            () => ("0x060400", "0x1000"),
        };
        write(&path.join("class"), class);
        write(&path.join("vendor"), vendor);
        for word in words {
            self.say(path, name, word);
        }
    }

    fn say(&self, path: &Path, name: &str, word: &str) {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        match key {
            "gpu" | "fpga" | "numa" => {}
            "class" | "vendor" => write(&path.join(key), &format!("0x{value}")),
            "nic" => {
                let (device, states) = value.split_once(':').unwrap_or((value, "ACTIVE"));
                let own = path.join("infiniband").join(device);
                fs::create_dir_all(&own).unwrap();
                symlink(path, own.join("device")).unwrap();
                symlink(&own, self.root().join("class/infiniband").join(device)).unwrap();
                self.set_ports(
                    device,
                    &states
                        .split(',')
                        .map(|state| if state == "ACTIVE" { "4: ACTIVE" } else { "1: DOWN" })
                        .collect::<Vec<_>>(),
                );
            }
            "vf" => {
                let (physical, number) = value.split_once('/').unwrap();
                let physical = fs::canonicalize(self.root().join("bus/pci/devices").join(physical)).unwrap();
                symlink(&physical, path.join("physfn")).unwrap();
                symlink(
                    Path::new("..").join(name),
                    physical.join(format!("virtfn{number}")),
                )
                .unwrap();
            }
            "verbs" => fs::create_dir_all(path.join(format!("infiniband_verbs/uverbs{value}"))).unwrap(),
            "mad" => {
                for kind in ["umad", "issm"] {
                    fs::create_dir_all(path.join(format!("infiniband_mad/{kind}{value}"))).unwrap();
                }
            }
            "dev" => write(
                &path.join("char").join(value.replace('/', "!")).join("uevent"),
                &format!("MAJOR=240\nDEVNAME={value}"),
            ),
            "region" => {
                let own = path.join("fpga_region").join(value);
                fs::create_dir_all(&own).unwrap();
                symlink(&own, self.root().join("class/fpga_region").join(value)).unwrap();
            }
            _ => panic!("{word:?}"),
        }
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("{text}\n")).unwrap();
}

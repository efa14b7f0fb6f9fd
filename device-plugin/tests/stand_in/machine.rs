//! A machine with NVIDIA GPUs, as NVML reports it: a directory with the stand-in library and the
//! files that it lives on. `nvml.c` says what they hold.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use device_plugin::devices::inventory::source::{DeviceSource, NvmlSource};
use tempfile::TempDir;

/// An interval that does not pass during a test.
pub(crate) const NEVER: Duration = Duration::from_secs(3600);

/// The XID bit of an event's type.
const XID_CRITICAL: u64 = 8;

/// The NVML return code of every call about a lost device.
pub(crate) const LOST: u32 = 15;

/// One GPU.
#[derive(Clone)]
pub(crate) struct Card {
    /// NVML's handle, which stays with the card whatever its place in the order.
    pub(crate) handle: i32,
    pub(crate) uuid: String,
    pub(crate) minor: u32,
    pub(crate) memory: u64,
    pub(crate) mig: bool,
    /// 0: no events, 1: XIDs, 2: XIDs are promised and registration fails.
    pub(crate) events: u32,
    /// The NVML return code of calls about it; 0 is success.
    pub(crate) code: u32,
    pub(crate) bus_id: String,
    pub(crate) model: String,
}

/// A healthy card with 16 GiB whose minor number is its handle.
pub(crate) fn card(handle: u32) -> Card {
    Card {
        handle: i32::try_from(handle).unwrap(),
        uuid: format!("GPU-{handle}"),
        minor: handle,
        memory: 16 << 30,
        mig: false,
        events: 1,
        code: 0,
        bus_id: format!("00000000:{:02X}:00.0", 0x3b + handle),
        model: "Tesla T4".to_owned(),
    }
}

/// The machine; its directory goes with it.
pub(crate) struct Machine {
    folder: TempDir,
    n_events: AtomicU32,
}

impl Machine {
    pub(crate) fn new(cards: &[Card]) -> Self {
        let machine = Self {
            folder: tempfile::tempdir().unwrap(),
            n_events: AtomicU32::new(0),
        };
        fs::write(machine.library(), library()).unwrap();
        fs::create_dir(machine.path("events-queue")).unwrap();
        machine.insert(cards);
        machine
    }

    /// Replaces the library by one that lacks functions of newer drivers.
    pub(crate) fn downgrade(&self) {
        fs::write(self.library(), old_library()).unwrap();
    }

    /// Processes on the cards: handle, number, bytes.
    pub(crate) fn run_processes(&self, processes: &[(u32, u32, u64)]) {
        let line = |(handle, pid, bytes): &(u32, u32, u64)| format!("{handle} {pid} {bytes}\n");
        self.put("processes", &processes.iter().map(line).collect::<String>());
    }

    /// Replaces the cards at once.
    pub(crate) fn insert(&self, cards: &[Card]) {
        let line = |card: &Card| {
            let Card {
                handle,
                uuid,
                minor,
                memory,
                mig,
                events,
                code,
                bus_id,
                model,
            } = card;
            let mig = u8::from(*mig);
            format!("{handle} {uuid} {minor} {memory} {mig} {events} {code} {bus_id} {model}\n")
        };
        self.put("devices", &cards.iter().map(line).collect::<String>());
    }

    /// Makes `nvmlInit` answer `code`.
    pub(crate) fn answer_init(&self, code: u32) {
        self.put("init", &code.to_string());
    }

    /// Queues a critical XID of the device with this handle.
    pub(crate) fn xid(&self, handle: i32, xid: u64) {
        let name = format!(
            "events-queue/{:06}",
            self.n_events.fetch_add(1, Ordering::Relaxed)
        );
        self.put(&name, &format!("{handle} {XID_CRITICAL} {xid}"));
    }

    /// The calls so far, a line each.
    pub(crate) fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    pub(crate) fn library(&self) -> PathBuf {
        self.path("libnvidia-ml.so.1")
    }

    /// The source with nothing but this machine's sysfs, that probes only at the start of a watch.
    pub(crate) fn nvml(&self) -> NvmlSource {
        NvmlSource {
            library: self.library(),
            sysfs: self.path("sys"),
            procfs: self.path("proc"),
            probe_interval: NEVER,
            reopen_interval: NEVER,
            ..NvmlSource::default()
        }
    }

    pub(crate) fn source(&self) -> DeviceSource {
        DeviceSource::Machine(self.nvml())
    }

    /// Links, each from a handle to a bus address, active or not.
    pub(crate) fn set_links(&self, links: &[(u32, &str, bool)]) {
        let line = |(at, (handle, far_end, is_active)): (usize, &(u32, &str, bool))| {
            let number = links
                .iter()
                .take(at)
                .filter(|(other, ..)| other == handle)
                .count();
            format!("{handle} {number} {} {far_end}\n", u8::from(*is_active))
        };
        self.put("links", &links.iter().enumerate().map(line).collect::<String>());
    }

    /// Says in sysfs what a function is.
    pub(crate) fn set_kind(&self, address: &str, class: &str, vendor: &str) {
        let device = self.path("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("class"), class).unwrap();
        fs::write(device.join("vendor"), vendor).unwrap();
    }

    /// Says in sysfs on which NUMA node a device hangs.
    pub(crate) fn set_numa_node(&self, address: &str, node: i32) {
        let device = self.path("sys/bus/pci/devices").join(address);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
    }

    /// Writes a file that the stand-in lives on, or takes it away.
    pub(crate) fn set(&self, name: &str, text: Option<&str>) {
        match text {
            Some(text) => self.put(name, text),
            None => fs::remove_file(self.path(name)).unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file so that the library never sees half of it.
    fn put(&self, name: &str, text: &str) {
        let draft = self.path("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, self.path(name)).unwrap();
    }
}

/// The stand-in, compiled once per test run.
fn library() -> &'static [u8] {
    static LIBRARY: OnceLock<Vec<u8>> = OnceLock::new();
    LIBRARY.get_or_init(|| compile(&[]))
}

/// The library of a driver that lacks functions of newer ones.
fn old_library() -> &'static [u8] {
    static LIBRARY: OnceLock<Vec<u8>> = OnceLock::new();
    LIBRARY.get_or_init(|| compile(&["-DWITHOUT_NEW_SYMBOLS"]))
}

fn compile(options: &[&str]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let object = folder.path().join("nvml.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in/nvml.c");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"])
        .args(options)
        .arg("-o")
        .args([&object, &source])
        .arg("-ldl")
        .status()
        .expect("the tests need a C compiler named `cc`");
    assert!(status.success(), "{} does not compile", source.display());
    fs::read(object).unwrap()
}

//! The memory, files, threads and wake-ups of a process, from `/proc`.

use std::path::Path;

use anyhow::{Context, Result};

/// The resources that a process takes now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Resident memory, in bytes.
    pub resident: u64,
    /// The highest resident memory so far, in bytes.
    pub peak: u64,
    /// Open files, sockets among them.
    pub files: usize,
    /// Threads.
    pub threads: usize,
    /// The number of times that one of these threads has waited for something, and so was woken up, since it began.
    pub wake_ups: usize,
}

impl ProcessUsage {
    /// The resources of a process that runs, of the same user.
    pub fn of(pid: u32) -> Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let read = || format!("cannot read {}", process.display());
        let status = std::fs::read_to_string(process.join("status")).with_context(read)?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.with_context(|| format!("{} has no {name}", process.display()))
        };
        // The kernel writes kB and means KiB.
        let bytes = |name: &str| -> Result<u64> {
            let kib = field(name)?.trim().trim_end_matches(" kB");
            Ok(kib.parse::<u64>()? << 10)
        };
        let mut wake_ups = 0;
        for thread in std::fs::read_dir(process.join("task")).with_context(read)? {
            // A thread may end in the meantime.
            let status = std::fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            wake_ups += line
                .and_then(|number| number.trim().parse::<usize>().ok())
                .unwrap_or(0);
        }
        Ok(Self {
            wake_ups,
            resident: bytes("VmRSS:")?,
            peak: bytes("VmHWM:")?,
            files: std::fs::read_dir(process.join("fd")).with_context(read)?.count(),
            threads: field("Threads:")?.trim().parse()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_process_uses_something() {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let usage = ProcessUsage::of(std::process::id()).unwrap();
        assert!(
            usage.resident > 1 << 20 && usage.peak >= usage.resident,
            "{usage:?}"
        );
        // To wait for a thread is to be woken up, unless the thread has ended already.
        while ProcessUsage::of(std::process::id()).unwrap().wake_ups <= usage.wake_ups {
            std::thread::spawn(std::thread::yield_now).join().unwrap();
        }
        assert!(usage.files >= 4 && usage.threads >= 1, "{usage:?}");
        drop(file);
    }
}

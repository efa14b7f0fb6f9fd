//! Observations of devices, the threads that make them, and the bounded channel on which they report.
//!
//! A watch cannot be an async task because NVML waits for events by blocking. The source decides which calls a thread makes; this
//! file starts, reports and stops.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{self, error::TrySendError};

use super::error::InventoryError;
use super::physical_id::PhysicalId;

const CAPACITY: usize = 64;

/// Delay before another attempt to send on a full channel.
const FULL_RETRY: Duration = Duration::from_millis(20);

/// An observation that a watch made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The device; `None` if it is unknown, or if the observation concerns all devices.
    pub device: Option<PhysicalId>,
    /// The observation itself.
    pub kind: ObservationKind,
}

/// The observations that a watch can make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObservationKind {
    /// The driver reported a critical error with this XID; 999 stands for an error that the driver cannot name.
    Xid(u64),
    /// The device answered a probe; it is unknown whether it needs a reset.
    Answered,
    /// The device answered a probe and needs no reset: its driver says so, or a reset has been observed.
    AnsweredWithoutFault,
    /// The device answered a probe, and its driver says that it must be reset; the text names the recovery action.
    NeedsReset(String),
    /// The device fell off the bus, or the driver no longer lists it.
    Lost,
    /// The device is there and a probe of it failed; the text gives the error.
    Failed(String),
    /// The device is there and in MIG mode, in which it cannot be shared.
    MigMode,
    /// No port of the adapter is active; the text gives their states.
    PortDown(String),
    /// The source now lists other devices, or the same ones with other properties. The reader must discover them again.
    InventoryChanged,
    /// The node's driver no longer matches the library in this process; the text gives the evidence.
    DriverReplaced(String),
}

/// The observations that a watch reports together.
pub type Observations = Vec<Observation>;

/// A running watch. Dropping it asks its threads to end, which takes them some seconds; [`Feed::stop`] waits for them.
#[derive(Debug)]
pub struct Feed {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// One round of a watch, which its thread repeats until it returns [`Stopped`], as it must soon after a call of [`Reporter`] has.
pub(super) type Watcher = Box<dyn FnMut(&Reporter) -> Result<(), Stopped> + Send>;

impl Feed {
    /// Starts each of `watchers` on a thread of its own; all report on one channel.
    pub(super) fn start(
        watchers: Vec<Watcher>,
    ) -> Result<(Self, mpsc::Receiver<Observations>), InventoryError> {
        let (sender, receiver) = mpsc::channel(CAPACITY);
        let mut feed = Self {
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
        };
        for mut watch in watchers {
            let reporter = Reporter {
                stop: Arc::clone(&feed.stop),
                sender: sender.clone(),
                has_announced: Cell::new(false),
                added: RefCell::default(),
            };
            let thread = thread::Builder::new()
                .name("device-watch".to_owned())
                .spawn(move || while watch(&reporter).is_ok() {});
            let problem = "cannot start the thread that watches the devices";
            feed.threads
                .push(thread.map_err(|source| InventoryError::failed(problem.to_owned(), source))?);
        }
        Ok((feed, receiver))
    }

    /// Ends the watch and waits for its threads, some seconds at most. Blocks: not for async threads.
    pub fn stop(mut self) -> thread::Result<()> {
        self.signal();
        let mut ended = Ok(());
        for thread in std::mem::take(&mut self.threads) {
            ended = ended.and(thread.join());
        }
        ended
    }

    /// Asks the threads to stop, and wakes those that pause between two rounds.
    fn signal(&self) {
        self.stop.store(true, Ordering::Release);
        // A thread may pause for the whole interval between probes.
        for thread in &self.threads {
            thread.thread().unpark();
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        // Does not wait for the threads: one of them may hang in the driver.
        self.signal();
    }
}

/// The watch must end: its feed was stopped, or the reader of its channel is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

/// A watch thread's end of the feed.
#[derive(Debug)]
pub(super) struct Reporter {
    stop: Arc<AtomicBool>,
    sender: mpsc::Sender<Observations>,
    /// True once this thread has reported a change of the inventory.
    has_announced: Cell<bool>,
    added: RefCell<Observations>,
}

impl Reporter {
    pub(super) fn check(&self) -> Result<(), Stopped> {
        if self.stop.load(Ordering::Acquire) || self.sender.is_closed() {
            Err(Stopped)
        } else {
            Ok(())
        }
    }

    /// Adds an observation to the next report, which [`Self::send_added`] sends: each report wakes its reader up.
    pub(super) fn add(&self, device: Option<&PhysicalId>, kind: ObservationKind) {
        self.added.borrow_mut().push(Observation {
            device: device.cloned(),
            kind,
        });
    }

    /// Reports one observation, after those that were added; waits while the channel is full.
    pub(super) fn send(&self, device: Option<&PhysicalId>, kind: ObservationKind) -> Result<(), Stopped> {
        self.add(device, kind);
        self.send_added()
    }

    /// Reports the observations that were added, if there are any; waits while the channel is full.
    pub(super) fn send_added(&self) -> Result<(), Stopped> {
        let mut report = self.added.take();
        loop {
            self.check()?;
            if report.is_empty() {
                return Ok(());
            }
            // A send that blocks would not notice that the watch must end.
            match self.sender.try_send(report) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(Stopped),
                Err(TrySendError::Full(returned)) => report = returned,
            }
            thread::park_timeout(FULL_RETRY);
        }
    }

    /// Reports once that the source lists other devices: the reader then discovers the devices and starts another watch.
    pub(super) fn announce_change(&self) -> Result<(), Stopped> {
        if self.has_announced.replace(true) {
            return Ok(());
        }
        self.send(None, ObservationKind::InventoryChanged)
    }

    /// Waits for `duration` between two rounds; returns early, with an error, when the watch must end.
    pub(super) fn pause(&self, duration: Duration) -> Result<(), Stopped> {
        // The thread wakes up at this interval, since nothing wakes it when the reader of the channel is gone.
        const CHECK: Duration = Duration::from_secs(5);
        let until = Instant::now() + duration;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::park_timeout(left.min(CHECK));
        }
    }
}

//! The threads behind a device watch, and the bounded channel it reports on.
//!
//! NVML waits for events by blocking, so a watch cannot be a task. What is watched is the business
//! of the source; here is only how it starts, reports and stops.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use tokio::sync::mpsc::{self, error::TrySendError};

use crate::health::{Observation, ObservationKind};

use super::{InventoryError, PhysicalId};

/// How many observations may wait to be read.
const CAPACITY: usize = 64;

/// How soon a full channel is tried again.
const FULL_RETRY: Duration = Duration::from_millis(20);

/// A running watch. Dropping it tells its threads to end, which they do within a second;
/// [`Feed::stop`] waits for that.
#[derive(Debug)]
pub struct Feed {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// What a thread of a watch does. It must return soon after a send or a pause answers that it is over.
pub(super) type Watcher = Box<dyn FnOnce(&Outbox) -> Over + Send>;

impl Feed {
    /// Starts each of `watchers` on a thread of its own; all report on one channel.
    pub(super) fn start(
        watchers: Vec<Watcher>,
    ) -> Result<(Self, mpsc::Receiver<Observation>), InventoryError> {
        let (sender, receiver) = mpsc::channel(CAPACITY);
        let mut feed = Self {
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
        };
        for watch in watchers {
            let outbox = Outbox {
                stop: Arc::clone(&feed.stop),
                sender: sender.clone(),
            };
            let thread = thread::Builder::new()
                .name("device-watch".to_owned())
                .spawn(move || {
                    let Over = watch(&outbox);
                });
            feed.threads
                .push(thread.map_err(|source| InventoryError::Thread { source })?);
        }
        Ok((feed, receiver))
    }

    /// Ends the watch and waits for its threads, at most about a second. Blocks: call it off the
    /// async threads.
    pub fn stop(mut self) -> io::Result<()> {
        self.signal();
        let ended: Vec<_> = std::mem::take(&mut self.threads)
            .into_iter()
            .map(JoinHandle::join)
            .collect();
        if ended.iter().any(Result::is_err) {
            return Err(io::Error::other("a thread that watches the devices has panicked"));
        }
        Ok(())
    }

    fn signal(&self) {
        self.stop.store(true, Ordering::Release);
        for thread in &self.threads {
            thread.thread().unpark();
        }
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.signal();
    }
}

/// The watch is to end: it was stopped, or nobody reads it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Over;

/// A thread's end of a feed.
#[derive(Debug)]
pub(super) struct Outbox {
    stop: Arc<AtomicBool>,
    sender: mpsc::Sender<Observation>,
}

impl Outbox {
    /// Whether to go on.
    pub(super) fn check(&self) -> Result<(), Over> {
        if self.stop.load(Ordering::Acquire) || self.sender.is_closed() {
            Err(Over)
        } else {
            Ok(())
        }
    }

    /// Reports one observation, waiting for room as long as the watch is wanted.
    pub(super) fn send(&self, device: Option<&PhysicalId>, kind: ObservationKind) -> Result<(), Over> {
        let mut observation = Observation {
            device: device.cloned(),
            kind,
        };
        loop {
            self.check()?;
            match self.sender.try_send(observation) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(Over),
                Err(TrySendError::Full(back)) => observation = back,
            }
            thread::park_timeout(FULL_RETRY);
        }
    }

    /// Waits for `duration`, or less when the watch ends.
    pub(super) fn pause(&self, duration: Duration) -> Result<(), Over> {
        /// Nothing wakes the thread when the reader goes away, so it looks now and then.
        const LOOK: Duration = Duration::from_secs(1);
        let until = Instant::now() + duration;
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::park_timeout(left.min(LOOK));
        }
    }
}

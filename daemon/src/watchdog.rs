//! Ends the process when it hangs: when the runtime runs no task, or a lock cannot be taken, for too long.
//!
//! A hung extender delays every pod that kube-scheduler asks it about, and a hung device plugin every pod that kubelet admits on
//! its node, so a restart is better. The watchdog counts its own checks without an answer, and reads no clock: for a process that
//! was stopped (SIGSTOP, a suspended machine, a starved control group) the limit begins when it goes on.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tracing::error;

use crate::tick::next_tick;

/// The number of checks within the limit: few, since each wakes the process up.
const CHECKS: u32 = 2;
/// Longest time for the last line of the log, after which the process ends in any case: the log itself may hang.
const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// A part of the process that answers requests while it does not hang.
#[expect(missing_debug_implementations, reason = "a function has none")]
pub struct Probe {
    name: &'static str,
    /// Sends the request of a number, which is answered when `answered` has that number.
    ask: Box<dyn FnMut(u64) + Send>,
    answered: Arc<AtomicU64>,
    asked: u64,
    /// The number of checks since that request which found no answer.
    missed: u32,
}

impl Probe {
    fn new(name: &'static str, ask: Box<dyn FnMut(u64) + Send>, answered: Arc<AtomicU64>) -> Self {
        Self {
            name,
            ask,
            answered,
            asked: 0,
            missed: 0,
        }
    }

    /// A probe of the runtime that may hang for `limit`: it answers if a task with a timer runs.
    pub fn of_runtime(runtime: Handle, limit: Duration) -> Self {
        // Less than the time between two checks. For 10 s it is 3 s, as other pauses are: equal ones end together (`next_tick`).
        let pause = limit * 3 / 10;
        let answered = Arc::new(AtomicU64::new(0));
        let answer = Arc::clone(&answered);
        let ask = move |number| {
            let answer = Arc::clone(&answer);
            runtime.spawn(async move {
                // A runtime whose timers do not fire hangs too, although it runs tasks.
                next_tick(pause).await;
                answer.store(number, Ordering::Release);
            });
        };
        Self::new("runtime", Box::new(ask), answered)
    }

    /// A probe of a lock: it answers if `take`, which takes the lock and releases it, returns.
    pub fn of_lock(name: &'static str, take: impl Fn() + Send + 'static) -> io::Result<Self> {
        let answered = Arc::new(AtomicU64::new(0));
        let answer = Arc::clone(&answered);
        let (send, asked) = mpsc::channel();
        let answer_requests = move || {
            for number in asked {
                take();
                answer.store(number, Ordering::Release);
            }
        };
        // On a thread of its own, since the watchdog's thread must not wait for the lock.
        let thread = thread::Builder::new().name("watchdog-lock".to_owned());
        thread.spawn(answer_requests)?;
        let ask = move |number| {
            // The receiving thread lives as long as this sender, so this cannot fail.
            let _ = send.send(number);
        };
        Ok(Self::new(name, Box::new(ask), answered))
    }

    /// Sends the next request if the last one is answered. Returns true once [`CHECKS`] checks have found no answer.
    fn has_hung(&mut self) -> bool {
        if self.answered.load(Ordering::Acquire) == self.asked {
            self.missed = 0;
            self.asked += 1;
            (self.ask)(self.asked);
            return false;
        }
        self.missed += 1;
        self.missed >= CHECKS
    }
}

/// Ends the process (SIGABRT) when a probe does not answer for `limit`; noticed up to half the limit later.
pub fn watch(limit: Duration, mut probe: Probe) -> io::Result<()> {
    let check = move || {
        loop {
            thread::sleep(limit / CHECKS);
            if probe.has_hung() {
                abort(probe.name, limit);
            }
        }
    };
    let thread = thread::Builder::new().name("watchdog".to_owned());
    thread.spawn(check).map(drop)
}

/// Logs that this part of the process hangs, and ends the process with SIGABRT, also if the log itself hangs.
fn abort(hung: &'static str, limit: Duration) {
    let (logged, is_logged) = mpsc::channel();
    let log = move || {
        error!(hangs = hung, ?limit, "the process hangs and ends itself");
        // An error means that the receiver is gone after `LOG_TIMEOUT`.
        let _ = logged.send(());
    };
    let thread = thread::Builder::new().name("watchdog-log".to_owned());
    if thread.spawn(log).is_ok() {
        // The process ends whether the line is written or the log hangs.
        let _ = is_logged.recv_timeout(LOG_TIMEOUT);
    }
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe whose answers the test controls.
    fn probe() -> (Probe, Arc<AtomicU64>) {
        let answered = Arc::new(AtomicU64::new(0));
        (
            Probe::new("test", Box::new(drop), Arc::clone(&answered)),
            answered,
        )
    }

    #[test]
    fn late_answers_are_counted() {
        let (mut probe, answered) = probe();
        for number in 1..100 {
            assert!(!probe.has_hung());
            assert_eq!(probe.asked, number);
            assert!(
                (1..CHECKS).all(|_| !probe.has_hung()),
                "one check less than the limit"
            );
            answered.store(number, Ordering::Release);
        }
    }

    #[test]
    fn no_answer_for_the_whole_limit_is_a_hang() {
        let (mut probe, answered) = probe();
        assert!(!probe.has_hung());
        answered.store(1, Ordering::Release);
        assert!(!probe.has_hung());
        let checks = (1..=CHECKS).find(|_| probe.has_hung());
        assert_eq!(checks, Some(CHECKS));
    }

    /// During a stop of any length the watchdog itself checks only once.
    #[test]
    fn a_paused_process_misses_one_check_only() {
        let (mut probe, answered) = probe();
        assert!(!probe.has_hung());
        assert!(!probe.has_hung(), "the first check after the stop");
        answered.store(1, Ordering::Release);
        assert!(!probe.has_hung());
        assert_eq!(probe.missed, 0);
    }
}

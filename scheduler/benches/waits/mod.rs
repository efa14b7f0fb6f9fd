//! Waits of a writer of the index, which a read lock holds up.

use std::thread;
use std::time::{Duration, Instant};

use scheduler::index::{Index, Shared};

/// The longest wait of a writer while `read` reads the index.
pub(crate) fn longest_wait<T: Send>(index: &Shared<Index>, read: impl FnOnce() -> T + Send) -> Duration {
    thread::scope(|scope| {
        let reading = scope.spawn(read);
        let mut longest = Duration::ZERO;
        while !reading.is_finished() {
            let began = Instant::now();
            drop(index.write());
            longest = longest.max(began.elapsed());
            thread::yield_now();
        }
        longest
    })
}

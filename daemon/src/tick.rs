//! Pauses of tasks that look at something again and again.
//!
//! Pauses of equal length end together, however many tasks make them, so that a process at rest wakes up once for all of them.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// Ends at the next multiple of `interval` since the first call in this process: after at most `interval`.
pub fn next_tick(interval: Duration) -> Sleep {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let now = Instant::now();
    let since = now.saturating_duration_since(*BEGAN.get_or_init(|| now));
    let nanos = interval.as_nanos().max(1);
    // Less than an interval, so it fits.
    let past = u64::try_from(since.as_nanos() % nanos).unwrap_or(0);
    sleep_until(now + interval.saturating_sub(Duration::from_nanos(past)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_of_one_length_end_together() {
        let second = Duration::from_secs(1);
        next_tick(second).await;
        let began = Instant::now();
        let first = next_tick(second).deadline();
        tokio::time::advance(Duration::from_millis(700)).await;
        assert_eq!(next_tick(second).deadline(), first);
        assert_eq!(first - began, second);
        // Multiples of one length coincide with it.
        let fifth = next_tick(5 * second).deadline();
        assert!((fifth - first).subsec_nanos() == 0 && fifth - began <= 5 * second);
    }
}

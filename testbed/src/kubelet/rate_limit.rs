//! A token bucket, as kubelet puts before its pod-resources socket.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// Calls per second that kubelet answers.
const PER_SECOND: f64 = 100.0;
/// Calls that it answers at once after a pause.
const BURST: f64 = 10.0;

#[derive(Debug)]
pub(crate) struct RateLimit(Mutex<(f64, Instant)>);

impl RateLimit {
    pub(crate) fn full() -> Self {
        Self(Mutex::new((BURST, Instant::now())))
    }

    /// Takes a token if there is one.
    pub(crate) fn allow(&self) -> bool {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, filled) = *bucket;
        let now = Instant::now();
        let tokens = (tokens + now.duration_since(filled).as_secs_f64() * PER_SECOND).min(BURST);
        let allowed = tokens >= 1.0;
        *bucket = (if allowed { tokens - 1.0 } else { tokens }, now);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::RateLimit;

    #[tokio::test(start_paused = true)]
    async fn ten_at_once_then_one_every_ten_milliseconds() {
        let limit = RateLimit::full();
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 10);
        tokio::time::advance(Duration::from_millis(35)).await;
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 3);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 10);
    }
}

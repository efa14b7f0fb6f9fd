//! Limits the log to one line of a kind each minute, so that clients which cause a line with every request do not fill it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time between two lines of one kind.
const INTERVAL: Duration = Duration::from_secs(60);

/// The log lines of one kind: the time of the last line that was written, and the number of lines left out since then.
#[derive(Debug)]
pub struct LogLimit(Mutex<(Option<Instant>, u64)>);

impl LogLimit {
    /// A kind of which no line has been written yet.
    #[expect(clippy::new_without_default, reason = "it stands in a static")]
    pub const fn new() -> Self {
        Self(Mutex::new((None, 0)))
    }

    /// The number of lines left out since the last one, if a line may be written now; else `None`: this line is left out too.
    pub fn next_line(&self) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, left_out) = &mut *state;
        if last.is_some_and(|last| last.elapsed() < INTERVAL) {
            *left_out += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_minute_has_one_line_and_the_count_of_the_others() {
        let limit = LogLimit::new();
        let lines: Vec<_> = (0..1000).map(|_| limit.next_line()).collect();
        assert_eq!(lines.iter().flatten().collect::<Vec<_>>(), [&0]);
        advance(INTERVAL).await;
        assert_eq!([limit.next_line(), limit.next_line()], [Some(999), None]);
        advance(INTERVAL * 2).await;
        assert_eq!(limit.next_line(), Some(1));
    }
}

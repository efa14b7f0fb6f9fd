//! A look at something that changes, shared by all who asked before it began.
//!
//! Whoever asks gets what a look found that began after it asked, so nothing is older than the question. However many
//! ask at once, at most two looks follow one another: kubelet limits how often it may be asked.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The looks at one thing.
#[derive(Debug)]
pub struct SharedLook<T> {
    /// Held by whoever looks.
    turn: tokio::sync::Mutex<Option<Instant>>,
    found: Mutex<Found<T>>,
    /// Least time from the beginning of one look to that of the next.
    pace: Duration,
}

#[derive(Debug)]
struct Found<T> {
    n_begun: u64,
    /// The number of the latest finished look, and what it found.
    latest: Option<(u64, T)>,
}

impl<T: Clone> SharedLook<T> {
    /// Nobody has looked yet.
    pub fn new(pace: Duration) -> Self {
        Self {
            turn: tokio::sync::Mutex::new(None),
            found: Mutex::new(Found {
                n_begun: 0,
                latest: None,
            }),
            pace,
        }
    }

    /// What a look found that began after this call.
    pub async fn look(&self, look: impl AsyncFnOnce() -> T) -> T {
        let needed = self.found().n_begun + 1;
        let mut began = self.turn.lock().await;
        if let Some((number, found)) = &self.found().latest
            && *number >= needed
        {
            return found.clone();
        }
        if let Some(before) = *began {
            sleep_until(before + self.pace).await;
        }
        *began = Some(Instant::now());
        let number = {
            let mut found = self.found();
            found.n_begun += 1;
            found.n_begun
        };
        let seen = look().await;
        self.found().latest = Some((number, seen.clone()));
        seen
    }

    fn found(&self) -> MutexGuard<'_, Found<T>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use tokio::task::LocalSet;

    use super::*;

    /// A thing that changes all the time, a look at which takes 10 ms.
    async fn run(pace: Duration, asked_at: &[u64]) -> (Vec<u64>, u64) {
        let (looks, n_looks) = (Rc::new(SharedLook::new(pace)), Rc::new(Cell::new(0)));
        let began = Instant::now();
        let local = LocalSet::new();
        let tasks: Vec<_> = asked_at
            .iter()
            .map(|at| {
                let (looks, n_looks, at) = (Rc::clone(&looks), Rc::clone(&n_looks), *at);
                local.spawn_local(async move {
                    sleep_until(began + Duration::from_millis(at)).await;
                    let look = async || {
                        n_looks.set(n_looks.get() + 1);
                        let now = u64::try_from(began.elapsed().as_millis()).unwrap();
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        now
                    };
                    looks.look(look).await
                })
            })
            .collect();
        local.await;
        let mut found = Vec::new();
        for task in tasks {
            found.push(task.await.unwrap());
        }
        (found, n_looks.get())
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_ask_together_share_a_look_that_began_after_them() {
        let (found, n_looks) = run(Duration::ZERO, &[0, 1, 5, 9, 30]).await;
        assert_eq!(found, [0, 10, 10, 10, 30]);
        assert_eq!(n_looks, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn looks_keep_their_pace() {
        let (found, _) = run(Duration::from_millis(50), &[0, 1, 60]).await;
        assert_eq!(found, [0, 50, 100]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_was_given_up_is_nobodys_answer() {
        let looks = SharedLook::new(Duration::ZERO);
        let forever = tokio::time::timeout(
            Duration::from_millis(5),
            looks.look(async || std::future::pending::<u8>().await),
        );
        assert!(forever.await.is_err());
        assert_eq!(looks.look(async || 7).await, 7);
    }
}

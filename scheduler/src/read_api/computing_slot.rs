//! The slot in which answers that look at all nodes (`explain`, `fit`) are computed: one at a time, and callers in turn.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use tokio::sync::Mutex;

use super::refusal;
use crate::keyed_lock::KeyedLock;

/// Most requests of one caller that are computed or wait at one time. All port-forwards to a pod are one caller.
const MAX_PER_CALLER: usize = 8;

/// Computes answers one at a time, so that they take at most one core from filters.
#[derive(Debug, Default)]
pub(super) struct ComputingSlot {
    /// A caller with many requests waits here with all but one of them, so that another caller's request is soon next.
    callers: KeyedLock,
    /// Held for the request that is computed now.
    slot: Arc<Mutex<()>>,
}

impl ComputingSlot {
    /// Computes an answer in the caller's turn, on a thread for blocking work, so that no filter waits for it.
    pub(super) async fn compute<T: Send + 'static>(
        &self,
        caller: &str,
        computation: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Response> {
        if self.callers.n_users(caller) >= MAX_PER_CALLER {
            let text = format!(
                "{MAX_PER_CALLER} questions of this client are being computed, as many as may at one time; try again later\n"
            );
            return Err((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "1")], text).into_response());
        }
        let _turn = self.callers.lock(caller).await;
        let slot = Arc::clone(&self.slot).lock_owned().await;
        let computing = tokio::task::spawn_blocking(move || {
            // Held until the computation ends, which goes on if its caller disconnects.
            let _slot = slot;
            computation()
        });
        let computed = computing.await;
        computed.map_err(|error| refusal(StatusCode::INTERNAL_SERVER_ERROR, &error))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::{self, mpsc};

    use futures::poll;
    use tokio::sync::oneshot;
    use tokio::task::JoinSet;

    use super::*;

    /// A computation that ends when the sender is dropped, and has begun when the receiver has a value.
    fn computation() -> (mpsc::Sender<()>, oneshot::Receiver<()>, impl FnOnce() + Send) {
        let (end, ended) = mpsc::channel();
        let (running, begun) = oneshot::channel();
        let computation = move || {
            running.send(()).unwrap();
            ended.recv().unwrap_err();
        };
        (end, begun, computation)
    }

    #[tokio::test]
    async fn callers_take_turns_and_have_a_limit() {
        let slot = Arc::new(ComputingSlot::default());
        let (end, begun, first) = computation();
        let order = Arc::new(sync::Mutex::new(Vec::new()));
        let mut answers = JoinSet::new();
        answers.spawn({
            let slot = Arc::clone(&slot);
            async move { slot.compute("many", first).await.is_ok() }
        });
        begun.await.unwrap();
        for caller in ["many"; MAX_PER_CALLER].into_iter().chain(["few"]) {
            let (slot, order) = (Arc::clone(&slot), Arc::clone(&order));
            let computation = move || order.lock().unwrap().push(caller);
            answers.spawn(async move { slot.compute(caller, computation).await.is_ok() });
        }
        let refused = answers.join_next().await.unwrap();
        assert!(!refused.unwrap(), "one more than the limit");
        drop(end);
        let answered = answers.join_all().await;
        assert_eq!(answered, [true; MAX_PER_CALLER + 1]);
        let few = order.lock().unwrap().iter().position(|caller| *caller == "few");
        assert!(
            few.unwrap() <= 1,
            "after at most one waiting request of the other caller"
        );
    }

    /// A caller that disconnects again and again has no more than one request computed at a time.
    #[tokio::test]
    async fn an_abandoned_question_keeps_the_slot_to_its_end() {
        let slot = ComputingSlot::default();
        let (end, begun, first) = computation();
        let mut abandoned = Box::pin(slot.compute("a", first));
        assert!(poll!(abandoned.as_mut()).is_pending());
        begun.await.unwrap();
        drop(abandoned);
        let mut second = pin!(slot.compute("a", || ()));
        assert!(poll!(second.as_mut()).is_pending());
        drop(end);
        second.await.unwrap();
    }
}

//! Which bindings go to the API server: never more than so many at one time, and those of a node one after the other.
//!
//! What waits here has decided nothing yet, so that it can be given up.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::poll;
use tokio::sync::{OwnedSemaphorePermit as Permit, Semaphore};
use tokio::time::timeout;

use super::turns::{Turn, Turns};

/// How long a binding waits for those before it on its node; well below what is left of kube-scheduler's own patience.
const NODE_PATIENCE: Duration = Duration::from_millis(500);

/// Who may send a binding.
#[derive(Debug)]
pub(super) struct Sending {
    permits: Arc<Semaphore>,
    /// By node name; with the turn a binding hands its permit to the next one of the node.
    turns: Turns<Option<Permit>>,
}

/// Leave to send a binding, until dropped.
#[derive(Debug)]
pub(super) struct Leave<'a> {
    permit: Option<Permit>,
    turn: Option<Turn<'a, Option<Permit>>>,
}

impl Sending {
    /// Lets so many be sent at one time.
    pub(super) fn new(most: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(most)),
            turns: Turns::default(),
        }
    }

    /// Waits until one more may be sent; first come, first served.
    pub(super) async fn anywhere(&self) -> Leave<'_> {
        Leave {
            permit: self.permit().await,
            turn: None,
        }
    }

    /// Waits for that, and for the node's turn. A write that hangs does not hold up those behind it for long; that others
    /// wait for a permit is not held against them, as nobody takes the turn without one.
    pub(super) async fn to(&self, node: &str) -> Leave<'_> {
        let mut permit = self.permit().await;
        let mut turn = pin!(self.turns.take(node));
        let mut turn = if let Poll::Ready(turn) = poll!(turn.as_mut()) {
            Some(turn)
        } else {
            // Another node's binding can use it meanwhile: this one is handed that of the binding before it.
            permit = None;
            timeout(NODE_PATIENCE, turn).await.ok()
        };
        let handed = turn.as_mut().and_then(|turn| turn.value()?.take());
        let permit = match permit.or(handed) {
            None => self.permit().await,
            permit => permit,
        };
        Leave { permit, turn }
    }

    /// Always one: nobody closes the semaphore.
    async fn permit(&self) -> Option<Permit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if let Some(value) = self.turn.as_mut().and_then(Turn::value) {
            // Where nobody waits for the turn, what it holds goes with it.
            *value = self.permit.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn not_more_than_so_many_at_one_time() {
        let sending = Sending::new(2);
        let (first, second) = (sending.to("a").await, sending.anywhere().await);
        let (mut third, mut fourth) = (Box::pin(sending.to("b")), Box::pin(sending.to("c")));
        assert!(poll!(third.as_mut()).is_pending() && poll!(fourth.as_mut()).is_pending());
        drop(second);
        assert!(
            poll!(fourth.as_mut()).is_pending(),
            "who came before is served before"
        );
        let third = third.await;
        drop((first, third));
        drop(fourth.await);
        assert_eq!(sending.permits.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_its_node_takes_nobody_s_place() {
        let sending = Sending::new(2);
        let first = sending.to("a").await;
        let mut second = Box::pin(sending.to("a"));
        assert!(poll!(second.as_mut()).is_pending());
        let other = sending.to("b").await;
        drop(first);
        let second = second.await;
        assert_eq!(
            sending.permits.available_permits(),
            0,
            "the first one's was handed on"
        );
        drop((second, other));
        assert_eq!(sending.permits.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn giving_up_keeps_nothing() {
        let sending = Sending::new(1);
        let first = sending.to("a").await;
        let mut second = Box::pin(sending.to("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(second);
        drop(first);
        assert_eq!(sending.permits.available_permits(), 1);
        let sending = Sending::new(2);
        let first = sending.to("a").await;
        let mut second = Box::pin(sending.to("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(first);
        drop(second);
        assert_eq!(sending.permits.available_permits(), 2, "nor what it was handed");
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_hangs_is_passed_after_a_while() {
        let sending = Sending::new(3);
        let hanging = sending.to("a").await;
        let begun = tokio::time::Instant::now();
        let second = sending.to("a").await;
        assert_eq!(begun.elapsed(), NODE_PATIENCE);
        drop((hanging, second));
        assert_eq!(sending.permits.available_permits(), 3);
    }
}

//! Limits of bindings on their way to the API server: a number in all, and one at a time for each node.
//!
//! A bind that waits here has chosen no devices yet, so nothing has to be taken back if it gives up.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::poll;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::keyed_lock::{KeyGuard, KeyedLock};

/// The time that a binding waits for the one before it on its node: well below what is left of kube-scheduler's timeout.
const NODE_QUEUE_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct BindLimiter {
    permits: Arc<Semaphore>,
    /// One lock for each node, by name. The holder of a node's lock leaves its permit to the next one.
    nodes: KeyedLock<Option<OwnedSemaphorePermit>>,
}

/// Permission to send one binding, until dropped.
#[derive(Debug)]
pub(super) struct BindPermit<'a> {
    permit: Option<OwnedSemaphorePermit>,
    /// The lock of the node; `None` for a binding that does not wait for others to its node.
    node: Option<KeyGuard<'a, Option<OwnedSemaphorePermit>>>,
}

impl BindLimiter {
    /// A limiter that lets this number of bindings be written at one time.
    pub(super) fn new(n_permits: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(n_permits)),
            nodes: KeyedLock::default(),
        }
    }

    /// Waits for a permit, in the order of arrival.
    pub(super) async fn acquire(&self) -> BindPermit<'_> {
        BindPermit {
            permit: self.permit().await,
            node: None,
        }
    }

    /// Waits for a permit and for the earlier bindings to the node, so that the API server, and kubelet after it, gets the
    /// bindings of a node in the order of their decisions. Passes an earlier binding that hangs.
    pub(super) async fn acquire_for(&self, node: &str) -> BindPermit<'_> {
        let mut permit = self.permit().await;
        let mut lock = pin!(self.nodes.lock(node));
        let mut node = if let Poll::Ready(guard) = poll!(lock.as_mut()) {
            Some(guard)
        } else {
            // A binding to another node can use the permit meanwhile. The timeout begins only now, since the holder of the
            // node's lock has a permit, and waits for no other binding.
            permit = None;
            timeout(NODE_QUEUE_TIMEOUT, lock).await.ok()
        };
        let handed_on = node.as_mut().and_then(|node| node.value()?.take());
        let permit = match permit.or(handed_on) {
            None => self.permit().await,
            permit => permit,
        };
        BindPermit { permit, node }
    }

    /// Waits for a permit; `None` only if the semaphore were closed, which it never is.
    async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.permits).acquire_owned().await.ok()
    }
}

impl Drop for BindPermit<'_> {
    /// Leaves the permit to the next binding that waits for the same node.
    fn drop(&mut self) {
        // If no other binding waits for the node, the permit is released together with the node's lock.
        if let Some(value) = self.node.as_mut().and_then(KeyGuard::value) {
            *value = self.permit.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_number_of_permits_is_limited() {
        let limiter = BindLimiter::new(2);
        let (first, second) = (limiter.acquire_for("a").await, limiter.acquire().await);
        let (mut third, mut fourth) = (
            Box::pin(limiter.acquire_for("b")),
            Box::pin(limiter.acquire_for("c")),
        );
        assert!(poll!(third.as_mut()).is_pending() && poll!(fourth.as_mut()).is_pending());
        drop(second);
        assert!(poll!(fourth.as_mut()).is_pending(), "first come, first served");
        let third = third.await;
        drop((first, third));
        drop(fourth.await);
        assert_eq!(limiter.permits.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_bind_that_waits_for_its_node_holds_no_permit() {
        let limiter = BindLimiter::new(2);
        let first = limiter.acquire_for("a").await;
        let mut second = Box::pin(limiter.acquire_for("a"));
        assert!(poll!(second.as_mut()).is_pending());
        let other = limiter.acquire_for("b").await;
        drop(first);
        let second = second.await;
        assert_eq!(
            limiter.permits.available_permits(),
            0,
            "the first one's permit was handed on"
        );
        drop((second, other));
        assert_eq!(limiter.permits.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_wait_keeps_no_permit() {
        let limiter = BindLimiter::new(1);
        let first = limiter.acquire_for("a").await;
        let mut second = Box::pin(limiter.acquire_for("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(second);
        drop(first);
        assert_eq!(limiter.permits.available_permits(), 1);
        let limiter = BindLimiter::new(2);
        let first = limiter.acquire_for("a").await;
        let mut second = Box::pin(limiter.acquire_for("a"));
        assert!(poll!(second.as_mut()).is_pending());
        drop(first);
        drop(second);
        assert_eq!(
            limiter.permits.available_permits(),
            2,
            "nor one that was handed on"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_bind_that_hangs_does_not_block_other_nodes() {
        let limiter = BindLimiter::new(3);
        let hanging = limiter.acquire_for("a").await;
        let begun = tokio::time::Instant::now();
        let second = limiter.acquire_for("a").await;
        assert_eq!(begun.elapsed(), NODE_QUEUE_TIMEOUT);
        drop((hanging, second));
        assert_eq!(limiter.permits.available_permits(), 3);
    }
}

//! Informs kube-scheduler of room that has opened without an event, so that it tries refused pods again.
//!
//! Its loop also ends hints whose time is over, so that their room opens even if no request comes.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use super::waiting::Waiting;
use super::{Extender, now};
use crate::room::{AnnounceError, Room};

/// Time between two looks at whether room has opened.
const LOOK: Duration = Duration::from_millis(250);

impl Extender {
    /// Announces room in this object while this replica leads, until the process ends.
    pub async fn announce(self: Arc<Self>, room: Room) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failure = None;
        loop {
            looks.tick().await;
            self.keep_time();
            if self.leadership().check(now()).is_err() {
                self.waiting().stand_by();
                continue;
            }
            let openings = {
                let index = self.index.read();
                index.ready().map(|()| index.openings())
            };
            let Ok(openings) = openings else { continue };
            if !self.waiting().is_due(openings, now()) {
                continue;
            }
            match room.announce().await {
                Ok(()) => {
                    self.waiting().announced(openings, now());
                    self.metrics.room_announced();
                    debug!(openings.all, openings.silent, "announced that room has opened");
                    failure = None;
                }
                Err(error) => {
                    self.waiting().rest(error.pause(), now());
                    report(&error, &mut failure);
                }
            }
        }
    }

    /// Ends hints whose time is up.
    fn keep_time(&self) {
        if self.index.read().is_due(now()) {
            self.index.write().tick(now());
        }
    }

    /// The refused pods that wait for room.
    pub(super) fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs a failure, unless the last announcement failed for the same reason.
fn report(error: &AnnounceError, last: &mut Option<String>) {
    let text = error.to_string();
    if last.as_ref() != Some(&text) {
        warn!(
            error = text,
            "refused pods may wait for up to five minutes for room that opens without an event"
        );
        *last = Some(text);
    }
}

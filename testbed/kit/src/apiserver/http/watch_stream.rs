//! The body of a watch: one JSON line per event, with bookmarks, until the watch's timeout or the end of the connection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::Stream;
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, interval_at, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Server;
use super::request::ApiRequest;
use crate::apiserver::faults::{Faults, WatchOrder, WatchSelection};
use crate::apiserver::render::{self, View};
use crate::apiserver::resource::Resource;
use crate::apiserver::status::ApiError;
use crate::apiserver::watch::{ReportedChange, Watch};

/// The duration of a watch whose client sets no `timeoutSeconds`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The pause between bookmarks of a watch.
const BOOKMARKS: Duration = Duration::from_secs(60);

/// The pause between bookmarks of a watch that sends nothing else, by the fault [`WatchOrder::Mute`].
const MUTE_BOOKMARKS: Duration = Duration::from_millis(100);

/// A watch on its way to a client.
#[expect(
    clippy::struct_excessive_bools,
    reason = "the client's wishes and the faults are independent"
)]
#[derive(Debug)]
pub(super) struct WatchStream {
    view: View,
    resource: Arc<Resource>,
    /// Name of the user who watches; faults may meet the watches of one user.
    user: String,
    watch: Result<Watch, ApiError>,
    /// `allowWatchBookmarks` of the request.
    has_bookmarks: bool,
    bookmark: Interval,
    /// True until the bookmark is sent that ends the initial events of a `WatchList`; false from the start for other watches.
    ends_initial_events: bool,
    deadline: Instant,
    faults: Faults,
    orders: broadcast::Receiver<(WatchSelection, WatchOrder)>,
    held: watch::Receiver<Vec<WatchSelection>>,
    /// True if a fault has held back the watch since it last sent events.
    was_held: bool,
    /// True if a fault lets the watch send bookmarks only.
    is_mute: bool,
    stopping: CancellationToken,
    /// True once nothing comes after the chunk that was sent last.
    ended: bool,
}

/// The reason for which a stream that waits goes on.
enum WakeReason {
    Changed,
    Bookmark,
    Ended,
    Ordered(WatchOrder),
}

impl WatchStream {
    /// The stream of a watch; a watch that could not be started ends the stream with its error as the first event.
    pub(super) fn new(
        server: &Server,
        request: &ApiRequest,
        watch: Result<Watch, ApiError>,
    ) -> Result<Self, ApiError> {
        let now = Instant::now();
        let mut bookmark = interval_at(now + BOOKMARKS, BOOKMARKS);
        // A watch that was held back must not send all missed bookmarks in a burst.
        bookmark.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let seconds = request
            .query
            .number("timeoutSeconds")?
            .filter(|seconds| *seconds > 0);
        Ok(Self {
            view: request.view,
            resource: Arc::clone(&request.target.resource),
            user: request.user.name.clone(),
            watch,
            has_bookmarks: request.query.is_set("allowWatchBookmarks"),
            bookmark,
            ends_initial_events: request.query.is_set("sendInitialEvents"),
            deadline: now + seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs),
            faults: server.faults.clone(),
            orders: server.faults.orders(),
            held: server.faults.held(),
            was_held: false,
            is_mute: false,
            stopping: server.stopping.clone(),
            ended: false,
        })
    }

    /// The chunks of the body; an error cuts the connection.
    pub(super) fn into_stream(self) -> impl Stream<Item = io::Result<Bytes>> {
        futures::stream::unfold(self, |mut stream| async move {
            let chunk = stream.next_chunk().await?;
            Some((chunk, stream))
        })
    }

    /// Waits for the next lines of the stream: events, a bookmark, or an error. `None` ends the stream.
    async fn next_chunk(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if self.ended {
                return None;
            }
            let held = self.is_held();
            self.was_held |= held;
            let found = match &mut self.watch {
                // A held watch does not read the log: its cursor stays, and it gets all events when it is
                // released. The bookmarks of a mute one name the revision of its last event.
                Ok(_) if held || self.is_mute => Ok(Vec::new()),
                Ok(watch) => watch.read_changes(),
                Err(error) => Err(error.clone()),
            };
            match found {
                Err(error) => {
                    self.ended = true;
                    return Some(Ok(line("ERROR", error.to_status().to_string().as_bytes())));
                }
                Ok(changes) if !changes.is_empty() => {
                    if std::mem::take(&mut self.was_held) {
                        self.faults.note_late();
                    }
                    return Some(Ok(self.lines(&changes)));
                }
                Ok(_) if self.ends_initial_events && !held => {
                    self.ends_initial_events = false;
                    return self.bookmark_line(true);
                }
                Ok(_) => {}
            }
            match self.wait(held).await {
                WakeReason::Changed => {}
                WakeReason::Bookmark if held => {}
                WakeReason::Bookmark => return self.bookmark_line(false),
                WakeReason::Ended => {
                    self.ended = true;
                    // kube-apiserver ends a watch with a bookmark, so that the client resumes without a list.
                    if held || !self.has_bookmarks {
                        return None;
                    }
                    return self.bookmark_line(false);
                }
                WakeReason::Ordered(WatchOrder::Mute) => {
                    self.is_mute = true;
                    self.bookmark = interval(MUTE_BOOKMARKS);
                }
                WakeReason::Ordered(WatchOrder::Cut) => {
                    self.ended = true;
                    self.faults.note_cut();
                    return Some(Err(io::Error::new(
                        io::ErrorKind::ConnectionAborted,
                        "injected fault",
                    )));
                }
            }
        }
    }

    /// Returns true if a fault holds back the events of this watch now.
    fn is_held(&mut self) -> bool {
        self.held
            .borrow_and_update()
            .iter()
            .any(|held| held.includes(&self.resource.plural, &self.user))
    }

    /// Waits until there may be something to send, and returns the reason to wake up.
    async fn wait(&mut self, held: bool) -> WakeReason {
        let Ok(watch) = &mut self.watch else {
            return WakeReason::Ended;
        };
        let (plural, user) = (&self.resource.plural, &self.user);
        tokio::select! {
            () = self.stopping.cancelled() => WakeReason::Ended,
            order = next_order(&mut self.orders, plural, user) => WakeReason::Ordered(order),
            () = sleep_until(self.deadline) => WakeReason::Ended,
            Ok(()) = self.held.changed() => WakeReason::Changed,
            () = watch.changed(), if !held && !self.is_mute => WakeReason::Changed,
            _ = self.bookmark.tick(), if self.has_bookmarks => WakeReason::Bookmark,
        }
    }

    /// The line of a bookmark with the revision up to which the client has seen everything.
    fn bookmark_line(&self, ends_initial_events: bool) -> Option<io::Result<Bytes>> {
        let watch = self.watch.as_ref().ok()?;
        let object = render::bookmark(&self.resource, self.view, watch.cursor(), ends_initial_events);
        Some(Ok(line("BOOKMARK", object.to_string().as_bytes())))
    }

    /// The lines of some changes, in the order of the changes.
    fn lines(&self, changes: &[ReportedChange]) -> Bytes {
        let mut lines = BytesMut::new();
        for change in changes {
            let object = render::render_object(self.view, &self.resource, &change.version);
            write_line(&mut lines, change.kind, &object);
        }
        lines.freeze()
    }
}

/// Waits for an order to the watches of this resource and user.
async fn next_order(
    orders: &mut broadcast::Receiver<(WatchSelection, WatchOrder)>,
    plural: &str,
    user: &str,
) -> WatchOrder {
    loop {
        match orders.recv().await {
            Ok((watches, order)) if watches.includes(plural, user) => return order,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// Appends one event to the lines: its type and an object that is serialised already.
fn write_line(lines: &mut BytesMut, kind: &str, object: &[u8]) {
    lines.extend_from_slice(b"{\"type\":\"");
    lines.extend_from_slice(kind.as_bytes());
    lines.extend_from_slice(b"\",\"object\":");
    lines.extend_from_slice(object);
    lines.extend_from_slice(b"}\n");
}

fn line(kind: &str, object: &[u8]) -> Bytes {
    let mut lines = BytesMut::new();
    write_line(&mut lines, kind, object);
    lines.freeze()
}

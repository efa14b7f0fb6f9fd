//! Events of the files in a directory, by inotify, until the directory itself is removed or renamed.
//!
//! Says nothing about files that were there before: the caller looks at them once the events have begun.

use std::io;
use std::path::Path;

use futures::StreamExt;
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchMask};

/// Size, in bytes, of the buffer for events: an event has at most 272.
pub(crate) const BUFFER: usize = 32 << 10;

pub(crate) struct DirectoryEvents(EventStream<Vec<u8>>);

impl DirectoryEvents {
    /// Begins to watch a directory for these events of its files. Must be called within a Tokio runtime.
    pub(crate) fn of(directory: &Path, files: WatchMask) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        inotify.watches().add(
            directory,
            files | WatchMask::DELETE_SELF | WatchMask::MOVE_SELF | WatchMask::ONLYDIR,
        )?;
        Ok(Self(inotify.into_event_stream(vec![0; BUFFER])?))
    }

    /// The next event; `None` once the directory itself is removed or renamed. An event without a name is one of the directory
    /// itself, or stands for events that were lost.
    pub(crate) async fn next(&mut self) -> io::Result<Option<EventOwned>> {
        let Some(event) = self.0.next().await else {
            return Err(io::Error::other("the watch of the directory has ended"));
        };
        let event = event?;
        let of_directory = EventMask::IGNORED | EventMask::DELETE_SELF | EventMask::MOVE_SELF;
        Ok((!event.mask.intersects(of_directory)).then_some(event))
    }
}

//! Notices that socket files in kubelet's device plugin directory come or go.
//!
//! One watch serves all resources, so that a node at rest wakes the plugin for none of them. It shows that something may have
//! changed; [`registration`](super::registration) compares the files.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use daemon::tick::next_tick;
use inotify::WatchMask;
use tokio::sync::watch;

use crate::directory_events::DirectoryEvents;
use crate::logged_error::LoggedError;

/// Notes each change of a socket file in a directory until the task is dropped. As long as the directory cannot be watched, every
/// `interval` counts as a change.
pub async fn watch_sockets(dir: PathBuf, interval: Duration, changes: watch::Sender<()>) {
    let mut logged = LoggedError::default();
    loop {
        match follow(&dir, &changes).await {
            Ok(()) => logged.clear(),
            Err(error) => logged.warn(
                &error,
                "cannot watch kubelet's directory, looking at it again and again",
            ),
        }
        next_tick(interval).await;
        changes.send_replace(());
    }
}

/// Notes the changes until the directory itself is removed or renamed.
async fn follow(dir: &Path, changes: &watch::Sender<()>) -> io::Result<()> {
    let files = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVED_TO | WatchMask::MOVED_FROM;
    let mut events = DirectoryEvents::of(dir, files)?;
    // Files may have come and gone before.
    changes.send_replace(());
    while let Some(event) = events.next().await? {
        // kubelet writes its checkpoint in the same directory. An event without a name may stand for one of a socket.
        let name = event.name.as_deref().map(Path::new);
        if name.is_none_or(|name| name.extension().is_some_and(|extension| extension == "sock")) {
            changes.send_replace(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// The directory comes later than the watch, and is replaced by another one.
    #[tokio::test]
    async fn changes_of_sockets_are_noted() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("device-plugins");
        let (changes, mut seen) = watch::channel(());
        let watching = tokio::spawn(watch_sockets(dir.clone(), Duration::from_millis(1), changes));
        for socket in ["kubelet.sock", "gpushare-shared.sock"] {
            fs::create_dir(&dir).unwrap();
            // Ticks may be seen until the watch exists; from then on a change is seen by its event alone.
            for _ in 0..3 {
                drop(UnixListener::bind(dir.join(socket)).unwrap());
                seen.changed().await.unwrap();
                fs::remove_file(dir.join(socket)).unwrap();
                seen.changed().await.unwrap();
            }
            fs::remove_dir(&dir).unwrap();
        }
        watching.abort();
    }

    #[tokio::test]
    async fn other_files_are_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let (changes, mut seen) = watch::channel(());
        let mut watching = tokio::spawn({
            let dir = dir.path().to_owned();
            async move { follow(&dir, &changes).await }
        });
        seen.changed().await.unwrap();
        fs::write(dir.path().join("kubelet_internal_checkpoint"), "{}").unwrap();
        // The end of the watch comes after the event of the file.
        let removed = dir.path().to_owned();
        dir.close().unwrap();
        assert!((&mut watching).await.unwrap().is_ok(), "{}", removed.display());
        assert!(!seen.has_changed().unwrap_or(false));
    }
}

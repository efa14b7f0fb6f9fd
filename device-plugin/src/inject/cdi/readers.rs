//! Detects that a container runtime reads the spec directory.
//!
//! A runtime with CDI reads all specs again when one changes, under the lock that an injection needs too: once a spec has been
//! opened after it was written, every later injection resolves it. A runtime whose CDI is off opens nothing. But another program
//! with a CDI cache, such as NVIDIA's DRA driver, looks like the runtime; and a runtime that started before the directory existed
//! reads it at its first injection alone.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use inotify::{EventMask, EventOwned, WatchMask};
use tokio::sync::{Mutex, watch};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::directory_events::DirectoryEvents;
use crate::logged_error::LoggedError;

use super::SpecDir;
use super::dir::{OWN_PREFIX, PROMPT_FILE};

/// Pause before a watch that has failed begins again.
const RETRY: Duration = Duration::from_secs(1);

/// Longest wait of a start for the container runtime to read a spec: the runtime parses all specs, and the machine may be busy.
const READ_LIMIT: Duration = Duration::from_secs(2);

/// Longest wait of a start if the plugin has not seen the container runtime read specs: the runtime's CDI may be off.
const FIRST_READ_LIMIT: Duration = Duration::from_millis(200);

/// Number of waits of starts in a row without a read after which the runtime counts as no longer reading.
const MOST_MISSED: u32 = 3;

/// The events of this plugin's files in the spec directory, and counts of the runtime's reads.
#[derive(Clone, Debug, Default)]
struct ReaderState {
    /// The files that were moved into place: true if the file was opened since.
    files: HashMap<String, bool>,
    /// The spec files with which the first containers of pods start: once such a pod runs, the runtime must have read its file.
    started: HashSet<String>,
    /// Number of reads: a read is the first opening of one of this plugin's files after a write of the file.
    n_reads: u64,
    /// Number of waits of starts that have ended in a row without a read.
    n_missed: u32,
}

impl ReaderState {
    fn has_read(&self, file: &str) -> bool {
        self.files.get(file) == Some(&true)
    }

    /// Applies an event of inotify about a file of the spec directory. Returns true if it changed anything.
    fn apply(&mut self, file: &str, mask: EventMask) -> bool {
        if !file.starts_with(OWN_PREFIX) {
            return false;
        }
        if mask.contains(EventMask::MOVED_TO) {
            self.files.insert(file.to_owned(), false);
            return true;
        }
        if mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
            self.started.remove(file);
            return self.files.remove(file).is_some();
        }
        // A runtime opens an unchanged file again at each change of the directory; only the first read since the write counts.
        match self.files.get_mut(file) {
            Some(is_read) if !*is_read => {
                *is_read = true;
                self.n_reads += 1;
                self.n_missed = 0;
                true
            }
            _ => false,
        }
    }
}

/// The runtime's reads of one spec directory; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Readers {
    state: Arc<watch::Sender<ReaderState>>,
    /// Held by the one start that prompts the runtime for all that wait, until the runtime has read the files of that moment.
    turn: Arc<Mutex<()>>,
}

impl Readers {
    /// Watches the spec directory for writes and for the runtime's reads until the task is dropped; begins again after a failure.
    pub(crate) async fn watch(self, dir: PathBuf) {
        let mut logged = LoggedError::default();
        loop {
            let ended = self.apply_events(&dir).await;
            // Files may have come and gone while the directory was not watched.
            self.state.send_modify(|state| {
                state.files.clear();
                state.started.clear();
            });
            // A removed directory is made and watched again at once: a spec that is written before that passes for unread.
            let Err(error) = ended else { continue };
            if let Some(error) = logged.changed(&error) {
                warn!(dir = %dir.display(), error, "cannot see whether the container runtime reads CDI specs; trying again");
            }
            sleep(RETRY).await;
        }
    }

    /// Applies the events of the directory until the directory itself is removed or renamed.
    async fn apply_events(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let files = WatchMask::MOVED_TO | WatchMask::MOVED_FROM | WatchMask::DELETE | WatchMask::OPEN;
        let mut events = DirectoryEvents::of(dir, files)?;
        while let Some(EventOwned { mask, name, .. }) = events.next().await? {
            // An event of the directory itself has no name.
            if let Some(file) = name.as_deref().and_then(OsStr::to_str) {
                self.state.send_if_modified(|state| state.apply(file, mask));
            }
        }
        Ok(())
    }

    /// Forgets the events of a file that the plugin is about to write, so that only a read after the write counts.
    pub(crate) fn forget(&self, file: &str) {
        self.state
            .send_if_modified(|state| state.files.remove(file).is_some());
    }

    /// Counts a spec that an earlier process wrote, and that the runtime may have read then, as read.
    pub(crate) fn assume_read(&self, file: &str) {
        self.state.send_modify(|state| {
            state.files.insert(file.to_owned(), true);
        });
    }

    /// Returns when the container runtime has read these spec files, or at a limit: the container then starts without proof.
    pub(crate) async fn until_resolved(&self, specs: &SpecDir, files: &[String]) {
        let is_reading = self.has_reader();
        let limit = if is_reading { READ_LIMIT } else { FIRST_READ_LIMIT };
        if !files.is_empty() && !self.until_read(specs, files, limit).await {
            info!(
                files = files.join(","),
                "the container runtime was not seen reading a new CDI spec; the container starts all the same"
            );
        }
    }

    /// Prompts the runtime, and returns true if it has read `files` within the limit.
    async fn until_read(&self, specs: &SpecDir, files: &[String], limit: Duration) -> bool {
        let is_read = timeout(limit, self.prompt_until_read(specs, files)).await.is_ok();
        if !is_read {
            self.state
                .send_modify(|state| state.n_missed = state.n_missed.saturating_add(1));
            // The start goes on without the read. The last prompt may have come before these files, so the runtime gets another.
            prompt(specs);
        }
        is_read
    }

    /// Prompts the runtime again and again until it has read these files since they were written.
    async fn prompt_until_read(&self, specs: &SpecDir, files: &[String]) {
        loop {
            // One start prompts for all that wait: the runtime reads every spec for each prompt, and injects none meanwhile.
            let _turn = self.turn.lock().await;
            if files.iter().all(|file| self.state.borrow().has_read(file)) {
                return;
            }
            self.forget(PROMPT_FILE);
            prompt(specs);
            // The runtime reads files that come after it has listed the directory only at the next prompt, so the loop goes on.
            let is_answered = |state: &ReaderState| state.has_read(PROMPT_FILE);
            // `wait_for` fails only without a sender, and `self` holds the sender.
            let _ = self.state.subscribe().wait_for(is_answered).await;
        }
    }

    /// True if the runtime was seen reading a spec, and fewer than `MOST_MISSED` waits of starts in a row have ended without it.
    pub(crate) fn has_reader(&self) -> bool {
        let state = self.state.borrow();
        state.n_reads > 0 && state.n_missed < MOST_MISSED
    }

    /// Notes that a pod which does not run yet starts a container with the spec in this file.
    pub(crate) fn note_start(&self, file: &str) {
        self.state
            .send_if_modified(|state| state.started.insert(file.to_owned()));
    }

    /// True if a container was started with the spec in this file, and no read of the file was seen.
    pub(crate) fn is_unread_by_start(&self, file: &str) -> bool {
        let state = self.state.borrow();
        state.started.contains(file) && state.files.get(file) == Some(&false)
    }

    /// True if a file that this process has written was read since the write; none if no event of the file has been seen.
    pub(crate) fn was_read(&self, file: &str) -> Option<bool> {
        self.state.borrow().files.get(file).copied()
    }

    /// Returns once the runtime has read any of this plugin's files for the first time since the file's last write.
    pub(crate) async fn until_next_read(&self) {
        let mut state = self.state.subscribe();
        let before = state.borrow_and_update().n_reads;
        let _ = state.wait_for(|state| state.n_reads != before).await;
    }
}

/// Makes the runtime read all specs by a change in their directory; a failure is logged.
pub(crate) fn prompt(specs: &SpecDir) {
    if let Err(error) = specs.prompt_read() {
        warn!(dir = %specs.path().display(), %error, "cannot have the container runtime read CDI specs");
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use futures::StreamExt;
    use inotify::Inotify;

    use super::*;
    use crate::directory_events::BUFFER;
    use crate::inject::cdi::{Edits, SpecDir};

    fn mask(event: &str) -> EventMask {
        match event {
            "to" => EventMask::MOVED_TO,
            "from" => EventMask::MOVED_FROM,
            "delete" => EventMask::DELETE,
            _ => EventMask::OPEN,
        }
    }

    #[rstest]
    #[case::read("to open", Some(true), 1)]
    #[case::not_read("to", Some(false), 0)]
    #[case::opened_before_it_was_written("open to", Some(false), 0)]
    #[case::opened_twice("to open open", Some(true), 1)]
    #[case::written_again("to open to", Some(false), 1)]
    #[case::retired("to open from", None, 1)]
    #[case::removed("to delete open", None, 0)]
    fn a_read_counts_after_the_last_write(
        #[case] events: &str,
        #[case] was_read: Option<bool>,
        #[case] n_reads: u64,
    ) {
        let readers = Readers::default();
        for event in events.split(' ') {
            for file in ["gpushare.dev-gpu_a.json", "nvidia.json"] {
                readers
                    .state
                    .send_if_modified(|state| state.apply(file, mask(event)));
            }
        }
        assert_eq!(
            (
                readers.was_read("gpushare.dev-gpu_a.json"),
                readers.state.borrow().n_reads
            ),
            (was_read, n_reads)
        );
        assert_eq!(readers.was_read("nvidia.json"), None);
    }

    /// A reboot, an operator or a tool of the vendor may make the directory again: writes from then on are seen, long before
    /// the pause after a failure has passed.
    #[rstest]
    #[case::removed(|dir: &Path| std::fs::remove_dir_all(dir))]
    #[case::renamed(|dir: &Path| std::fs::rename(dir, dir.with_extension("aside")))]
    #[tokio::test]
    async fn a_directory_that_is_created_again_is_watched_at_once(
        #[case] take_away: fn(&Path) -> io::Result<()>,
    ) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("cdi");
        let readers = Readers::default();
        let watching = tokio::spawn(readers.clone().watch(path.clone()));
        let dir = SpecDir::new(path.clone());
        let write_until_seen = async || {
            while readers.was_read(PROMPT_FILE).is_none() {
                dir.prompt_read().unwrap();
                tokio::task::yield_now().await;
            }
        };
        write_until_seen().await;
        take_away(&path).unwrap();
        let forgotten = async {
            while readers.was_read(PROMPT_FILE).is_some() {
                tokio::task::yield_now().await;
            }
            write_until_seen().await;
        };
        timeout(RETRY, forgotten)
            .await
            .expect("nothing that is written is seen for as long as after a failure");
        watching.abort();
    }

    /// A pod that ran before its spec was written, as after a reboot or in an emptied directory, proves nothing.
    #[rstest]
    #[case::never_read("to need", true)]
    #[case::read("to need open", false)]
    #[case::ran_before("to", false)]
    #[case::removed_and_written_again("to need delete to", false)]
    #[case::not_written_here("need", false)]
    fn a_start_proves_cdi_off_if_its_spec_was_never_read(#[case] events: &str, #[case] expected: bool) {
        const FILE: &str = "gpushare.dev-gpu_a.json";
        let readers = Readers::default();
        for event in events.split(' ') {
            if event == "need" {
                readers.note_start(FILE);
            } else {
                readers
                    .state
                    .send_if_modified(|state| state.apply(FILE, mask(event)));
            }
        }
        assert_eq!(readers.is_unread_by_start(FILE), expected);
    }

    /// The plugin compares a spec at each start; that must not look like the runtime's read.
    #[tokio::test]
    async fn reads_by_the_plugin_itself_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        let readers = Readers::default();
        let watching = tokio::spawn(readers.clone().watch(root.path().to_owned()));
        let dir = SpecDir::new(root.path().to_owned());
        let edits = Edits::default();
        let file = SpecDir::file("one");
        // The watch may begin after the first write.
        while readers.was_read(PROMPT_FILE).is_none() {
            dir.prompt_read().unwrap();
            tokio::task::yield_now().await;
        }
        dir.write("one", &edits, std::time::SystemTime::now()).unwrap();
        dir.write("one", &edits, std::time::SystemTime::now()).unwrap();
        dir.env("one");
        while readers.was_read(&file).is_none() {
            tokio::task::yield_now().await;
        }
        assert!(
            !readers
                .until_read(&dir, std::slice::from_ref(&file), Duration::from_millis(50))
                .await
        );
        assert!(!readers.has_reader());
        std::fs::read(root.path().join(&file)).unwrap();
        while readers.was_read(&file) != Some(true) {
            tokio::task::yield_now().await;
        }
        assert!(readers.until_read(&dir, &[file], Duration::from_secs(10)).await && readers.has_reader());
        for n_missed in 1..=MOST_MISSED {
            assert!(
                !readers
                    .until_read(&dir, &["never-written".to_owned()], Duration::from_millis(1))
                    .await
            );
            assert_eq!(readers.has_reader(), n_missed < MOST_MISSED);
        }
        watching.abort();
    }

    /// As containerd: after each event but the appearance of a file, all specs are read in the order of their names.
    async fn runtime(dir: PathBuf, n_refreshes: Arc<std::sync::atomic::AtomicUsize>) {
        let inotify = Inotify::init().unwrap();
        inotify
            .watches()
            .add(
                &dir,
                WatchMask::MODIFY | WatchMask::MOVED_FROM | WatchMask::DELETE,
            )
            .unwrap();
        let mut events = inotify.into_event_stream(vec![0; BUFFER]).unwrap();
        while let Some(Ok(event)) = events.next().await {
            let is_spec = event
                .name
                .as_deref()
                .is_some_and(|name| Path::new(name).extension().is_some_and(|end| end == "json"));
            if event.mask.contains(EventMask::MODIFY) && !is_spec {
                continue;
            }
            n_refreshes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let mut paths: Vec<PathBuf> = std::fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
            paths.sort();
            for path in paths.iter().filter(|path| path.is_file()) {
                let _ = std::fs::read(path);
                tokio::task::yield_now().await;
            }
        }
    }

    /// Each reading of all specs makes every injection wait.
    #[tokio::test]
    async fn starts_that_wait_together_share_one_read_of_the_runtime() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().to_owned());
        let readers = Readers::default();
        let n_refreshes = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let watching = tokio::spawn(readers.clone().watch(root.path().to_owned()));
        let runtime = tokio::spawn(runtime(root.path().to_owned(), Arc::clone(&n_refreshes)));
        while !readers
            .until_read(&dir, &[PROMPT_FILE.to_owned()], Duration::from_millis(20))
            .await
        {}
        let before = n_refreshes.load(std::sync::atomic::Ordering::SeqCst);
        let starts = (0..30).map(|number| {
            let (dir, readers) = (dir.clone(), readers.clone());
            async move {
                let name = format!("s{number}");
                let file = SpecDir::file(&name);
                readers.forget(&file);
                dir.write(&name, &Edits::default(), std::time::SystemTime::now())
                    .unwrap();
                readers.until_read(&dir, &[file], Duration::from_secs(30)).await
            }
        });
        assert!(
            futures::future::join_all(starts)
                .await
                .into_iter()
                .all(|is_read| is_read)
        );
        let n_refreshes = n_refreshes.load(std::sync::atomic::Ordering::SeqCst) - before;
        assert!(
            (1..=5).contains(&n_refreshes),
            "{n_refreshes} readings for 30 starts"
        );
        watching.abort();
        runtime.abort();
    }
}

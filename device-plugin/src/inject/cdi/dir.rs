//! The directory of this plugin's CDI specs: files appear and change in one step, and a CDI device name gets other content only
//! after runtimes have had time to forget the old one.
//!
//! A runtime reads all specs again for each file that is renamed, written or removed in the directory, and for none that is
//! moved in from another one (its [package](https://github.com/cncf-tags/container-device-interface) subscribes to no such
//! event). So the specs of containers are moved in, and [`SpecDir::prompt_read`] has all that start together read at once.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::file_version::FileVersion;

use super::{CONTAINER_KIND, DRIVER_KIND, Edits, spec_text, variables};

/// The start of the file names of containers' specs; the short CDI device name in the answer to Allocate follows, and the end.
const CONTAINER_PREFIX: &str = "gpushare.dev-gpu_";
const CONTAINER_SUFFIX: &str = ".json";

pub(crate) const DRIVER_FILE: &str = "gpushare.dev-driver.json";

/// The file whose replacement makes runtimes read all specs: in the order of names, and so this file after containers' specs.
pub(crate) const PROMPT_FILE: &str = "gpushare.dev-read.json";

/// The directory from which containers' specs are moved into the spec directory; runtimes read no directories in that.
const STAGING: &str = ".gpushare.dev-new";

pub(super) const OWN_PREFIX: &str = "gpushare.dev-";

/// The extension of a retired spec: renamed because its device name gets other content. Runtimes read `.json` and `.yaml` alone.
const RETIRED: &str = "retired";

/// Time before the device name of a retired spec is used again: a runtime resolves the old content for up to a second.
const RETIREMENT: Duration = Duration::from_secs(5);

/// Age below which no spec is cleaned up: kubelet may not have written the checkpoint that names it yet.
const YOUNG: Duration = Duration::from_secs(60);

/// The reason that a spec is not in place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpecError {
    #[error(
        "its CDI device {name} had other content before; it starts once the runtime no longer knows that"
    )]
    Retired { name: String },
    #[error(
        "no CDI spec of the vendor has NVIDIA's hook for memory limits now; it starts once the spec is there again"
    )]
    NoLimitHook,
    #[error("cannot write the CDI spec {}", path.display())]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A directory of specs; clones share the cache of its content.
#[derive(Clone, Debug)]
pub struct SpecDir {
    dir: PathBuf,
    /// The last content of each container's spec.
    known: Arc<Mutex<Contents>>,
}

/// Texts of files, each with the version of the file that had it.
type Contents = HashMap<PathBuf, (FileVersion, Arc<str>)>;

impl SpecDir {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            known: Arc::default(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// The file name of the container's spec with this CDI device name.
    pub(crate) fn file(name: &str) -> String {
        format!("{CONTAINER_PREFIX}{name}{CONTAINER_SUFFIX}")
    }

    /// Puts a container's spec with this CDI device name in place; runtimes read it after the next [`SpecDir::prompt_read`].
    /// Returns false if it was there with this content, and an error while a runtime may resolve the name with other content.
    pub(crate) fn write(&self, name: &str, edits: &Edits, now: SystemTime) -> Result<bool, SpecError> {
        let path = self.dir.join(Self::file(name));
        let retired = path.with_extension(RETIRED);
        let wanted = spec_text(CONTAINER_KIND, name, edits);
        let io_error = |source| SpecError::Io {
            path: path.clone(),
            source,
        };
        let name = name.to_owned();
        let still_resolved = SpecError::Retired { name };
        match self.content(&path) {
            Some(found) if *found == *wanted => return Ok(false),
            // No runtime resolves a spec that does not parse, so only one that parses is retired.
            Some(found) if serde_json::from_str::<Value>(&found).is_ok() => {
                // A runtime refreshes its cache some time after the change, and would give this container the old content until
                // then. So the spec is retired, and kubelet tries the start again; `RETIREMENT` counts from the rename on.
                fs::rename(&path, &retired).map_err(io_error)?;
                return Err(still_resolved);
            }
            _ => {}
        }
        if age(&retired, now).is_some_and(|age| age < RETIREMENT) {
            return Err(still_resolved);
        }
        // Moved in from another directory, so that runtimes do not read all specs for each container that starts.
        replace(&path, &self.dir.join(STAGING), &wanted).map_err(io_error)?;
        // The text is kept, so that the plugin need not read the file that it has just written.
        if let Ok(found) = fs::metadata(&path) {
            let version = FileVersion::from(&found);
            self.known().insert(path, (version, wanted.into()));
        }
        // There is a retired file only after a retirement. If its removal fails, `clean` removes it later.
        let _ = fs::remove_file(retired);
        Ok(true)
    }

    /// Replaces the driver's spec if it has other content, and returns true if it had.
    pub(crate) fn write_driver(&self, edits: &Edits) -> io::Result<bool> {
        let path = self.dir.join(DRIVER_FILE);
        let wanted = spec_text(DRIVER_KIND, "all", edits);
        // Runtimes read all specs again for each file that is written, so an equal text stays.
        if fs::read_to_string(&path).is_ok_and(|found| found == wanted) {
            return Ok(false);
        }
        // A rename within the directory, which runtimes notice.
        replace(&path, &self.dir, &wanted).map(|()| true)
    }

    /// Makes runtimes read all specs that are in place now.
    pub(crate) fn prompt_read(&self) -> io::Result<()> {
        // A spec without any edit is invalid.
        let edits = Edits {
            env: [("GPUSHARE_READ".to_owned(), String::new())].into(),
            ..Edits::default()
        };
        let text = spec_text("gpushare.dev/read", "read", &edits);
        replace(&self.dir.join(PROMPT_FILE), &self.dir, &text)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.dir.join(Self::file(name)).exists()
    }

    /// The variables that the container's spec with this CDI device name sets, if it exists and parses.
    pub(crate) fn env(&self, name: &str) -> Option<HashMap<String, String>> {
        let spec: Value = serde_json::from_str(&self.content(&self.dir.join(Self::file(name)))?).ok()?;
        let list = spec.pointer("/devices/0/containerEdits/env")?.as_array()?;
        Some(variables(list).collect())
    }

    /// Removes old specs whose device names are not among `kept`, and files that interrupted writes left; returns their number.
    pub(crate) fn clean(&self, kept: &BTreeSet<String>, now: SystemTime) -> io::Result<usize> {
        let mut n_removed = 0;
        let staged = fs::read_dir(self.dir.join(STAGING)).into_iter().flatten();
        for entry in fs::read_dir(&self.dir)?.chain(staged) {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().into_owned();
            let rest = file.strip_prefix(CONTAINER_PREFIX).unwrap_or_default();
            let is_unused = rest
                .strip_suffix(CONTAINER_SUFFIX)
                .is_some_and(|name| !kept.contains(name));
            // The name of a temporary file of `replace` begins with a dot.
            let is_left_over = file.starts_with(&format!(".{OWN_PREFIX}"))
                || (file.starts_with(OWN_PREFIX) && file.ends_with(RETIRED));
            if !is_unused && !is_left_over {
                continue;
            }
            let is_old = age(&entry.path(), now).is_some_and(|age| age > YOUNG);
            // A file that cannot be removed now is tried again at the next cleaning.
            if is_old && fs::remove_file(entry.path()).is_ok() {
                self.known().remove(&entry.path());
                n_removed += 1;
            }
        }
        Ok(n_removed)
    }

    /// Removes every file of this plugin, as uninstalling it demands. Returns the number of removed specs.
    pub(crate) fn remove_all(&self) -> io::Result<usize> {
        let staging = self.dir.join(STAGING);
        if staging.exists() {
            fs::remove_dir_all(&staging)?;
        }
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            entries => entries?,
        };
        let mut n_removed = 0;
        for entry in entries {
            let entry = entry?;
            let file = entry.file_name().to_string_lossy().into_owned();
            // The name of a temporary file begins with a dot.
            if file.strip_prefix('.').unwrap_or(&file).starts_with(OWN_PREFIX) {
                fs::remove_file(entry.path())?;
                n_removed += 1;
            }
        }
        self.known().clear();
        Ok(n_removed)
    }

    fn content(&self, path: &Path) -> Option<Arc<str>> {
        let version = FileVersion::from(&fs::metadata(path).ok()?);
        // The module `readers` would take another opening of the file for a read by the runtime.
        if let Some((known, text)) = self.known().get(path)
            && *known == version
        {
            return Some(Arc::clone(text));
        }
        let text: Arc<str> = fs::read_to_string(path).ok()?.into();
        self.known().insert(path.to_owned(), (version, Arc::clone(&text)));
        Some(text)
    }

    fn known(&self) -> MutexGuard<'_, Contents> {
        // Each change is one insertion or removal, so a panic elsewhere leaves it whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Replaces a file in one step. Runtimes notice that only if `staging`, which gets the temporary file, is the same directory.
fn replace(path: &Path, staging: &Path, text: &str) -> io::Result<()> {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    // Runtimes read only files that end with .json or .yaml.
    let temporary = staging.join(format!(".{file}.tmp"));
    let mut written = fs::write(&temporary, text);
    if let Err(error) = &written
        && error.kind() == io::ErrorKind::NotFound
    {
        // /var/run/cdi is in memory, and another program may clear it.
        fs::create_dir_all(staging)?;
        written = fs::write(&temporary, text);
    }
    let written = written.and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // On a full disk the temporary file would only take more room.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The time since a file was last written or renamed; none if there is no such file, or if the clock was set back.
fn age(path: &Path, now: SystemTime) -> Option<Duration> {
    let found = fs::metadata(path).ok()?;
    let seconds = u64::try_from(found.ctime()).ok()?;
    let nanos = u32::try_from(found.ctime_nsec()).ok()?;
    // A rename leaves the time of modification as it is, so the time of the last status change counts.
    let changed = SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, nanos))?;
    now.duration_since(changed).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(value: &str) -> Edits {
        Edits {
            env: [("V".to_owned(), value.to_owned())].into(),
            ..Edits::default()
        }
    }

    fn files(dir: &SpecDir) -> Vec<String> {
        let mut files: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        files.retain(|file| file != STAGING);
        files.sort();
        files
    }

    #[test]
    fn a_spec_with_other_content_is_removed_for_a_while_before_its_name_is_reused() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().join("made/on/the/way"));
        let now = SystemTime::now();
        assert!(dir.write("one", &edits("a"), now).unwrap());
        assert!(!dir.write("one", &edits("a"), now).unwrap());
        assert_eq!(dir.env("one").unwrap()["V"], "a");
        let error = dir.write("one", &edits("b"), now).unwrap_err();
        assert!(matches!(error, SpecError::Retired { .. }), "{error}");
        assert!(!dir.has("one"), "no runtime resolves it any more");
        assert!(
            dir.write("one", &edits("b"), now + Duration::from_secs(1))
                .is_err(),
            "the runtime may still know the old one"
        );
        assert!(dir.write("one", &edits("b"), now + 2 * RETIREMENT).unwrap());
        assert_eq!(files(&dir), ["gpushare.dev-gpu_one.json"]);
    }

    #[test]
    fn all_files_of_this_plugin_can_be_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().join("cdi"));
        assert_eq!(dir.remove_all().unwrap(), 0, "the directory is not there");
        dir.write("one", &edits("a"), SystemTime::now()).unwrap();
        dir.write_driver(&Edits::default()).unwrap();
        dir.prompt_read().unwrap();
        fs::write(root.path().join("cdi/nvidia.yaml"), "").unwrap();
        assert_eq!(dir.remove_all().unwrap(), 3);
        let left: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["nvidia.yaml"]);
        assert!(!dir.has("one"));
    }

    /// The process that retired it may have ended since.
    #[test]
    fn the_removal_of_a_spec_is_known_to_the_next_process() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().to_owned());
        dir.write("one", &edits("a"), SystemTime::now()).unwrap();
        dir.write("one", &edits("b"), SystemTime::now()).unwrap_err();
        let after_restart = SpecDir::new(root.path().to_owned());
        assert!(
            after_restart
                .write("one", &edits("b"), SystemTime::now())
                .is_err()
        );
    }

    #[test]
    fn an_incomplete_file_counts_as_missing() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().to_owned());
        dir.write("one", &edits("a"), SystemTime::now()).unwrap();
        let path = root.path().join(SpecDir::file("one"));
        let whole = fs::read_to_string(&path).unwrap();
        for left in ["", &whole[..whole.len() / 2]] {
            fs::write(&path, left).unwrap();
            assert!(dir.write("one", &edits("b"), SystemTime::now()).unwrap());
            fs::write(&path, left).unwrap();
            assert!(dir.write("one", &edits("a"), SystemTime::now()).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), whole);
        }
    }

    #[test]
    fn old_files_without_an_answer_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let dir = SpecDir::new(root.path().to_owned());
        for name in ["kept", "gone"] {
            dir.write(name, &edits("a"), SystemTime::now()).unwrap();
        }
        dir.write("retired", &edits("a"), SystemTime::now()).unwrap();
        dir.write("retired", &edits("b"), SystemTime::now()).unwrap_err();
        assert!(
            dir.write_driver(&Edits::default()).unwrap() && !dir.write_driver(&Edits::default()).unwrap()
        );
        for other in ["nvidia.json", ".gpushare.dev-gpu_torn.json.tmp", ".other.tmp"] {
            fs::write(root.path().join(other), "{}").unwrap();
        }
        let kept = BTreeSet::from(["kept".to_owned()]);
        assert_eq!(dir.clean(&kept, SystemTime::now()).unwrap(), 0, "they are young");
        assert_eq!(dir.clean(&kept, SystemTime::now() + 2 * YOUNG).unwrap(), 3);
        assert_eq!(
            files(&dir),
            [
                ".other.tmp",
                DRIVER_FILE,
                "gpushare.dev-gpu_kept.json",
                "nvidia.json"
            ]
        );
    }
}

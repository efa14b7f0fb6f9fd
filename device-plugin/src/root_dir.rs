//! The root directory of another system, such as the node's as it is mounted into this container. Links are followed as in that
//! system: an absolute target begins at its root, and no path leads out of it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Most symbolic links on one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Most bytes that are read of a file.
const MAX_BYTES: u64 = 16 << 20;

/// The root directory of another system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RootDir {
    path: PathBuf,
}

impl RootDir {
    /// The root at this path.
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path, as this process sees it, of the file to which `path` leads in that system; `None` if it is missing, or if links
    /// form a loop.
    pub(crate) fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let mut remaining = names(path);
        let mut below = PathBuf::new();
        let mut n_links = 0;
        while let Some(name) = remaining.pop_front() {
            if name == ".." {
                // At the root nothing is left to pop: its `..` is the root itself.
                below.pop();
                continue;
            }
            let next = below.join(&name);
            let found = self.path.join(&next);
            if !fs::symlink_metadata(&found).ok()?.is_symlink() {
                below = next;
                continue;
            }
            n_links += 1;
            if n_links > MAX_LINKS {
                return None;
            }
            let target = fs::read_link(&found).ok()?;
            if target.is_absolute() {
                // An absolute link begins at that system's root, and not at the root of this process.
                below = PathBuf::new();
            }
            let mut of_target = names(&target);
            of_target.append(&mut remaining);
            remaining = of_target;
        }
        Some(self.path.join(below))
    }

    /// The content of a file, up to 16 MiB; `None` if it cannot be read.
    pub(crate) fn read(&self, path: &Path) -> Option<Vec<u8>> {
        let found = self.resolve(path)?;
        // Opening a pipe would wait for its writer.
        if !fs::metadata(&found).ok()?.is_file() {
            return None;
        }
        let mut bytes = Vec::new();
        File::open(found)
            .ok()?
            .take(MAX_BYTES)
            .read_to_end(&mut bytes)
            .ok()?;
        Some(bytes)
    }

    /// The paths in that system for which a pattern with `*` in its names stands, sorted. Names without `*` are not looked up.
    pub(crate) fn expand(&self, pattern: &Path) -> Vec<PathBuf> {
        let mut found = vec![PathBuf::from("/")];
        for name in names(pattern) {
            let pattern = name.to_string_lossy();
            let mut next = Vec::new();
            for dir in &found {
                if pattern.contains('*') {
                    next.extend(self.matching(dir, &pattern));
                } else {
                    next.push(dir.join(&name));
                }
            }
            found = next;
        }
        found
    }

    /// The entries of a directory whose names match the pattern, sorted; none if it cannot be read.
    fn matching(&self, dir: &Path, pattern: &str) -> Vec<PathBuf> {
        let Some(Ok(entries)) = self.resolve(dir).map(fs::read_dir) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            if is_match(pattern, &name.to_string_lossy()) {
                found.push(dir.join(name));
            }
        }
        found.sort();
        found
    }
}

/// The names in a path, `..` included.
fn names(path: &Path) -> VecDeque<OsString> {
    let mut names = VecDeque::new();
    for component in path.components() {
        if matches!(component, Component::Normal(_) | Component::ParentDir) {
            names.push_back(component.as_os_str().to_owned());
        }
    }
    names
}

/// Returns true if a name matches a pattern in which `*` stands for any characters. As in a shell, `*` matches no hidden name.
fn is_match(pattern: &str, name: &str) -> bool {
    if name.starts_with('.') && !pattern.starts_with('.') {
        return false;
    }
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let Some(last) = parts.next_back() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.split_once(part) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A root with a file `/a/b/file`, and links to it and elsewhere.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        fs::write(root.path().join("a/b/file"), "text").unwrap();
        for (link, target) in [
            ("absolute", "/a/b/file"),
            ("directory", "/a"),
            ("out", "../../../../a/b/file"),
            ("a/up", "../directory/b"),
            ("loop", "/loop"),
            ("dangling", "/nothing"),
            ("host", "/etc/passwd"),
        ] {
            symlink(target, root.path().join(link)).unwrap();
        }
        root
    }

    #[rstest]
    #[case::plain("/a/b/file", Some("a/b/file"))]
    #[case::absolute_link("/absolute", Some("a/b/file"))]
    #[case::through_a_directory("/directory/b/file", Some("a/b/file"))]
    #[case::beyond_the_root("/../../a/b/file", Some("a/b/file"))]
    #[case::link_beyond_the_root("/out", Some("a/b/file"))]
    #[case::two_links("/a/up/file", Some("a/b/file"))]
    #[case::up_from_a_link("/a/up/../b/file", Some("a/b/file"))]
    #[case::the_root("/", Some(""))]
    #[case::a_loop("/loop", None)]
    #[case::dangling("/dangling", None)]
    #[case::file_of_this_machine("/host", None)]
    #[case::below_a_file("/a/b/file/more", None)]
    fn links_are_followed_inside_the_root(#[case] path: &str, #[case] expected: Option<&str>) {
        let dir = root();
        let found = RootDir::new(dir.path()).resolve(Path::new(path));
        assert_eq!(found, expected.map(|below| dir.path().join(below)));
    }

    #[test]
    fn a_file_is_read_and_a_directory_is_not() {
        let dir = root();
        let root = RootDir::new(dir.path());
        assert_eq!(root.read(Path::new("/absolute")), Some(b"text".to_vec()));
        assert_eq!(root.read(Path::new("/directory")), None);
    }

    #[rstest]
    #[case::none("/a/b/*.conf", &[])]
    #[case::plain("/no/such", &["/no/such"])]
    #[case::names("/a/b/f*", &["/a/b/file"])]
    #[case::directories("/dir*/*/file", &["/directory/b/file", "/directory/up/file"])]
    fn patterns(#[case] pattern: &str, #[case] expected: &[&str]) {
        let dir = root();
        let found = RootDir::new(dir.path()).expand(Path::new(pattern));
        assert_eq!(found, expected.iter().map(PathBuf::from).collect::<Vec<_>>());
    }

    #[rstest]
    #[case::all("*", "name", true)]
    #[case::hidden("*", ".name", false)]
    #[case::suffix("*.conf", "a.conf", true)]
    #[case::other_suffix("*.conf", "a.conf.bak", false)]
    #[case::twice("a*b*c", "a1b2c", true)]
    #[case::too_short("ab*bc", "abc", false)]
    #[case::nothing_between("a*c", "ac", true)]
    fn names_match_a_pattern(#[case] pattern: &str, #[case] name: &str, #[case] expected: bool) {
        assert_eq!(is_match(pattern, name), expected);
    }

    proptest! {
        /// No path leads out of the root, and none panics.
        #[test]
        fn every_path_stays_inside(path in "(/|\\.\\./|a/|b/|up/|out/|directory/|file|\\PC){0,12}") {
            let dir = root();
            if let Some(found) = RootDir::new(dir.path()).resolve(Path::new(&path)) {
                prop_assert!(found.starts_with(dir.path()));
                prop_assert!(!found.components().any(|part| part == Component::ParentDir));
            }
        }
    }
}

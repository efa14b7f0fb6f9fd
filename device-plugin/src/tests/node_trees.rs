//! The files of NVIDIA nodes, as far as the plugin and `deploy/which-node.sh` read them, and the script's answers about them.
//!
//! The layouts are those of the distributions and of NVIDIA's installers; the libraries are empty files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The library that the script looks for.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// The content of a library for 32-bit programs.
pub(crate) const ELF_32: &str = "\u{7f}ELF\u{1}\u{1}\u{1}";

/// The driver's directories that the component `driver-root` names, below the root.
const DRIVER_ROOTS: [&str; 3] = ["", "run/nvidia/driver", "home/kubernetes/bin/nvidia"];

/// A root directory with the files of a node.
pub(crate) struct NodeTree {
    dir: tempfile::TempDir,
}

impl NodeTree {
    /// A tree with these files and their texts, and these links and their targets. Links to a missing file are fine.
    pub(crate) fn new(files: &[(&str, &str)], links: &[(&str, &str)]) -> Self {
        let tree = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        // Links first: a file may lie below a linked directory.
        for (path, target) in links {
            symlink(target, tree.place(path)).unwrap();
        }
        for (path, text) in files {
            tree.write(path, text.as_bytes());
        }
        tree
    }

    /// Adds a file of the loader's cache that lists these paths, or with a driver's directory that directory's.
    pub(crate) fn with_cache(self, root: &str, paths: &[&str]) -> Self {
        self.write(&format!("{root}etc/ld.so.cache"), &loader_cache(paths));
        self
    }

    /// Writes a file below the root.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        fs::write(self.place(path), bytes).unwrap();
    }

    /// The root.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The driver's directories as the component `driver-root` names them.
    pub(crate) fn driver_roots(&self) -> Vec<PathBuf> {
        DRIVER_ROOTS.iter().map(|root| self.path().join(root)).collect()
    }

    /// The script's rows about this tree, by their first words.
    pub(crate) fn ask_script(&self) -> BTreeMap<String, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/which-node.sh");
        let output = Command::new("sh")
            .arg(script)
            .arg("--root")
            .arg(self.path())
            .args(["--runtime", "containerd://2.1.9"])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && errors.is_empty(), "{errors}");
        let answer = String::from_utf8(output.stdout).unwrap();
        let mut rows = BTreeMap::new();
        for line in answer.lines().filter_map(|line| line.strip_prefix("  ")) {
            if let Some((name, value)) = line.split_once("  ") {
                rows.insert(name.to_owned(), value.trim().to_owned());
            }
        }
        rows
    }

    /// The place of a file, with the folders that lead to it.
    fn place(&self, path: &str) -> PathBuf {
        let place = self.path().join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        place
    }
}

/// A file of the loader's cache in its present format: a header of 48 bytes, 24 bytes for each library, and the texts.
fn loader_cache(paths: &[&str]) -> Vec<u8> {
    let start = 48 + 24 * paths.len();
    let (mut entries, mut texts) = (Vec::new(), Vec::new());
    for path in paths {
        let at = |texts: &Vec<u8>| u32::try_from(start + texts.len()).unwrap().to_le_bytes();
        let key = at(&texts);
        texts.extend_from_slice(path.rsplit('/').next().unwrap().as_bytes());
        texts.push(0);
        let value = at(&texts);
        texts.extend_from_slice(path.as_bytes());
        texts.push(0);
        // The flags of a 64-bit library on x86.
        entries.extend_from_slice(&0x0303_u32.to_le_bytes());
        entries.extend_from_slice(&key);
        entries.extend_from_slice(&value);
        entries.extend_from_slice(&[0; 12]);
    }
    let mut cache = b"glibc-ld.so.cache1.1".to_vec();
    cache.extend_from_slice(&u32::try_from(paths.len()).unwrap().to_le_bytes());
    cache.extend_from_slice(&u32::try_from(texts.len()).unwrap().to_le_bytes());
    cache.extend_from_slice(&[0; 20]);
    cache.extend(entries);
    cache.extend(texts);
    cache
}

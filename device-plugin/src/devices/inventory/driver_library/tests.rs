//! The library on the trees of nodes, as the plugin and `deploy/which-node.sh` find it.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use crate::tests::node_trees::{ELF_32, LIBRARY, NodeTree};

/// The library below the tree's root as the plugin finds it.
fn found_by_plugin(tree: &NodeTree) -> Option<String> {
    let found = find_library(&tree.driver_roots(), OsStr::new(LIBRARY))?;
    let below = found.strip_prefix(tree.path()).unwrap();
    Some(below.to_str().unwrap().to_owned())
}

/// The same as the script finds it.
fn found_by_script(tree: &NodeTree) -> Option<String> {
    let row = tree.ask_script().remove("the driver's library").unwrap();
    row.strip_prefix('/').map(str::to_owned)
}

/// A tree with an entry in each line: a file with its text behind `=`, where `|` ends a line, a link with its target behind
/// `->`, or the loader's cache below a root with its paths. `ML` is the library, and `32-bit` the content of one for 32-bit
/// programs.
fn tree(text: &str) -> NodeTree {
    let text = text.replace("ML", "libnvidia-ml.so");
    let (mut files, mut links, mut caches) = (Vec::new(), Vec::new(), Vec::new());
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some((path, target)) = line.split_once(" -> ") {
            links.push((path, target));
        } else if let Some((root, paths)) = line.strip_prefix("cache ").and_then(|rest| rest.split_once(": "))
        {
            caches.push((root, paths.split(' ').collect::<Vec<_>>()));
        } else {
            let (path, content) = line.split_once(" = ").unwrap_or((line, ""));
            files.push((path, content.replace("32-bit", ELF_32).replace('|', "\n")));
        }
    }
    let files: Vec<_> = files
        .iter()
        .map(|(path, content)| (*path, content.as_str()))
        .collect();
    let tree = NodeTree::new(&files, &links);
    caches.iter().fold(tree, |tree, (root, paths)| {
        tree.with_cache(root.trim_start_matches('/'), paths)
    })
}

#[rstest]
#[case::ubuntu(
    "
    lib -> usr/lib
    usr/lib/x86_64-linux-gnu/ML.580.159.04
    usr/lib/x86_64-linux-gnu/ML.1 -> ML.580.159.04
    cache /: /lib/x86_64-linux-gnu/libc.so.6 /lib/x86_64-linux-gnu/ML.1
",
    Some("usr/lib/x86_64-linux-gnu/ML.580.159.04")
)]
#[case::debian(
    "
    usr/lib/x86_64-linux-gnu/nvidia/current/ML.535.247.01
    usr/lib/x86_64-linux-gnu/nvidia/current/ML.1 -> ML.535.247.01
    usr/lib/x86_64-linux-gnu/ML.1 -> /etc/alternatives/nvidia--ML.1-x86_64-linux-gnu
    etc/alternatives/nvidia--ML.1-x86_64-linux-gnu -> /usr/lib/x86_64-linux-gnu/nvidia/current/ML.1
",
    Some("usr/lib/x86_64-linux-gnu/nvidia/current/ML.535.247.01")
)]
#[case::rhel(
    "
    lib64 -> usr/lib64
    usr/lib/ML.1 = 32-bit
    usr/lib64/ML.580.159.04
    usr/lib64/ML.1 -> ML.580.159.04
    cache /: /lib/ML.1 /lib64/ML.1
",
    Some("usr/lib64/ML.580.159.04")
)]
#[case::container_optimized_os(
    "
    etc/ld.so.cache
    home/kubernetes/bin/nvidia/lib64/ML.535.247.01
    home/kubernetes/bin/nvidia/lib64/ML.1 -> ML.535.247.01
",
    Some("home/kubernetes/bin/nvidia/lib64/ML.535.247.01")
)]
#[case::flatcar(
    "
    etc/ld.so.conf = # of the distribution|include ld.so.conf.d/*.conf|
    etc/ld.so.conf.d/nvidia.conf = /opt/nvidia/current/lib64|
    opt/nvidia/current -> /opt/nvidia/580.159.04
    opt/nvidia/580.159.04/lib64/ML.580.159.04
    opt/nvidia/580.159.04/lib64/ML.1 -> ML.580.159.04
",
    Some("opt/nvidia/580.159.04/lib64/ML.580.159.04")
)]
#[case::talos(
    "
    usr/local/glibc/usr/lib/ML.580.159.04
    usr/local/glibc/usr/lib/ML.1 -> ML.580.159.04
",
    Some("usr/local/glibc/usr/lib/ML.580.159.04")
)]
#[case::nixos(
    "
    run/opengl-driver -> /nix/store/a-graphics-drivers
    nix/store/a-graphics-drivers/lib/ML.1 -> /nix/store/b-nvidia-x11/lib/ML.1
    nix/store/b-nvidia-x11/lib/ML.1 -> ML.580.159.04
    nix/store/b-nvidia-x11/lib/ML.580.159.04
",
    Some("nix/store/b-nvidia-x11/lib/ML.580.159.04")
)]
// The links are relative to the driver's own root.
#[case::gpu_operator(
    "
    run/nvidia/driver/lib -> /usr/lib
    run/nvidia/driver/usr/lib/x86_64-linux-gnu/ML.1 -> /lib/x86_64-linux-gnu/ML.580.159.04
    run/nvidia/driver/usr/lib/x86_64-linux-gnu/ML.580.159.04
    run/nvidia/validations/driver-ready
    cache run/nvidia/driver/: /lib/x86_64-linux-gnu/ML.1
",
    Some("run/nvidia/driver/usr/lib/x86_64-linux-gnu/ML.580.159.04")
)]
#[case::bottlerocket(
    "
    usr/lib/nvidia/tesla/ML.570.172.08
    usr/lib/nvidia/tesla/ML.1 -> ML.570.172.08
",
    Some("usr/lib/nvidia/tesla/ML.570.172.08")
)]
// Links of the distribution's folders to a driver that is mounted elsewhere.
#[case::absolute_links(
    "
    usr/lib/x86_64-linux-gnu/ML.1 -> /usr/local/nvidia/lib64/ML.1
    usr/local/nvidia/lib64/ML.1 -> ML.580.159.04
    usr/local/nvidia/lib64/ML.580.159.04
",
    Some("usr/local/nvidia/lib64/ML.580.159.04")
)]
#[case::below_usr_local("usr/local/nvidia/lib64/ML.1", Some("usr/local/nvidia/lib64/ML.1"))]
// ldconfig alone knows the folder.
#[case::cache_only(
    "
    srv/driver/lib/ML.1
    cache /: /srv/driver/lib/ML.1
",
    Some("srv/driver/lib/ML.1")
)]
#[case::configuration_only(
    "
    etc/ld.so.conf = include /etc/ld.so.conf.d/*.conf|
    etc/ld.so.conf.d/a.conf = include /etc/ld.so.conf.d/a.conf|/srv/none|
    etc/ld.so.conf.d/b.conf =   /srv/driver/lib # of the vendor|
    etc/ld.so.conf.d/c.txt = /srv/other|
    srv/other/ML.1
    srv/driver/lib/ML.1
",
    Some("srv/driver/lib/ML.1")
)]
// The cache and a link of a driver that has been removed, beside a driver that is there.
#[case::stale(
    "
    usr/local/nvidia/lib64/ML.1
    usr/lib64/ML.1 -> ML.470.256.02
    cache /: /usr/lib64/ML.1
",
    Some("usr/local/nvidia/lib64/ML.1")
)]
#[case::no_driver(
    "
    usr/lib64/libc.so.6
    etc/ld.so.cache = no cache
    cache run/nvidia/driver/: /lib/libc.so.6
",
    None
)]
#[case::link_loop(
    "
    usr/lib64/ML.1 -> ML.580
    usr/lib64/ML.580 -> /usr/lib64/ML.1
    lib64 -> /lib64
",
    None
)]
#[case::no_64_bit("usr/lib/ML.1 = 32-bit", None)]
// A link whose target is on this machine and not below the root.
#[case::link_out_of_the_root(
    "
    usr/lib64/ML.1 -> /bin/sh
    usr/lib/ML.1 -> ../../../../../../../../bin/sh
",
    None
)]
fn the_plugin_and_the_script_find_the_same_library(#[case] files: &str, #[case] expected: Option<&str>) {
    let (tree, expected) = (
        tree(files),
        expected.map(|path| path.replace("ML", "libnvidia-ml.so")),
    );
    assert_eq!(found_by_plugin(&tree), expected, "the plugin");
    assert_eq!(found_by_script(&tree), expected, "the script");
}

/// The two lists of known folders are one, in one order.
#[test]
fn the_script_knows_the_same_folders() {
    let tree = NodeTree::new(&[], &[]);
    for folder in FOLDERS.iter().rev() {
        tree.write(&format!("{}/{LIBRARY}", folder.trim_start_matches('/')), b"");
        let expected = format!("{}/{LIBRARY}", folder.trim_start_matches('/'));
        assert_eq!(found_by_plugin(&tree), Some(expected.clone()));
        assert_eq!(found_by_script(&tree), Some(expected));
    }
}

proptest! {
    /// No cache makes the plugin panic, and it takes no path that the cache does not have.
    #[test]
    fn a_malformed_cache_is_read(cache in prop::collection::vec(prop_oneof![
        Just(b"/a/libnvidia-ml.so.1".to_vec()), Just(vec![0]), Just(b"libnvidia-ml.so.1".to_vec()), prop::collection::vec(any::<u8>(), 0..40)
    ], 0..8)) {
        let cache = cache.concat();
        for path in cached_paths(&cache, OsStr::new(LIBRARY)) {
            let bytes = path.as_os_str().as_bytes();
            prop_assert!(bytes.ends_with(b"/libnvidia-ml.so.1") && cache.windows(bytes.len()).any(|part| part == bytes));
        }
    }
}

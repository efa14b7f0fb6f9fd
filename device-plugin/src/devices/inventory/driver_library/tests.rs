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

fn ubuntu() -> NodeTree {
    NodeTree::new(
        &[("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04", "")],
        &[
            ("lib", "usr/lib"),
            (
                "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
                "libnvidia-ml.so.580.159.04",
            ),
        ],
    )
    .with_cache(
        "",
        &[
            "/lib/x86_64-linux-gnu/libc.so.6",
            "/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
        ],
    )
}

fn debian() -> NodeTree {
    let dir = "usr/lib/x86_64-linux-gnu";
    NodeTree::new(
        &[(&format!("{dir}/nvidia/current/libnvidia-ml.so.535.247.01"), "")],
        &[
            (
                &format!("{dir}/nvidia/current/libnvidia-ml.so.1"),
                "libnvidia-ml.so.535.247.01",
            ),
            (
                &format!("{dir}/libnvidia-ml.so.1"),
                "/etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu",
            ),
            (
                "etc/alternatives/nvidia--libnvidia-ml.so.1-x86_64-linux-gnu",
                "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
            ),
        ],
    )
}

fn rhel() -> NodeTree {
    NodeTree::new(
        &[
            ("usr/lib/libnvidia-ml.so.1", ELF_32),
            ("usr/lib64/libnvidia-ml.so.580.159.04", ""),
        ],
        &[
            ("lib64", "usr/lib64"),
            ("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580.159.04"),
        ],
    )
    .with_cache("", &["/lib/libnvidia-ml.so.1", "/lib64/libnvidia-ml.so.1"])
}

fn container_optimized_os() -> NodeTree {
    let dir = "home/kubernetes/bin/nvidia/lib64";
    NodeTree::new(
        &[
            (&format!("{dir}/libnvidia-ml.so.535.247.01"), ""),
            ("etc/ld.so.cache", ""),
        ],
        &[(&format!("{dir}/libnvidia-ml.so.1"), "libnvidia-ml.so.535.247.01")],
    )
}

fn flatcar() -> NodeTree {
    NodeTree::new(
        &[
            (
                "etc/ld.so.conf",
                "# of the distribution\ninclude ld.so.conf.d/*.conf\n",
            ),
            ("etc/ld.so.conf.d/nvidia.conf", "/opt/nvidia/current/lib64\n"),
            ("opt/nvidia/580.159.04/lib64/libnvidia-ml.so.580.159.04", ""),
        ],
        &[
            ("opt/nvidia/current", "/opt/nvidia/580.159.04"),
            (
                "opt/nvidia/580.159.04/lib64/libnvidia-ml.so.1",
                "libnvidia-ml.so.580.159.04",
            ),
        ],
    )
}

fn talos() -> NodeTree {
    let dir = "usr/local/glibc/usr/lib";
    NodeTree::new(
        &[(&format!("{dir}/libnvidia-ml.so.580.159.04"), "")],
        &[(&format!("{dir}/libnvidia-ml.so.1"), "libnvidia-ml.so.580.159.04")],
    )
}

fn nixos() -> NodeTree {
    NodeTree::new(
        &[("nix/store/b-nvidia-x11/lib/libnvidia-ml.so.580.159.04", "")],
        &[
            ("run/opengl-driver", "/nix/store/a-graphics-drivers"),
            (
                "nix/store/a-graphics-drivers/lib/libnvidia-ml.so.1",
                "/nix/store/b-nvidia-x11/lib/libnvidia-ml.so.1",
            ),
            (
                "nix/store/b-nvidia-x11/lib/libnvidia-ml.so.1",
                "libnvidia-ml.so.580.159.04",
            ),
        ],
    )
}

fn gpu_operator() -> NodeTree {
    let root = "run/nvidia/driver";
    NodeTree::new(
        &[
            (
                &format!("{root}/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"),
                "",
            ),
            ("run/nvidia/validations/driver-ready", ""),
        ],
        &[
            // Relative to the driver's own root.
            (&format!("{root}/lib"), "/usr/lib"),
            (
                &format!("{root}/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"),
                "/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
            ),
        ],
    )
    .with_cache("run/nvidia/driver/", &["/lib/x86_64-linux-gnu/libnvidia-ml.so.1"])
}

fn bottlerocket() -> NodeTree {
    NodeTree::new(
        &[("usr/lib/nvidia/tesla/libnvidia-ml.so.570.172.08", "")],
        &[(
            "usr/lib/nvidia/tesla/libnvidia-ml.so.1",
            "libnvidia-ml.so.570.172.08",
        )],
    )
}

/// Links of the distribution's folders to a driver that is mounted elsewhere.
fn absolute_links() -> NodeTree {
    NodeTree::new(
        &[("usr/local/nvidia/lib64/libnvidia-ml.so.580.159.04", "")],
        &[
            (
                "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
                "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
            ),
            (
                "usr/local/nvidia/lib64/libnvidia-ml.so.1",
                "libnvidia-ml.so.580.159.04",
            ),
        ],
    )
}

fn below_usr_local() -> NodeTree {
    NodeTree::new(&[("usr/local/nvidia/lib64/libnvidia-ml.so.1", "")], &[])
}

/// ldconfig alone knows the folder.
fn cache_only() -> NodeTree {
    NodeTree::new(&[("srv/driver/lib/libnvidia-ml.so.1", "")], &[])
        .with_cache("", &["/srv/driver/lib/libnvidia-ml.so.1"])
}

fn configuration_only() -> NodeTree {
    NodeTree::new(
        &[
            ("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n"),
            (
                "etc/ld.so.conf.d/a.conf",
                "include /etc/ld.so.conf.d/a.conf\n/srv/none\n",
            ),
            ("etc/ld.so.conf.d/b.conf", "  /srv/driver/lib # of the vendor\n"),
            ("etc/ld.so.conf.d/c.txt", "/srv/other\n"),
            ("srv/other/libnvidia-ml.so.1", ""),
            ("srv/driver/lib/libnvidia-ml.so.1", ""),
        ],
        &[],
    )
}

/// The cache and a link of a driver that has been removed, beside a driver that is there.
fn stale() -> NodeTree {
    NodeTree::new(
        &[("usr/local/nvidia/lib64/libnvidia-ml.so.1", "")],
        &[("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.470.256.02")],
    )
    .with_cache("", &["/usr/lib64/libnvidia-ml.so.1"])
}

fn no_driver() -> NodeTree {
    NodeTree::new(
        &[("usr/lib64/libc.so.6", ""), ("etc/ld.so.cache", "no cache")],
        &[],
    )
    .with_cache("run/nvidia/driver/", &[])
}

fn link_loop() -> NodeTree {
    NodeTree::new(
        &[],
        &[
            ("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.580"),
            ("usr/lib64/libnvidia-ml.so.580", "/usr/lib64/libnvidia-ml.so.1"),
            ("lib64", "/lib64"),
        ],
    )
}

/// Only for 32-bit programs.
fn no_64_bit() -> NodeTree {
    NodeTree::new(&[("usr/lib/libnvidia-ml.so.1", ELF_32)], &[])
}

/// A link whose target is on this machine and not below the root.
fn link_out_of_the_root() -> NodeTree {
    NodeTree::new(
        &[],
        &[
            ("usr/lib64/libnvidia-ml.so.1", "/bin/sh"),
            ("usr/lib/libnvidia-ml.so.1", "../../../../../../../../bin/sh"),
        ],
    )
}

#[rstest]
#[case::ubuntu(ubuntu(), Some("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04"))]
#[case::debian(
    debian(),
    Some("usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.247.01")
)]
#[case::rhel(rhel(), Some("usr/lib64/libnvidia-ml.so.580.159.04"))]
#[case::container_optimized_os(
    container_optimized_os(),
    Some("home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.535.247.01")
)]
#[case::flatcar(flatcar(), Some("opt/nvidia/580.159.04/lib64/libnvidia-ml.so.580.159.04"))]
#[case::talos(talos(), Some("usr/local/glibc/usr/lib/libnvidia-ml.so.580.159.04"))]
#[case::nixos(nixos(), Some("nix/store/b-nvidia-x11/lib/libnvidia-ml.so.580.159.04"))]
#[case::gpu_operator(
    gpu_operator(),
    Some("run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04")
)]
#[case::bottlerocket(bottlerocket(), Some("usr/lib/nvidia/tesla/libnvidia-ml.so.570.172.08"))]
#[case::absolute_links(absolute_links(), Some("usr/local/nvidia/lib64/libnvidia-ml.so.580.159.04"))]
#[case::below_usr_local(below_usr_local(), Some("usr/local/nvidia/lib64/libnvidia-ml.so.1"))]
#[case::cache_only(cache_only(), Some("srv/driver/lib/libnvidia-ml.so.1"))]
#[case::configuration_only(configuration_only(), Some("srv/driver/lib/libnvidia-ml.so.1"))]
#[case::stale(stale(), Some("usr/local/nvidia/lib64/libnvidia-ml.so.1"))]
#[case::no_driver(no_driver(), None)]
#[case::link_loop(link_loop(), None)]
#[case::no_64_bit(no_64_bit(), None)]
#[case::link_out_of_the_root(link_out_of_the_root(), None)]
fn the_plugin_and_the_script_find_the_same_library(#[case] tree: NodeTree, #[case] expected: Option<&str>) {
    assert_eq!(found_by_plugin(&tree).as_deref(), expected, "the plugin");
    assert_eq!(found_by_script(&tree).as_deref(), expected, "the script");
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

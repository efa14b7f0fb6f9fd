//! Containers and their cgroups: the IDs of containers in the names of cgroups, and the directories of containers' cgroups.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Characters of a container's ID in a cgroup's name.
const ID_LENGTH: usize = 64;

/// The end of the name of a container's cgroup that systemd has made.
const SCOPE: &str = ".scope";

/// The beginning of the names of kubelet's cgroups at the root: `kubepods`, `kubepods.slice`.
const KUBELET_ROOT: &str = "kubepods";

/// The cgroup of CRI-O's helper process of a container, whose name also ends with the container's ID, begins like this.
const CRIO_HELPER: &str = "crio-conmon-";

/// The cgroup below the container's scope of systemd in which the OCI runtime crun keeps the container's processes.
const CRUN_SUBGROUP: &str = "container";

/// Levels of cgroups below kubelet's, down to a container's: that of the quality of service, the pod's, and the container's.
const MAX_DEPTH: usize = 3;

pub(super) fn container_ids(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups.split(['/', '\n', ':']).filter_map(container_id)
}

/// The container's ID at the end of a cgroup's name such as `cri-containerd-ID.scope`, `crio-ID` and `ID`.
fn container_id(name: &str) -> Option<&str> {
    let id = name.trim_end_matches(SCOPE).rsplit('-').next()?;
    let is_id = id.len() == ID_LENGTH && id.as_bytes().iter().all(u8::is_ascii_hexdigit);
    is_id.then_some(id)
}

/// The directories of the cgroups of the containers with these IDs, by ID. `root` is the mount point of cgroup v2.
pub(super) fn find_cgroups(root: &Path, containers: &BTreeSet<&str>) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for (name, path) in subdirectories(root) {
        if name.starts_with(KUBELET_ROOT) {
            search(&path, MAX_DEPTH, containers, &mut found);
        }
    }
    found
}

/// Searches the cgroups below `parent`, `depth` levels deep, but not below the cgroup of a container, which may have any names.
fn search(parent: &Path, depth: usize, containers: &BTreeSet<&str>, found: &mut BTreeMap<String, PathBuf>) {
    for (name, path) in subdirectories(parent) {
        if let Some(id) = container_id(&name) {
            if containers.contains(id) && !name.starts_with(CRIO_HELPER) {
                let subgroup = path.join(CRUN_SUBGROUP);
                let is_of_crun = name.ends_with(SCOPE) && subgroup.is_dir();
                let path = if is_of_crun { subgroup } else { path };
                found.insert(id.to_owned(), path);
            }
        } else if depth > 1 {
            search(&path, depth - 1, containers, found);
        }
    }
}

/// The directories in a directory, with their names, symbolic links aside; none if it has just been removed.
fn subdirectories(directory: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Ok(name) = entry.file_name().into_string()
        {
            found.push((name, entry.path()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[rstest]
    #[case::systemd(
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-ID.scope\n",
        1
    )]
    #[case::crio("0::/kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope\n", 1)]
    #[case::cgroupfs("0::/kubepods/besteffort/pod1-2/ID\n", 1)]
    #[case::seen_from_another_cgroup("0::/../../kubepods-pod1_2.slice/cri-containerd-ID.scope\n", 1)]
    #[case::below_the_container("0::/kubepods/pod1-2/ID/init\n", 1)]
    #[case::cgroup_v1("5:cpu:/kubepods/pod1-2/ID\n4:memory:/kubepods/pod1-2/ID\n", 2)]
    #[case::a_service("0::/system.slice/nvidia-persistenced.service\n", 0)]
    #[case::nothing("", 0)]
    fn container_ids_of_cgroups(#[case] cgroups: &str, #[case] n: usize) {
        let cgroups = cgroups.replace("ID", ID);
        assert_eq!(container_ids(&cgroups).collect::<Vec<_>>(), vec![ID; n]);
    }

    #[rstest]
    #[case::systemd(
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-ID.scope",
        true
    )]
    #[case::systemd_guaranteed("kubepods.slice/kubepods-pod1_2.slice/cri-containerd-ID.scope", true)]
    #[case::cgroupfs("kubepods/besteffort/pod1-2/ID", true)]
    #[case::cgroupfs_guaranteed("kubepods/pod1-2/ID", true)]
    #[case::crio_systemd("kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope", true)]
    #[case::crun("kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope/container", true)]
    #[case::crio_cgroupfs("kubepods/burstable/pod1-2/crio-ID", true)]
    #[case::crio_helper("kubepods.slice/kubepods-pod1_2.slice/crio-conmon-ID.scope", false)]
    #[case::another_container("kubepods/pod1-2/OTHER", false)]
    #[case::below_another_container("kubepods/pod1-2/OTHER/ID", false)]
    #[case::no_cgroup_of_kubelet("system.slice/docker-ID.scope", false)]
    #[case::too_deep("kubepods/burstable/pod1-2/more/ID", false)]
    #[case::absent("kubepods/burstable/pod1-2", false)]
    fn directory_of_a_container(#[case] cgroup: &str, #[case] is_found: bool) {
        let root = tempfile::tempdir().unwrap();
        let cgroup = cgroup.replace("OTHER", &ID.replace('0', "f")).replace("ID", ID);
        let directory = root.path().join(cgroup);
        // A program in the container may make cgroups of any name below its own.
        fs::create_dir_all(directory.join(format!("kubepods/{ID}"))).unwrap();
        let expected: BTreeMap<_, _> = is_found.then(|| (ID.to_owned(), directory)).into_iter().collect();
        assert_eq!(find_cgroups(root.path(), &[ID].into()), expected);
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = root.path().join("elsewhere");
        fs::create_dir_all(elsewhere.join("pod1").join(ID)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, root.path().join("kubepods")).unwrap();
        assert_eq!(find_cgroups(root.path(), &[ID].into()), BTreeMap::new());
        assert_eq!(
            find_cgroups(&root.path().join("absent"), &[ID].into()),
            BTreeMap::new()
        );
    }
}

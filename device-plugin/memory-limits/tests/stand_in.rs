//! The call of the driver against the plugin's stand-in for libnvidia-ml, with the function and without it.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step fails the test"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

use memory_limits::{CgroupMemory, cgroup_memory};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use tempfile::TempDir;

/// A directory with the stand-in, one GPU, and directories in the place of cgroups.
fn machine(options: &[&str]) -> (TempDir, Nvml) {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnvidia-ml.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/stand_in/nvml.c");
    let compiled = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"])
        .args(options)
        .arg("-o")
        .args([&library, &source])
        .arg("-ldl")
        .status()
        .expect("the tests need a C compiler named `cc`");
    assert!(compiled.success());
    let device = "0 GPU-0 0 17179869184 0 1 0 00000000:3B:00.0 Tesla T4\n";
    fs::write(folder.path().join("devices"), device).unwrap();
    for name in ["limited", "unbounded", "unlimited", "free", "failing"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
    (folder, nvml)
}

#[test]
fn answers_of_a_driver_with_the_function() {
    let (folder, nvml) = machine(&[]);
    let device = nvml.device_by_index(0).unwrap();
    let ask = |name: &str| cgroup_memory(&device, &folder.path().join(name));
    assert_eq!(
        ask("limited").unwrap(),
        CgroupMemory::NotLimited,
        "a driver that limits nothing answers 3"
    );
    let root = folder.path().display();
    let limits = format!(
        "0 {root}/limited 1 4294967296 7 0\n0 {root}/unbounded 1 18446744073709551615 9 0\n\
         0 {root}/unlimited 0 18446744073709551615 9 0\n0 {root}/failing 0 0 0 999\n1 {root}/free 0 1 1 0\n"
    );
    fs::write(folder.path().join("memory-limits"), limits).unwrap();
    let limited = CgroupMemory::Limited {
        used: 7,
        limit: Some(4 << 30),
    };
    assert_eq!(ask("limited").unwrap(), limited);
    let unbounded = CgroupMemory::Limited { used: 9, limit: None };
    assert_eq!(ask("unbounded").unwrap(), unbounded);
    assert_eq!(
        ask("unlimited").unwrap(),
        CgroupMemory::NotLimited,
        "the two numbers that mean no limit"
    );
    assert_eq!(
        ask("free").unwrap(),
        CgroupMemory::NotLimited,
        "the limit is that of another GPU"
    );
    assert!(matches!(ask("failing"), Err(NvmlError::Unknown)));
    assert!(
        matches!(ask("absent"), Err(NvmlError::InvalidArg)),
        "the library opens the directory"
    );
    assert!(
        matches!(ask("zero\0byte"), Err(NvmlError::NulError(_))),
        "a path that C cannot hold does not reach the library"
    );
}

#[test]
fn an_older_driver_lacks_the_function() {
    let (folder, nvml) = machine(&["-DWITHOUT_NEW_SYMBOLS"]);
    let device = nvml.device_by_index(0).unwrap();
    let found = cgroup_memory(&device, &folder.path().join("limited")).unwrap();
    assert_eq!(found, CgroupMemory::NoFunction);
}

//! `gpu-probe` and the stand-in for the driver's libraries that it calls.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on should end"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the program into a directory, and the libraries into `lib` below it; returns the program and that directory.
pub(crate) fn build(dir: &Path) -> [PathBuf; 2] {
    let [program, libraries] = ["gpu-probe", "lib"].map(|name| dir.join(name));
    std::fs::create_dir(&libraries).unwrap();
    compile("gpu-probe/gpu-probe.c", &program, &[]);
    compile(
        "tests/stand_in/cuda.c",
        &libraries.join("libcuda.so.1"),
        &["-shared", "-fPIC"],
    );
    // The loader takes two names of one file for one library, so that both APIs have the same state.
    std::os::unix::fs::symlink("libcuda.so.1", libraries.join("libnvidia-ml.so.1")).unwrap();
    [program, libraries]
}

/// Compiles a C file of this crate.
fn compile(source: &str, output: &Path, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror"])
        .args(options)
        .arg("-o")
        .args([output, &source])
        .arg("-ldl")
        .status()
        .expect("the tests need a C compiler named `cc`");
    assert!(status.success(), "{} does not compile", source.display());
}

//! The demo as a user runs it, and as the testbed's image does: every check holds, and no process is left behind.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use kit::daemons::Binaries;
use serde_json::Value;

/// The folders of `deploy/` that a build of the images gets.
fn manifests_of_image() -> tempfile::TempDir {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let admitted = std::fs::read_to_string(repository.join(".dockerignore")).unwrap();
    let image = tempfile::tempdir().unwrap();
    for folder in admitted.lines().filter_map(|line| line.strip_prefix("!deploy/")) {
        symlink(repository.join("deploy").join(folder), image.path().join(folder)).unwrap();
    }
    image
}

/// With the manifests of the testbed's image, and like there without a shell or any other program.
#[tokio::test]
async fn the_demo_succeeds() {
    // Builds the daemons, since the demo does not without cargo's variable.
    Binaries::locate().await.unwrap();
    let manifests = manifests_of_image();
    let output = Command::new(env!("CARGO_BIN_EXE_testbed"))
        .args(["demo", "--json"])
        .env("TESTBED_DEPLOY", manifests.path())
        .env("PATH", "")
        .env_remove("CARGO")
        .output()
        .unwrap();
    let progress = String::from_utf8_lossy(&output.stderr);
    let result: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}\n{progress}"));
    let checks = result["checks"].as_array().unwrap();
    let failed: Vec<_> = checks
        .iter()
        .filter(|check| check["problems"] != Value::Array(Vec::new()))
        .collect();
    assert!(
        output.status.success() && failed.is_empty(),
        "{failed:#?}\n{progress}"
    );
    assert!(checks.len() >= 15, "{checks:#?}");
    assert_eq!(result["gpus"].as_array().unwrap().len(), 8);
    assert!(
        result["containers"].as_array().unwrap().len() >= 8,
        "{:#}",
        result["containers"]
    );
}

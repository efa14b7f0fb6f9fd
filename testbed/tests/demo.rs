//! The demo as a user runs it: every check holds, and no process is left behind.

use std::process::Command;

use serde_json::Value;

#[test]
fn the_demo_succeeds() {
    let output = Command::new(env!("CARGO_BIN_EXE_testbed"))
        .args(["demo", "--json"])
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

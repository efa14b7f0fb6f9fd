//! Tests of CDI resolution.

use std::path::PathBuf;

use tempfile::TempDir;

use super::{Edits, Specs, Unresolvable};

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn spec(kind: &str, device: &str, env: &str) -> String {
    format!(
        "cdiVersion: 0.6.0\nkind: {kind}\ncontainerEdits:\n  env: [ALL={env}]\ndevices:\n- name: {device}\n  containerEdits:\n    env: [ONE={env}]\n"
    )
}

fn resolve(dirs: &[PathBuf], names: &[String]) -> Result<Edits, Unresolvable> {
    Specs::of(dirs.to_vec()).resolve(names)
}

#[test]
fn a_specs_own_edits_come_once_and_before_its_devices() {
    let dir = TempDir::new().unwrap();
    let text = r#"{"cdiVersion": "0.6.0", "kind": "v.com/gpu", "containerEdits": {"env": ["ALL=1"], "mounts": [{"hostPath": "/h", "containerPath": "/c"}]},
        "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}, {"name": "b", "containerEdits": {"env": ["B=1"]}}]}"#;
    std::fs::write(dir.path().join("x.json"), text).unwrap();
    let edits = resolve(&[dir.path().to_owned()], &names(&["v.com/gpu=b", "v.com/gpu=a"])).unwrap();
    assert_eq!(edits.env, ["ALL=1", "B=1", "A=1"]);
    assert_eq!(edits.mounts[0].container_path, "/c");
}

#[test]
fn unknown_devices_bad_files_and_other_files_resolve_nothing() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("bad.yaml"), "kind: [").unwrap();
    std::fs::write(dir.path().join("half.tmp"), spec("v.com/gpu", "a", "tmp")).unwrap();
    let wanted = names(&["v.com/gpu=a", "v.com/gpu=b"]);
    let dirs = [dir.path().to_owned(), dir.path().join("missing")];
    assert_eq!(resolve(&dirs, &wanted), Err(Unresolvable(wanted.clone())));
    std::fs::write(dir.path().join("good.yaml"), spec("v.com/gpu", "a", "x")).unwrap();
    assert_eq!(resolve(&dirs, &wanted), Err(Unresolvable(names(&["v.com/gpu=b"]))));
}

#[test]
fn two_files_of_one_directory_conflict_and_a_later_directory_overrides() {
    let (first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let dirs = [first.path().to_owned(), second.path().to_owned()];
    std::fs::write(first.path().join("1.yaml"), spec("v.com/gpu", "a", "low")).unwrap();
    std::fs::write(second.path().join("1.yaml"), spec("v.com/gpu", "a", "high")).unwrap();
    let wanted = names(&["v.com/gpu=a"]);
    assert_eq!(resolve(&dirs, &wanted).unwrap().env, ["ALL=high", "ONE=high"]);
    std::fs::write(second.path().join("2.yaml"), spec("v.com/gpu", "a", "again")).unwrap();
    assert_eq!(resolve(&dirs, &wanted), Err(Unresolvable(wanted)));
}

#[test]
fn what_is_replaced_or_removed_is_seen() {
    let dir = TempDir::new().unwrap();
    let specs = Specs::of(vec![dir.path().to_owned()]);
    let (path, wanted) = (dir.path().join("1.yaml"), names(&["v.com/gpu=a"]));
    for env in ["one", "two"] {
        let new = dir.path().join("new");
        std::fs::write(&new, spec("v.com/gpu", "a", env)).unwrap();
        std::fs::rename(&new, &path).unwrap();
        assert_eq!(specs.resolve(&wanted).unwrap().env, [format!("ALL={env}"), format!("ONE={env}")]);
        assert_eq!(specs.resolve(&wanted).unwrap().env.len(), 2, "and so it stays");
    }
    std::fs::write(dir.path().join("2.yaml"), spec("v.com/gpu", "a", "again")).unwrap();
    assert_eq!(specs.resolve(&wanted), Err(Unresolvable(wanted.clone())));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(specs.resolve(&wanted).unwrap().env, ["ALL=again", "ONE=again"]);
}

/// A watch tells of it late, but not never.
#[test]
fn what_is_written_where_it_lies_is_seen_at_once_if_asked_about_and_else_soon() {
    let dir = TempDir::new().unwrap();
    let specs = Specs::of(vec![dir.path().to_owned()]);
    let (own, other) = (dir.path().join("1.yaml"), dir.path().join("2.yaml"));
    std::fs::write(&own, spec("v.com/gpu", "a", "one")).unwrap();
    std::fs::write(&other, spec("v.com/gpu", "b", "x")).unwrap();
    let wanted = names(&["v.com/gpu=a"]);
    assert_eq!(specs.resolve(&wanted).unwrap().env, ["ALL=one", "ONE=one"]);
    std::fs::write(&own, spec("v.com/gpu", "a", "other")).unwrap();
    assert_eq!(specs.resolve(&wanted).unwrap().env, ["ALL=other", "ONE=other"]);
    std::fs::write(&other, spec("v.com/gpu", "c", "y")).unwrap();
    assert_eq!(specs.resolve(&names(&["v.com/gpu=c"])).unwrap().env, ["ALL=y", "ONE=y"], "nothing is missed that is missing");
    std::fs::write(&other, spec("v.com/gpu", "a", "again")).unwrap();
    let began = std::time::Instant::now();
    while specs.resolve(&wanted).is_ok() {
        assert!(began.elapsed() < std::time::Duration::from_secs(10), "the conflict is never seen");
    }
}

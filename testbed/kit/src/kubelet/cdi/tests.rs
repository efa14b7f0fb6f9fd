//! Tests of CDI resolution.

use std::path::Path;
use std::time::Duration;

use tempfile::TempDir;

use super::{CdiCache, Unresolvable, resolve_now};

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn spec(kind: &str, device: &str, env: &str) -> String {
    format!(
        "cdiVersion: 0.6.0\nkind: {kind}\ncontainerEdits:\n  env: [ALL={env}]\ndevices:\n- name: {device}\n  containerEdits:\n    env: [ONE={env}]\n"
    )
}

#[test]
fn a_specs_own_edits_come_once_and_before_its_devices() {
    let dir = TempDir::new().unwrap();
    let text = r#"{"cdiVersion": "0.6.0", "kind": "v.com/gpu", "containerEdits": {"env": ["ALL=1"], "mounts": [{"hostPath": "/h", "containerPath": "/c"}]},
        "devices": [{"name": "a", "containerEdits": {"env": ["A=1"]}}, {"name": "b", "containerEdits": {"env": ["B=1"]}}]}"#;
    std::fs::write(dir.path().join("x.json"), text).unwrap();
    let edits = resolve_now(&[dir.path().to_owned()], &names(&["v.com/gpu=b", "v.com/gpu=a"])).unwrap();
    assert_eq!(edits.env, ["ALL=1", "B=1", "A=1"]);
    assert_eq!(edits.mounts[0].container_path, "/c");
}

#[test]
fn unknown_devices_and_malformed_files_resolve_to_nothing() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("bad.yaml"), "kind: [").unwrap();
    std::fs::write(dir.path().join("half.tmp"), spec("v.com/gpu", "a", "tmp")).unwrap();
    let wanted = names(&["v.com/gpu=a", "v.com/gpu=b"]);
    let dirs = [dir.path().to_owned(), dir.path().join("missing")];
    assert_eq!(resolve_now(&dirs, &wanted), Err(Unresolvable(wanted.clone())));
    std::fs::write(dir.path().join("good.yaml"), spec("v.com/gpu", "a", "x")).unwrap();
    assert_eq!(
        resolve_now(&dirs, &wanted),
        Err(Unresolvable(names(&["v.com/gpu=b"])))
    );
}

#[test]
fn two_files_of_one_directory_conflict_and_a_later_directory_overrides() {
    let (first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let dirs = [first.path().to_owned(), second.path().to_owned()];
    std::fs::write(first.path().join("1.yaml"), spec("v.com/gpu", "a", "low")).unwrap();
    std::fs::write(second.path().join("1.yaml"), spec("v.com/gpu", "a", "high")).unwrap();
    let wanted = names(&["v.com/gpu=a"]);
    assert_eq!(resolve_now(&dirs, &wanted).unwrap().env, ["ALL=high", "ONE=high"]);
    std::fs::write(second.path().join("2.yaml"), spec("v.com/gpu", "a", "again")).unwrap();
    assert_eq!(resolve_now(&dirs, &wanted), Err(Unresolvable(wanted.clone())));
    std::fs::remove_file(second.path().join("2.yaml")).unwrap();
    std::fs::write(first.path().join("2.yaml"), spec("v.com/gpu", "a", "again")).unwrap();
    assert_eq!(
        resolve_now(&dirs, &wanted),
        Err(Unresolvable(wanted)),
        "no directory resolves a conflict"
    );
}

#[test]
fn a_file_that_defines_a_device_twice_defines_no_device() {
    let dir = TempDir::new().unwrap();
    let text = r#"{"kind": "v.com/gpu", "devices": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}"#;
    std::fs::write(dir.path().join("x.json"), text).unwrap();
    let wanted = names(&["v.com/gpu=b"]);
    assert_eq!(
        resolve_now(&[dir.path().to_owned()], &wanted),
        Err(Unresolvable(wanted))
    );
}

/// Writes a spec as a writer does that wants it read whole: under another name, then renamed.
fn put(dir: &Path, name: &str, text: &str) {
    let new = dir.join("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, dir.join(name)).unwrap();
}

fn cache(dir: &Path) -> CdiCache {
    CdiCache::start(vec![dir.to_owned()], Duration::ZERO, 0).unwrap()
}

/// The edits that an injection of `name` brings.
fn known(cache: &CdiCache, name: &str) -> Result<super::RecordedEdits, Unresolvable> {
    cache.inject(&names(&[name])).map(|(edits, _)| edits)
}

/// The devices that an injection of `name` brings by a spec that is not there any more.
fn stale(cache: &CdiCache, name: &str) -> Vec<String> {
    cache.inject(&names(&[name])).unwrap().1
}

/// Waits until `name` resolves to this variable, or, of none, no longer resolves.
async fn until(cache: &CdiCache, name: &str, env: Option<&str>) {
    let agrees = || {
        known(cache, name).ok().map(|edits| edits.env).as_deref()
            == env
                .map(|env| vec![format!("ALL={env}"), format!("ONE={env}")])
                .as_deref()
    };
    let waiting = async {
        while !agrees() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .unwrap_or_else(|_| panic!("{name} never became {env:?}"));
}

#[tokio::test]
async fn a_changed_spec_counts_after_the_watch_has_read_it() {
    let dir = TempDir::new().unwrap();
    let cache = cache(dir.path());
    put(dir.path(), "1.yaml", &spec("v.com/gpu", "a", "one"));
    assert_eq!(
        known(&cache, "v.com/gpu=a"),
        Err(Unresolvable(names(&["v.com/gpu=a"]))),
        "an injection reads nothing itself"
    );
    until(&cache, "v.com/gpu=a", Some("one")).await;
    put(dir.path(), "1.yaml", &spec("v.com/gpu", "a", "two"));
    assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=one", "ONE=one"]);
    assert_eq!(
        stale(&cache, "v.com/gpu=a"),
        ["v.com/gpu=a"],
        "the spec has other content by now"
    );
    until(&cache, "v.com/gpu=a", Some("two")).await;
    assert_eq!(stale(&cache, "v.com/gpu=a"), [""; 0]);
    std::fs::remove_file(dir.path().join("1.yaml")).unwrap();
    assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=two", "ONE=two"]);
    assert_eq!(
        stale(&cache, "v.com/gpu=a"),
        ["v.com/gpu=a"],
        "the spec is gone by now"
    );
    until(&cache, "v.com/gpu=a", None).await;
}

#[tokio::test]
async fn a_new_directory_is_found_by_an_injection_and_watched_from_then_on() {
    let parent = TempDir::new().unwrap();
    let dir = parent.path().join("cdi");
    let cache = cache(&dir);
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("1.yaml"), spec("v.com/gpu", "a", "one")).unwrap();
    assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=one", "ONE=one"]);
    put(&dir, "1.yaml", &spec("v.com/gpu", "a", "two"));
    until(&cache, "v.com/gpu=a", Some("two")).await;
}

#[tokio::test]
async fn a_file_moved_in_from_another_directory_counts_after_the_next_change() {
    let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let cache = cache(dir.path());
    std::fs::write(other.path().join("1.yaml"), spec("v.com/gpu", "a", "one")).unwrap();
    std::fs::rename(other.path().join("1.yaml"), dir.path().join("1.yaml")).unwrap();
    put(dir.path(), "2.yaml", &spec("v.com/gpu", "b", "two"));
    until(&cache, "v.com/gpu=b", Some("two")).await;
    assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=one", "ONE=one"]);
}

#[tokio::test(start_paused = true)]
async fn during_a_slow_read_the_last_view_stays() {
    let dir = TempDir::new().unwrap();
    put(dir.path(), "1.yaml", &spec("v.com/gpu", "a", "one"));
    let cache = CdiCache::start(vec![dir.path().to_owned()], Duration::from_secs(1), 0).unwrap();
    put(dir.path(), "1.yaml", &spec("v.com/gpu", "a", "two"));
    for _ in 0..100 {
        tokio::task::yield_now().await;
        assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=one", "ONE=one"]);
    }
    for _ in 0..20 {
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    assert_eq!(known(&cache, "v.com/gpu=a").unwrap().env, ["ALL=two", "ONE=two"]);
}

//! kube-rs against the server: reads, watches, patches, deletions.

use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{
    AttachParams, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent,
    WatchParams,
};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::AsyncReadExt;

use super::setup::{DEADLINE, bind, client, code, next, pod, pods, start, start_with, typed};

#[tokio::test]
async fn lists_are_paged_and_selected() {
    let server = start().await;
    let api = pods(&server);
    for name in ["a", "b", "c"] {
        let mut new = typed(name);
        new.labels_mut()
            .insert("first".to_owned(), (name == "a").to_string());
        api.create(&PostParams::default(), &new).await.unwrap();
    }
    let first = api.list(&ListParams::default().limit(2)).await.unwrap();
    assert_eq!(first.metadata.remaining_item_count, Some(1));
    let token = first.metadata.continue_.unwrap();
    let rest = api
        .list(&ListParams::default().continue_token(&token))
        .await
        .unwrap();
    let names: Vec<String> = first
        .items
        .iter()
        .chain(&rest.items)
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(names, ["a", "b", "c"]);
    let selected = api
        .list(
            &ListParams::default()
                .labels("first!=true")
                .fields("metadata.name=c"),
        )
        .await
        .unwrap();
    assert_eq!(selected.items.len(), 1);
    let metadata = api.list_metadata(&ListParams::default()).await.unwrap();
    assert_eq!(metadata.items.len(), 3);
    server.shutdown().await;
}

#[tokio::test]
async fn a_watch_resumes_from_a_bookmark() {
    let server = start_with(|c| c.bookmark_interval = Duration::from_millis(20)).await;
    let api = pods(&server);
    let mut stream = Box::pin(api.watch(&WatchParams::default(), "0").await.unwrap());
    server
        .objects()
        .create("configmaps", json!({"metadata": {"name": "unrelated"}}))
        .unwrap();
    let newest = server.objects().revision().to_string();
    loop {
        match next(&mut stream).await.unwrap() {
            WatchEvent::Bookmark(mark) if mark.metadata.resource_version == newest => break,
            WatchEvent::Bookmark(_) => {}
            other => panic!("no pod changed: {other:?}"),
        }
    }
    api.create(&PostParams::default(), &typed("p")).await.unwrap();
    let mut resumed = Box::pin(api.watch(&WatchParams::default(), &newest).await.unwrap());
    assert!(matches!(next(&mut resumed).await.unwrap(), WatchEvent::Added(p) if p.name_any() == "p"));
}

#[rstest::rstest]
#[case::list_then_watch(watcher::Config::default())]
#[case::streaming_list(watcher::Config::default().streaming_lists())]
#[tokio::test]
async fn watchers_recover_from_compaction(#[case] config: watcher::Config) {
    let server = start().await;
    let api = pods(&server);
    api.create(&PostParams::default(), &typed("old")).await.unwrap();
    let mut stream = Box::pin(watcher(api.clone(), config));
    assert!(matches!(next(&mut stream).await.unwrap(), Event::Init));
    assert!(matches!(next(&mut stream).await.unwrap(), Event::InitApply(p) if p.name_any() == "old"));
    assert!(matches!(next(&mut stream).await.unwrap(), Event::InitDone));
    api.create(&PostParams::default(), &typed("seen")).await.unwrap();
    assert!(matches!(next(&mut stream).await.unwrap(), Event::Apply(p) if p.name_any() == "seen"));

    let held = server.faults().hold_watches("pods");
    server
        .objects()
        .delete("pods", "default", "old", Some(0))
        .unwrap();
    server.objects().create("pods", pod("missed")).unwrap();
    server.objects().compact();
    drop(held);
    let mut names = Vec::new();
    loop {
        match next(&mut stream).await {
            Ok(Event::InitApply(pod)) => names.push(pod.name_any()),
            Ok(Event::InitDone) => break,
            Ok(Event::Init) | Err(_) => {}
            Ok(other) => panic!("the past is gone: {other:?}"),
        }
    }
    assert_eq!(names, ["missed", "seen"]);
}

#[tokio::test]
async fn one_of_two_racing_bindings_wins() {
    let server = start().await;
    let api = pods(&server);
    for i in 0..20 {
        let name = format!("p{i}");
        api.create(&PostParams::default(), &typed(&name)).await.unwrap();
        let (one, two) = tokio::join!(bind(&api, &name, "n1"), bind(&api, &name, "n2"));
        let winner = if one.is_ok() { "n1" } else { "n2" };
        let lost = one
            .err()
            .into_iter()
            .chain(two.err())
            .map(code)
            .collect::<Vec<_>>();
        assert_eq!(lost, [409]);
        assert_eq!(
            api.get(&name).await.unwrap().spec.unwrap().node_name.as_deref(),
            Some(winner)
        );
    }
}

#[tokio::test]
async fn applies_conflict_until_forced() {
    let server = start().await;
    let api: Api<ConfigMap> = Api::default_namespaced(client(&server));
    let map = |value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"k": value}});
    let apply = |manager: &'static str, value: &str, force: bool| {
        let (api, patch) = (api.clone(), Patch::Apply(map(value)));
        let parameters = PatchParams {
            force,
            ..PatchParams::apply(manager)
        };
        async move { api.patch("m", &parameters, &patch).await }
    };
    let created = apply("a", "1", false).await.unwrap();
    assert_eq!(created.managed_fields()[0].manager.as_deref(), Some("a"));
    let again = apply("a", "1", false).await.unwrap();
    assert_eq!(
        again.resource_version(),
        created.resource_version(),
        "an unchanged apply writes nothing"
    );
    assert_eq!(code(apply("b", "2", false).await.unwrap_err()), 409);
    assert_eq!(apply("b", "2", true).await.unwrap().data.unwrap()["k"], "2");
    assert_eq!(code(apply("a", "1", false).await.unwrap_err()), 409);
    assert_eq!(code(apply("", "1", false).await.unwrap_err()), 400);
}

#[tokio::test]
async fn node_status_is_a_subresource() {
    let server = start().await;
    let api: Api<Node> = Api::all(client(&server));
    server
        .objects()
        .create("nodes", json!({"metadata": {"name": "n"}}))
        .unwrap();
    let patch = json!({"spec": {"unschedulable": true}, "status": {"capacity": {"x.y/z": "3"}}});
    let node = api
        .patch_status("n", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(node.spec.and_then(|s| s.unschedulable), None);
    assert_eq!(node.status.unwrap().capacity.unwrap()["x.y/z"].0, "3");
    let operations = json!([{"op": "remove", "path": "/status/capacity/x.y~1z"}]);
    let patch = Patch::Json::<()>(serde_json::from_value(operations).unwrap());
    let node = api
        .patch_status("n", &PatchParams::default(), &patch)
        .await
        .unwrap();
    assert!(node.status.unwrap().capacity.is_none_or(|c| c.is_empty()));
    let strategic = json!({"metadata": {"labels": {"a": "b"}}, "status": {"phase": "Running"}});
    let node = api
        .patch("n", &PatchParams::default(), &Patch::Strategic(&strategic))
        .await
        .unwrap();
    assert_eq!(
        (node.labels()["a"].clone(), node.status.and_then(|s| s.phase)),
        ("b".to_owned(), None)
    );
}

#[tokio::test]
async fn deletions_wait_for_grace_and_finalizers_and_check_preconditions() {
    let server = start().await;
    let api = pods(&server);
    let created = api.create(&PostParams::default(), &typed("p")).await.unwrap();
    bind(&api, "p", "n").await.unwrap();
    let wrong = Preconditions {
        uid: Some("other".to_owned()),
        resource_version: None,
    };
    let parameters = DeleteParams {
        preconditions: Some(wrong),
        ..DeleteParams::default()
    };
    assert_eq!(code(api.delete("p", &parameters).await.unwrap_err()), 409);
    let dying = api
        .delete("p", &DeleteParams::default())
        .await
        .unwrap()
        .left()
        .unwrap();
    assert_eq!(dying.metadata.deletion_grace_period_seconds, Some(30));
    let own = Preconditions {
        uid: created.uid(),
        resource_version: None,
    };
    let at_once = DeleteParams {
        preconditions: Some(own),
        ..DeleteParams::default().grace_period(0)
    };
    api.delete("p", &at_once).await.unwrap();
    assert_eq!(code(api.get("p").await.unwrap_err()), 404);

    let mut kept = typed("kept");
    kept.finalizers_mut().push("a.b/c".to_owned());
    api.create(&PostParams::default(), &kept).await.unwrap();
    assert!(
        api.delete("kept", &DeleteParams::default())
            .await
            .unwrap()
            .is_left()
    );
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    api.patch("kept", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(code(api.get("kept").await.unwrap_err()), 404);
}

#[tokio::test]
async fn collections_are_deleted_by_selector() {
    let server = start().await;
    let api = pods(&server);
    for name in ["a", "b"] {
        api.create(&PostParams::default(), &typed(name)).await.unwrap();
    }
    let only_a = ListParams::default().fields("metadata.name=a");
    api.delete_collection(&DeleteParams::default(), &only_a)
        .await
        .unwrap();
    let left: Vec<String> = api
        .list(&ListParams::default())
        .await
        .unwrap()
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(left, ["b"]);
}

#[tokio::test]
async fn a_new_pod_of_the_same_name_has_an_empty_log() {
    let server = start().await;
    let api = pods(&server);
    let create = || server.objects().create("pods", pod("p")).unwrap();
    create();
    server
        .objects()
        .bind("default", "p", json!({"target": {"name": "n"}}))
        .unwrap();
    server.objects().append_log("default", "p", "c", "one\ntwo\n");
    assert_eq!(
        api.logs("p", &kube::api::LogParams::default()).await.unwrap(),
        "one\ntwo\n"
    );
    let last = kube::api::LogParams {
        tail_lines: Some(1),
        ..Default::default()
    };
    assert_eq!(api.logs("p", &last).await.unwrap(), "two\n");
    let other = kube::api::LogParams {
        container: Some("x".to_owned()),
        ..Default::default()
    };
    assert_eq!(code(api.logs("p", &other).await.unwrap_err()), 400);
    server.objects().delete("pods", "default", "p", Some(0)).unwrap();
    create();
    server
        .objects()
        .bind("default", "p", json!({"target": {"name": "n"}}))
        .unwrap();
    assert_eq!(api.logs("p", &kube::api::LogParams::default()).await.unwrap(), "");
    api.evict("p", &kube::api::EvictParams::default()).await.unwrap();
    assert!(api.get("p").await.unwrap().metadata.deletion_timestamp.is_some());
}

#[tokio::test]
async fn shutdown_ends_watches() {
    let server = start().await;
    let api = pods(&server);
    let mut stream = Box::pin(api.watch(&WatchParams::default(), "0").await.unwrap());
    tokio::time::timeout(DEADLINE, server.shutdown())
        .await
        .expect("a watch kept the server");
    while let Ok(Some(_)) = tokio::time::timeout(DEADLINE, futures::StreamExt::next(&mut stream)).await {}
}

/// `kubectl exec` sends the same request: a GET that upgrades to `v5.channel.k8s.io`.
#[tokio::test]
async fn programs_in_a_container_answer_by_what_it_has_printed() {
    let server = start().await;
    let api = pods(&server);
    server.objects().create("pods", pod("p")).unwrap();
    let params = AttachParams::default();
    let exec = |command: &'static str| api.exec("p", [command], &params);
    assert!(exec("env").await.is_err());
    let target = json!({"target": {"name": "n"}});
    server.objects().bind("default", "p", target).unwrap();
    let running = json!({"phase": "Running"});
    server
        .objects()
        .patch_status("pods", "default", "p", &running)
        .unwrap();
    server
        .objects()
        .append_log("default", "p", "c", "DEVICE_NODES=\nA=1\n");
    for (command, output, end) in [("env", "A=1\n", "Success"), ("nvidia-smi", "", "Failure")] {
        let mut process = exec(command).await.unwrap();
        let mut printed = String::new();
        process
            .stdout()
            .unwrap()
            .read_to_string(&mut printed)
            .await
            .unwrap();
        let status = process.take_status().unwrap().await.unwrap();
        assert_eq!((printed.as_str(), status.status.as_deref()), (output, Some(end)));
    }
}

#[tokio::test]
async fn a_resize_changes_cpu_and_memory_of_containers_alone() {
    let server = start().await;
    let pods = pods(&server);
    pods.create(&PostParams::default(), &typed("p")).await.unwrap();
    let resize = async |limits: Value| {
        let patch = json!({
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": "other", "resources": {"limits": limits, "requests": limits}}]},
        });
        pods.patch_subresource("resize", "p", &PatchParams::default(), &Patch::Strategic(patch))
            .await
    };
    let error = resize(json!({"a.b/c": "1"})).await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("only cpu and memory resources are mutable"),
        "{error}"
    );
    assert_eq!(code(error), 422);
    let resized = resize(json!({"cpu": "2"})).await.unwrap();
    let container = &resized.spec.unwrap().containers[0];
    assert_eq!(container.image.as_deref(), Some("busybox"));
    assert_eq!(
        container.resources.as_ref().unwrap().limits.as_ref().unwrap()["cpu"].0,
        "2"
    );
    assert_eq!(resized.metadata.labels, None);
}

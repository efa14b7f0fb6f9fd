//! The API server on the wire: statuses of bad requests, tables, discovery, tokens, the audit record.

use http::Method;
use kit::apiserver::{UsedAccess, User};
use rstest::rstest;
use serde_json::{Value, json};

use super::raw::{get, post, send};
use super::setup::{pod, start};

const PODS: &str = "/api/v1/namespaces/default/pods";
const JSON: &str = "application/json";
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

#[rstest]
#[case::not_json(Method::POST, PODS, JSON, "{", 400, "BadRequest")]
#[case::not_an_object(Method::POST, PODS, JSON, "[]", 400, "BadRequest")]
#[case::empty(Method::POST, PODS, JSON, "", 400, "BadRequest")]
#[case::protobuf(
    Method::POST,
    PODS,
    "application/vnd.kubernetes.protobuf",
    "k8s",
    415,
    "UnsupportedMediaType"
)]
#[case::other_patch(
    Method::PATCH,
    "/api/v1/namespaces/default",
    "application/json",
    "{}",
    415,
    "UnsupportedMediaType"
)]
#[case::patch_of_nothing(
    Method::PATCH,
    "/api/v1/nodes/n",
    "application/merge-patch+json",
    "{}",
    404,
    "NotFound"
)]
#[case::no_such_resource(Method::GET, "/api/v1/frobs", JSON, "", 404, "NotFound")]
#[case::no_such_group(Method::GET, "/apis/x.y/v1/frobs", JSON, "", 404, "NotFound")]
#[case::no_such_method(Method::POST, "/api/v1/nodes/n", JSON, "{}", 405, "MethodNotAllowed")]
#[case::bad_selector(Method::GET, "/api/v1/pods?labelSelector=a+of+b", JSON, "", 400, "BadRequest")]
#[case::bad_version(Method::GET, "/api/v1/pods?resourceVersion=x", JSON, "", 400, "BadRequest")]
#[case::future_version(Method::GET, "/api/v1/pods?resourceVersion=999999", JSON, "", 504, "Timeout")]
#[case::bad_token(Method::GET, "/api/v1/pods?continue=x", JSON, "", 400, "BadRequest")]
#[case::bad_streaming_list(
    Method::GET,
    "/api/v1/pods?watch=1&sendInitialEvents=true",
    JSON,
    "",
    422,
    "Invalid"
)]
#[tokio::test]
async fn malformed_requests_get_a_status_object(
    #[case] method: Method,
    #[case] path: &str,
    #[case] content_type: &str,
    #[case] body: &'static str,
    #[case] code: u16,
    #[case] reason: &str,
) {
    let server = start().await;
    let before = server.objects().revision();
    let answer = send(&server, method, path, &[("content-type", content_type)], body)
        .await
        .unwrap();
    let status = answer.json();
    assert_eq!(
        (answer.code, &status["kind"], &status["reason"]),
        (code, &json!("Status"), &json!(reason)),
        "{status}"
    );
    assert_eq!(status["code"], code);
    assert_eq!(server.objects().revision(), before);
}

#[tokio::test]
async fn oversized_bodies_are_refused() {
    let server = start().await;
    let mut large = pod("p");
    large["metadata"]["annotations"] = json!({"a": "x".repeat(3 * 1024 * 1024)});
    let answer = post(&server, PODS, &large).await;
    assert_eq!(
        (answer.code, &answer.json()["reason"]),
        (413, &json!("RequestEntityTooLarge"))
    );
}

#[tokio::test]
async fn an_old_watch_gets_410_as_an_event() {
    let server = start().await;
    server.objects().compact();
    let answer = get(&server, "/api/v1/pods?watch=1&resourceVersion=1", "").await;
    let event: Value = serde_json::from_str(answer.text.trim()).unwrap();
    assert_eq!(answer.code, 200);
    assert_eq!(
        (
            &event["type"],
            &event["object"]["code"],
            &event["object"]["reason"]
        ),
        (&json!("ERROR"), &json!(410), &json!("Expired"))
    );
}

#[tokio::test]
async fn a_watch_ends_after_its_timeout_with_the_initial_events_marked() {
    let server = start().await;
    server.objects().create("pods", pod("p")).unwrap();
    let path = "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=1";
    let answer = get(&server, path, "").await;
    let events: Vec<Value> = answer
        .text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events[0]["type"], "ADDED");
    assert_eq!(events[1]["type"], "BOOKMARK");
    assert_eq!(
        events[1]["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
        "true"
    );
}

#[tokio::test]
async fn pods_are_printed_as_tables() {
    let server = start().await;
    server.objects().create("pods", pod("p")).unwrap();
    let table = get(&server, PODS, TABLE).await.json();
    let names: Vec<&str> = table["columnDefinitions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[..5], ["Name", "Ready", "Status", "Restarts", "Age"]);
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(cells.len(), names.len());
    assert_eq!(
        cells[..4],
        [json!("p"), json!("0/1"), json!("Pending"), json!("0")]
    );
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    let watched = get(&server, &format!("{PODS}?watch=1&timeoutSeconds=1"), TABLE).await;
    let event: Value = serde_json::from_str(watched.text.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&event["object"]["kind"], &event["object"]["rows"][0]["cells"][0]),
        (&json!("Table"), &json!("p"))
    );
}

#[tokio::test]
async fn tables_of_every_resource_have_as_many_cells_as_columns() {
    let server = start().await;
    let lists = [
        ("nodes", ""),
        ("events", ""),
        ("namespaces", ""),
        ("configmaps", ""),
        ("leases", ""),
        ("deployments", ""),
        ("roles", ""),
    ];
    for (plural, _) in lists {
        let resource = server.objects().resource(plural).unwrap();
        let new = json!({"metadata": {"name": "x"}});
        server.objects().create(plural, new).unwrap();
        let root = if resource.group.is_empty() { "api" } else { "apis" };
        let table = get(
            &server,
            &format!("/{root}/{}/{plural}", resource.api_version()),
            TABLE,
        )
        .await
        .json();
        let n_columns = table["columnDefinitions"].as_array().unwrap().len();
        assert_eq!(
            table["rows"][0]["cells"].as_array().unwrap().len(),
            n_columns,
            "{plural}"
        );
    }
}

#[tokio::test]
async fn events_are_served_in_both_api_groups() {
    let server = start().await;
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
        "regarding": {"kind": "Pod", "name": "p"}, "note": "hello", "reportingController": "x", "type": "Normal",
    });
    let path = "/apis/events.k8s.io/v1/namespaces/default/events";
    let created = post(&server, path, &event).await;
    assert_eq!((created.code, &created.json()["note"]), (201, &json!("hello")));
    let core = get(
        &server,
        "/api/v1/events?fieldSelector=involvedObject.name%3Dp",
        "",
    )
    .await
    .json();
    assert_eq!(
        (&core["items"][0]["message"], &core["items"][0]["apiVersion"]),
        (&json!("hello"), &json!("v1"))
    );
    let merge = [("content-type", "application/merge-patch+json")];
    let patched = send(
        &server,
        Method::PATCH,
        &format!("{path}/e"),
        &merge,
        r#"{"note":"again"}"#,
    )
    .await
    .unwrap();
    assert_eq!(patched.json()["note"], "again", "{}", patched.text);
}

#[tokio::test]
async fn dry_runs_change_nothing() {
    let server = start().await;
    let answer = post(&server, &format!("{PODS}?dryRun=All"), &pod("p")).await;
    assert_eq!(
        (answer.code, &answer.json()["spec"]["schedulerName"]),
        (201, &json!("default-scheduler"))
    );
    assert!(server.objects().list("pods", None).unwrap().is_empty());
}

#[tokio::test]
async fn custom_resources_are_discovered_at_once() {
    let server = start().await;
    let definition = json!({
        "metadata": {"name": "devices.x.io"},
        "spec": {
            "group": "x.io", "scope": "Cluster",
            "names": {"plural": "devices", "kind": "Device", "shortNames": ["dev"], "categories": ["all"]},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "Total", "type": "integer", "jsonPath": ".spec.total"}],
            }],
        },
    });
    server
        .objects()
        .create("customresourcedefinitions", definition)
        .unwrap();
    let resources = get(&server, "/apis/x.io/v1", "").await.json();
    insta::assert_snapshot!(resources["resources"], @r#"[{"categories":["all"],"kind":"Device","name":"devices","namespaced":false,"shortNames":["dev"],"singularName":"device","verbs":["create","delete","deletecollection","get","list","patch","update","watch"]},{"kind":"Device","name":"devices/status","namespaced":false,"singularName":"","verbs":["get","patch","update"]}]"#);
    let groups = get(&server, "/apis", "").await.json();
    assert!(
        groups["groups"]
            .as_array()
            .unwrap()
            .iter()
            .any(|g| g["name"] == "x.io")
    );
    let device =
        json!({"apiVersion": "x.io/v1", "kind": "Device", "metadata": {"name": "d"}, "spec": {"total": 8}});
    assert_eq!(post(&server, "/apis/x.io/v1/devices", &device).await.code, 201);
    let table = get(&server, "/apis/x.io/v1/devices", TABLE).await.json();
    assert_eq!(table["rows"][0]["cells"], json!(["d", 8]));
    for path in [
        "/version",
        "/openapi/v3",
        "/openapi/v3/apis/x.io/v1",
        "/readyz",
        "/api/v1",
    ] {
        assert_eq!(get(&server, path, "").await.code, 200, "{path}");
    }
}

#[tokio::test]
async fn tokens_identify_users_and_accesses_are_recorded() {
    let server = start().await;
    server.add_token(
        "secret",
        User {
            name: "alice".to_owned(),
            ..User::default()
        },
    );
    let none = get(&server, PODS, "").await;
    assert_eq!((none.code, &none.json()["reason"]), (401, &json!("Unauthorized")));
    assert_eq!(get(&server, "/readyz", "").await.code, 200);
    let headers = [("authorization", "Bearer secret"), ("content-type", JSON)];
    let body = pod("p").to_string();
    assert_eq!(
        send(&server, Method::POST, PODS, &headers, body)
            .await
            .unwrap()
            .code,
        201
    );
    let binding =
        json!({"kind": "Binding", "apiVersion": "v1", "metadata": {"name": "p"}, "target": {"name": "n"}})
            .to_string();
    let bind = send(
        &server,
        Method::POST,
        "/api/v1/namespaces/default/pods/p/binding",
        &headers,
        binding,
    );
    assert_eq!(bind.await.unwrap().code, 201);
    let access = |subresource: &str| UsedAccess {
        user: "alice".to_owned(),
        verb: "create".to_owned(),
        api_group: String::new(),
        resource: "pods".to_owned(),
        subresource: subresource.to_owned(),
    };
    let used: Vec<UsedAccess> = server.accesses().into_iter().collect();
    assert_eq!(used, [access(""), access("binding")]);
}

#[tokio::test]
async fn a_written_kubeconfig_works() {
    let server = start().await;
    server.add_token(
        "secret",
        User {
            name: "alice".to_owned(),
            ..User::default()
        },
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config");
    server.kubeconfig(&path, "alice").unwrap();
    let file = kube::config::Kubeconfig::read_from(&path).unwrap();
    let config = kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
        .await
        .unwrap();
    let version = kube::Client::try_from(config)
        .unwrap()
        .apiserver_version()
        .await
        .unwrap();
    assert_eq!(version.git_version, "v1.33.0");
}

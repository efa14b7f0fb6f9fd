//! Injected faults, as clients meet them.

use std::time::Duration;

use http::Method;
use kit::apiserver::{Fault, Matching};
use kube::api::{WatchEvent, WatchParams};
use serde_json::json;

use super::raw::{get, post, send};
use super::setup::{DEADLINE, next, pod, pods, start};

const PODS: &str = "/api/v1/namespaces/default/pods";

#[tokio::test]
async fn a_refusal_affects_matching_requests_the_given_number_of_times() {
    let server = start().await;
    let matching = Matching::anything()
        .verb("create")
        .resource("pods")
        .subresource("")
        .name(|n| n == "p")
        .times(2);
    let injected = server.faults().inject(matching, Fault::RefuseUntil(429, 7));
    assert_eq!(post(&server, PODS, &pod("other")).await.code, 201);
    for _ in 0..2 {
        let answer = post(&server, PODS, &pod("p")).await;
        assert_eq!(
            (answer.code, answer.headers["retry-after"].to_str().unwrap()),
            (429, "7")
        );
        assert_eq!(answer.json()["details"]["retryAfterSeconds"], 7);
    }
    assert_eq!(post(&server, PODS, &pod("p")).await.code, 201);
    assert_eq!(injected.hits(), 2);
    let broken = server
        .faults()
        .inject(Matching::anything().verb("get"), Fault::Refuse(503));
    assert_eq!(
        get(&server, &format!("{PODS}/p"), "").await.json()["reason"],
        "ServiceUnavailable"
    );
    broken.remove();
    assert_eq!(get(&server, &format!("{PODS}/p"), "").await.code, 200);
}

#[tokio::test]
async fn a_part_of_the_requests_of_one_user_is_refused() {
    let server = start().await;
    let some = Matching::anything().user("system:anonymous").percent(50);
    let injected = server.faults().inject(some, Fault::Refuse(500));
    let other = Matching::anything().user("nobody");
    let others = server.faults().inject(other, Fault::Refuse(500));
    let mut codes = Vec::new();
    for _ in 0..40 {
        codes.push(get(&server, PODS, "").await.code);
    }
    let n_refused = codes.iter().filter(|code| **code == 500).count();
    assert!((5..35).contains(&n_refused), "{codes:?}");
    assert_eq!((injected.hits(), others.hits()), (n_refused as u64, 0));
}

#[tokio::test]
async fn a_lost_reply_is_not_a_lost_write() {
    let server = start().await;
    let create = || {
        send(
            &server,
            Method::POST,
            PODS,
            &[("content-type", "application/json")],
            pod("p").to_string(),
        )
    };
    let lost = server
        .faults()
        .inject(Matching::anything().times(1), Fault::DropConnection);
    assert!(create().await.is_err());
    assert!(server.objects().get("pods", "default", "p").is_err());
    assert_eq!(lost.hits(), 1);
    server
        .faults()
        .inject(Matching::anything().times(1), Fault::DropReply);
    assert!(create().await.is_err());
    assert!(server.objects().get("pods", "default", "p").is_ok());
    assert_eq!(create().await.unwrap().code, 409);
}

#[tokio::test]
async fn a_delay_slows_matching_requests() {
    let server = start().await;
    server.faults().inject(
        Matching::anything().resource("pods"),
        Fault::Delay(Duration::from_secs(3600)),
    );
    let slow = tokio::time::timeout(Duration::from_millis(100), get(&server, PODS, "")).await;
    assert!(slow.is_err());
    server.faults().clear();
    assert_eq!(
        tokio::time::timeout(DEADLINE, get(&server, PODS, ""))
            .await
            .unwrap()
            .code,
        200
    );
}

#[tokio::test]
async fn watches_are_closed_and_held() {
    let server = start().await;
    let api = pods(&server);
    let mut stream = Box::pin(api.watch(&WatchParams::default(), "0").await.unwrap());
    let held = server.faults().hold_watches("pods");
    server.objects().create("pods", pod("p")).unwrap();
    let early = tokio::time::timeout(Duration::from_millis(100), futures::StreamExt::next(&mut stream)).await;
    assert!(early.is_err(), "held back: {early:?}");
    drop(held);
    assert!(matches!(next(&mut stream).await.unwrap(), WatchEvent::Added(_)));
    server.faults().drop_watches("nodes");
    server
        .objects()
        .patch(
            "pods",
            "default",
            "p",
            json!({"metadata": {"labels": {"a": "b"}}}),
        )
        .unwrap();
    assert!(matches!(
        next(&mut stream).await.unwrap(),
        WatchEvent::Modified(_)
    ));
    server.faults().drop_watches("");
    let ended = tokio::time::timeout(DEADLINE, futures::StreamExt::next(&mut stream))
        .await
        .unwrap();
    assert!(!matches!(ended, Some(Ok(_))), "{ended:?}");
}

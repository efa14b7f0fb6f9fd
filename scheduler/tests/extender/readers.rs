//! Access to the views, and the number of readers at one time: certificates, tokens, pages, and clients that take nothing.

use std::time::Duration;

use axum::body::Body;
use daemon::http_server::ClientCertificate;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use rstest::rstest;
use scheduler::config::Serving;
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::api::Fault;
use crate::objects::units;
use crate::world::World;

const PATH: &str = "/gpushare-scheduler/inspect";

/// A world that demands certificates, with a node and a pod.
fn guarded() -> World {
    let world = World::unsynced(&Serving {
        tls_from_secret: true,
        ..Serving::default()
    })
    .with_node("n1", &[100]);
    world.apply_pod(&units("p", 10));
    world
}

async fn answered(world: &World, path: &str, token: Option<&str>, has_certificate: bool) -> Response<Body> {
    let mut request = Request::get(path).body(Body::empty()).unwrap();
    if let Some(token) = token {
        request
            .headers_mut()
            .insert("authorization", token.parse().unwrap());
    }
    if has_certificate {
        request.extensions_mut().insert(ClientCertificate);
    }
    world.router.clone().oneshot(request).await.unwrap()
}

async fn text(reply: Response<Body>) -> (StatusCode, String) {
    let status = reply.status();
    (
        status,
        String::from_utf8(reply.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap(),
    )
}

/// In the old extender every client that reached the port could list every tenant's pods.
#[rstest]
#[case::nothing(None, false, StatusCode::UNAUTHORIZED, "views demand a client certificate")]
#[case::certificate(None, true, StatusCode::OK, "")]
#[case::reader(Some("Bearer of-reader"), false, StatusCode::OK, "")]
#[case::any_case(Some("bearer  of-reader"), false, StatusCode::OK, "")]
#[case::other_user(
    Some("Bearer of-other"),
    false,
    StatusCode::FORBIDDEN,
    "user \"other\" may not get /gpushare-scheduler/inspect; give a ClusterRole"
)]
#[case::right_elsewhere(
    Some("Bearer of-elsewhere"),
    false,
    StatusCode::FORBIDDEN,
    "user \"elsewhere\" may not get"
)]
#[case::stale(
    Some("Bearer of-nobody"),
    false,
    StatusCode::UNAUTHORIZED,
    "does not know this bearer token"
)]
#[case::basic(
    Some("Basic of-reader"),
    false,
    StatusCode::UNAUTHORIZED,
    "views demand a client certificate"
)]
#[case::empty(
    Some("Bearer "),
    false,
    StatusCode::UNAUTHORIZED,
    "views demand a client certificate"
)]
#[tokio::test]
async fn views_need_a_client_certificate_or_a_permitted_token(
    #[values("", "/n1", "?limit=1")] view: &str,
    #[case] token: Option<&str>,
    #[case] has_certificate: bool,
    #[case] expected: StatusCode,
    #[case] words: &str,
) {
    let world = guarded();
    world.api.add_user("of-reader", "reader", Some(PATH));
    world.api.add_user("of-other", "other", None);
    world.api.add_user("of-elsewhere", "elsewhere", Some("/metrics"));
    let reply = answered(&world, &format!("{PATH}{view}"), token, has_certificate).await;
    let challenge = reply.headers().get("www-authenticate").cloned();
    let (status, answer) = text(reply).await;
    assert_eq!(
        (status, challenge.is_some()),
        (expected, expected == StatusCode::UNAUTHORIZED),
        "{answer}"
    );
    assert!(answer.contains(words), "{answer}");
    assert_eq!(
        answer.contains("n1") || answer.contains("uid-p"),
        expected == StatusCode::OK,
        "{answer}"
    );
    if expected == StatusCode::OK && token.is_some() {
        let reviews = world.api.reviews();
        let asked = &reviews[1]["spec"];
        assert_eq!(
            (&reviews[0]["spec"]["token"], &asked["groups"], &asked["extra"]),
            (&json!("of-reader"), &json!(["g"]), &json!({"e": ["1"]}))
        );
    }
}

#[tokio::test]
async fn views_are_open_if_authentication_is_off() {
    let world = World::new().with_node("n1", &[100]);
    assert_eq!(answered(&world, PATH, None, false).await.status(), StatusCode::OK);
    assert_eq!(world.api.reviews().len(), 0);
}

#[tokio::test]
async fn probes_and_metrics_need_no_authentication() {
    let world = guarded();
    for path in ["/healthz", "/metrics", "/version", "/gpushare-scheduler/version"] {
        assert_eq!(
            answered(&world, path, None, false).await.status(),
            StatusCode::OK,
            "{path}"
        );
    }
}

/// A withdrawn right ends within seconds, and reads in a loop cost the API server next to nothing.
#[tokio::test(start_paused = true)]
async fn reviews_are_cached_for_some_seconds() {
    let world = guarded();
    world.api.add_user("of-reader", "reader", Some(PATH));
    for _ in 0..20 {
        assert_eq!(
            answered(&world, PATH, Some("Bearer of-reader"), false)
                .await
                .status(),
            StatusCode::OK
        );
        assert_eq!(
            answered(&world, PATH, Some("Bearer of-nobody"), false)
                .await
                .status(),
            StatusCode::UNAUTHORIZED
        );
    }
    assert_eq!(
        world.api.reviews().len(),
        3,
        "one of the stranger, two of the reader"
    );
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(
        answered(&world, PATH, Some("Bearer of-reader"), false)
            .await
            .status(),
        StatusCode::OK
    );
    assert_eq!(world.api.reviews().len(), 5);
}

/// Unknown tokens fill no memory, and evict only the oldest reviews.
#[tokio::test(start_paused = true)]
async fn unknown_tokens_do_not_evict_recent_reviews() {
    let world = guarded();
    for idx in 0..1000 {
        let token = format!("Bearer stranger-{idx}");
        assert_eq!(
            answered(&world, PATH, Some(&token), false).await.status(),
            StatusCode::UNAUTHORIZED
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(
        answered(&world, PATH, Some("Bearer stranger-900"), false)
            .await
            .status(),
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(world.api.reviews().len(), 1000, "it was known");
    assert_eq!(
        answered(&world, PATH, Some("Bearer stranger-1"), false)
            .await
            .status(),
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(world.api.reviews().len(), 1001, "it was forgotten");
}

#[rstest]
#[case::error(Fault::Status(500))]
#[case::forbidden(Fault::Status(403))]
#[case::silence(Fault::Hang)]
#[tokio::test(start_paused = true)]
async fn a_failed_review_denies_access(#[case] fault: Fault) {
    let world = guarded();
    world.api.add_user("of-reader", "reader", Some(PATH));
    world.api.fail_posts([fault]);
    let (status, answer) = text(answered(&world, PATH, Some("Bearer of-reader"), false).await).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    assert!(
        answer.contains("the API server did not review this bearer token"),
        "{answer}"
    );
    assert_eq!(
        answered(&world, PATH, Some("Bearer of-reader"), false)
            .await
            .status(),
        StatusCode::OK,
        "it is asked again"
    );
}

/// As one text under the lock, the answer for 15,000 nodes would have 43 MB.
#[tokio::test]
async fn a_view_is_streamed_and_holds_no_lock_meanwhile() {
    let mut world = World::new();
    for idx in 0..100 {
        world = world.with_node(&format!("n{idx:02}"), &[100; 8]);
    }
    let mut body = answered(&world, PATH, None, false).await.into_body();
    let mut taken = body.frame().await.unwrap().unwrap().into_data().unwrap().to_vec();
    assert!((30_000..50_000).contains(&taken.len()), "{}", taken.len());
    assert!(
        world.index.write().show_node("n99").is_some(),
        "the index is not locked"
    );
    world.delete_node(&crate::objects::node("n98", "MiB"));
    while let Some(piece) = body.frame().await {
        taken.extend_from_slice(&piece.unwrap().into_data().unwrap());
    }
    let answer: Value = serde_json::from_slice(&taken).unwrap();
    let names: Vec<&str> = answer["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        (names.len(), names.contains(&"n98")),
        (99, false),
        "each node is as it was when its turn came"
    );
}

#[tokio::test(start_paused = true)]
async fn the_number_of_running_views_is_limited() {
    let world = World::new().with_node("n1", &[100]);
    let mut open: Vec<_> = Vec::new();
    for _ in 0..8 {
        open.push(answered(&world, PATH, None, false).await);
    }
    for view in ["", "/n1"] {
        let (status, answer) = text(answered(&world, &format!("{PATH}{view}"), None, false).await).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert!(answer.contains("8 views are being answered"), "{answer}");
    }
    open.pop();
    assert_eq!(answered(&world, PATH, None, false).await.status(), StatusCode::OK);
}

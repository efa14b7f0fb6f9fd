//! Any bytes at any route: each request is answered, none with 500, and no handler panics, which would end a release build.

use axum::body::Body;
use fuzz::damaged;
use http::{HeaderValue, Method, Request, StatusCode};
use http_body_util::BodyExt;
use proptest::prelude::*;
use scheduler::config::Serving;
use serde_json::json;
use tower::ServiceExt;

use crate::objects::{node, units};
use crate::world::World;

/// Every route, with texts in place of names, and some paths without a route.
const PATHS: [&str; 15] = [
    "/gpushare-scheduler/filter",
    "/gpushare-scheduler/prioritize",
    "/gpushare-scheduler/preempt",
    "/gpushare-scheduler/bind",
    "/gpushare-scheduler/inspect",
    "/gpushare-scheduler/inspect/n1",
    "/gpushare-scheduler/inspect/%00%ff",
    "/gpushare-scheduler/inspect/n1/p",
    "/gpushare-scheduler/inspect/%2e%2e/%ff",
    "/gpushare-scheduler/version",
    "/version",
    "/healthz",
    "/readyz",
    "/metrics",
    "/",
];

/// Valid requests of kube-scheduler, to be damaged.
fn requests() -> Vec<Vec<u8>> {
    let pod = units("p", 1);
    let requests = [
        json!({"Pod": pod, "Nodes": null, "NodeNames": ["n1", "n2", "n1"]}),
        json!({"Pod": pod, "Nodes": {"metadata": {}, "items": [node("n1", "MiB")]}, "NodeNames": null}),
        json!({"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "n2"}),
    ];
    requests.map(|request| request.to_string().into_bytes()).to_vec()
}

fn body() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![3 => damaged(requests()), 1 => prop::collection::vec(any::<u8>(), 0..200)]
}

fn query() -> impl Strategy<Value = String> {
    let parts = [
        "pod=",
        "format=text",
        "&",
        "=",
        "%2F",
        "%",
        "default/p",
        "-1",
        "99999999999999999999",
        "n1",
        "1",
        "é",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..6)
        .prop_map(|parts| parts.concat().replace('é', "%C3%A9"))
}

proptest! {
    #[test]
    fn no_request_makes_a_route_panic(
        path in prop::sample::select(PATHS.to_vec()),
        method in prop::sample::select(vec![Method::GET, Method::POST, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS]),
        query in query(),
        body in body(),
        authorization in prop::option::of(prop::collection::vec(0x20..=0xff_u8, 0..40)),
        length in prop::option::of("[-0-9a-z]{0,25}"),
        guarded in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let world = World::unsynced(&Serving { tls_from_secret: guarded, ..Serving::default() }).with_node("n1", &[1000]);
            let mut request = Request::builder().method(method).uri(format!("{path}?{query}")).body(Body::from(body)).unwrap();
            for (header, value) in [("authorization", authorization), ("content-length", length.map(String::into_bytes))] {
                if let Some(value) = value.and_then(|value| HeaderValue::from_bytes(&value).ok()) {
                    request.headers_mut().insert(header, value);
                }
            }
            let reply = world.router.clone().oneshot(request).await.unwrap();
            prop_assert_ne!(reply.status(), StatusCode::INTERNAL_SERVER_ERROR);
            reply.into_body().collect().await.unwrap();
            world.check();
            Ok(())
        })?;
    }
}

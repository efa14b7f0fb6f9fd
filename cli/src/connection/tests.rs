//! Lists that the API server sends in pages.

use clap::Parser;
use http::{Request, Response};
use kube::client::Body;
use rstest::rstest;
use serde_json::json;

use super::*;
use crate::args::Args;

/// The last page has no token of a next one, or an empty one.
#[rstest]
#[case::no_token(json!({}))]
#[case::empty_token(json!({"continue": ""}))]
#[tokio::test]
async fn a_list_has_the_objects_of_all_pages(#[case] last: Value) {
    let service = tower::service_fn(move |request: Request<Body>| {
        let is_last = request
            .uri()
            .query()
            .unwrap_or_default()
            .contains("continue=next");
        let (name, metadata) = if is_last {
            ("b", last.clone())
        } else {
            ("a", json!({"continue": "next"}))
        };
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": [name]});
        let answer = Response::new(Body::from(list.to_string().into_bytes()));
        std::future::ready(Ok::<_, kube::Error>(answer))
    });
    let args = Args::try_parse_from(["kubectl-gpushare", "top"]).unwrap();
    let connection = ClusterConnection::of(args.connection, Client::new(service, "default"));
    assert_eq!(connection.list_json("/api/v1/pods").await.unwrap(), ["a", "b"]);
}

//! The page: whole, small, without anything that its policy forbids, and with the access of the read API.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt;
use scheduler::page::router;
use scheduler::read_api::ReadApi;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::world::World;

/// The most that all files may have together, in bytes.
const MAX_BYTES: usize = 110_000;

fn page_of(world: &World, demands_credentials: bool) -> Router {
    let api = ReadApi::new(Arc::clone(&world.extender), None, CancellationToken::new());
    router(&Arc::new(api), demands_credentials)
}

async fn get(router: &Router, path: &str, host: &str) -> (StatusCode, HeaderMap, String) {
    let request = Request::get(path).header(header::HOST, host).body(Body::empty());
    let response = router.clone().oneshot(request.unwrap()).await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, headers, String::from_utf8(body.to_vec()).unwrap())
}

/// The paths in quotes after any of these words.
fn references<'a>(text: &'a str, words: &[&str]) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    for word in words {
        for (at, _) in text.match_indices(word) {
            let rest = &text[at + word.len()..];
            let end = rest.find(['"', '\'']).unwrap();
            found.insert(rest[..end].trim_start_matches("./"));
        }
    }
    found
}

/// All files by path: the first, those that it names, and so on.
async fn files(page: &Router) -> BTreeMap<String, String> {
    let (mut open, mut files) = (vec![String::new()], BTreeMap::new());
    while let Some(path) = open.pop() {
        if files.contains_key(&path) {
            continue;
        }
        let (status, headers, text) = get(page, &format!("/{path}"), "localhost:12346").await;
        assert_eq!(status, StatusCode::OK, "{path}");
        assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff", "{path}");
        for name in references(&text, &["src=\"", "href=\"", "from '", "import '"]) {
            if !name.starts_with('#') {
                open.push(name.to_owned());
            }
        }
        files.insert(path, text);
    }
    files
}

#[tokio::test]
async fn every_file_that_a_file_names_is_served_and_all_are_small() {
    let world = World::new();
    let files = files(&page_of(&world, false)).await;
    let n_bytes: usize = files.values().map(String::len).sum();
    assert!(files.len() > 10, "{:?}", files.keys());
    assert!(n_bytes < MAX_BYTES, "{n_bytes} bytes in {:?}", files.keys());
}

#[tokio::test]
async fn nothing_comes_from_elsewhere_and_no_text_becomes_markup() {
    let world = World::new();
    let page = page_of(&world, false);
    let (_, headers, html) = get(&page, "/", "127.0.0.1:12346").await;
    let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    for part in [
        "default-src 'none';",
        "connect-src 'self';",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    for inline in ["<style", "style=", "onclick=", "onload=", "<script>"] {
        assert!(!html.contains(inline), "{inline}");
    }
    let markup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write"];
    for (path, text) in files(&page).await {
        for forbidden in markup
            .into_iter()
            .chain(["eval(", "new Function", "https://", "//cdn"])
        {
            assert!(!text.contains(forbidden), "{path}: {forbidden}");
        }
    }
}

#[tokio::test]
async fn the_page_lets_in_the_clients_of_the_read_api() {
    let world = World::new();
    let local = page_of(&world, false);
    let (status, _, state) = get(&local, "/v1/state", "127.0.0.1:12346").await;
    assert_eq!((status, state.starts_with('{')), (StatusCode::OK, true));
    for path in ["/", "/page.js", "/v1/state"] {
        let (status, headers, _) = get(&local, path, "evil.example:12346").await;
        assert_eq!(status, StatusCode::MISDIRECTED_REQUEST, "{path}");
        assert!(headers.contains_key(header::CONTENT_SECURITY_POLICY), "{path}");
    }
    let guarded = page_of(&world, true);
    let (status, _, _) = get(&guarded, "/", "gpus.example").await;
    assert_eq!(status, StatusCode::OK, "the page asks for the token");
    let (status, _, _) = get(&guarded, "/v1/state", "gpus.example").await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}

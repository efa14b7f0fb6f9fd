//! The live page: a few files for browsers, on one listener with the read API that their scripts read.
//!
//! The files hold no data, so that a browser loads them without a token; the read API demands one unless the page listens on a
//! loopback address. The headers let the browser run no other scripts, and send nothing to other sites.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use http::HeaderValue;
use http::header::{self, HeaderName};

use crate::read_api::{self, ReadApi, refuse_foreign_site};

/// The path of a file, its content type, and its content.
type File = (&'static str, &'static str, &'static [u8]);

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [File; 13] = [
    ("/", HTML, include_bytes!("../page/index.html")),
    ("/page.css", CSS, include_bytes!("../page/page.css")),
    ("/icon.svg", "image/svg+xml", include_bytes!("../page/icon.svg")),
    ("/page.js", SCRIPT, include_bytes!("../page/page.js")),
    ("/cluster.js", SCRIPT, include_bytes!("../page/cluster.js")),
    ("/connection.js", SCRIPT, include_bytes!("../page/connection.js")),
    ("/headline.js", SCRIPT, include_bytes!("../page/headline.js")),
    ("/map.js", SCRIPT, include_bytes!("../page/map.js")),
    ("/paint.js", SCRIPT, include_bytes!("../page/paint.js")),
    ("/verdicts.js", SCRIPT, include_bytes!("../page/verdicts.js")),
    ("/charts.js", SCRIPT, include_bytes!("../page/charts.js")),
    ("/table.js", SCRIPT, include_bytes!("../page/table.js")),
    ("/format.js", SCRIPT, include_bytes!("../page/format.js")),
];

const SAME_ORIGIN: HeaderValue = HeaderValue::from_static("same-origin");

/// The security headers of every answer: a browser loads and runs only files of this listener, and shows them in no frame.
const HEADERS: [(HeaderName, HeaderValue); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ),
    (
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    ),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        SAME_ORIGIN,
    ),
    (HeaderName::from_static("cross-origin-opener-policy"), SAME_ORIGIN),
];

/// The routes of the page and of the read API. With `demands_credentials` the read API demands a certificate or a bearer token.
pub fn router(api: &Arc<ReadApi>, demands_credentials: bool) -> Router {
    let mut files = Router::new();
    for file in FILES {
        let (path, ..) = file;
        files = files.route(path, get(move || async move { file_response(file) }));
    }
    // Without credentials, a page on the Internet whose name resolves to the loopback address could read everything.
    if !demands_credentials {
        files = files.layer(from_fn(demand_local_host));
    }
    // Here the routes of the read API have no prefix.
    files
        .merge(read_api::router(api, "", demands_credentials))
        .layer(from_fn(add_headers))
}

fn file_response((_, content_type, content): File) -> ([(HeaderName, &'static str); 2], &'static [u8]) {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        // A browser asks again each time: after an upgrade the files of two versions must not mix.
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, content)
}

/// Middleware that refuses requests whose headers show that a page of another site has caused them.
async fn demand_local_host(request: Request, next: Next) -> Response {
    if let Some(refusal) = refuse_foreign_site(&request) {
        return refusal;
    }
    next.run(request).await
}

/// Middleware that adds the security headers to every response.
async fn add_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    // To errors too, since a browser shows the text of a refusal.
    response.headers_mut().extend(HEADERS);
    response
}

//! Requests for a collection: list, watch, deletecollection.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::HeaderValue;

use super::Server;
use super::admitted;
use super::admitted::AdmittedWrite;
use super::request::{ApiRequest, invalid};
use super::watch_stream::{WatchParams, WatchStream};
use super::{body_answer, bytes_answer, warned};
use crate::apiserver::read::{self};
use crate::apiserver::render::{self, View};
use crate::apiserver::status::ApiError;
use crate::apiserver::watch::{Watch, WatchStart};

/// The size of the pieces in which a list is sent. A list of a large cluster has tens of megabytes, which would
/// otherwise be held twice.
const CHUNK: usize = 256 * 1024;

/// Answers a list: the body is produced in chunks, so that a long list is never in memory as a whole.
pub(super) fn list(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let view = request.view()?;
    let query = request.list_query()?;
    let resource = Arc::clone(&request.route.resource);
    let page = read::list(&server.objects.state().store, &resource.storage, &query)?;
    let meta = render::list_meta(page.revision, page.next.as_deref(), page.remaining);
    let (head, tail) = render::envelope(view, &resource, &meta);
    let mut items = page
        .items
        .into_iter()
        .map(move |v| render::render_list_item(view, &resource, &v))
        .peekable();
    let mut head = Some(head);
    let chunks = std::iter::from_fn(move || {
        let mut chunk = BytesMut::with_capacity(CHUNK);
        match head.take() {
            Some(head) => chunk.extend_from_slice(head.as_bytes()),
            None if items.peek().is_none() => return None,
            None => chunk.extend_from_slice(b","),
        }
        while let Some(item) = items.next() {
            chunk.extend_from_slice(&item);
            if chunk.len() >= CHUNK || items.peek().is_none() {
                break;
            }
            chunk.extend_from_slice(b",");
        }
        if items.peek().is_none() {
            chunk.extend_from_slice(tail.as_bytes());
        }
        Some(Ok::<Bytes, std::convert::Infallible>(chunk.freeze()))
    });
    let body = Body::from_stream(futures::stream::iter(chunks));
    Ok(body_answer(
        200,
        HeaderValue::from_static("application/json"),
        body,
    ))
}

/// Starts a watch and answers with the stream of its events.
pub(super) fn watch(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let view = request.view()?;
    let resource = Arc::clone(&request.route.resource);
    let bookmarks = request.query.is_set("allowWatchBookmarks");
    let streams_list = request.query.is_set("sendInitialEvents");
    let matching = request.query.get("resourceVersionMatch");
    if streams_list && (matching != Some("NotOlderThan") || !bookmarks) {
        let why = "sendInitialEvents requires resourceVersionMatch=NotOlderThan and allowWatchBookmarks=true";
        return Err(invalid(why));
    }
    if !streams_list && matching.is_some() && request.query.get("sendInitialEvents").is_none() {
        return Err(invalid(
            "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
        ));
    }
    let start = match request.query.number("resourceVersion")? {
        Some(rv) if rv > 0 && !streams_list => WatchStart::After(rv),
        _ if request.query.get("sendInitialEvents") == Some("false") => {
            WatchStart::After(server.objects.revision())
        }
        _ => WatchStart::Present,
    };
    let namespace = request.route.namespace.as_deref();
    let watch = Watch::new(
        server.objects.shared_state(),
        &resource.storage,
        namespace,
        request.selectors()?,
        start,
    );
    let plan = WatchParams {
        view,
        resource,
        user: request.user.name.clone(),
        bookmarks,
        ends_initial_events: streams_list,
        timeout: request
            .query
            .number("timeoutSeconds")?
            .filter(|s| *s > 0)
            .map(Duration::from_secs),
    };
    let stream = WatchStream::new(server, watch, plan);
    Ok(body_answer(
        200,
        HeaderValue::from_static("application/json"),
        Body::from_stream(stream.into_stream()),
    ))
}

/// Answers a `deletecollection`: deletes the selected objects and lists them.
pub(super) async fn delete(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let selectors = request.selectors()?;
    let target = request.route.target();
    let AdmittedWrite {
        done: deleted,
        warnings,
    } = admitted::delete_all(server, request, &selectors, &options).await?;
    let revision = server.objects.revision();
    let meta = render::list_meta(revision, None, None);
    let (head, tail) = render::envelope(View::Object, &target.resource, &meta);
    let mut body = BytesMut::from(head.as_bytes());
    for (i, version) in deleted.iter().enumerate() {
        if i > 0 {
            body.extend_from_slice(b",");
        }
        body.extend_from_slice(&render::render_list_item(View::Object, &target.resource, version));
    }
    body.extend_from_slice(tail.as_bytes());
    Ok(warned(bytes_answer(200, body.freeze()), &warnings))
}

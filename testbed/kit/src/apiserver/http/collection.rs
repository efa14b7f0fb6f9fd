//! Requests for a collection: list, watch, deletecollection.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::BytesMut;
use serde_json::Value;

use super::Server;
use super::admitted;
use super::request::ApiRequest;
use super::watch_stream::{WatchParams, WatchStream};
use super::{JSON, body_answer, json_bytes_answer};
use crate::apiserver::read;
use crate::apiserver::render::{self, View};
use crate::apiserver::resource::Resource;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::watch::{Watch, WatchStart};

pub(super) fn list(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let view = request.view()?;
    let query = request.list_query()?;
    let resource = Arc::clone(&request.route.resource);
    let page = read::list(&server.objects.state().store, &resource.storage, &query)?;
    let meta = render::list_meta(page.revision, page.next.as_deref());
    Ok(list_answer(view, &resource, &meta, &page.items))
}

fn list_answer(view: View, resource: &Resource, meta: &Value, items: &[Arc<ObjectVersion>]) -> Response {
    let (head, tail) = render::envelope(view, resource, meta);
    let mut body = BytesMut::from(head.as_bytes());
    for (i, version) in items.iter().enumerate() {
        if i > 0 {
            body.extend_from_slice(b",");
        }
        body.extend_from_slice(&render::render_list_item(view, resource, version));
    }
    body.extend_from_slice(tail.as_bytes());
    json_bytes_answer(200, body.freeze())
}

/// Starts a watch and answers with the stream of its events.
pub(super) fn watch(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let view = request.view()?;
    let resource = Arc::clone(&request.route.resource);
    let bookmarks = request.query.is_set("allowWatchBookmarks");
    // A WatchList: the client gets the present objects as events, where older clients list them first.
    let streams_list = request.query.is_set("sendInitialEvents");
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
    let params = WatchParams {
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
    let stream = WatchStream::new(server, watch, params);
    Ok(body_answer(200, JSON, Body::from_stream(stream.into_stream())))
}

/// Answers a `deletecollection`: deletes the selected objects and lists them.
pub(super) async fn delete(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let selectors = request.selectors()?;
    let target = request.route.target();
    let deleted = admitted::delete_all(server, request, &selectors, &options).await?;
    let meta = render::list_meta(server.objects.revision(), None);
    Ok(list_answer(View::Object, &target.resource, &meta, &deleted))
}

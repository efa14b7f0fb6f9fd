//! Requests for a collection: list, watch, deletecollection.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use bytes::BytesMut;
use serde_json::Value;

use super::Server;
use super::admitted;
use super::request::ApiRequest;
use super::watch_stream::WatchStream;
use super::{JSON, body_answer, json_bytes_answer};
use crate::apiserver::read;
use crate::apiserver::render::{self, View};
use crate::apiserver::resource::Resource;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::watch::Watch;

pub(super) fn list(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let query = request.list_query()?;
    let resource = &request.target.resource;
    let page = read::list(&server.objects.state().store, &resource.storage, &query)?;
    let meta = render::list_meta(page.revision, page.next.as_deref());
    Ok(list_answer(request.view, resource, &meta, &page.items))
}

fn list_answer(view: View, resource: &Resource, meta: &Value, items: &[Arc<ObjectVersion>]) -> Response {
    let mut body = BytesMut::from(render::list_head(view, resource, meta).as_bytes());
    for (i, version) in items.iter().enumerate() {
        if i > 0 {
            body.extend_from_slice(b",");
        }
        body.extend_from_slice(&render::render_list_item(view, resource, version));
    }
    body.extend_from_slice(b"]}");
    json_bytes_answer(200, body.freeze())
}

/// Starts a watch and answers with the stream of its events.
pub(super) fn watch(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    // A WatchList: the client gets the present objects as events, where older clients list them first.
    let streams_list = request.query.is_set("sendInitialEvents");
    let after = match request.query.number("resourceVersion")? {
        Some(rv) if rv > 0 && !streams_list => Some(rv),
        _ if request.query.get("sendInitialEvents") == Some("false") => Some(server.objects.revision()),
        _ => None,
    };
    let watch = Watch::new(&server.objects, &request.target, request.selectors()?, after);
    let stream = WatchStream::new(server, request, watch)?;
    Ok(body_answer(200, JSON, Body::from_stream(stream.into_stream())))
}

/// Answers a `deletecollection`: deletes the selected objects and lists them.
pub(super) async fn delete(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let selectors = request.selectors()?;
    let deleted = admitted::delete_all(server, request, &selectors, &options).await?;
    let meta = render::list_meta(server.objects.revision(), None);
    Ok(list_answer(
        View::Object,
        &request.target.resource,
        &meta,
        &deleted,
    ))
}

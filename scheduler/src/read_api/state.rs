//! `GET state`: the nodes of a snapshot, with the names that one client may see.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use proto::read_api::{Node, State as ClusterState, VERSION};
use rustc_hash::FxHashMap;

use super::memory_use::{Measured, UnknownUse};
use super::names::{SeenNames, Viewer};
use super::snapshot::{RenderedNode, StateSnapshot};
use super::{ReadApi, header_text, json, parameter};

/// Nodes in one piece of the body.
const NODES_PER_PIECE: usize = 16;
const NO_NODES: &[u8] = b"\"nodes\":[]";

/// The memory in use, by node; empty unless the client has asked for it.
type UseByNode = FxHashMap<Arc<str>, Measured>;

/// The body of one answer, which is made piece by piece as the client takes it: the JSON of 15,000 nodes has 40 MB.
struct StateBody {
    snapshot: Arc<StateSnapshot>,
    names: SeenNames,
    in_use: UseByNode,
    /// The JSON of the state in front of the nodes, until it is sent.
    head: Option<Bytes>,
    /// The JSON of the state behind the nodes, until it is sent.
    tail: Option<Bytes>,
    last_rendered: Option<Arc<str>>,
}

pub(super) async fn state(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let snapshot = api.snapshot().await;
    let mut response_headers = HeaderMap::from_iter([
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        // A cache may keep an answer, but has to ask whether its tag is still the newest.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ]);
    let mut in_use = UseByNode::default();
    if parameter(query.as_deref(), "use") == Some("true") {
        // The memory in use changes without a new revision, so that no tag identifies this answer.
        let nodes = snapshot.nodes.keys().cloned().collect();
        in_use = api.memory_use.measure(api.index(), nodes).await;
    } else {
        let tag = format!("\"{}{}\"", snapshot.id(), viewer.names.tag());
        let client_tags = header_text(&headers, header::IF_NONE_MATCH).unwrap_or_default();
        if client_tags.split(',').any(|client_tag| client_tag.trim() == tag) {
            return (StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response();
        }
        response_headers.extend(tag.parse().map(|tag| (header::ETAG, tag)));
    }
    let body = StateBody::new(&api, snapshot, viewer.names, in_use);
    let pieces = stream::unfold(body, async |mut body| {
        // Lets filter requests of the extender run between two pieces.
        tokio::task::yield_now().await;
        body.next().map(|piece| (Ok::<_, Infallible>(piece), body))
    });
    (response_headers, Body::from_stream(pieces)).into_response()
}

impl StateBody {
    /// A body of which nothing is sent yet. The state without its nodes is serialized at once, and split where the nodes go.
    fn new(api: &ReadApi, snapshot: Arc<StateSnapshot>, names: SeenNames, in_use: UseByNode) -> Self {
        let whole = json(&ClusterState {
            api_version: VERSION.to_owned(),
            revision: snapshot.id(),
            time: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            replica: api.replica(),
            totals: snapshot.totals,
            models: snapshot.models.clone(),
            nodes: Vec::new(),
            pending: names.pending(&snapshot.pending.pods),
            pending_total: snapshot.pending.total,
            use_unknown: unknown_use(&in_use),
            names_hidden: !names.are_all(),
        });
        // The nodes go between the brackets of the empty list.
        let mut windows = whole.windows(NO_NODES.len());
        let split = windows.position(|window| window == NO_NODES);
        let at = split.map_or(0, |at| at + NO_NODES.len() - 1);
        let whole = Bytes::from(whole);
        Self {
            snapshot,
            names,
            in_use,
            tail: Some(whole.slice(at..)),
            head: Some(whole.slice(..at)),
            last_rendered: None,
        }
    }

    fn next(&mut self) -> Option<Bytes> {
        if let Some(head) = self.head.take() {
            return Some(head);
        }
        // The tail is the last piece.
        self.tail.as_ref()?;
        let mut piece = Vec::new();
        let snapshot = Arc::clone(&self.snapshot);
        let last = self.last_rendered.clone();
        for (name, node) in snapshot.nodes_after(last.as_ref()).take(NODES_PER_PIECE) {
            if self.last_rendered.is_some() {
                piece.push(b',');
            }
            piece.extend_from_slice(&self.node_json(name, node));
            self.last_rendered = Some(Arc::clone(name));
        }
        if piece.is_empty() {
            return self.tail.take();
        }
        Some(piece.into())
    }

    /// The JSON of a node, with the memory in use if the client has asked for it.
    fn node_json(&self, name: &Arc<str>, rendered: &RenderedNode) -> Bytes {
        let Some(Ok(in_use)) = self.in_use.get(name) else {
            return rendered.json_for(&self.names);
        };
        let mut node: Node = serde_json::from_slice(&rendered.json).unwrap_or_default();
        // Before names are hidden, since plugins report pods by name.
        in_use.add_to(&mut node);
        node.hide_names(|namespace| self.names.include(namespace));
        json(&node).into()
    }
}

/// The names of the nodes whose memory in use is not known, by the reason.
fn unknown_use(in_use: &UseByNode) -> BTreeMap<String, Vec<String>> {
    let mut unknown: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (node, measured) in in_use {
        let reason = match measured {
            Err(reason) => *reason,
            Ok(in_use) if in_use.total().is_none() => UnknownUse::NotMeasured,
            Ok(_) => continue,
        };
        let nodes = unknown.entry(reason.to_string()).or_default();
        nodes.push(node.to_string());
    }
    for nodes in unknown.values_mut() {
        nodes.sort_unstable();
    }
    unknown
}

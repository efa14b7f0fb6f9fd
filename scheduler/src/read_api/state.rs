//! `GET state`: the nodes of a snapshot as one client sees them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Extension, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use http::{HeaderMap, StatusCode, header};
use proto::read_api::{Node, State as ClusterState, VERSION};
use rustc_hash::FxHashMap;

use super::memory_use::Measured;
use super::names::{SeenNames, Viewer};
use super::snapshot::{RenderedNode, StateSnapshot};
use super::{ReadApi, json, parameter};

/// Nodes of one piece of the body: between two pieces, filters that wait for a thread come first.
const PIECE: usize = 16;
/// An empty list of nodes in the JSON of a state.
const NO_NODES: &[u8] = b"\"nodes\":[]";

/// The memory in use, by node.
type UseByNode = FxHashMap<Arc<str>, Measured>;

/// A state that is rendered as it is sent.
struct StateBody {
    snapshot: Arc<StateSnapshot>,
    names: SeenNames,
    in_use: UseByNode,
    /// The state without nodes, in front of them and behind them.
    head: Option<Bytes>,
    tail: Option<Bytes>,
    has_nodes: bool,
    /// The name of the last node that was rendered.
    last: Option<Arc<str>>,
}

pub(super) async fn state(
    State(api): State<Arc<ReadApi>>,
    Extension(viewer): Extension<Viewer>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let snapshot = api.snapshot().await;
    let mut response_headers = vec![
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CACHE_CONTROL, "no-cache".to_owned()),
    ];
    let mut in_use = UseByNode::default();
    if parameter(query.as_deref(), "use") == Some("true") {
        // The use changes without a revision, so that no tag identifies this answer.
        let nodes = snapshot.nodes.keys().cloned().collect();
        in_use = api.memory_use.measure(api.index(), nodes).await;
    } else {
        let tag = format!("\"{}{}\"", snapshot.id(), viewer.names.tag());
        let known = headers
            .get(header::IF_NONE_MATCH)
            .and_then(|tag| tag.to_str().ok());
        if known.is_some_and(|known| known.split(',').any(|known| known.trim() == tag)) {
            return (StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response();
        }
        response_headers.push((header::ETAG, tag));
    }
    let body = StateBody::new(&api, snapshot, viewer.names, in_use);
    let pieces = stream::unfold(body, async |mut body| {
        tokio::task::yield_now().await;
        body.next().map(|piece| (Ok::<_, Infallible>(piece), body))
    });
    let mut response = Body::from_stream(pieces).into_response();
    for (name, value) in response_headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

impl StateBody {
    fn new(api: &ReadApi, snapshot: Arc<StateSnapshot>, names: SeenNames, in_use: UseByNode) -> Self {
        let head = json(&ClusterState {
            api_version: VERSION.to_owned(),
            revision: snapshot.id(),
            time: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            replica: api.replica(),
            totals: snapshot.totals,
            models: snapshot.models.clone(),
            nodes: Vec::new(),
            pending: names.pending(&snapshot.pending.pods),
            pending_total: snapshot.pending.total,
            use_unknown: unknown(&in_use),
            names_hidden: !names.are_all(),
        });
        // The empty list of nodes is where the nodes go.
        let split = head.windows(NO_NODES.len()).position(|window| window == NO_NODES);
        let at = split.map_or(0, |at| at + NO_NODES.len() - 1);
        let head = Bytes::from(head);
        Self {
            snapshot,
            names,
            in_use,
            tail: Some(head.slice(at..)),
            head: Some(head.slice(..at)),
            has_nodes: false,
            last: None,
        }
    }

    /// The next piece of the body.
    fn next(&mut self) -> Option<Bytes> {
        if let Some(head) = self.head.take() {
            return Some(head);
        }
        self.tail.as_ref()?;
        let mut piece = Vec::new();
        let snapshot = Arc::clone(&self.snapshot);
        for (name, node) in snapshot.nodes_after(self.last.take().as_ref()).take(PIECE) {
            if self.has_nodes {
                piece.push(b',');
            }
            piece.extend_from_slice(&self.node(name, node));
            self.has_nodes = true;
            self.last = Some(Arc::clone(name));
        }
        if piece.is_empty() {
            return self.tail.take();
        }
        Some(piece.into())
    }

    fn node(&self, name: &Arc<str>, rendered: &RenderedNode) -> Bytes {
        let Some(Ok(in_use)) = self.in_use.get(name) else {
            return rendered.json_for(&self.names);
        };
        let mut node: Node = serde_json::from_slice(&rendered.json).unwrap_or_default();
        // By name of the pod, so that names are hidden afterwards.
        in_use.fill(&mut node);
        self.names.hide_others(&mut node);
        json(&node).into()
    }
}

/// The nodes whose use is not known, by the reason.
fn unknown(in_use: &UseByNode) -> BTreeMap<String, Vec<String>> {
    let mut unknown: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (node, measured) in in_use {
        if let Err(reason) = measured {
            let nodes = unknown.entry(reason.as_str().to_owned()).or_default();
            nodes.push(node.to_string());
        }
    }
    for nodes in unknown.values_mut() {
        nodes.sort_unstable();
    }
    unknown
}

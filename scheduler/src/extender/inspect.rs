//! `inspect`: the nodes of the read API over HTTP, translated into the JSON of the old extender, for its tools.
//!
//! Numbers named `…GPU` are whole memory units of the node; the exact bytes are in other fields. All nodes are a stream: a node
//! is copied under a lock that is held for that node alone, and the next piece is made once the client has taken the last one. So
//! a view of any size takes a few dozen KiB of memory and holds up no filter, and each node is shown as it was in its turn.

use std::cmp::Reverse;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use futures::stream;
use http::{StatusCode, header};
use placement::NodeId;
use proto::memory_unit::MemoryUnit;
use proto::read_api::{Gpu, Node, OtherDevice};
use serde::Serialize;
use tokio::sync::OwnedSemaphorePermit;

use super::{Extender, access, json, respond};
use crate::config::PREFIX;
use crate::index::view;
use crate::metrics::{Ending, Verb};

/// The most views that are answered at one time; more wait as long as a request may take to arrive.
pub(super) const MAX_VIEWS: usize = 8;
/// The length at which a piece of an answer is sent, in bytes.
const PIECE: usize = 32 << 10;

/// The routes of the views, for clients with access.
pub(super) fn routes(extender: &Arc<Extender>) -> Router<Arc<Extender>> {
    Router::new()
        .route(&format!("{PREFIX}/inspect"), get(inspect_all))
        .route(&format!("{PREFIX}/inspect/{{node}}"), get(inspect_node))
        .route_layer(from_fn_with_state(Arc::clone(extender), access::require_access))
}

/// Streams the view of all nodes that share GPUs or have a problem, in the order of their names.
async fn inspect_all(State(extender): State<Arc<Extender>>) -> Response {
    let permit = match acquire_view(&extender).await {
        Ok(permit) => permit,
        Err(refusal) => return refusal,
    };
    let nodes = view::nodes_by_name(extender.index.read().fleet());
    let all = NodeStream {
        nodes: nodes.into_iter(),
        n_written: 0,
        has_ended: false,
        started: Instant::now(),
        extender,
        _permit: permit,
    };
    let pieces = stream::unfold(all, async |mut all| {
        let piece = all.next_piece().await?;
        Some((Ok::<_, Infallible>(piece), all))
    });
    let content_type = [(header::CONTENT_TYPE, "application/json")];
    (content_type, Body::from_stream(pieces)).into_response()
}

async fn inspect_node(State(extender): State<Arc<Extender>>, Path(name): Path<String>) -> Response {
    let _permit = match acquire_view(&extender).await {
        Ok(permit) => permit,
        Err(refusal) => return refusal,
    };
    let mut timer = extender.metrics.time(Verb::Inspect);
    let shown = extender.index.read().show_node(&name);
    let mut answer = Inspected::default();
    match shown {
        Some(node) => answer.nodes.push(node.into()),
        None => answer.error = format!("there is no node {name:?}"),
    }
    respond(&mut timer, Ok(json(&answer)))
}

/// Waits for a permit; returns the refusal if none is free in time.
async fn acquire_view(extender: &Extender) -> Result<OwnedSemaphorePermit, Response> {
    let permit = Arc::clone(&extender.views).acquire_owned();
    if let Ok(Ok(permit)) = tokio::time::timeout(extender.serving.read_timeout, permit).await {
        return Ok(permit);
    }
    extender.metrics.time(Verb::Inspect).ending = Ending::Refused;
    let text = format!(
        "{MAX_VIEWS} views are being answered, as many as there may be at one time; try again later\n"
    );
    Err((StatusCode::TOO_MANY_REQUESTS, [(header::RETRY_AFTER, "10")], text).into_response())
}

/// A view of all nodes that is being sent.
struct NodeStream {
    extender: Arc<Extender>,
    /// The nodes that are not written yet.
    nodes: std::vec::IntoIter<NodeId>,
    n_written: usize,
    has_ended: bool,
    started: Instant,
    _permit: OwnedSemaphorePermit,
}

impl NodeStream {
    /// Writes the next nodes as JSON, about `PIECE` bytes of them; `None` after the last piece.
    async fn next_piece(&mut self) -> Option<Bytes> {
        if self.has_ended {
            return None;
        }
        let permit = self.extender.rendering.acquire().await;
        // Larger pieces would hold up the next view, smaller ones cost a frame each.
        let mut piece = Vec::with_capacity(PIECE);
        if self.n_written == 0 {
            piece.extend_from_slice(b"{\"nodes\":[");
        }
        while piece.len() < PIECE {
            let Some(id) = self.nodes.next() else {
                piece.extend_from_slice(b"]}");
                self.has_ended = true;
                break;
            };
            // A node may be gone since the list was made. Typical requests say which memory is stranded: the old JSON has none.
            let no_typical_requests = &[];
            let shown = view::listed_node(self.extender.index.read().filter(), id, no_typical_requests);
            if let Some(node) = shown {
                if self.n_written > 0 {
                    piece.push(b',');
                }
                piece.extend_from_slice(&json(&InspectedNode::from(node)));
                self.n_written += 1;
            }
        }
        // Other views go on while this client takes the piece.
        drop(permit);
        // Lets the extender's filter requests run between two pieces.
        tokio::task::yield_now().await;
        Some(piece.into())
    }
}

impl Drop for NodeStream {
    /// Counts the view in the metrics.
    fn drop(&mut self) {
        // A client that disconnects drops the stream before its end.
        let ending = if self.has_ended {
            Ending::Ok
        } else {
            Ending::Broken
        };
        let metrics = &self.extender.metrics;
        metrics.record(Verb::Inspect, ending, self.started.elapsed());
    }
}

/// The answer for one node: a list with the node alone, or an error.
#[derive(Default, Serialize)]
struct Inspected {
    nodes: Vec<InspectedNode>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

/// One node, in the JSON of gpushare-scheduler-extender with more fields behind those of that project.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedNode {
    name: String,
    #[serde(rename = "totalGPU")]
    total_gpu: u64,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    devs: Vec<InspectedGpu>,
    unit: String,
    unit_bytes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_devices: Vec<OtherDevice>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    plugin: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedGpu {
    id: u32,
    #[serde(rename = "totalGPU")]
    total_gpu: u64,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    pods: Vec<InspectedPod>,
    uuid: String,
    healthy: bool,
    total_bytes: u64,
    used_bytes: u64,
    total_core: u64,
    used_core: u64,
    total_slots: u64,
    used_slots: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(rename = "pcieID", skip_serializing_if = "Option::is_none")]
    pcie_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    enforcement: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedPod {
    name: String,
    namespace: String,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    uid: String,
    used_bytes: u64,
    assumed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl From<Node> for InspectedNode {
    fn from(node: Node) -> Self {
        // At least 1, since amounts are divided by it.
        let unit_bytes = node.unit.unwrap_or(MemoryUnit::MIB.bytes()).max(1);
        let unit = match MemoryUnit::from_bytes(unit_bytes) {
            Some(unit) => unit.to_string(),
            None => unit_bytes.to_string(),
        };
        let gpus = node.gpus.into_iter();
        let devs: Vec<_> = gpus.map(|gpu| InspectedGpu::new(gpu, unit_bytes)).collect();
        Self {
            name: node.name,
            total_gpu: devs.iter().map(|gpu| gpu.total_gpu).sum(),
            used_gpu: devs.iter().map(|gpu| gpu.used_gpu).sum(),
            devs,
            unit,
            unit_bytes,
            other_devices: node.other_devices,
            problems: node.problems,
            plugin: node.plugin,
        }
    }
}

impl InspectedGpu {
    /// A GPU with its amounts in bytes and in units of `unit` bytes.
    fn new(gpu: Gpu, unit: u64) -> Self {
        let (total_bytes, used_bytes) = (gpu.memory.total, gpu.memory.allocated);
        let used_gpu = used_units(used_bytes, total_bytes, unit);
        let bytes: Vec<u64> = gpu.holders.iter().map(|holder| holder.memory).collect();
        let mut pods = Vec::with_capacity(gpu.holders.len());
        // The units of the pods add up to those of the GPU, as users of the old tools expect.
        for (holder, used_gpu) in gpu.holders.into_iter().zip(split_units(&bytes, used_gpu, unit)) {
            pods.push(InspectedPod {
                name: holder.name,
                namespace: holder.namespace,
                used_gpu,
                uid: holder.uid,
                used_bytes: holder.memory,
                assumed: holder.assumed,
                problem: holder.problem,
            });
        }
        Self {
            id: gpu.minor,
            total_gpu: total_bytes / unit,
            used_gpu,
            pods,
            uuid: gpu.uuid,
            healthy: gpu.healthy,
            total_bytes,
            used_bytes,
            total_core: gpu.core.total,
            used_core: gpu.core.allocated,
            total_slots: gpu.sharers.total,
            used_slots: gpu.sharers.allocated,
            numa_node: gpu.numa,
            pcie_id: gpu.pcie,
            enforcement: gpu.enforcement,
        }
    }
}

/// The used bytes of a GPU in whole units: rounded up, though not above the whole units of its total, unless the GPU is
/// overcommitted.
fn used_units(used: u64, total: u64, unit: u64) -> u64 {
    let rounded_up = used.div_ceil(unit);
    if used > total {
        rounded_up
    } else {
        rounded_up.min(total / unit)
    }
}

/// The bytes of each pod on a GPU in whole units, which add up to the `used` units of the GPU: rounded down, and the units that
/// this leaves go to the pods with the largest remainders.
fn split_units(bytes: &[u64], used: u64, unit: u64) -> Vec<u64> {
    let mut shares: Vec<u64> = bytes.iter().map(|bytes| bytes / unit).collect();
    let mut n_left = used.saturating_sub(shares.iter().sum());
    let mut remainders: Vec<(Reverse<u64>, &mut u64)> = Vec::new();
    for (bytes, share) in bytes.iter().zip(&mut shares) {
        remainders.push((Reverse(bytes % unit), share));
    }
    // A stable sort: of equal pods the first in the answer gets the unit.
    remainders.sort_by_key(|(remainder, _)| *remainder);
    for (Reverse(remainder), share) in remainders {
        if n_left > 0 && remainder > 0 {
            *share += 1;
            n_left -= 1;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A GPU of 159 bytes in units of 10.
    #[rstest]
    #[case::nothing(&[], 0, &[])]
    #[case::whole_units(&[20, 30], 5, &[2, 3])]
    #[case::one_byte(&[1], 1, &[1])]
    #[case::full_to_the_last_byte(&[159], 15, &[15])]
    #[case::full_by_thirds(&[53, 53, 53], 15, &[5, 5, 5])]
    #[case::the_largest_rest_first(&[12, 14, 19], 5, &[1, 2, 2])]
    #[case::overcommitted(&[159, 20], 18, &[16, 2])]
    fn rounded(#[case] bytes: &[u64], #[case] used: u64, #[case] expected: &[u64]) {
        let found = used_units(bytes.iter().sum(), 159, 10);
        assert_eq!(
            (found, split_units(bytes, found, 10).as_slice()),
            (used, expected)
        );
    }

    proptest! {
        #[test]
        fn used_amounts_are_shown_within_the_totals(unit in 1_u64..50, total in 0_u64..1000, parts in prop::collection::vec(0_u64..300, 0..8)) {
            let used: u64 = parts.iter().sum();
            let shown = used_units(used, total, unit);
            let shares = split_units(&parts, shown, unit);
            prop_assert!(shares.iter().sum::<u64>() <= shown);
            prop_assert!(used > total || shown <= total / unit);
            prop_assert!(shown.abs_diff(used / unit) <= 1 && shares.iter().zip(&parts).all(|(share, part)| share.abs_diff(part / unit) <= 1));
        }
    }
}

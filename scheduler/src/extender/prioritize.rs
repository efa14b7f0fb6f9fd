//! `prioritize`: how good each node would be, from 0 to 10, beside the others that are asked about.

use placement::NodeId;
use proto::extender::{HostPriority, WholeNode};

use super::question::{Nodes, Question};
use super::standing::{Order, Standing, scores};
use super::wanted::Wanted;
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;
use crate::index::Index;

/// Request bytes in, answer bytes out.
///
/// # Errors
/// If the bytes are no prioritize request, or the state is not complete.
pub fn answer(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestFailure> {
    let malformed = |reason: String| RequestFailure::malformed("prioritize", &reason);
    let Question { pod, nodes, .. } =
        Question::read(body, &extender.roll()).map_err(|error| malformed(error.to_string()))?;
    let index = extender.index.read();
    index
        .ready()
        .map_err(|reason| RequestFailure::NotReady { reason })?;
    let facts = PodFacts::of(&pod, index.names());
    let wanted = Wanted::of(&index, &pod, facts.as_ref());
    let failed = extender.attempts().avoided(pod.uid(), super::now());
    let order = Order::new(&index, &pod.spec, &failed);
    let name = |node: &WholeNode| node.node.metadata.name.clone().unwrap_or_default();
    let whole: Vec<String>;
    let names: Vec<&str> = match &nodes {
        Nodes::Names(names) => names.iter().collect(),
        Nodes::Whole(nodes) => {
            whole = nodes.items.iter().map(name).collect();
            whole.iter().map(String::as_str).collect()
        }
    };
    let scores = score(&index, &wanted, &order, &names);
    let answer: Vec<HostPriority<'_>> = names
        .into_iter()
        .zip(scores)
        .map(|(host, score)| HostPriority { host, score })
        .collect();
    serde_json::to_vec(&answer).map_err(|error| malformed(error.to_string()))
}

/// A score for each node; 0 where the pod does not fit, or does not care.
fn score(index: &Index, wanted: &Wanted<'_>, order: &Order<'_>, names: &[&str]) -> Vec<i64> {
    let mut scored = vec![0; names.len()];
    let (Wanted::Room(_), Some(mut asking)) = (wanted, wanted.asking(index)) else {
        return scored;
    };
    let mut places = Vec::with_capacity(names.len());
    let mut standings: Vec<Standing<'_>> = Vec::with_capacity(names.len());
    for (at, name) in names.iter().enumerate() {
        let node: Option<NodeId> = index.fleet().node_id(name);
        if let Ok(fit) = wanted.of_found(index, name, node, Some(&mut asking)) {
            places.push(at);
            standings.push(order.standing(name, fit.merit));
        }
    }
    for (at, score) in places.into_iter().zip(scores(&standings)) {
        if let Some(scored) = scored.get_mut(at) {
            *scored = score;
        }
    }
    scored
}

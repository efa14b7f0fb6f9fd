//! `prioritize`: how good each node would be, from 0 to 10.

use proto::extender::{ExtenderArgs, HostPriority};

use super::filter::Wanted;
use super::{Extender, RequestFailure};
use crate::accounting::PodFacts;

/// Request bytes in, answer bytes out.
///
/// # Errors
/// If the bytes are no prioritize request, or the state is not complete.
pub fn answer(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestFailure> {
    let malformed = |reason: String| RequestFailure::malformed("prioritize", &reason);
    let args: ExtenderArgs<'_> = serde_json::from_slice(body).map_err(|error| malformed(error.to_string()))?;
    let index = extender.index.read();
    index.ready().map_err(|reason| RequestFailure::NotReady { reason })?;
    let facts = PodFacts::of(&args.pod, index.names());
    let wanted = Wanted::of(&index, args.pod.uid(), facts.as_ref());
    let mut asking = wanted.asking(&index);
    let mut score = |name| match (&wanted, &mut asking) {
        (Wanted::Room(ask), Some(asking)) => HostPriority { host: name, score: index.score(name, ask, asking) },
        _ => HostPriority { host: name, score: 0 },
    };
    let scores: Vec<HostPriority<'_>> = match (&args.node_names, &args.nodes) {
        (Some(names), _) => names.iter().map(|name| score(&name.0)).collect(),
        (None, Some(nodes)) => nodes.items.iter().map(|node| score(node.node.metadata.name.as_deref().unwrap_or_default())).collect(),
        (None, None) => return Err(malformed("neither NodeNames nor Nodes is given".to_owned())),
    };
    serde_json::to_vec(&scores).map_err(|error| malformed(error.to_string()))
}

//! The scheduler's own library over objects that this command reads itself, for clusters whose scheduler does not answer.

use std::time::Duration;

use placement::Policies;
use proto::node::Node;
use proto::pod::Pod;
use proto::resource::ResourceNames;
use scheduler::index::{Index, RawDevice, Shared};
use scheduler::watch::ObjectStore;

use crate::connection::ClusterConnection;
use crate::failure::CommandFailure;

/// The lifetime of hints, of which an index without requests has none.
const NO_HINTS: Duration = Duration::from_secs(1);

/// Reads all nodes, Device objects and pods into an index.
pub(crate) async fn index(connection: &ClusterConnection) -> Result<Shared<Index>, CommandFailure> {
    // The three lists are of slightly different times, as they are for the watches of the scheduler at its start.
    let (nodes, devices, pods) = tokio::join!(
        connection.list::<Node>("nodes", None),
        connection.list::<RawDevice>("devices.scheduling.koordinator.sh", None),
        connection.list::<Pod>("pods", None),
    );
    let nodes = nodes?;
    // A cluster of the old plugin alone has no Device objects.
    let devices = match devices {
        Err(CommandFailure::Api { .. }) => Vec::new(),
        devices => devices?,
    };
    Ok(index_of(nodes, devices, pods?))
}

/// An index of these objects.
pub(crate) fn index_of(nodes: Vec<Node>, devices: Vec<RawDevice>, pods: Vec<Pod>) -> Shared<Index> {
    // The flags of the scheduler are not known here; its defaults decide order, not room.
    let mut index = Index::new(ResourceNames::default(), Policies::default(), NO_HINTS);
    fill(&mut index, nodes);
    fill(&mut index, devices);
    fill(&mut index, pods);
    Shared::new(index)
}

fn fill<K>(index: &mut Index, objects: Vec<K>)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    for object in objects {
        index.apply(object);
    }
    ObjectStore::<K>::end_list(index);
}

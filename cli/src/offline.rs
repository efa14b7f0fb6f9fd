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

/// The lifetime of hints (room that filter keeps for a pod until its bind). Without filter requests there are none.
const NO_HINTS: Duration = Duration::from_secs(1);

pub(crate) async fn index(connection: &ClusterConnection) -> Result<Shared<Index>, CommandFailure> {
    // The three lists are of slightly different times, as they are for the watches of the scheduler at its start.
    let (nodes, devices, pods) = tokio::join!(
        connection.list::<Node>(None, None),
        // A cluster without the CustomResourceDefinition lists none: the old gpushare device plugin has no such objects.
        connection.list::<RawDevice>(None, None),
        connection.list::<Pod>(None, None),
    );
    Ok(index_of(nodes?, devices?, pods?))
}

pub(crate) fn index_of(nodes: Vec<Node>, devices: Vec<RawDevice>, pods: Vec<Pod>) -> Shared<Index> {
    // The flags of the scheduler are not known here, so its defaults apply, even to those that change which pods fit.
    let mut index = Index::new(ResourceNames::default(), Policies::default(), NO_HINTS);
    add_all(&mut index, nodes);
    add_all(&mut index, devices);
    add_all(&mut index, pods);
    Shared::new(index)
}

/// Adds all objects of one kind to an index, as the first list of a watch does.
fn add_all<K>(index: &mut Index, objects: Vec<K>)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    for object in objects {
        index.apply(object);
    }
    ObjectStore::<K>::end_list(index);
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use scheduler::read_api;
    use serde::Deserialize;

    use super::*;

    /// Objects that the daemons of the previous version wrote, and that version's own view of them.
    #[derive(Deserialize)]
    struct Recording {
        inspect: View,
        nodes: Vec<Node>,
        devices: Vec<RawDevice>,
        pods: Vec<Pod>,
    }

    #[derive(Deserialize)]
    struct View {
        nodes: Vec<NodeView>,
    }

    #[derive(Deserialize)]
    struct NodeView {
        devs: Vec<DeviceView>,
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct DeviceView {
        uuid: String,
        total_bytes: u64,
        used_bytes: u64,
        used_core: u64,
        used_slots: u64,
        pods: Vec<PodView>,
    }

    #[derive(Deserialize)]
    struct PodView {
        name: String,
    }

    /// Memory, allocated memory, compute and slots of a GPU, and the pods on it.
    type Account = (u64, u64, u64, u64, BTreeSet<String>);

    #[tokio::test]
    async fn what_the_previous_version_wrote_is_counted_as_it_was() {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../testbed/tests/recorded/previous_version.json");
        let recording: Recording = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut expected: BTreeMap<String, Account> = BTreeMap::new();
        for gpu in recording.inspect.nodes.into_iter().flat_map(|node| node.devs) {
            let pods = gpu.pods.into_iter().map(|pod| pod.name).collect();
            let account = (
                gpu.total_bytes,
                gpu.used_bytes,
                gpu.used_core,
                gpu.used_slots,
                pods,
            );
            expected.insert(gpu.uuid, account);
        }
        assert_eq!(expected.len(), 8);
        let state = read_api::state_of(index_of(recording.nodes, recording.devices, recording.pods)).await;
        let mut counted: BTreeMap<String, Account> = BTreeMap::new();
        for gpu in state.nodes.into_iter().flat_map(|node| node.gpus) {
            assert!(gpu.healthy, "{}", gpu.uuid);
            let pods = gpu.holders.into_iter().map(|holder| holder.name).collect();
            let account = (
                gpu.memory.total,
                gpu.memory.allocated,
                gpu.core.allocated,
                gpu.sharers.allocated,
                pods,
            );
            counted.insert(gpu.uuid, account);
        }
        assert_eq!(counted, expected);
    }
}

//! The node affinity of `PersistentVolume`s, by which a pod with claims may move: read with the rights of the caller, as the
//! scheduler reads no volumes.

use std::collections::BTreeMap;

use proto::pod::NodeSelector;
use proto::read_api::{LeftPod, MAX_AFFINITY_PARTS, MAX_PODS_WITH_VOLUMES, PodVolumes};
use serde_json::Value;

use crate::connection::ClusterConnection;
use crate::fields::{array, text as field};
use crate::pod_path::is_plain;

/// The volumes of the pods that stay because of them, by UID. Left out, so that they stay, are pods of which a claim or volume
/// cannot be read, and pods beyond the limits of a plan request.
pub(crate) async fn of_pods(connection: &ClusterConnection, left: &[LeftPod]) -> PodVolumes {
    let (mut known, mut pods) = (PodVolumes::new(), BTreeMap::new());
    for pod in left.iter().filter(|pod| pod.volumes && !pod.name.is_empty()) {
        if known.len() == MAX_PODS_WITH_VOLUMES {
            break;
        }
        if let Some(volumes) = of_pod(connection, pod, &mut pods).await
            && volumes.iter().map(NodeSelector::n_parts).sum::<usize>() <= MAX_AFFINITY_PARTS
        {
            known.insert(pod.uid.clone(), volumes);
        }
    }
    known
}

/// The node affinity of a pod's volumes; `None` if one cannot be read, or is for one node at a time and another pod uses it too.
/// `pods` keeps the pods of the namespaces that were listed for earlier pods.
async fn of_pod<'p>(
    connection: &ClusterConnection,
    pod: &'p LeftPod,
    pods: &mut BTreeMap<&'p str, Vec<Value>>,
) -> Option<Vec<NodeSelector>> {
    let LeftPod { namespace, name, .. } = pod;
    let object = read(connection, &format!("namespaces/{namespace}/pods/{name}")).await?;
    // Another pod has the name by now.
    if field(&object, "/metadata/uid") != pod.uid {
        return None;
    }
    let mut selectors = Vec::new();
    for volume in object.pointer("/spec/volumes")?.as_array()? {
        if volume.get("persistentVolumeClaim").is_none() {
            continue;
        }
        let claim_name = field(volume, "/persistentVolumeClaim/claimName");
        let path = format!("namespaces/{namespace}/persistentvolumeclaims/{claim_name}");
        let claim = read(connection, &path).await?;
        let name = field(&claim, "/spec/volumeName");
        let volume = read(connection, &format!("persistentvolumes/{name}")).await?;
        // The volume would have to stay on the node of another pod that uses it.
        if !is_for_many_nodes(&volume) {
            if !pods.contains_key(namespace.as_str()) {
                let path = format!("/api/v1/namespaces/{namespace}/pods");
                pods.insert(namespace, connection.list_json(&path).await.ok()?);
            }
            let mut others = pods.get(namespace.as_str())?.iter();
            if others.any(|other| field(other, "/metadata/uid") != pod.uid && uses(other, claim_name)) {
                return None;
            }
        }
        if let Some(required) = volume.pointer("/spec/nodeAffinity/required") {
            selectors.push(serde_json::from_value(required.clone()).ok()?);
        }
    }
    Some(selectors)
}

/// Returns true if pods on several nodes can use a volume at the same time.
fn is_for_many_nodes(volume: &Value) -> bool {
    let mut modes = array(volume, "/spec/accessModes").iter();
    modes.any(|mode| mode == "ReadWriteMany" || mode == "ReadOnlyMany")
}

fn uses(pod: &Value, claim: &str) -> bool {
    let has_ended = ["Succeeded", "Failed"].contains(&field(pod, "/status/phase"));
    let mut volumes = array(pod, "/spec/volumes").iter();
    !has_ended && volumes.any(|volume| field(volume, "/persistentVolumeClaim/claimName") == claim)
}

/// An object of the core API; `None` if it cannot be read, or if a name in the path would change the path.
async fn read(connection: &ClusterConnection, path: &str) -> Option<Value> {
    if !path.split('/').all(is_plain) {
        return None;
    }
    let found = connection.get("read a volume", &format!("/api/v1/{path}")).await;
    found.ok().flatten()
}

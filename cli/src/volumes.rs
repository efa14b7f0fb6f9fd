//! The node affinity of `PersistentVolume`s, by which a pod with claims may move: read with the rights of the caller, as the scheduler
//! reads no volumes.

use proto::pod::NodeSelector;
use proto::read_api::{LeftPod, PodVolumes};
use serde_json::Value;

use crate::connection::ClusterConnection;
use crate::fields::text as field;

/// The volumes of the pods that stay because of them. A pod of which any claim or volume cannot be read is left out.
pub(crate) async fn of_pods(connection: &ClusterConnection, left: &[LeftPod]) -> PodVolumes {
    let mut known = PodVolumes::new();
    for pod in left.iter().filter(|pod| pod.volumes && !pod.name.is_empty()) {
        if let Some(volumes) = of_pod(connection, pod).await {
            known.insert(pod.uid.clone(), volumes);
        }
    }
    known
}

/// The node affinity of the volumes of a pod; `None` if it is not known of all.
async fn of_pod(connection: &ClusterConnection, pod: &LeftPod) -> Option<Vec<NodeSelector>> {
    let LeftPod { namespace, name, .. } = pod;
    let object = read(connection, &format!("namespaces/{namespace}/pods/{name}")).await?;
    if field(&object, "/metadata/uid") != pod.uid {
        return None;
    }
    let mut selectors = Vec::new();
    for volume in object.pointer("/spec/volumes")?.as_array()? {
        if volume.get("persistentVolumeClaim").is_none() {
            continue;
        }
        let claim = field(volume, "/persistentVolumeClaim/claimName");
        let path = format!("namespaces/{namespace}/persistentvolumeclaims/{claim}");
        let claim = read(connection, &path).await?;
        let name = field(&claim, "/spec/volumeName");
        let volume = read(connection, &format!("persistentvolumes/{name}")).await?;
        if let Some(required) = volume.pointer("/spec/nodeAffinity/required") {
            selectors.push(serde_json::from_value(required.clone()).ok()?);
        }
    }
    Some(selectors)
}

/// An object of the core API; `None` if it cannot be read.
async fn read(connection: &ClusterConnection, path: &str) -> Option<Value> {
    let is_plain = path
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-./".contains(&b));
    if !is_plain || path.ends_with('/') {
        return None;
    }
    let found = connection.get("read a volume", &format!("/api/v1/{path}")).await;
    found.ok().flatten()
}

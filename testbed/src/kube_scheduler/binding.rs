//! The binding cycle: an extender's bind verb, or the binding that kube-scheduler writes itself.

use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kube::api::{Api, PostParams};
use kube::{Client, ResourceExt};
use tracing::warn;

use super::extender::Extender;
use super::report::{namespace, nominate};
use super::waits::Waits;

/// Binds pods; cloned into every binding cycle.
#[derive(Clone)]
pub(super) struct Binder {
    client: Client,
    extender: Option<Extender>,
}

impl Binder {
    /// A binder that asks the one extender that binds, if there is one.
    pub(super) fn new(client: Client, extenders: &[Extender]) -> Self {
        Self {
            client,
            extender: extenders.iter().find(|extender| extender.is_binder()).cloned(),
        }
    }

    /// Waits as long as Permit and `PreBind` make a binding cycle wait before it binds.
    pub(super) async fn wait(&self, pod: &Pod, node: &str, waits: &Waits) {
        if waits.nominates
            && let Err(error) = nominate(&self.client, pod, node).await
        {
            warn!(pod = pod.name_any(), %error, "cannot nominate a node for a pod that waits");
        }
        tokio::time::sleep(waits.total).await;
    }

    /// Binds a pod, once.
    pub(super) async fn bind(&self, pod: &Pod, uid: &str, node: &str) -> Result<(), String> {
        if let Some(extender) = self
            .extender
            .as_ref()
            .filter(|extender| extender.is_interested(pod))
        {
            match extender.bind(namespace(pod), &pod.name_any(), uid, node).await {
                Err(error) if extender.is_ignorable() => warn!(%error, "an ignorable extender does not bind"),
                result => return result.map_err(|error| error.to_string()),
            }
        }
        self.bind_directly(pod, uid, node)
            .await
            .map_err(|error| error.to_string())
    }

    async fn bind_directly(&self, pod: &Pod, uid: &str, node: &str) -> kube::Result<()> {
        let target = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        };
        let metadata = ObjectMeta {
            name: Some(pod.name_any()),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace(pod));
        let binding = Binding { metadata, target };
        let answer: Result<Status, _> = pods
            .create_subresource("binding", &pod.name_any(), &PostParams::default(), &binding)
            .await;
        answer.map(|_| ())
    }
}

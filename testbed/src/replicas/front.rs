//! A model of kube-proxy for one Service: each connection goes to one of the ready pods that the Service
//! selects.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::NAMESPACE;
use kit::apiserver::{self, object};

/// The addresses at which one replica listens, by the flags that set them.
pub(super) type Ports = BTreeMap<&'static str, SocketAddr>;

/// Labels that a Service selects.
pub(super) type Selector = BTreeMap<String, String>;

/// The address of each replica, by the name of its pod.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplicaAddresses(Arc<Mutex<BTreeMap<String, Ports>>>);

impl ReplicaAddresses {
    pub(super) fn insert(&self, name: &str, ports: Ports) {
        self.0.lock().insert(name.to_owned(), ports);
    }

    pub(super) fn remove(&self, name: &str) {
        self.0.lock().remove(name);
    }

    pub(super) fn of(&self, name: &str, flag: &str) -> Option<SocketAddr> {
        self.0.lock().get(name)?.get(flag).copied()
    }
}

/// Listens at the address of a Service, and forwards each connection to the address that `flag` sets on a replica, in turn.
pub(super) async fn serve(
    address: SocketAddr,
    selector: Selector,
    api: &apiserver::ApiObjects,
    addresses: &ReplicaAddresses,
    flag: &'static str,
) -> Result<AbortOnDropHandle<()>> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    let (api, addresses) = (api.clone(), addresses.clone());
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        let mut connections = JoinSet::new();
        let mut n_accepted = 0;
        while let Ok((mut client, _)) = listener.accept().await {
            while connections.try_join_next().is_some() {}
            let backends = backends(&api, &selector, &addresses, flag);
            n_accepted += 1;
            let Some(backend) = backends.get(n_accepted % backends.len().max(1)).copied() else {
                continue;
            };
            connections.spawn(async move {
                // The two ends of the connection notice when it breaks.
                if let Ok(mut server) = TcpStream::connect(backend).await {
                    let _ = copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    })))
}

/// The addresses that `flag` sets on the replicas that a Service selects.
fn backends(
    api: &apiserver::ApiObjects,
    selector: &Selector,
    addresses: &ReplicaAddresses,
    flag: &str,
) -> Vec<SocketAddr> {
    let pods = api.list("pods", Some(NAMESPACE)).unwrap_or_default();
    let mut backends = Vec::new();
    for pod in pods {
        let label = |key: &String| pod.pointer("/metadata/labels").and_then(|labels| labels.get(key));
        let is_selected = selector
            .iter()
            .all(|(key, value)| label(key).is_some_and(|label| label == value));
        if is_selected && is_ready(&pod) && pod.pointer("/metadata/deletionTimestamp").is_none() {
            backends.extend(addresses.of(object::text(&pod, "/metadata/name"), flag));
        }
    }
    backends
}

/// Returns true if a pod's condition `Ready` is true.
pub(super) fn is_ready(pod: &Value) -> bool {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|one| object::text(one, "/type") == "Ready" && object::text(one, "/status") == "True")
}

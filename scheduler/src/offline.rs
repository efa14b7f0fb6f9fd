//! An extender that answers from given objects, without an API server: for benchmarks, tests and trials. No daemon calls it.
//!
//! Its bind verb fails, as no API server listens; [`bind`] returns the binding that the verb would write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use daemon::metrics_text::MetricsText;
use kube::Client;
use placement::Policies;
use prometheus_client::registry::Registry;
use proto::node::Node;
use proto::pod::Pod;
use proto::resource::ResourceNames;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::bind::{Binder, PodBinding, PodId};
use crate::config::Serving;
use crate::extender::bind::BindError;
use crate::extender::{Extender, router};
use crate::index::{Assumed, Index, RawDevice, Shared};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::watch::ObjectStore;

/// An index that was shown these objects as the complete lists of their kinds. Objects that cannot be read are left out.
pub fn index(
    nodes: impl Iterator<Item = Value>,
    devices: impl Iterator<Item = Value>,
    pods: impl Iterator<Item = Value>,
) -> Index {
    index_with(Policies::default(), nodes, devices, pods)
}

/// An index that was shown these objects as the complete lists of their kinds, and that places pods by these policies.
pub fn index_with(
    policies: Policies,
    nodes: impl Iterator<Item = Value>,
    devices: impl Iterator<Item = Value>,
    pods: impl Iterator<Item = Value>,
) -> Index {
    let hint_ttl = Duration::from_secs(30);
    let mut index = Index::new(ResourceNames::default(), policies, hint_ttl);
    list::<Node>(&mut index, nodes);
    list::<RawDevice>(&mut index, devices);
    list::<Pod>(&mut index, pods);
    index
}

/// Shows all objects of one kind to the index, as a watch does with its first list. Objects that cannot be parsed are left out.
fn list<K: DeserializeOwned>(index: &mut Index, objects: impl Iterator<Item = Value>)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    // Between the begin and the end of a list, so that the index takes these objects for all of their kind.
    for object in objects.filter_map(|object| serde_json::from_value(object).ok()) {
        index.apply(object);
    }
    ObjectStore::<K>::end_list(index);
}

/// An extender that answers from this index.
pub fn extender(index: Index) -> Extender {
    let index = Shared::new(index);
    let refuse_connection = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        Err::<http::Response<kube::client::Body>, _>(std::io::Error::from(
            std::io::ErrorKind::ConnectionRefused,
        ))
    });
    let leadership = Leadership::alone();
    let metrics = Metrics::register(&mut Registry::default(), index.clone(), &leadership);
    let binder = Binder::new(
        Client::new(refuse_connection, "default"),
        // The time limit of binds does not matter: every connection is refused at once.
        Duration::from_secs(4),
        leadership,
    );
    Extender::new(index, metrics, binder, &Serving::default())
}

/// The routes of an extender, which answer without a socket.
pub fn routes(extender: &Arc<Extender>) -> Router {
    router(Arc::clone(extender), MetricsText::new(Registry::default()))
}

/// Decides on a bind as the bind verb does, and counts the binding as written. The index must have been shown the pod before.
pub fn bind(
    extender: &Extender,
    pod: &PodId,
    node: &str,
    nanos: u64,
    now: Instant,
) -> Result<PodBinding, BindError> {
    let mut index = extender.index().write();
    let facts = index.pod(&pod.uid).filter(|facts| index.requests_devices(facts));
    let Some(facts) = facts.cloned() else {
        return Ok(PodBinding::without_devices(pod.clone(), node));
    };
    match index.assume(pod, &facts, node, nanos, now)? {
        Assumed::AlreadyBound => Ok(PodBinding::without_devices(pod.clone(), node)),
        Assumed::Write {
            binding, assumed_at, ..
        } => {
            index.confirm(&pod.uid, assumed_at, now);
            Ok(binding)
        }
    }
}

//! Fills a real API server with nodes, Device objects and bound pods that no kubelet runs, and removes them again.
//!
//! Every object has a label, so that a second run makes only what is missing and `--clean` deletes nothing
//! else.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::objects::{Objects, each};
use crate::load::fleet;
use kit::console::Console;
use kit::pods::set_in;

/// The namespace of the pods.
pub(super) const NAMESPACE: &str = "gpushare-load";
/// The label of every object of this load.
pub(super) const LABEL: &str = "gpushare/load";
/// The label's value on pods that a scheduler has to place.
pub(super) const WAITING: &str = "waiting";
/// The label's value on all other objects: nodes, devices, bound pods.
const FLEET: &str = "fleet";
/// The label's value on a node that still has the taint of a new one; a run that broke off makes it again.
const BEGUN: &str = "begun";

/// The longest wait until a new `CustomResourceDefinition` is served.
const PATIENCE: Duration = Duration::from_secs(20);

const NAMESPACES: &str = "/api/v1/namespaces";
const NODES: &str = "/api/v1/nodes";
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const DEVICES: &str = "/apis/scheduling.koordinator.sh/v1alpha1/devices";

/// The URL path of a namespaced kind in this load's namespace.
pub(super) fn path(kind: &str) -> String {
    format!("{NAMESPACES}/{NAMESPACE}/{kind}")
}

/// The size of the cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClusterSize {
    pub(super) n_nodes: u32,
    pub(super) n_pods: u32,
    pub(super) pod_bytes: usize,
}

/// Creates the objects that are missing; refuses a cluster that has other nodes.
pub(super) async fn fill(console: &Console, objects: &Objects, size: ClusterSize) -> Result<()> {
    let others = objects.names(NODES, &format!("!{LABEL}")).await?;
    ensure!(
        others.is_empty(),
        "the cluster has {} nodes of its own; pods of this load could run there",
        others.len()
    );
    objects.create(CRDS, &fleet::crd()?).await?;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    objects.create(NAMESPACES, &labelled(namespace, FLEET)).await?;
    // Pods are refused without the namespace's service account, and the cluster may have no controller that makes it.
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    objects.create(&path("serviceaccounts"), &account).await?;
    until_there_are_devices(objects).await?;
    make_nodes(console, objects, size).await?;
    make_pods(console, objects, size).await
}

/// Creates the Device object of the first node as soon as the API server serves the new `CustomResourceDefinition`.
async fn until_there_are_devices(objects: &Objects) -> Result<()> {
    let device = labelled(fleet::device(&fleet::node_name(0)), FLEET);
    let began = Instant::now();
    loop {
        match objects.create(DEVICES, &device).await {
            Err(_) if began.elapsed() < PATIENCE => tokio::time::sleep(Duration::from_millis(200)).await,
            made => return made,
        }
    }
}

/// Creates the missing nodes and their Device objects.
async fn make_nodes(console: &Console, objects: &Objects, size: ClusterSize) -> Result<()> {
    let wanted: BTreeSet<String> = (0..size.n_nodes).map(fleet::node_name).collect();
    let there = objects.names(NODES, &format!("{LABEL}={FLEET}")).await?;
    ensure!(
        there.is_subset(&wanted),
        "the cluster is filled with more nodes than asked for; empty it with --clean"
    );
    each(
        console,
        "making nodes",
        wanted.difference(&there),
        |name| async move {
            objects
                .create(DEVICES, &labelled(fleet::device(name), FLEET))
                .await?;
            objects.create(NODES, &labelled(fleet::node(name), BEGUN)).await?;
            // A new node is tainted as not ready until a controller has looked at it.
            let ready = json!({"metadata": {"labels": {LABEL: FLEET}}, "spec": {"taints": null}});
            objects.patch(&format!("{NODES}/{name}"), &ready).await
        },
    )
    .await
}

/// Creates the missing bound pods.
async fn make_pods(console: &Console, objects: &Objects, size: ClusterSize) -> Result<()> {
    let pods = path("pods");
    // Named by node, so that clusters of different sizes are not mistaken for one another.
    let name = |idx: u32| format!("bound-{:05}-{}", idx % size.n_nodes, idx / size.n_nodes);
    let there = objects.names(&pods, &format!("{LABEL}={FLEET}")).await?;
    let wanted: BTreeSet<String> = (0..size.n_pods).map(name).collect();
    ensure!(
        there.is_subset(&wanted),
        "the cluster is filled with more pods than asked for; empty it with --clean"
    );
    let missing = (0..size.n_pods).filter(|idx| !there.contains(&name(*idx)));
    let (name, pods) = (&name, pods.as_str());
    each(console, "making bound pods", missing, |idx| async move {
        let mut pod = fleet::bound_pod(idx, size.n_nodes, size.pod_bytes);
        set_in(&mut pod, "metadata", "name", json!(name(idx)));
        objects.create(pods, &of_load(pod, FLEET)).await
    })
    .await
}

/// Deletes all objects of this load but the `CustomResourceDefinition` of Device objects, which others may use.
pub(super) async fn clean(console: &Console, objects: &Objects) -> Result<()> {
    for kind in [path("pods").as_str(), NODES, DEVICES] {
        let names = objects.names(kind, LABEL).await?;
        objects.delete_all(console, kind, names).await?;
    }
    objects.delete(&format!("{NAMESPACES}/{NAMESPACE}")).await
}

/// The pod with this load's namespace and label, and without a token, which no controller may be there to
/// issue.
pub(super) fn of_load(pod: Value, label: &str) -> Value {
    let mut pod = labelled(pod, label);
    set_in(&mut pod, "metadata", "namespace", json!(NAMESPACE));
    set_in(&mut pod, "spec", "automountServiceAccountToken", json!(false));
    pod
}

/// The object with this load's label and no other.
fn labelled(mut object: Value, label: &str) -> Value {
    set_in(&mut object, "metadata", "labels", json!({LABEL: label}));
    object
}

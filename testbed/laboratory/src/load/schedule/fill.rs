//! Fills a real API server with nodes, Device objects and bound pods that no kubelet runs, and removes them again.
//!
//! Every object has a label, so that a second run makes only what is missing and `--clean` deletes nothing
//! else.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::ScheduleArgs;
use super::objects::{Objects, each};
use crate::load::fleet;
use kit::console::Console;
use kit::pods::set_in;
use kit::polling;

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

pub(super) fn path(kind: &str) -> String {
    format!("{NAMESPACES}/{NAMESPACE}/{kind}")
}

/// Creates the objects that are missing; refuses a cluster that has other nodes.
pub(super) async fn fill(console: &Console, objects: &Objects, args: &ScheduleArgs) -> Result<()> {
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
    make_nodes(console, objects, args).await?;
    make_pods(console, objects, args).await
}

/// Creates the Device object of the first node as soon as the API server serves the new `CustomResourceDefinition`.
async fn until_there_are_devices(objects: &Objects) -> Result<()> {
    let device = labelled(fleet::device(&fleet::node_name(0)), FLEET);
    let created = async || {
        let created = objects.create(DEVICES, &device).await;
        Ok(created.map_err(|error| format!("{error:#}")))
    };
    polling::until_found(PATIENCE, created).await
}

async fn make_nodes(console: &Console, objects: &Objects, args: &ScheduleArgs) -> Result<()> {
    let wanted: BTreeSet<String> = (0..args.nodes).map(fleet::node_name).collect();
    let there = objects.names(NODES, &format!("{LABEL}={FLEET}")).await?;
    ensure!(
        there.is_subset(&wanted),
        "the cluster is filled with more nodes than asked for; empty it with --clean"
    );
    let missing = wanted.difference(&there);
    each(console, "making nodes", missing, |name| make_node(objects, name)).await
}

async fn make_node(objects: &Objects, name: &str) -> Result<()> {
    let device = labelled(fleet::device(name), FLEET);
    objects.create(DEVICES, &device).await?;
    objects.create(NODES, &labelled(fleet::node(name), BEGUN)).await?;
    // A new node is tainted as not ready until a controller has looked at it.
    let ready = json!({"metadata": {"labels": {LABEL: FLEET}}, "spec": {"taints": null}});
    objects.patch(&format!("{NODES}/{name}"), &ready).await
}

async fn make_pods(console: &Console, objects: &Objects, args: &ScheduleArgs) -> Result<()> {
    let pods = path("pods");
    // Named by node, so that clusters of different sizes are not mistaken for one another.
    let name = |idx: u32| format!("bound-{:05}-{}", idx % args.nodes, idx / args.nodes);
    let there = objects.names(&pods, &format!("{LABEL}={FLEET}")).await?;
    let wanted: BTreeSet<String> = (0..args.n_pods()).map(name).collect();
    ensure!(
        there.is_subset(&wanted),
        "the cluster is filled with more pods than asked for; empty it with --clean"
    );
    let missing = (0..args.n_pods()).filter(|idx| !there.contains(&name(*idx)));
    let (name, pods) = (&name, pods.as_str());
    each(console, "making bound pods", missing, |idx| async move {
        let mut pod = fleet::bound_pod(idx, args.nodes, args.pod_bytes);
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

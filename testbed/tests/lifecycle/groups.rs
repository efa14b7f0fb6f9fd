//! Groups of pods that have to be on one node, or on the GPUs of one link group: from their annotations to the GPUs that their
//! containers see.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kit::cluster::{GpuFault, GpuSpec, LocalCluster, NodeSetup};
use kit::http_client::HttpClient;
use kit::kube_scheduler::PERMIT_WAIT;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, node_of};
use kit::pods::{NamespacePods, PodBuilder};
use kit::polling;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use proto::record::DEVICE_ALLOCATED;
use serde_json::{Value, json};
use testbed::replicas::Replicas;

use crate::{DEADLINE, cluster_of_all, until_run, verify};

/// Members of each group.
const N_MEMBERS: usize = 4;
/// MiB of a GPU.
const GPU_MIB: u64 = 16384;

/// Eight GPUs on two NUMA nodes, each on a switch of its own, of which some are sick.
fn node(name: &str, sick: &[u32]) -> NodeSetup {
    let spec = NodeSetup::new(name, &[GPU_MIB; 8]);
    let place = |gpu: GpuSpec| {
        let details = [
            ("pcieId", json!(format!("0000:{:02x}:00.0", gpu.minor))),
            ("numaNode", json!(gpu.minor / 4)),
        ];
        let health = if sick.contains(&gpu.minor) {
            GpuFault::Xid(79)
        } else {
            GpuFault::Healthy
        };
        GpuSpec {
            details: details
                .into_iter()
                .map(|(field, value)| (field.to_owned(), value))
                .collect(),
            health,
            ..gpu
        }
    };
    NodeSetup {
        gpus: spec.gpus.into_iter().map(place).collect(),
        ..spec
    }
}

/// Creates a `PodGroup` with a wish for a domain, and its members.
async fn create_group(
    cluster: &LocalCluster,
    pods: &NamespacePods,
    group: &str,
    domain: &str,
    mib: u64,
) -> Result<Vec<String>> {
    let annotations = json!({"gpushare/group-domain": domain, "gpushare/group-domain-policy": "required"});
    let object = json!({
        "metadata": {"name": group, "annotations": annotations},
        "spec": {"schedulingPolicy": {"gang": {"minCount": N_MEMBERS}}},
    });
    let groups: Api<PodGroup> = Api::namespaced(cluster.client().clone(), "default");
    groups
        .create(&PostParams::default(), &serde_json::from_value(object)?)
        .await?;
    let mut names = Vec::new();
    for nth in 0..N_MEMBERS {
        let name = format!("{group}-{nth}");
        pods.create(&PodBuilder::units(&name, mib / 1024).member_of(group))
            .await?;
        names.push(name);
    }
    Ok(names)
}

/// The node of a bound pod and the minors in its record.
fn place_of(snapshot: &ClusterSnapshot, name: &str) -> Result<(String, Vec<u64>)> {
    let pod = snapshot.pod(name).with_context(|| format!("no pod {name}"))?;
    let node = node_of(pod).with_context(|| format!("{name} is not bound"))?;
    let annotations = pod.metadata.annotations.as_ref().context("no annotations")?;
    let record: Value = serde_json::from_str(annotations.get(DEVICE_ALLOCATED).context("no record")?)?;
    let gpus = record
        .get("gpu")
        .and_then(Value::as_array)
        .context("no GPU in the record")?;
    let minors = gpus.iter().filter_map(|gpu| gpu.get("minor")?.as_u64()).collect();
    Ok((node.to_owned(), minors))
}

/// The nodes, and the NUMA nodes on them, of pods.
fn domains_of(snapshot: &ClusterSnapshot, names: &[String]) -> Result<BTreeSet<(String, u64)>> {
    let mut domains = BTreeSet::new();
    for name in names {
        let (node, minors) = place_of(snapshot, name)?;
        domains.extend(minors.into_iter().map(|minor| (node.clone(), minor / 4)));
    }
    Ok(domains)
}

fn snapshot_of(cluster: &LocalCluster) -> ClusterSnapshot {
    ClusterSnapshot::of(cluster.api().objects())
}

/// Each NUMA node of `n1` has three GPUs, and one of `n2` has four: a group of four whole GPUs fits there alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_runs_on_one_link_group_ten_times_of_ten() -> Result<()> {
    let (cluster, pods) = cluster_of_all(vec![node("n1", &[0, 4]), node("n2", &[5])]).await?;
    for round in 0..10 {
        let names = create_group(&cluster, &pods, &format!("group-{round}"), "link", GPU_MIB).await?;
        run_on_the_only_link_group(&cluster, &pods, &names).await?;
    }
    Ok(())
}

/// Members by Koordinator's annotations come one by one, and wait in Permit until all of them have a node.
#[tokio::test(flavor = "multi_thread")]
async fn members_that_wait_in_permit_run_on_one_link_group() -> Result<()> {
    let (cluster, pods) = cluster_of_all(vec![node("n1", &[0, 4]), node("n2", &[5])]).await?;
    for round in 0..10 {
        let annotations: BTreeMap<String, String> = [
            ("gang.scheduling.koordinator.sh/name", format!("gang-{round}")),
            (
                "gang.scheduling.koordinator.sh/min-available",
                N_MEMBERS.to_string(),
            ),
            ("gpushare/group-domain", "link".to_owned()),
            ("gpushare/group-domain-policy", "required".to_owned()),
            (PERMIT_WAIT, "500".to_owned()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let mut names = Vec::new();
        for nth in 0..N_MEMBERS {
            let name = format!("gang-{round}-{nth}");
            pods.create(&PodBuilder::units(&name, GPU_MIB / 1024).annotated(&annotations))
                .await?;
            names.push(name);
        }
        run_on_the_only_link_group(&cluster, &pods, &names).await?;
    }
    Ok(())
}

/// Waits until the members run on the only link group with four GPUs, and deletes them.
async fn run_on_the_only_link_group(
    cluster: &LocalCluster,
    pods: &NamespacePods,
    names: &[String],
) -> Result<()> {
    let names_to_run: Vec<&str> = names.iter().map(String::as_str).collect();
    until_run(cluster, &names_to_run).await?;
    let domains = domains_of(&snapshot_of(cluster), names)?;
    ensure!(domains == BTreeSet::from([("n2".to_owned(), 0)]), "{domains:?}");
    verify(cluster).await?;
    delete_all(cluster, pods, names).await
}

/// Deletes pods, and waits until they are gone.
async fn delete_all(cluster: &LocalCluster, pods: &NamespacePods, names: &[String]) -> Result<()> {
    for name in names {
        pods.api().delete(name, &DeleteParams::default()).await?;
    }
    let are_gone = |snapshot: &ClusterSnapshot| {
        let mut left = names.iter().filter(|name| snapshot.pod(name).is_some());
        left.next().is_none().then_some(())
    };
    cluster.until("the members to be gone", DEADLINE, are_gone).await
}

/// Fifty groups of three wishes compete for room for forty while leaders die: forty run whole, ten wait whole.
#[tokio::test(flavor = "multi_thread")]
async fn groups_that_compete_run_whole_or_wait_whole() -> Result<()> {
    const N_GROUPS: usize = 50;
    const N_ROOMS: usize = 40;
    let nodes = (0..5).map(|at| node(&format!("n{at}"), &[])).collect();
    let (cluster, pods) = cluster_of_all(nodes).await?;
    cluster.scheduler.kill().await;
    let mut replicas = Replicas::start(&cluster).await?;
    replicas.until_led_by_another_than("").await?;
    let mut groups: BTreeMap<String, (&str, Vec<String>)> = BTreeMap::new();
    for at in 0..N_GROUPS {
        let domain = ["any", "node", "link"][at % 3];
        let name = format!("{domain}-{at}");
        let members = create_group(&cluster, &pods, &name, domain, GPU_MIB / 4).await?;
        groups.insert(name, (domain, members));
        if at % 20 == 10 {
            let leader = replicas.until_led_by_another_than("").await?;
            replicas.kill(&leader).await?;
            replicas.until_led_by_another_than(&leader).await?;
            replicas.restart(&leader).await?;
        }
    }
    let bound_in_part = |snapshot: &ClusterSnapshot| -> Vec<String> {
        let mut parts = Vec::new();
        for (group, (_, members)) in &groups {
            let is_up = |name: &&String| snapshot.pod(name).is_some_and(is_running);
            let n_running = members.iter().filter(is_up).count();
            if n_running > 0 && n_running < N_MEMBERS {
                parts.push(format!("{group}: {n_running}"));
            }
        }
        parts
    };
    let all_run = async || {
        let snapshot = snapshot_of(&cluster);
        let members = groups.values().flat_map(|(_, members)| members);
        let is_up = |name: &&String| snapshot.pod(name).is_some_and(is_running);
        let n_running = members.filter(is_up).count();
        let missing = || {
            format!(
                "{n_running} members run; groups in part: {:?}",
                bound_in_part(&snapshot)
            )
        };
        Ok((n_running == N_ROOMS * N_MEMBERS)
            .then_some(())
            .ok_or_else(missing))
    };
    polling::until_found(2 * DEADLINE, all_run).await?;
    verify(&cluster).await?;
    let snapshot = snapshot_of(&cluster);
    let mut n_waiting = 0;
    for (group, (domain, members)) in &groups {
        let bound = members
            .iter()
            .filter(|name| snapshot.pod(name).is_some_and(|pod| node_of(pod).is_some()));
        let n_bound = bound.count();
        ensure!(
            n_bound == 0 || n_bound == N_MEMBERS,
            "{group} is bound in part: {n_bound}"
        );
        if n_bound == 0 {
            n_waiting += 1;
            continue;
        }
        let places = domains_of(&snapshot, members)?;
        let nodes: BTreeSet<&String> = places.iter().map(|(node, _)| node).collect();
        ensure!(*domain == "any" || nodes.len() == 1, "{group}: {places:?}");
        ensure!(*domain != "link" || places.len() == 1, "{group}: {places:?}");
    }
    ensure!(n_waiting == N_GROUPS - N_ROOMS, "{n_waiting} groups wait");
    let waiting: Vec<String> = groups
        .values()
        .flat_map(|(_, members)| members)
        .filter(|name| !snapshot.pod(name).is_some_and(is_running))
        .cloned()
        .collect();
    delete_all(&cluster, &pods, &waiting).await?;
    let leader = replicas.until_led_by_another_than("").await?;
    let url = format!("http://{}/metrics", replicas.address(&leader)?);
    let client = HttpClient::new();
    let kept = "room is kept though no member waits".to_owned();
    polling::until(DEADLINE, kept, async || {
        let Ok((_, metrics)) = client.get(&url).await else {
            return false;
        };
        let metrics = String::from_utf8_lossy(&metrics).into_owned();
        let is_zero = |name: &str| metrics.lines().any(|line| line == format!("{name} 0"));
        is_zero("gpushare_scheduler_group_rooms") && is_zero("gpushare_scheduler_hints")
    })
    .await?;
    replicas.end().await
}

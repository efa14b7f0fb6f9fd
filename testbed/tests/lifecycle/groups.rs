//! Groups of pods that have to be on one node, or on the GPUs of one link group: from their annotations to the GPUs that their
//! containers see.
//!
//! `GROUPS_RUNS` is the number of clusters on which groups compete, `GROUPS_SEED` the seed of the first one.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kit::cluster::{GpuFault, GpuSpec, LocalCluster, NodeSetup};
use kit::dice::dice;
use kit::http_client::HttpClient;
use kit::kube_scheduler::PERMIT_WAIT;
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, node_of};
use kit::pods::{NamespacePods, PodBuilder};
use kit::polling;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use proto::record::DEVICE_ALLOCATED;
use rand::RngExt;
use rand::seq::{IndexedRandom, IteratorRandom};
use rstest::rstest;
use serde_json::{Value, json};
use testbed::replicas::Replicas;

use super::{DEADLINE, cluster_of_all, until_run, verify};

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

/// The label of a node's rack.
const RACK: &str = "example.com/rack";

fn in_rack(rack: &str, node: NodeSetup) -> NodeSetup {
    NodeSetup {
        labels: [(RACK.to_owned(), rack.to_owned())].into(),
        ..node
    }
}

/// A `PodGroup`'s wishes.
#[derive(Clone, Copy)]
struct Wish<'a> {
    domain: &'a str,
    /// True if the nodes of all members share the label [`RACK`].
    is_in_one_rack: bool,
}

/// A wish for a domain alone.
fn within(domain: &str) -> Wish<'_> {
    Wish {
        domain,
        is_in_one_rack: false,
    }
}

/// Creates a `PodGroup` with a wish for a domain, and its members.
async fn create_group(
    cluster: &LocalCluster,
    pods: &NamespacePods,
    group: &str,
    wish: Wish<'_>,
    mib: u64,
) -> Result<Vec<String>> {
    let (domain, topology) = (wish.domain, json!([{"key": RACK}]));
    let constraints = wish.is_in_one_rack.then(|| json!({"topology": topology}));
    let annotations = json!({"gpushare/group-domain": domain, "gpushare/group-domain-policy": "required"});
    let object = json!({
        "metadata": {"name": group, "annotations": annotations},
        "spec": {"schedulingPolicy": {"gang": {"minCount": N_MEMBERS}}, "schedulingConstraints": constraints},
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
        let names = create_group(
            &cluster,
            &pods,
            &format!("group-{round}"),
            within("link"),
            GPU_MIB,
        )
        .await?;
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

/// kube-scheduler offers the nodes of one rack after the other. The only link group for the group is in the rack that it tries
/// last, or in the one that it tries first, so that the last decision of the extender is not the one that counts.
#[rstest]
#[case::tried_last("a", "b")]
#[case::tried_first("b", "a")]
#[tokio::test(flavor = "multi_thread")]
async fn a_group_runs_on_the_link_group_of_one_rack(#[case] without: &str, #[case] with: &str) -> Result<()> {
    let nodes = vec![
        in_rack(without, node("n1", &[0, 4])),
        in_rack(with, node("n2", &[5])),
    ];
    let (cluster, pods) = cluster_of_all(nodes).await?;
    let wish = Wish {
        domain: "link",
        is_in_one_rack: true,
    };
    for round in 0..3 {
        let names = create_group(&cluster, &pods, &format!("group-{round}"), wish, GPU_MIB).await?;
        run_on_the_only_link_group(&cluster, &pods, &names).await?;
    }
    Ok(())
}

/// Both racks have room, and nodes of different racks follow each other by name. A group on any nodes needs two of them.
#[rstest]
#[case::any("any", GPU_MIB)]
#[case::node("node", GPU_MIB / 2)]
#[tokio::test(flavor = "multi_thread")]
async fn a_group_runs_inside_one_rack(#[case] domain: &str, #[case] mib: u64) -> Result<()> {
    let mut nodes = Vec::new();
    for (name, rack) in [("n1", "a"), ("n2", "b"), ("n3", "a"), ("n4", "b")] {
        nodes.push(in_rack(rack, node(name, &[0, 1, 2, 3, 4])));
    }
    let (cluster, pods) = cluster_of_all(nodes).await?;
    let wish = Wish {
        domain,
        is_in_one_rack: true,
    };
    for round in 0..3 {
        let names = create_group(&cluster, &pods, &format!("group-{round}"), wish, mib).await?;
        let names_to_run: Vec<&str> = names.iter().map(String::as_str).collect();
        until_run(&cluster, &names_to_run).await?;
        let snapshot = snapshot_of(&cluster);
        let places = domains_of(&snapshot, &names)?;
        let nodes: BTreeSet<&str> = places.iter().map(|(node, _)| node.as_str()).collect();
        ensure!(nodes.len() == if domain == "any" { 2 } else { 1 }, "{places:?}");
        ensure!(
            nodes.is_subset(&["n1", "n3"].into()) || nodes.is_subset(&["n2", "n4"].into()),
            "{places:?}"
        );
        verify(&cluster).await?;
        delete_all(&cluster, &pods, &names).await?;
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

/// A number from the environment.
fn setting(name: &str, default: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is {text:?}")),
        Err(_) => Ok(default),
    }
}

/// Groups of three wishes compete for room for ten fewer while leaders die: all run whole or wait whole, and none waits for which
/// there is room.
#[tokio::test(flavor = "multi_thread")]
async fn groups_that_compete_run_whole_or_wait_whole() -> Result<()> {
    let first = setting("GROUPS_SEED", 0)?;
    for seed in first..first + setting("GROUPS_RUNS", 1)? {
        compete(seed).await.with_context(|| format!("seed {seed}"))?;
    }
    Ok(())
}

/// Groups by name, with their wishes and the names of their members.
type Groups<'a> = BTreeMap<String, (Wish<'a>, Vec<String>)>;

/// The groups that do not run whole and do not wait for room: some members are bound, or the shares that are free in a domain
/// are enough. A NUMA node has `n_shares` of them.
fn unsettled<'a>(
    snapshot: &ClusterSnapshot,
    groups: &Groups<'_>,
    nodes: impl Iterator<Item = &'a String>,
    n_shares: u64,
) -> Result<Vec<String>> {
    let numa_nodes = nodes.flat_map(|node| [(node.clone(), 0), (node.clone(), 1)]);
    let mut free: BTreeMap<(String, u64), u64> = numa_nodes.map(|at| (at, n_shares)).collect();
    let is_bound = |name: &&String| snapshot.pod(name).is_some_and(|pod| node_of(pod).is_some());
    for name in groups.values().flat_map(|(_, members)| members).filter(is_bound) {
        let (node, minors) = place_of(snapshot, name)?;
        for minor in minors {
            let n_free = free.get_mut(&(node.clone(), minor / 4)).context("no such GPU")?;
            *n_free = n_free.checked_sub(1).context("a GPU has more shares than room")?;
        }
    }
    let mut of_nodes: BTreeMap<&str, u64> = BTreeMap::new();
    for ((node, _), n_free) in &free {
        *of_nodes.entry(node).or_default() += n_free;
    }
    let most = |domain: &str| match domain {
        "link" => free.values().max().copied().unwrap_or(0),
        "node" => of_nodes.values().max().copied().unwrap_or(0),
        _ => free.values().sum(),
    };
    let mut unsettled = Vec::new();
    for (group, (wish, members)) in groups {
        let is_up = |name: &&String| snapshot.pod(name).is_some_and(is_running);
        let n_running = members.iter().filter(is_up).count();
        let waits = !members.iter().any(|name| is_bound(&name)) && most(wish.domain) < N_MEMBERS as u64;
        if n_running < N_MEMBERS && !waits {
            unsettled.push(format!("{group}: {n_running} run"));
        }
    }
    Ok(unsettled)
}

/// Checks that each group is where it has to be, whole, or waits whole; returns the number of those that wait.
fn check_places(
    snapshot: &ClusterSnapshot,
    groups: &Groups<'_>,
    racks: &BTreeMap<String, &str>,
) -> Result<usize> {
    let mut n_waiting = 0;
    for (group, (wish, members)) in groups {
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
        let places = domains_of(snapshot, members)?;
        let nodes: BTreeSet<&String> = places.iter().map(|(node, _)| node).collect();
        let racks: BTreeSet<&&str> = nodes.iter().filter_map(|node| racks.get(*node)).collect();
        ensure!(wish.domain == "any" || nodes.len() == 1, "{group}: {places:?}");
        ensure!(wish.domain != "link" || places.len() == 1, "{group}: {places:?}");
        ensure!(!wish.is_in_one_rack || racks.len() == 1, "{group}: {places:?}");
    }
    Ok(n_waiting)
}

/// One run. The seed decides the wishes, the size of a share, and the groups after whose creation a leader dies.
async fn compete(seed: u64) -> Result<()> {
    const N_WAITING: usize = 10;
    const N_KILLS: usize = 3;
    let mut dice = dice(seed, &["groups"]);
    let racks: BTreeMap<String, &str> = ["a", "b", "a", "b", "a"]
        .into_iter()
        .enumerate()
        .map(|(at, rack)| (format!("n{at}"), rack))
        .collect();
    let nodes = racks
        .iter()
        .map(|(name, rack)| in_rack(rack, node(name, &[])))
        .collect();
    let n_per_gpu: u64 = *[2, 3, 4].choose(&mut dice).context("no size")?;
    let n_rooms = racks.len() * 8 * usize::try_from(n_per_gpu)? / N_MEMBERS;
    let n_groups = n_rooms + N_WAITING;
    let kills = (0..n_groups).sample(&mut dice, N_KILLS);
    let (cluster, pods) = cluster_of_all(nodes).await?;
    cluster.scheduler.kill().await;
    let mut replicas = Replicas::start(&cluster).await?;
    replicas.until_led_by_another_than("").await?;
    let mut groups: Groups<'_> = Groups::new();
    for at in 0..n_groups {
        let domain = *["any", "node", "link"].choose(&mut dice).context("no domain")?;
        let name = format!("{domain}-{at}");
        let wish = Wish {
            domain,
            // Room for members on several nodes is kept in the last placement alone.
            is_in_one_rack: domain != "any" && dice.random(),
        };
        let members = create_group(&cluster, &pods, &name, wish, GPU_MIB / n_per_gpu).await?;
        groups.insert(name, (wish, members));
        if kills.contains(&at) {
            let leader = replicas.until_led_by_another_than("").await?;
            replicas.process(&leader)?.kill().await;
            replicas.until_led_by_another_than(&leader).await?;
            replicas.process(&leader)?.restart().await?;
        }
    }
    let is_over = async || {
        let snapshot = snapshot_of(&cluster);
        let unsettled = unsettled(&snapshot, &groups, racks.keys(), 4 * n_per_gpu)?;
        Ok(if unsettled.is_empty() {
            Ok(())
        } else {
            Err(unsettled.join(", "))
        })
    };
    polling::until_found(2 * DEADLINE, is_over).await?;
    verify(&cluster).await?;
    let snapshot = snapshot_of(&cluster);
    let n_waiting = check_places(&snapshot, &groups, &racks)?;
    ensure!(n_waiting >= N_WAITING, "{n_waiting} groups wait");
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

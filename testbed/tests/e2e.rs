//! Every scenario, faults included, on the testbed; then what the daemons asked of the API server against `deploy/`.

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use serde_json::json;
use testbed::apiserver::{self, Fault, Matching};
use testbed::cluster::{
    Cluster, ClusterSpec, NodeSpec, PLUGIN_USER, SCHEDULER_USER, WebhookSpec, default_deploy,
};
use testbed::console::Console;
use testbed::kubelet::PreparedDevice;
use testbed::observer::Snapshot;
use testbed::pods::PodSpec;
use testbed::rbac::{self, Access, Rbac, RbacTarget};
use testbed::scenario::{self, World};
use testbed::{e2e, manifests, replicas};
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn every_scenario() {
    let endings = e2e::on_testbed(&Console::new(true), &scenario::all(), default_deploy())
        .await
        .unwrap();
    let failures: Vec<_> = endings.iter().filter(|ending| ending.failure.is_some()).collect();
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(endings.len() >= 20);
}

/// Its container is held, and held again when kubelet tries once more: an event, and the same event counted again.
async fn hold_a_pod_bound_without_the_scheduler(cluster: &Cluster) -> Result<(), Box<dyn Error>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), "default");
    let container = json!({"name": "c", "image": "x", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}}});
    let pod = json!({"metadata": {"name": "stray"}, "spec": {"nodeName": "n1", "containers": [container]}});
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    let is_written =
        |verb: &str| {
            cluster.api().accesses().iter().any(|access| {
                access.user == PLUGIN_USER && access.resource == "events" && access.verb == verb
            })
        };
    let written = async {
        while !(is_written("create") && is_written("patch")) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(60), written)
        .await
        .map_err(|_| "the plugin writes no event of a pod that it holds")?;
    Ok(())
}

/// kubelet lists a claim: the plugin asks the API server whether it is for administration only. No such claim is there.
async fn use_a_claim(cluster: &mut Cluster) -> Result<(), Box<dyn Error>> {
    let device = PreparedDevice {
        driver: "gpu.nvidia.com".to_owned(),
        pool: "n2".to_owned(),
        name: "gpu-0".to_owned(),
        cdi_names: vec!["k8s.gpu.nvidia.com/claim=uid-gpu-0".to_owned()],
    };
    cluster
        .node("n2")?
        .kubelet()
        .prepare_claim("default", "one", vec![device]);
    let pods: Api<Pod> = Api::namespaced(cluster.client().clone(), "default");
    pods.create(
        &PostParams::default(),
        &PodSpec::new("claimant", &[]).claiming("one").on("n2").pod()?,
    )
    .await?;
    let is_counted = |snapshot: &Snapshot| {
        let device = snapshot.devices.get("n2")?;
        device
            .annotations()
            .get(DEVICES_CHECKPOINTS)?
            .contains("gpu.nvidia.com")
            .then_some(())
    };
    Ok(cluster
        .until("the claim to be counted", Duration::from_secs(60), is_counted)
        .await?)
}

/// The roles of `deploy/` must allow what the daemons really do, and nothing in them may be for show.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemons_do_only_what_their_roles_allow() {
    let cluster = Cluster::start(ClusterSpec::of(vec![
        NodeSpec::new("n1", &[16384, 16384]),
        NodeSpec::new("n2", &[16384]),
    ]))
    .await
    .unwrap();
    let client = cluster.client().clone();
    let deploy = cluster.deploy().to_owned();
    // A binding without an answer makes the scheduler look at the pod.
    let on_bind = Matching::anything()
        .verb("create")
        .resource("pods")
        .subresource("binding")
        .times(1);
    cluster.api().faults().inject(on_bind, Fault::DropReply);
    let mut world = World::new(client, "rbac", None, Some(cluster)).await.unwrap();
    let names = [
        "gpushare-pod",
        "two-devices",
        "refusals",
        "leader-killed",
        "fence-refused",
    ];
    let scenarios = scenario::all();
    for name in names {
        let scenario = scenarios.iter().find(|scenario| scenario.name == name).unwrap();
        world
            .run(scenario)
            .await
            .unwrap_or_else(|error| panic!("{name}: {error:#}"));
    }
    let mut cluster = world.end().await.unwrap().unwrap();
    hold_a_pod_bound_without_the_scheduler(&cluster).await.unwrap();
    use_a_claim(&mut cluster).await.unwrap();
    let mut used = cluster.api().accesses();
    used.extend(
        read_the_views_with_a_token()
            .await
            .unwrap()
            .into_iter()
            .filter(|access| access.resource.ends_with("reviews")),
    );
    let files = ["scheduler-rbac.yaml", "device-plugin-rbac.yaml"]
        .map(|file| manifests::read(&deploy.join("base").join(file)).unwrap());
    let objects: Vec<_> = files
        .iter()
        .flatten()
        .map(|object| serde_json::to_value(object).unwrap())
        .collect();
    let rbac = Rbac::of(&objects).unwrap();
    let daemons = BTreeSet::from([SCHEDULER_USER, PLUGIN_USER]);
    let asked: Vec<_> = used
        .iter()
        .filter(|access| daemons.contains(access.user.as_str()))
        .collect();
    let forbidden: Vec<_> = asked
        .iter()
        .filter(|a| {
            let access = Access {
                group: &a.api_group,
                resource: &a.resource,
                subresource: &a.subresource,
                verb: &a.verb,
            };
            // The leader's own pod and Lease, and the object by which it announces room, are where the daemon itself is.
            let at_home = ["gpushare-scheduler", "gpushare-room"].map(|name| RbacTarget {
                namespace: replicas::NAMESPACE,
                name,
            });
            !std::iter::once(RbacTarget::default())
                .chain(at_home)
                .any(|target| rbac.allows(&a.user, access, target))
        })
        .collect();
    assert!(forbidden.is_empty(), "{forbidden:#?}");
    let scheduler = [rbac::SCHEDULER, rbac::SCHEDULER_LEADER, rbac::SCHEDULER_ROOM]
        .map(|allowed| (SCHEDULER_USER, allowed));
    let allowed = scheduler.into_iter().chain([(PLUGIN_USER, rbac::DEVICE_PLUGIN)]);
    for (daemon, allowed) in allowed {
        let is_used = |access: &&Access<'_>| {
            asked.iter().any(|a| {
                let Access {
                    group,
                    resource,
                    subresource,
                    verb,
                } = **access;
                // A server-side apply that makes the object is a patch, for which the API server also demands `create`.
                let is_applied = ["devices", "csistoragecapacities"].contains(&resource);
                let verb = if is_applied && verb == "create" {
                    "patch"
                } else {
                    verb
                };
                a.user == daemon
                    && [&a.api_group, &a.resource, &a.subresource, &a.verb].map(String::as_str)
                        == [group, resource, subresource, verb]
            })
        };
        let idle: Vec<_> = allowed.iter().filter(|access| !is_used(access)).collect();
        assert!(
            idle.is_empty(),
            "{daemon} is allowed what it never does: {idle:?}"
        );
    }
    cluster.stop().await.unwrap();
}

/// Reads the views as users do that show a token and no certificate; returns the accesses of the daemons that this takes.
async fn read_the_views_with_a_token() -> Result<Vec<apiserver::UsedAccess>, Box<dyn Error>> {
    let webhooks = Some(WebhookSpec { lifetime: "90d" });
    let cluster = Cluster::start(ClusterSpec {
        webhooks,
        ..ClusterSpec::of(vec![NodeSpec::new("n1", &[16384])])
    })
    .await?;
    let url = format!("{}/gpushare-scheduler/inspect", cluster.scheduler_url());
    let of_user = |user: &str| {
        cluster
            .api()
            .token_of(user)
            .ok_or_else(|| format!("{user} has no token"))
    };
    let (plugin, admin) = (of_user(PLUGIN_USER)?, of_user("admin")?);
    let cases = [
        (None, 401),
        (Some("of no user".to_owned()), 401),
        (Some(plugin), 403),
        (Some(admin), 200),
    ];
    for (token, expected) in cases {
        let reader = cluster.scheduler_reader()?;
        let reader = token.map_or(reader.clone(), |token| reader.bearing(token));
        assert_eq!(reader.get(&url).await?.0.as_u16(), expected);
    }
    let used = cluster.api().accesses().into_iter().collect();
    cluster.stop().await?;
    Ok(used)
}

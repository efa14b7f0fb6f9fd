//! Two replicas of the scheduler, of which one leads: killed, stopped, replaced.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::BoxFuture;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use kube::api::{Api, DeleteParams, ListParams};
use proto::resource::GPU_MEMORY;
use serde_json::{Value, json};

use super::breaking;
use super::world::NO_SCHEDULER;
use super::{DEADLINE, Scenario, World};
use crate::replicas::{NAMESPACE, Replicas};
use kit::apiserver::{self, Fault, Matching};
use kit::cluster::SCHEDULER_USER;
use kit::manifests;
use kit::pods::PodBuilder;
use kit::polling;

/// Pods that are on their way while a leader is killed.
const N_PODS: usize = 12;
/// The number of bindings that are in flight when the leader is killed.
const N_LATE: u64 = 3;
/// Faults of bindings that the leader has sent when it dies: not written yet, or written and not answered.
const LATE: [Fault; 2] = [Fault::Delay(Duration::from_millis(500)), Fault::DropReply];
/// A policy that refuses every binding.
const REFUSAL: &str = "test-refuses-bindings";
/// Pause between pods that arrive during a rollout.
const ARRIVAL: Duration = Duration::from_millis(250);

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "replicas that it starts itself", on [Replicas], within with_replicas(world, replicas):
    "leader-killed" => leader_killed,
        "the leader of two replicas killed with bindings in flight: the other goes on, nothing is lost or doubled";
    "leader-paused" => leader_paused,
        "a leader that stands still until another leads binds nothing when it goes on";
    "fence-reinstalled" => fence_reinstalled,
        "the policy that fences replicas deleted and installed again: the next leader binds";
    "fence-refused" => fence_refused,
        "a leader whose bindings the API server refuses is not ready and says so, and goes on when it may";
    "rollout" => rollout,
        "both replicas replaced while pods arrive: none waits, and webhooks answer for each";
};

/// The function of a scenario, which gets the replicas.
type ReplicaAction = for<'a> fn(&'a mut World, &'a mut Replicas) -> BoxFuture<'a, Result<()>>;

/// Runs a scenario with replicas in the place of the cluster's own scheduler.
async fn with_replicas(world: &mut World, scenario: ReplicaAction) -> Result<()> {
    let cluster = world.cluster()?;
    cluster.scheduler.kill().await;
    let mut replicas = Replicas::start(cluster).await?;
    scenario(world, &mut replicas).await?;
    replicas.end().await?;
    world.restart_scheduler().await
}

/// Waits for a condition that no watch shows.
async fn until_true(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let failure = format!("waited in vain for {what}");
    polling::until(DEADLINE, failure, || std::future::ready(condition())).await
}

async fn leader_killed(world: &mut World, replicas: &mut Replicas) -> Result<()> {
    let faults = world.cluster()?.api().faults().clone();
    let mut names = Vec::new();
    for (kill, fault) in LATE.into_iter().enumerate() {
        let leader = replicas.until_led_by_another_than("").await?;
        let on_bind = Matching::requests("create", "pods/binding").times(N_LATE);
        let late = faults.inject(on_bind, fault);
        names.extend(world.create_many(&format!("pod-{kill}"), N_PODS, 1).await?);
        until_true("bindings to be under way", || late.hits() >= N_LATE).await?;
        replicas.process(&leader)?.kill().await;
        replicas.until_led_by_another_than(&leader).await?;
        replicas.process(&leader)?.restart().await?;
    }
    faults.clear();
    world.until_running(&names).await
}

/// Stops the leader until another replica leads, and sends the stopped one a bind request: when it goes on, it must not write
/// the binding. Any error text is right, since the process may look at its own lease before or after it reads the request.
async fn leader_paused(world: &mut World, replicas: &mut Replicas) -> Result<()> {
    let node = world.gpu_node(1)?;
    let room = node.units.iter().min().copied().unwrap_or_default();
    // All GPUs but one are taken.
    world.fill_gpus("holder", &node, 1).await?;
    let late = PodBuilder::units("late", room).scheduler(NO_SCHEDULER);
    let late = world.pods.create(&late).await?;
    let leader = replicas.until_led_by_another_than("").await?;
    let (cluster, address) = (world.cluster()?, replicas.address(&leader)?);
    let url = format!("{}/gpushare-scheduler", cluster.scheduler_url());
    let client = cluster.scheduler_client_at(address)?;
    // The client opens a connection and keeps it.
    client.get(&format!("{url}/inspect")).await?;
    replicas.process(&leader)?.pause().await?;
    let bind = breaking::bind_late(client, url, &late, &node.name);
    replicas.until_led_by_another_than(&leader).await?;
    world.start_units("prompt", room, &node.name).await?;
    replicas.process(&leader)?.resume()?;
    breaking::ensure_not_bound(world, &late, bind).await?;
    world.verify().await?;
    // The previous leader does not come back: its label is removed.
    let leads_no_more = || !replicas.leaders().contains(&leader);
    until_true("the former leader's label to be taken off", leads_no_more).await
}

async fn fence_reinstalled(world: &mut World, replicas: &mut Replicas) -> Result<()> {
    let leader = replicas.until_led_by_another_than("").await?;
    world.start(PodBuilder::units("before", 1)).await?;
    let client = world.client();
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(client.clone());
    let (one, all) = (DeleteParams::default(), ListParams::default());
    // kube-apiserver's informer of the policy's parameter ends with the bindings: only that of a custom resource starts again.
    let deleted = bindings.delete_collection(&one, &all).await;
    deleted.context("cannot delete bindings of policies")?;
    let deleted = policies.delete_collection(&one, &all).await;
    deleted.context("cannot delete policies")?;
    let path = world.cluster()?.deploy().join("base/scheduler-admission.yaml");
    manifests::apply_file(&client, &path).await?;
    world.start(PodBuilder::units("reinstalled", 1)).await?;
    replicas.process(&leader)?.kill().await;
    replicas.until_led_by_another_than(&leader).await?;
    world.start(PodBuilder::units("next-leader", 1)).await?;
    replicas.process(&leader)?.restart().await?;
    replicas.until_ready(&leader).await
}

async fn fence_refused(world: &mut World, replicas: &mut Replicas) -> Result<()> {
    let leader = replicas.until_led_by_another_than("").await?;
    let api = world.cluster()?.api().objects().clone();
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]});
    let account = format!("request.userInfo.username == '{SCHEDULER_USER}'");
    let policy = json!({"metadata": {"name": REFUSAL}, "spec": {
        "failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]},
        "matchConditions": [{"name": "is-scheduler", "expression": account}],
        "validations": [{"expression": "false", "message": "not today", "reason": "Forbidden"}],
    }});
    let binding = json!({"metadata": {"name": REFUSAL}, "spec": {"policyName": REFUSAL, "validationActions": ["Deny"]}});
    // The second refusal updates the event of the first.
    let mut version = refusal_event(&api, &leader);
    for pod in ["waits", "waits-again"] {
        api.create("validatingadmissionpolicies", policy.clone())?;
        api.create("validatingadmissionpolicybindings", binding.clone())?;
        world.create(PodBuilder::units(pod, 1)).await?;
        until_true("the leader not to be ready", || !replicas.is_ready(&leader)).await?;
        let before = version.clone();
        until_true("an event of the leader's pod", || {
            version = refusal_event(&api, &leader);
            version != before
        })
        .await?;
        api.delete("validatingadmissionpolicybindings", "", REFUSAL, None)?;
        api.delete("validatingadmissionpolicies", "", REFUSAL, None)?;
        world.until_running(&[pod]).await?;
        replicas.until_ready(&leader).await?;
    }
    Ok(())
}

/// The version of the event which says that a leader's bindings are refused.
fn refusal_event(api: &apiserver::ApiObjects, leader: &str) -> Option<String> {
    let events = api.list("events", Some(NAMESPACE)).ok()?;
    let is =
        |event: &Value, pointer: &str, text: &str| event.pointer(pointer).is_some_and(|value| value == text);
    let event = events
        .iter()
        .find(|event| is(event, "/reason", "BindingsRefused") && is(event, "/involvedObject/name", leader))?;
    Some(event.pointer("/metadata/resourceVersion")?.as_str()?.to_owned())
}

async fn rollout(world: &mut World, replicas: &mut Replicas) -> Result<()> {
    ensure!(world.has_webhooks, "no webhook would complete the pods");
    let names = arrivals(world, replicas).await?;
    world.until_running(&names).await?;
    ensure!(replicas.leaders().len() == 1, "{:?} lead", replicas.leaders());
    Ok(())
}

/// Pods that arrive while all replicas are replaced.
async fn arrivals(world: &World, replicas: &mut Replicas) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut rolling = std::pin::pin!(replicas.roll());
    let mut arrival = tokio::time::interval(ARRIVAL);
    loop {
        tokio::select! {
            rolled = &mut rolling => return rolled.map(|()| names),
            _ = arrival.tick() => {
                let name = format!("pod-{}", names.len());
                // The pod can be placed only if the webhook has completed its request.
                world.create(PodBuilder::new(&name, &[(GPU_MEMORY, "64Mi")])).await?;
                names.push(name);
            }
        }
    }
}

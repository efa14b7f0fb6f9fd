//! Holds what runs against what is recorded: at the start, after every restart of kubelet, when a record changes, and once a
//! minute.
//!
//! Starts are judged one by one as they come; this finds what has become different since, by whatever hand: records that
//! were changed under a running pod, a Device object that was made anew and says nothing of exchanges any more, CDI specs
//! that are gone or nobody's, pods that run without a record, flags that say of a pod that kubelet has not taken on that
//! it has its devices. What can be put right without touching a container is; the rest is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::record::{DeviceAllocations, MEM_ASSIGNED, Record};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::exchange::annotate;
use crate::fleet::{DeviceKey, Fleet};
use crate::identity::Ledger;
use crate::identity::checkpoint::{Allocated, Checkpoint};
use crate::inject;
use crate::inventory::PhysicalId;
use crate::metrics::Outcome;
use crate::plugin::NodeState;
use crate::pods::{NodePod, Placement, PodUid, Pods, Stage};
use crate::proof::sight::{self, Sight, Sights};
use crate::proof::verdict::{Evidence, Refusal, Verdict};

use super::specs::{device_of, note_admitted_before, rebuild};
use super::{Gate, OnMismatch, Start, Unplaced, refusal_reason, restore};

/// How often everything is compared.
const INTERVAL: Duration = Duration::from_secs(60);

/// How long a kubelet that has just begun is left alone, and a record that has just changed.
const SETTLE: Duration = Duration::from_secs(2);

/// What was found before, so that nothing is told or counted twice.
#[derive(Debug, Default)]
struct Memory {
    /// The last that was said of a pod.
    told: BTreeMap<PodUid, String>,
    /// Pods whose flag was stale at the last look.
    suspects: BTreeSet<PodUid>,
    /// The number of containers that had answers of an earlier version.
    n_admitted_before: Option<usize>,
    /// How often records had changed at the last look.
    n_altered: u64,
}

impl Memory {
    /// Whether this has not been said of the pod.
    fn is_news(&mut self, uid: &PodUid, text: &str) -> bool {
        self.told.insert(uid.clone(), text.to_owned()).as_deref() != Some(text)
    }
}

/// Compares again and again until the task is dropped.
pub async fn keep_reconciled(node: Arc<NodeState>) {
    let mut memory = Memory::default();
    let _ = node.pods.clone().wait_for(Pods::is_synced).await;
    if let Some(gate) = node.gate.get() {
        gate.note_told();
    }
    loop {
        if let (Some(gate), Some(written)) = (node.gate.get(), node.checkpoint().and_then(Checkpoint::read)) {
            gate.reconcile(&node, &written, &mut memory).await;
        }
        let mut pods = node.pods.clone();
        let is_altered = |pods: &Pods| pods.n_altered() != memory.n_altered;
        let altered = async { pods.wait_for(is_altered).await.map(drop) };
        let prompted = async {
            tokio::select! {
                () = node.resumed.notified() => {}
                Ok(()) = altered => {}
            }
        };
        if timeout(INTERVAL, prompted).await.is_ok() {
            sleep(SETTLE).await;
        }
    }
}

impl Gate {
    async fn reconcile(&self, node: &NodeState, written: &[Allocated], memory: &mut Memory) {
        let verified = self.exchange.lock().await.verify().await;
        match verified {
            Ok(false) => {}
            Ok(true) => {
                self.metrics.count(Outcome::Restored);
                warn!(
                    "somebody had removed the records that pods have exchanged from the Device object; they are there again"
                );
            }
            // Specs are files of this node. Records are compared again when the API server is back.
            Err(error) => debug!(error = one_line(&error), "records are compared later"),
        }
        let uids: Vec<PodUid> = {
            let pods = node.pods.borrow();
            memory.n_altered = pods.n_altered();
            if !pods.is_synced() || pods.exchanged().is_none() {
                return;
            }
            rebuild(node, &pods, written);
            note_admitted_before(&pods, written, &self.metrics, &mut memory.n_admitted_before);
            node.ledger().observe(&pods);
            node.ledger().forget_starts(written);
            memory.told.retain(|uid, _| pods.get(uid).is_some());
            pods.iter()
                .filter(|pod| has_started(pod, &node.ledger()))
                .map(|pod| pod.uid.clone())
                .collect()
        };
        for uid in uids {
            self.reconcile_pod(node, written, &uid, memory).await;
        }
        self.clear_flags(node, written, memory).await;
    }

    /// Puts one running pod right, or tells what is wrong with it. Where a container may not have started yet only what is
    /// right in any case is done: its turn comes when it starts.
    async fn reconcile_pod(
        &self,
        node: &NodeState,
        written: &[Allocated],
        uid: &PodUid,
        memory: &mut Memory,
    ) {
        let mut exchange = self.exchange.lock().await;
        let Some(Judged {
            pod,
            seen,
            verdict,
            is_certain,
            removed,
        }) = judge_running(node, written, uid)
        else {
            return;
        };
        let name = pod.display_name();
        if let Some(record) = removed {
            self.restore(&pod, &record).await;
            return;
        }
        match verdict {
            Verdict::Confirm
            | Verdict::LookAgain(_)
            | Verdict::Refuse(Refusal::Unavailable(_) | Refusal::Unknown) => {
                memory.told.remove(uid);
            }
            Verdict::Exchange(other) => match exchange.swap(node, (uid, &other), &[]).await {
                Ok(_) => {
                    self.metrics.count(Outcome::Exchanged);
                    warn!(
                        pod = name,
                        other = other.as_str(),
                        "a running pod has the devices of another: their records are exchanged"
                    );
                }
                Err(error) => debug!(
                    pod = name,
                    error = one_line(&error),
                    "records are exchanged later"
                ),
            },
            Verdict::Refuse(Refusal::Unplaced(_)) if self.policy.unplaced == Unplaced::Adopt => {
                let Some(entry) = written
                    .iter()
                    .find(|entry| entry.pod == *uid && entry.resource.device_type() == TYPE_GPU)
                else {
                    return;
                };
                let start = Start {
                    resource: entry.resource,
                    ids: &entry.ids,
                    uid: uid.clone(),
                };
                match self.adopt(node, &pod, written, &start).await {
                    Ok(()) => self.metrics.count(Outcome::Adopted),
                    Err(held) => self.report(&pod, "GPUNotPlaced", one_line(&held), memory),
                }
            }
            Verdict::Refuse(refusal) => {
                let truth = (refusal.is_final() && is_certain)
                    .then(|| truth(node, &pod, &seen))
                    .flatten();
                let Some(truth) = truth else {
                    let is_to_go =
                        is_certain && refusal.is_final() && self.policy.on_mismatch == OnMismatch::Evict;
                    self.report(&pod, refusal_reason(&refusal), refusal.to_string(), memory);
                    if is_to_go {
                        self.evict(&pod).await;
                    }
                    return;
                };
                match exchange.put(uid, truth).await {
                    Ok(true) => {
                        self.metrics.count(Outcome::Recorded);
                        self.recorder.warn(
                            &pod,
                            "GPUMismatch",
                            format!("{refusal}; its record now says what it has"),
                        );
                        warn!(pod = name, reason = %refusal, "the record of a running pod now says what it has");
                    }
                    Ok(false) => {}
                    Err(error) => debug!(
                        pod = name,
                        error = one_line(&error),
                        "a record is put right later"
                    ),
                }
            }
        }
    }

    fn report(&self, pod: &NodePod, reason: &'static str, text: String, memory: &mut Memory) {
        if memory.is_news(&pod.uid, &text) {
            self.metrics.count(Outcome::Reported);
            warn!(
                pod = pod.display_name(),
                reason = text,
                "a running pod and its record do not agree"
            );
            self.recorder.warn(pod, reason, text);
        }
    }

    /// Takes the flag off pods that had it at two looks and that kubelet has given nothing: with it they are not answered for.
    async fn clear_flags(&self, node: &NodeState, written: &[Allocated], memory: &mut Memory) {
        let stale = {
            let pods = node.pods.borrow();
            stale_flags(&pods, &node.ledger(), written)
        };
        for pod in stale.iter().filter(|pod| memory.suspects.contains(&pod.uid)) {
            let flag = [(MEM_ASSIGNED.to_owned(), "false".to_owned())].into();
            match annotate(&self.client, pod, &flag).await {
                Ok(()) => {
                    self.metrics.count(Outcome::Unflagged);
                    info!(
                        pod = pod.display_name(),
                        "kubelet has given it nothing yet, so it is not marked assigned any more"
                    );
                }
                Err(error) => debug!(error = %format!("{error:#}"), "a flag is taken off later"),
            }
        }
        memory.suspects = stale.into_iter().map(|pod| pod.uid).collect();
    }
}

fn has_started(pod: &NodePod, ledger: &Ledger) -> bool {
    pod.stage == Stage::Running || (pod.stage != Stage::Terminal && ledger.is_confirmed(&pod.uid))
}

/// A running pod, and what is to be said of it.
struct Judged {
    pod: NodePod,
    seen: Sights,
    verdict: Verdict,
    /// Whether this process knows that all its containers with devices have started.
    is_certain: bool,
    /// Its record, if its annotations do not have it any more.
    removed: Option<Record>,
}

/// What is to be said of a running pod whose devices this plugin gave out, by what its containers see since they started.
fn judge_running(node: &NodeState, written: &[Allocated], uid: &PodUid) -> Option<Judged> {
    let pods = node.pods.borrow();
    let ledger = node.ledger();
    let fleet = node.fleet.borrow();
    let pod = pods.get(uid).filter(|pod| has_started(pod, &ledger))?;
    let variable = &node.settings.visible_devices_env;
    // The spec of a container that has not started may be that of an earlier holder of its IDs.
    let has_started = |entry: &Allocated| {
        ledger.has_let_start(entry) || (entry.pod == *uid && restore::has_run_placed(pod, entry))
    };
    let known = |entry: &Allocated| {
        if has_started(entry) {
            as_started(node, entry)
        } else {
            entry.clone()
        }
    };
    let is_certain = written
        .iter()
        .filter(|entry| entry.pod == *uid)
        .all(|entry| ledger.has_let_start(entry));
    let written: Vec<Allocated> = written.iter().map(known).collect();
    let seen = sight::of_pod(&written, uid, variable, &fleet);
    if seen.is_empty() {
        return None;
    }
    let (unit, written) = (node.settings.memory_unit, written.as_slice());
    let evidence = Evidence {
        pods: &pods,
        fleet: &fleet,
        ledger: &ledger,
        written,
        is_written_known: true,
        is_young: false,
        variable,
        unit,
    };
    let verdict = evidence.judge(pod, &seen);
    let was_placed = written.iter().filter(|entry| entry.pod == *uid).all(has_started);
    let removed = restore::removed_record(node, &evidence, pod, &seen, was_placed);
    Some(Judged {
        pod: pod.clone(),
        seen,
        verdict,
        is_certain,
        removed,
    })
}

/// The entry with what its CDI spec says in place of its answer: a running container sees what the spec said.
fn as_started(node: &NodeState, entry: &Allocated) -> Allocated {
    let Some(mut envs) = device_of(&entry.answer).and_then(|name| node.settings.injection.specs.env(name))
    else {
        return entry.clone();
    };
    let visible = inject::variable(&node.settings.visible_devices_env, entry.resource);
    // Specs of versions before name the devices in the vendor's variable.
    if let Some(named) = envs.get(inject::own_variable(entry.resource)).cloned() {
        envs.insert(visible.to_owned(), named);
    }
    Allocated {
        answer: ContainerAllocateResponse {
            envs,
            ..ContainerAllocateResponse::default()
        },
        ..entry.clone()
    }
}

/// The record of a pod with the GPUs that it sees; none if it sees other devices than GPUs that it should not, or not as many.
fn truth(node: &NodeState, pod: &NodePod, seen: &Sights) -> Option<DeviceAllocations> {
    let Some(Sight::Devices(gpus)) = seen.get(TYPE_GPU) else {
        return None;
    };
    let placement = pod.placement.as_ref().ok()?;
    on_gpus(
        placement,
        placement.to_allocations(node.settings.memory_unit),
        gpus,
        &node.fleet.borrow(),
    )
}

/// The record on these GPUs; what it has of one that is not among them it has of one that it did not name.
fn on_gpus(
    placement: &Placement,
    mut record: DeviceAllocations,
    gpus: &BTreeSet<PhysicalId>,
    fleet: &Fleet,
) -> Option<DeviceAllocations> {
    let keys: Vec<DeviceKey> = fleet
        .gpus
        .iter()
        .map(|entry| DeviceKey::from(&entry.gpu))
        .filter(|key| gpus.contains(&key.id))
        .collect();
    let entries = record.get_mut(TYPE_GPU)?;
    if entries.len() != keys.len() || placement.gpus.len() != keys.len() {
        return None;
    }
    let is_named = |key: &&DeviceKey| placement.gpus.iter().any(|name| name.is(key));
    let mut unnamed = keys.iter().filter(|key| !is_named(key));
    for (entry, name) in entries.iter_mut().zip(&placement.gpus) {
        if !keys.iter().any(|key| name.is(key)) {
            let key = unnamed.next()?;
            entry.minor = i32::try_from(key.minor).ok()?;
            entry.id = key.id.to_string();
        }
    }
    Some(record)
}

/// The pods that are marked assigned though kubelet has not taken them on.
fn stale_flags(pods: &Pods, ledger: &Ledger, written: &[Allocated]) -> Vec<NodePod> {
    let is_marked = |pod: &&NodePod| {
        pod.stage == Stage::Bound && pod.placement.as_ref().is_ok_and(Placement::is_assigned)
    };
    let is_given = |pod: &NodePod| {
        ledger.is_answered(&pod.uid)
            || ledger.is_confirmed(&pod.uid)
            || written.iter().any(|entry| entry.pod == pod.uid)
    };
    pods.iter()
        .filter(is_marked)
        .filter(|pod| !is_given(pod))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests;

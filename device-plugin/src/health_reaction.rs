//! What follows from the health of devices for those who look at nodes and pods: events on the node when a device falls
//! sick, goes, comes or returns, events on the pods that it is counted for, and their eviction if the operator wishes so.
//!
//! Whether a device is sick is decided in [`crate::health`]; nothing here keeps a pod from being placed on it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use daemon::events::{EventType, Recorder};
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::eviction::evict;
use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, Fleet, type_name};
use crate::health::ApplicationFault;
use crate::pods::{NodePod, PodUid, Pods, Stage};

use proto::device::TYPE_GPU;

/// How long a device must have been sick before its pods are evicted: some trouble passes.
const GRACE: Duration = Duration::from_secs(60);

/// How long after an eviction that was refused it is tried again.
const AGAIN: Duration = Duration::from_secs(15);

/// A device type and what identifies the device.
type Id = (String, String);

/// One device as it was seen last.
#[derive(Clone, Debug)]
struct Bed {
    key: DeviceKey,
    /// What is wrong with it, and since when.
    sick: Option<(String, Instant)>,
    /// Pods that have been told of that.
    told: BTreeSet<PodUid>,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deed {
    /// An event on the node.
    TellNode(EventType, &'static str, String),
    /// An event on a pod.
    TellPod(PodUid, &'static str, String),
    /// The pod is to go.
    Evict(PodUid),
}

/// The devices that are known and the pods that have been told of their trouble. Pure: whoever calls brings the time.
#[derive(Clone, Debug, Default)]
pub struct Ward {
    /// None before the first look, which finds nothing new.
    beds: Option<BTreeMap<Id, Bed>>,
    evicts: bool,
    /// When the eviction of a pod was asked for last.
    asked: BTreeMap<PodUid, Instant>,
}

impl Ward {
    /// A ward that has seen no device; `evicts` says whether pods of sick devices are to go.
    pub fn new(evicts: bool) -> Self {
        Self {
            evicts,
            ..Self::default()
        }
    }

    /// Takes in how devices and pods are now.
    pub fn look(&mut self, fleet: &Fleet, pods: &Pods, now: Instant) -> Vec<Deed> {
        let mut deeds = Vec::new();
        self.admit(fleet, now, &mut deeds);
        self.asked.retain(|uid, _| pods.get(uid).is_some());
        for ((device_type, id), bed) in self.beds.iter_mut().flatten() {
            let Some((problem, since)) = &bed.sick else {
                continue;
            };
            let affected = pods
                .iter()
                .filter(|pod| pod.stage != Stage::Terminal && holds(pod, device_type, &bed.key));
            for pod in affected {
                let device = format!("{} {id}", type_name(device_type));
                if bed.told.insert(pod.uid.clone()) {
                    deeds.push(Deed::TellPod(
                        pod.uid.clone(),
                        "GPUUnhealthy",
                        format!("{device}, which this pod holds: {problem}"),
                    ));
                }
                let is_asked = self.asked.get(&pod.uid).is_some_and(|asked| *asked + AGAIN > now);
                if self.evicts && !pod.deleting && now >= *since + GRACE && !is_asked {
                    self.asked.insert(pod.uid.clone(), now);
                    deeds.push(Deed::Evict(pod.uid.clone()));
                }
            }
        }
        deeds
    }

    /// Compares the devices with those known before. One that has gone stays, sick, as long as it is not back.
    fn admit(&mut self, fleet: &Fleet, now: Instant, deeds: &mut Vec<Deed>) {
        let is_first = self.beds.is_none();
        let beds = self.beds.get_or_insert_default();
        let mut gone: BTreeSet<Id> = beds.keys().cloned().collect();
        for (id, key, is_healthy, message) in all(fleet) {
            gone.remove(&id);
            let device = format!("{} {}", type_name(&id.0), id.1);
            let sick = (!is_healthy).then(|| message.to_owned());
            let before = beds.get(&id).map(|bed| bed.sick.clone());
            let news = match (&before, &sick) {
                (None, None) if is_first => None,
                (None, None) => Some((EventType::Normal, "GPUAdded", format!("{device} has come"))),
                (Some(Some(_)), None) => Some((
                    EventType::Normal,
                    "GPUHealthy",
                    format!("{device} is healthy again: {message}"),
                )),
                (before, Some(problem))
                    if before
                        .as_ref()
                        .and_then(|before| before.as_ref())
                        .map(|(text, _)| text)
                        != Some(problem) =>
                {
                    Some((
                        EventType::Warning,
                        "GPUUnhealthy",
                        format!("{device} is unhealthy: {problem}"),
                    ))
                }
                _ => None,
            };
            let is_news = news.is_some();
            deeds.extend(news.map(|(weight, reason, text)| Deed::TellNode(weight, reason, text)));
            let since = before.flatten().map_or(now, |(_, since)| since);
            let told = if is_news {
                BTreeSet::new()
            } else {
                beds.remove(&id).map(|bed| bed.told).unwrap_or_default()
            };
            beds.insert(
                id,
                Bed {
                    key,
                    sick: sick.map(|problem| (problem, since)),
                    told,
                },
            );
        }
        for id in gone {
            let Some(bed) = beds
                .get_mut(&id)
                .filter(|bed| bed.sick.as_ref().is_none_or(|(problem, _)| problem != GONE))
            else {
                continue;
            };
            deeds.push(Deed::TellNode(
                EventType::Warning,
                "GPUGone",
                format!("{} {} {GONE}", type_name(&id.0), id.1),
            ));
            let since = bed.sick.take().map_or(now, |(_, since)| since);
            bed.sick = Some((GONE.to_owned(), since));
            bed.told.clear();
        }
    }

    /// When something is to be done though nothing changes.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        let beds = self.beds.iter().flatten().filter(|_| self.evicts);
        let due = beds.filter_map(|(_, bed)| bed.sick.as_ref().map(|(_, since)| *since + GRACE));
        due.map(|due| if due > now { due } else { now + AGAIN }).min()
    }

    /// What pods are told of a fault that leaves the device in order.
    pub fn fault(fault: &ApplicationFault, pods: &Pods, fleet: &Fleet) -> Vec<Deed> {
        let Some(entry) = fleet.gpus.iter().find(|entry| entry.gpu.uuid == fault.uuid) else {
            return Vec::new();
        };
        let (key, ApplicationFault { uuid, xid }) = (DeviceKey::from(&entry.gpu), fault);
        let affected = pods
            .iter()
            .filter(|pod| pod.stage == Stage::Running && holds(pod, TYPE_GPU, &key));
        let text = format!(
            "the driver reported XID {xid} on GPU {uuid}, which an application causes by a fault of its own: this pod, or another one on that GPU"
        );
        affected
            .map(|pod| Deed::TellPod(pod.uid.clone(), "GPUApplicationFault", text.clone()))
            .collect()
    }
}

/// What is said of a device that is not listed any more.
const GONE: &str = "is no longer on this node";

/// Every device with its state and what is said of it.
fn all(fleet: &Fleet) -> impl Iterator<Item = (Id, DeviceKey, bool, &str)> {
    let gpus = fleet.gpus.iter().map(|entry| {
        (
            TYPE_GPU.to_owned(),
            DeviceKey::from(&entry.gpu),
            entry.is_healthy,
            entry.message.as_str(),
        )
    });
    let others = fleet.others.iter().map(|entry| {
        let device = &entry.device;
        (
            device.device_type.clone(),
            DeviceKey::from(device),
            entry.is_healthy,
            entry.message.as_str(),
        )
    });
    gpus.chain(others).map(|(device_type, key, is_healthy, message)| {
        ((device_type, key.id.to_string()), key, is_healthy, message)
    })
}

fn holds(pod: &NodePod, device_type: &str, key: &DeviceKey) -> bool {
    let Ok(placement) = &pod.placement else {
        return false;
    };
    let resources = [
        ExtendedResource::Whole,
        ExtendedResource::Rdma,
        ExtendedResource::Fpga,
    ]
    .into_iter()
    .filter(|resource| resource.device_type() == device_type);
    resources
        .flat_map(|resource| placement.names(resource))
        .any(|name| name.is(key))
}

/// Where it is learned what devices and pods do, and who is told.
#[derive(Debug)]
pub struct Sources {
    /// The devices and their health.
    pub fleet: watch::Receiver<Arc<Fleet>>,
    /// The pods of this node.
    pub pods: watch::Receiver<Pods>,
    /// Faults of applications.
    pub faults: mpsc::Receiver<ApplicationFault>,
    /// Who writes events.
    pub recorder: Recorder,
}

/// Tells and evicts until the task is dropped.
pub async fn look_after(client: Client, sources: Sources, evicts: bool) {
    let Sources {
        mut fleet,
        mut pods,
        mut faults,
        recorder,
    } = sources;
    let mut ward = Ward::new(evicts);
    if pods.wait_for(Pods::is_synced).await.is_err() {
        return std::future::pending().await;
    }
    loop {
        let now = Instant::now();
        let known = Arc::clone(&fleet.borrow_and_update());
        let deeds = ward.look(&known, &pods.borrow_and_update(), now);
        carry_out(&client, &recorder, &pods, deeds).await;
        let next = ward.next(now);
        tokio::select! {
            _ = fleet.changed() => {}
            _ = pods.changed() => {}
            Some(fault) = faults.recv() => {
                let deeds = Ward::fault(&fault, &pods.borrow(), &known);
                carry_out(&client, &recorder, &pods, deeds).await;
            }
            () = async { sleep_until(next.unwrap_or(now)).await }, if next.is_some() => {}
        }
    }
}

async fn carry_out(client: &Client, recorder: &Recorder, pods: &watch::Receiver<Pods>, deeds: Vec<Deed>) {
    let pod = |uid: &PodUid| pods.borrow().get(uid).cloned();
    for deed in deeds {
        match deed {
            Deed::TellNode(weight, reason, text) => recorder.node(weight, reason, text),
            Deed::TellPod(uid, reason, text) => drop(pod(&uid).map(|pod| recorder.warn(&pod, reason, text))),
            Deed::Evict(uid) => {
                let Some(pod) = pod(&uid) else { continue };
                match evict(client, &pod).await {
                    Ok(()) => info!(
                        pod = pod.display_name(),
                        "evicted, as a device that it holds is sick"
                    ),
                    Err(error) => warn!(
                        pod = pod.display_name(),
                        error = one_line(&error),
                        "a pod stays on a sick device"
                    ),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Records the events of a run: each start of a container with its pod's record at that moment, refusals,
//! failed pods, delays.
//!
//! The record is read from the API server's objects while the container starts, since it may change later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use parking_lot::{Mutex, MutexGuard};
use proto::device::Device;
use serde::de::DeserializeOwned;

use kit::apiserver::ApiObjects as Api;
use kit::invariants::{self, ContainerView};
use kit::kubelet::{ContainerStart, PodAdmission, RuntimeContainer};

/// A real kubelet's pause before it tries to start a container again, added to the measured delays: that of the testbed tries
/// sooner.
pub(super) const RETRY: Duration = Duration::from_secs(10);
/// The most sentences in [`Tally::wrong_quotes`].
const QUOTED: usize = 10;

/// The recorder of one run; shared with the kubelets.
#[derive(Debug, Default)]
pub(super) struct RunRecorder {
    api: OnceLock<Api>,
    tally: Mutex<Tally>,
    /// Pods as they were last seen, by UID: a container may start although its pod has just been removed.
    known: Mutex<BTreeMap<String, Pod>>,
}

/// The start of a container: pod UID, container, and number of starts of the container so far.
type StartKey = (String, String, u32);

/// The counts of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// The number of the step that is under way.
    pub(super) step: usize,
    /// Pods that kubelet has admitted or refused, by UID; after a restart it does so again.
    pub(super) admitted: BTreeSet<String>,
    pub(super) n_starts: usize,
    /// Starts of containers whose record was not seen.
    pub(super) n_unknown: usize,
    /// Starts with other devices than the record named.
    pub(super) wrong: BTreeSet<StartKey>,
    /// Wrong starts that see a device which the record does not name.
    pub(super) sees_more: BTreeSet<StartKey>,
    /// Starts with the content of a CDI spec that was not written for them.
    pub(super) stale: BTreeSet<StartKey>,
    /// Starts with a driver limit other than the container's share.
    pub(super) other_limits: BTreeSet<StartKey>,
    /// Some of the starts in `wrong`, `stale` and `other_limits`, in words.
    pub(super) wrong_quotes: Vec<String>,
    /// Pods that kubelet failed because the plugin answered with an error, in words.
    pub(super) failed_by_plugin: Vec<String>,
    /// Pods that the plugin evicted: they are gone although no step has deleted them.
    pub(super) evicted: BTreeSet<String>,
    /// Pods that kubelet failed without an error from the plugin, as while the plugin is away, in words.
    pub(super) failed_by_kubelet: Vec<String>,
    /// Starts that were refused and tried again, by the first words of the reason.
    pub(super) refusals: BTreeMap<String, usize>,
    /// The delay of each start through the plugin, as it would be with kubelet's own pause between two tries.
    pub(super) delays: Vec<Duration>,
    /// The duration of kubelet's admission of each pod.
    pub(super) admissions: Vec<Duration>,
    /// Violations of other invariants, with the step after which they were found.
    pub(super) violations: Vec<String>,
}

impl RunRecorder {
    /// Sets the API server whose objects have the records.
    pub(super) fn connect(&self, api: Api) {
        // A second call would set the same cluster.
        let _ = self.api.set(api);
    }

    /// The counts so far.
    pub(super) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock()
    }

    /// Records the start of a container.
    pub(super) fn note_start(&self, node: &str, start: &ContainerStart) {
        let container = &start.container;
        let view = self.view(node, start);
        let mut tally = self.tally();
        tally.n_starts += 1;
        tally.n_unknown += usize::from(view.is_none());
        for refusal in &start.refusals {
            *tally.refusals.entry(refusal_kind(refusal)).or_default() += 1;
        }
        let n_refusals = u32::try_from(start.refusals.len()).unwrap_or(u32::MAX);
        tally.delays.push(start.spent + RETRY * n_refusals);
        if let Some(view) = view.filter(|view| view.sees != view.should_see) {
            tally.note_wrong(&container.pod_uid, container.starts, &view);
        }
        tally.note_stale(container);
    }

    /// Records a container whose driver limit is not its share of a GPU of this size.
    pub(super) fn note_limit(&self, container: &RuntimeContainer, gpu_mib: u64) {
        let Some(what) = invariants::wrong_limit(container, gpu_mib) else {
            return;
        };
        let mut tally = self.tally();
        if tally.other_limits.insert(start_of(container)) {
            tally.quote(&format!("{}/{}: {what}", container.pod, container.name));
        }
    }

    /// Remembers pods as they are now, besides earlier ones.
    pub(super) fn note_pods(&self, pods: BTreeMap<String, Pod>) {
        let by_uid = |pod: Pod| Some((pod.metadata.uid.clone()?, pod));
        self.known().extend(pods.into_values().filter_map(by_uid));
    }

    /// Remembers pods as they are now, and forgets all earlier ones.
    pub(super) fn replace_pods(&self, pods: BTreeMap<String, Pod>) {
        self.known().clear();
        self.note_pods(pods);
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<String, Pod>> {
        self.known.lock()
    }

    /// The GPUs that a started container sees and should see; `None` if its pod is no longer known.
    fn view(&self, node: &str, start: &ContainerStart) -> Option<ContainerView> {
        let (api, container) = (self.api.get()?, &start.container);
        let device: Option<Device> = typed(api, "devices.scheduling.koordinator.sh", "", node);
        let now: Option<Pod> = typed(api, "pods", &container.namespace, &container.pod);
        let now = now.filter(|pod| pod.metadata.uid.as_ref() == Some(&container.pod_uid));
        let pod = now.or_else(|| self.known().get(&container.pod_uid).cloned())?;
        let should_see = invariants::should_see(&pod, device.as_ref(), &container.name);
        Some(ContainerView {
            pod: format!("{}/{}", container.namespace, container.pod),
            container: container.name.clone(),
            sees: container.gpus.clone(),
            should_see,
        })
    }

    /// Records violations of other invariants.
    pub(super) fn note_violations(&self, found: Vec<String>) {
        let mut tally = self.tally();
        for violation in found {
            let sentence = format!("step {}: {violation}", tally.step);
            tally.violations.push(sentence);
        }
    }

    /// Records pods that are gone although no step has deleted them.
    pub(super) fn note_evicted(&self, pods: BTreeSet<String>) {
        self.tally().evicted.extend(pods);
    }

    /// Records an admission, and kubelet's refusal if there is one.
    pub(super) fn note_admission(&self, admission: &PodAdmission) {
        let mut tally = self.tally();
        tally.admitted.insert(admission.uid.clone());
        tally.admissions.push(admission.took);
        let step = tally.step;
        if let Some((reason, message)) = &admission.refusal {
            let quote = format!("step {step}: {}: {reason}: {message}", admission.pod);
            if is_kubelets_own(reason, message) {
                tally.failed_by_kubelet.push(quote);
            } else {
                tally.failed_by_plugin.push(quote);
            }
        }
    }
}

impl Tally {
    /// Returns true if no start was wrong and no other invariant was violated.
    pub(super) fn is_clean(&self) -> bool {
        self.violations.is_empty()
            && self.wrong.is_empty()
            && self.stale.is_empty()
            && self.other_limits.is_empty()
    }

    /// Records a container whose CDI specs were not written for this start.
    pub(super) fn note_stale(&mut self, container: &RuntimeContainer) {
        let Some(what) = invariants::stale_spec(container) else {
            return;
        };
        if self.stale.insert(start_of(container)) {
            self.quote(&format!("{}/{}: {what}", container.pod, container.name));
        }
    }

    /// Adds a sentence about a container's start to `wrong_quotes`, unless [`QUOTED`] sentences are there.
    fn quote(&mut self, sentence: &str) {
        if self.wrong_quotes.len() < QUOTED {
            self.wrong_quotes.push(format!("step {}: {sentence}", self.step));
        }
    }

    /// Records a container that sees other devices than its record names.
    pub(super) fn note_wrong(&mut self, uid: &str, n_starts: u32, view: &ContainerView) {
        let start = (uid.to_owned(), view.container.clone(), n_starts);
        if view.sees.iter().any(|device| !view.should_see.contains(device)) {
            self.sees_more.insert(start.clone());
        }
        if self.wrong.insert(start) {
            self.quote(&format!(
                "{}/{} sees {:?}, its record names {:?}",
                view.pod, view.container, view.sees, view.should_see
            ));
        }
    }
}

/// The key of a container's newest start.
fn start_of(container: &RuntimeContainer) -> StartKey {
    let RuntimeContainer {
        pod_uid,
        name,
        starts,
        ..
    } = container;
    (pod_uid.clone(), name.clone(), *starts)
}

/// An object of the API server, decoded; `None` if it does not exist.
fn typed<T: DeserializeOwned>(api: &Api, resource: &str, namespace: &str, name: &str) -> Option<T> {
    let object = api.get(resource, namespace, name).ok()?;
    serde_json::from_value(serde_json::Value::clone(&object)).ok()
}

/// Returns true if kubelet failed the pod without an error from the plugin.
fn is_kubelets_own(reason: &str, message: &str) -> bool {
    let own = [
        "endpoint of",
        "no healthy devices present",
        "previously allocated devices are no longer healthy",
        "cannot allocate unregistered device",
        "unknown Device Plugin",
        // The connection broke in the middle of a call.
        "rpc error: code = Unavailable",
        "rpc error: code = Canceled",
        "transport error",
    ];
    reason == "UnexpectedAdmissionError" && own.iter().any(|words| message.contains(words))
}

/// The words of a refusal without names and numbers, so that equal refusals of different pods are counted
/// together.
fn refusal_kind(refusal: &str) -> String {
    let text = refusal.split("desc = ").last().unwrap_or(refusal);
    let mut words: Vec<&str> = text.split_whitespace().collect();
    words.retain(|word| !word.contains(['/', '=', '"', '-']) && !word.contains(char::is_numeric));
    words.truncate(9);
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proto::record::MEM_CONTAINER;
    use proto::resource::GPU_MEM;

    use super::*;
    use kit::kubelet::{ContainerType, RunState};

    fn view(sees: &[&str], should_see: &[&str]) -> ContainerView {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        ContainerView {
            pod: "default/p".to_owned(),
            container: "c".to_owned(),
            sees: names(sees),
            should_see: names(should_see),
        }
    }

    /// A container by CDI that holds two memory units.
    fn container(stale_devices: &[&str], units: &str) -> RuntimeContainer {
        RuntimeContainer {
            namespace: "default".to_owned(),
            pod: "p".to_owned(),
            pod_uid: "u".to_owned(),
            name: "c".to_owned(),
            kind: ContainerType::App,
            state: RunState::Waiting {
                reason: String::new(),
                message: String::new(),
            },
            starts: 1,
            env: BTreeMap::from([(MEM_CONTAINER.to_owned(), units.to_owned())]),
            devices: BTreeMap::from([(GPU_MEM.to_owned(), vec!["a".to_owned(), "b".to_owned()])]),
            cdi_devices: vec!["gpushare.dev/gpu=x".to_owned()],
            stale_devices: stale_devices.iter().map(|name| (*name).to_owned()).collect(),
            device_nodes: Vec::new(),
            mounts: Vec::new(),
            hooks: Vec::new(),
            gpus: Vec::new(),
            gpu_bytes: 0,
        }
    }

    #[test]
    fn a_container_that_sees_more_than_its_record_is_counted() {
        let mut tally = Tally::default();
        tally.note_wrong("u", 1, &view(&[], &["GPU-a"]));
        assert_eq!(
            (tally.wrong.len(), tally.sees_more.len()),
            (1, 0),
            "too few is wrong, and not more"
        );
        tally.note_wrong("u", 2, &view(&["GPU-a", "GPU-b"], &["GPU-a"]));
        tally.note_wrong("other", 1, &view(&["GPU-a"], &[]));
        assert_eq!(
            (tally.wrong.len(), tally.sees_more.len(), tally.is_clean()),
            (3, 2, false)
        );
    }

    #[test]
    fn a_stale_spec_is_counted() {
        let mut tally = Tally::default();
        tally.note_stale(&container(&[], "2"));
        assert!(tally.is_clean(), "{:?}", tally.wrong_quotes);
        tally.note_stale(&container(&["gpushare.dev/gpu=x"], "2"));
        tally.note_stale(&RuntimeContainer {
            starts: 2,
            ..container(&[], "3")
        });
        assert_eq!((tally.stale.len(), tally.is_clean()), (2, false));
        assert_eq!(tally.wrong_quotes.len(), 2, "{:?}", tally.wrong_quotes);
    }
}

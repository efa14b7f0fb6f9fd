//! Answers Allocate: finds the container, tells it its devices, enters it in the books.
//!
//! Waits for a pod that kubelet knows before we do, and asks nobody: kubelet admits no other pod
//! meanwhile and sets no deadline.

use std::time::Duration;

use proto::kubelet::deviceplugin::{ContainerAllocateRequest, ContainerAllocateResponse};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tracing::{info, warn};

use crate::fleet::Unavailable;
use crate::identity::{self, Call, Found, Patience, Unidentified};
use crate::inject;
use crate::inventory::Gpu;
use crate::pods::{NodePod, Placement, Pods};
use crate::served::Served;

use super::NodeState;

/// How long a call waits while the watch of pods is known to be broken: refusing a pod is for good.
const BLIND_WAIT: Duration = Duration::from_secs(30);

/// Why a call is answered with an error. kubelet shows the text to the pod's owner and fails the pod.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    /// The pods of this node are not known.
    #[error("cannot tell which pod asks for {count} of {resource}: the API server has not yet told the pods of this node")]
    NotSynced {
        /// The resource.
        resource: String,
        /// How many IDs.
        count: u64,
    },
    /// No pod waits for this.
    #[error("no pod of this node waits for {count} of {resource}")]
    Nobody {
        /// The resource.
        resource: String,
        /// How many IDs.
        count: u64,
    },
    /// The pod that waits for this has no usable record.
    #[error("pod {pod}: {reason}")]
    Unplaced {
        /// The pod.
        pod: String,
        /// What is wrong with its record.
        reason: String,
    },
    /// An earlier answer turns out to have been for another pod.
    #[error(
        "pod {pod}: an earlier container was given the devices of pod {mistaken_for}, which asked for the same amount at the same time"
    )]
    Ambiguous {
        /// The pod.
        pod: String,
        /// The other one.
        mistaken_for: String,
    },
    /// The pod's record names a GPU that it cannot have.
    #[error("pod {pod}: {source}")]
    Unavailable {
        /// The pod.
        pod: String,
        /// Which GPU, and why not.
        source: Unavailable,
    },
}

impl From<AllocateError> for Status {
    fn from(error: AllocateError) -> Self {
        Self::failed_precondition(error.to_string())
    }
}

impl NodeState {
    /// Answers for one container.
    pub(super) async fn allocate(
        &self,
        resource: Served,
        request: &ContainerAllocateRequest,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        let gpus = self.gpus_of(resource, &request.device_ids);
        let call = Call { resource, count: request.device_ids.len() as u64, gpus: &gpus };
        let answer = match self.follow_preference(&call) {
            Some(answer) => Ok(answer),
            None => self.when_identified(&call, |pods, found| self.answer(pods, found, resource)).await,
        };
        let answer = answer.map_err(|reason| self.unidentified(&call, reason))?;
        self.answered.notify_one();
        answer
    }

    /// Answers for the pod that `GetPreferredAllocation` was answered for just before, if there is one.
    fn follow_preference(&self, call: &Call<'_>) -> Option<Result<ContainerAllocateResponse, AllocateError>> {
        let pods = self.pods.borrow();
        let found = identity::preferred(&pods, &self.ledger(), call)?;
        Some(self.answer(&pods, found, call.resource))
    }

    /// Calls `act` as soon as it is clear whom `call` is for.
    pub(super) async fn when_identified<T>(&self, call: &Call<'_>, act: impl Fn(&Pods, Found) -> T) -> Result<T, Unidentified> {
        let began = Instant::now();
        let mut pods = self.pods.clone();
        let mut patience = Patience::Waiting;
        loop {
            match self.try_identify(&mut pods, call, patience, &act) {
                Ok(result) => return Ok(result),
                Err(reason) if patience == Patience::Over => return Err(reason),
                Err(_) => {}
            }
            let is_current = pods.borrow().is_current();
            let limit = if is_current { self.settings.allocate_wait } else { self.settings.allocate_wait.max(BLIND_WAIT) };
            if !matches!(timeout_at(began + limit, pods.changed()).await, Ok(Ok(()))) {
                patience = Patience::Over;
            }
        }
    }

    fn try_identify<T>(
        &self,
        pods: &mut watch::Receiver<Pods>,
        call: &Call<'_>,
        patience: Patience,
        act: impl Fn(&Pods, Found) -> T,
    ) -> Result<T, Unidentified> {
        let pods = pods.borrow_and_update();
        let found = {
            let mut ledger = self.ledger();
            self.catch_up(&mut ledger, &pods);
            identity::identify(&pods, &ledger, call, patience)?
        };
        Ok(act(&pods, found))
    }

    /// The GPUs that device IDs are of; IDs that nobody issued say nothing.
    pub(super) fn gpus_of(&self, resource: Served, ids: &[String]) -> Vec<Gpu> {
        let fleet = self.fleet.borrow();
        let is_meant = |gpu: &Gpu| ids.iter().any(|id| fleet.ids.gpu_of(resource, id) == Some(&gpu.uuid));
        fleet.gpus.iter().map(|entry| &entry.gpu).filter(|gpu| is_meant(gpu)).cloned().collect()
    }

    fn answer(&self, pods: &Pods, found: Found, resource: Served) -> Result<ContainerAllocateResponse, AllocateError> {
        let (uid, container_idx) = (found.pod.clone(), found.container);
        let nobody = || AllocateError::Nobody { resource: resource.name(&self.settings.names).to_owned(), count: 0 };
        let pod = pods.get(&uid).ok_or_else(nobody)?;
        let own = pod.placement.as_ref().ok();
        if own.is_some_and(|own| own.gpus != found.placement.gpus) {
            warn!(
                pod = pod.display_name(),
                given = found.placement.to_string(),
                recorded = own.map(ToString::to_string),
                "kubelet admitted an equal pod in this pod's place: the two have changed devices"
            );
        }
        let result = self.environment(pod, &found.placement, container_idx, resource);
        match &result {
            Ok(_) => self.ledger().record(found, pods),
            // kubelet fails the pod now; until we hear of that it must not be taken for the next one.
            Err(_) => self.ledger().refuse(&uid, pods),
        }
        result
    }

    fn environment(
        &self,
        pod: &NodePod,
        placement: &Placement,
        container_idx: usize,
        resource: Served,
    ) -> Result<ContainerAllocateResponse, AllocateError> {
        let fleet = self.fleet.borrow();
        let unplaced = |reason: String| AllocateError::Unplaced { pod: pod.display_name(), reason };
        let container = pod.containers.get(container_idx).ok_or_else(|| unplaced("it has no such container".to_owned()))?;
        let gpus = fleet.resolve(&placement.gpus);
        let gpus = gpus.map_err(|source| AllocateError::Unavailable { pod: pod.display_name(), source })?;
        let uuids: Vec<_> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        info!(
            pod = pod.display_name(),
            container = container.name,
            resource = resource.name(&self.settings.names),
            count = resource.count(container),
            gpus = uuids.join(","),
            "allocated"
        );
        let envs = inject::environment(&self.settings, pod, placement, container, resource, &gpus);
        Ok(ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() })
    }

    /// The error to tell kubelet, which fails the pod on that.
    fn unidentified(&self, call: &Call<'_>, reason: Unidentified) -> AllocateError {
        let (resource, count) = (call.resource.name(&self.settings.names).to_owned(), call.count);
        // The pods before the books, as everywhere.
        let pods = self.pods.borrow();
        match reason {
            Unidentified::NotSynced => AllocateError::NotSynced { resource, count },
            Unidentified::Nobody => AllocateError::Nobody { resource, count },
            Unidentified::Unplaced { uid, pod, reason } => {
                self.ledger().refuse(&uid, &pods);
                AllocateError::Unplaced { pod, reason }
            }
            Unidentified::Ambiguous { pod, mistaken_for } => {
                let mut ledger = self.ledger();
                ledger.refuse(&pod, &pods);
                ledger.reopen(&mistaken_for);
                let name = |uid| pods.get(uid).map_or_else(|| "(gone)".to_owned(), NodePod::display_name);
                AllocateError::Ambiguous { pod: name(&pod), mistaken_for: name(&mistaken_for) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proto::memory_unit::MemoryUnit;
    use proto::resource::ResourceNames;

    use super::*;
    use crate::builders::{fleet, pods};
    use crate::identity::Ledger;
    use crate::plugin::Settings;

    /// How long a call is waited for that nobody is due for.
    async fn waited(is_interrupted: bool) -> Duration {
        let (_fleet, fleet) = watch::channel(Arc::new(fleet(1)));
        let mut known = pods([]);
        known.set_interrupted(is_interrupted);
        let (_pods, pods) = watch::channel(known);
        let settings = Settings {
            names: ResourceNames::default(),
            memory_unit: MemoryUnit::GIB,
            visible_devices_env: "NVIDIA_VISIBLE_DEVICES".to_owned(),
            allocate_wait: Duration::from_secs(2),
        };
        let node = NodeState::new(settings, fleet, pods, Ledger::default());
        let began = Instant::now();
        let request = ContainerAllocateRequest { device_ids: vec!["a-0".to_owned()] };
        assert!(node.allocate(Served::Memory, &request).await.is_err());
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn waits_longer_while_pods_are_not_told() {
        assert_eq!(waited(false).await.as_secs(), 2);
        assert_eq!(waited(true).await.as_secs(), 30);
    }
}

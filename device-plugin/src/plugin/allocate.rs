//! Answers Allocate. Never an error, as kubelet fails the pod for good on that: who must not start is held before its
//! containers start.
//!
//! By CDI the answer needs no pod: it names a spec that is written before the container starts. By variable it stands as long
//! as the container lives, so the pod that it is for is waited for a little, if kubelet knows it before we do; then it is the
//! devices of the IDs. Makes no remote call: kubelet admits no other pod meanwhile and sets no deadline.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proto::kubelet::deviceplugin::{ContainerAllocateRequest, ContainerAllocateResponse};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, info};

use crate::cdi::name_of;
use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, Fleet};
use crate::identity::{self, Call, Found, Patience, Unidentified};
use crate::inject::{self, Given, Known};
use crate::injection::Mode;
use crate::inventory::PhysicalId;
use crate::pods::{Placement, Pods};

use super::{NodeState, SHORT_CHECKPOINT};

impl NodeState {
    /// Answers for one container.
    pub(super) async fn allocate(
        &self,
        resource: ExtendedResource,
        request: &ContainerAllocateRequest,
    ) -> ContainerAllocateResponse {
        self.until_decided().await;
        let ids = &request.device_ids;
        let devices = self.devices_of(resource, ids);
        let call = Call {
            resource,
            count: ids.len() as u64,
            devices: &devices,
        };
        let answer = |pods: &Pods, found: Found| self.answer(pods, found, &call, ids);
        let answered = match self.follow_preference(&call, answer) {
            Some(response) => Ok(response),
            None => {
                self.when_identified(&call, self.allocate_patience(), answer)
                    .await
            }
        };
        let response = answered.unwrap_or_else(|reason| self.answer_by_ids(&call, ids, &reason));
        self.answered.notify_one();
        response
    }

    /// How long to wait for the pod of an Allocate.
    fn allocate_patience(&self) -> Duration {
        let has_waited = self.has_waited.swap(false, Ordering::Relaxed);
        if has_waited || self.mode() == Mode::Cdi {
            Duration::ZERO
        } else {
            self.pod_wait()
        }
    }

    /// Answers for the pod that `GetPreferredAllocation` was answered for just before, if there is one.
    fn follow_preference<T>(&self, call: &Call<'_>, act: impl Fn(&Pods, Found) -> T) -> Option<T> {
        let pods = self.pods.borrow();
        let found = identity::preferred(&pods, &self.ledger(), call)?;
        Some(act(&pods, found))
    }

    /// Calls `act` as soon as it is clear whom `call` is for, or after so long if that is only likely.
    pub(super) async fn when_identified<T>(
        &self,
        call: &Call<'_>,
        patience: Duration,
        act: impl Fn(&Pods, Found) -> T,
    ) -> Result<T, Unidentified> {
        let until = Instant::now() + patience;
        let mut pods = self.pods.clone();
        loop {
            if let Ok(result) = self.try_identify(&mut pods, call, Patience::Waiting, &act) {
                return Ok(result);
            }
            if patience.is_zero() || !matches!(timeout_at(until, pods.changed()).await, Ok(Ok(()))) {
                return self.try_identify(&mut pods, call, Patience::Over, &act);
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
            self.catch_up(
                &mut ledger,
                &pods,
                if patience == Patience::Over {
                    u64::MAX
                } else {
                    SHORT_CHECKPOINT
                },
            );
            identity::identify(&pods, &ledger, call, patience)?
        };
        Ok(act(&pods, found))
    }

    /// The devices that device IDs are of; IDs that nobody issued say nothing.
    pub(crate) fn devices_of(&self, resource: ExtendedResource, ids: &[String]) -> Vec<DeviceKey> {
        let fleet = self.fleet.borrow();
        let meant: BTreeSet<&PhysicalId> = ids
            .iter()
            .filter_map(|id| fleet.ids.device_of(resource, id))
            .collect();
        fleet
            .entries(resource.device_type())
            .map(|entry| entry.key)
            .filter(|key| meant.contains(&key.id))
            .collect()
    }

    fn answer(
        &self,
        pods: &Pods,
        found: Found,
        call: &Call<'_>,
        ids: &[String],
    ) -> ContainerAllocateResponse {
        let pod = pods.get(&found.pod);
        let known = pod.and_then(|pod| {
            Some(Known {
                pod,
                container: pod.containers.get(found.container)?,
                placement: found.placement.as_ref(),
            })
        });
        let fleet = self.fleet.borrow().clone();
        let given = given(&fleet, found.placement.as_ref(), call);
        let response = self.respond(known.as_ref(), call.resource, ids, &given);
        self.log(call, &response);
        let mut ledger = self.ledger();
        ledger.keep(call.resource, ids, Some(found.pod.clone()), response.clone());
        ledger.record(found, pods);
        response
    }

    fn answer_by_ids(
        &self,
        call: &Call<'_>,
        ids: &[String],
        reason: &Unidentified,
    ) -> ContainerAllocateResponse {
        let fleet = self.fleet.borrow().clone();
        let response = self.respond(None, call.resource, ids, &given(&fleet, None, call));
        debug!(
            resource = self.settings.names.of(call.resource),
            ?reason,
            "allocated before the pod is known"
        );
        self.log(call, &response);
        self.ledger().keep(call.resource, ids, None, response.clone());
        response
    }

    /// Logs what is known of an answer. kubelet does not name the pod; the log of the container's start does.
    fn log(&self, call: &Call<'_>, response: &ContainerAllocateResponse) {
        let (resource, count) = (self.settings.names.of(call.resource), call.count);
        let cdi_device = response
            .cdi_devices
            .iter()
            .find_map(|device| name_of(&device.name));
        let devices = response.envs.get(inject::own_variable(call.resource));
        info!(resource, count, cdi_device, devices, "allocated");
    }

    fn respond(
        &self,
        known: Option<&Known<'_>>,
        resource: ExtendedResource,
        ids: &[String],
        given: &Given<'_>,
    ) -> ContainerAllocateResponse {
        match self.mode() {
            Mode::Cdi => inject::cdi_answer(
                &self.settings.visible_devices_env,
                resource,
                ids,
                self.fresh_number(),
            ),
            Mode::Envvar => inject::envvar_answer(&self.settings, known, resource, given),
        }
    }
}

/// The record's devices, sick or not, if all of them are there; else those of the device IDs, of memory units the first.
fn given<'a>(fleet: &'a Fleet, placement: Option<&Placement>, call: &Call<'_>) -> Given<'a> {
    let names = placement.map_or(&[][..], |placement| placement.names(call.resource));
    let recorded: Option<Vec<DeviceKey>> = names.iter().map(|name| fleet.find(call.resource, name)).collect();
    let n_of_ids = if call.resource == ExtendedResource::Memory {
        1
    } else {
        usize::MAX
    };
    let of_ids = || call.devices.iter().take(n_of_ids).cloned().collect();
    let keys = recorded.filter(|keys| !keys.is_empty()).unwrap_or_else(of_ids);
    Given::of(fleet, call.resource, &keys)
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

    const IDS: [&str; 2] = ["9507230f-0", "9507230f-1"];

    /// What a call is answered that nobody is due for, and after how long.
    async fn nobodys(mode: Mode) -> (ContainerAllocateResponse, u64) {
        let (_fleet, fleet) = watch::channel(Arc::new(fleet(1)));
        let (_pods, pods) = watch::channel(pods([]));
        let mut settings = Settings::plain(ResourceNames::default(), MemoryUnit::GIB, Duration::from_secs(2));
        settings.injection.mode = Some(mode);
        let node = NodeState::new(settings, fleet, pods, Ledger::default());
        let began = Instant::now();
        let request = ContainerAllocateRequest {
            device_ids: IDS.map(str::to_owned).into(),
        };
        let answer = node.allocate(ExtendedResource::Memory, &request).await;
        (answer, began.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn by_variable_a_call_waits_and_is_then_answered_by_its_ids() {
        let (answer, waited) = nobodys(Mode::Envvar).await;
        assert_eq!(waited, 2);
        let uuid = crate::builders::gpu(0).uuid.to_string();
        assert_eq!(
            answer.envs,
            ["NVIDIA_VISIBLE_DEVICES", "GPUSHARE_GPU_DEVICES"]
                .map(|name| (name.to_owned(), uuid.clone()))
                .into()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn by_cdi_a_call_is_answered_at_once_by_its_ids_alone() {
        let (answer, waited) = nobodys(Mode::Cdi).await;
        let names: Vec<_> = answer
            .cdi_devices
            .iter()
            .map(|device| device.name.as_str())
            .collect();
        assert_eq!((waited, names.len(), names[0]), (0, 2, "gpushare.dev/driver=all"));
        assert!(
            names[1].starts_with("gpushare.dev/gpu=be37fd026d9b3b0b-"),
            "{}",
            names[1]
        );
        assert_eq!(
            answer.envs,
            [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())].into()
        );
    }
}

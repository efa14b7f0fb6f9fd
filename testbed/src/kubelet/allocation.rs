//! One container's turn in the device manager: choose, ask for the preference, Allocate, record, checkpoint.
//!
//! The state is not locked during calls to plugins; that only one pod is admitted at a time is the caller's duty.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use proto::kubelet::deviceplugin::ContainerPreferredAllocationRequest;
use rand::seq::SliceRandom;

use super::devices::{AllocationError, Choice, Wish};
use super::held::{DeviceId, Holder};
use super::pod::{ContainerKind, ContainerSpec, PodSpec};
use super::process::Process;
use super::runtime::RunState;
use crate::dice::dice;

/// Devices of ordinary init containers, offered first to the containers after them.
pub(crate) type Reusable = BTreeMap<String, BTreeSet<DeviceId>>;

impl Process {
    /// Gives every container of a pod its devices, in order.
    pub(crate) async fn allocate_pod(&self, pod: &PodSpec) -> Result<(), AllocationError> {
        let mut reusable = Reusable::new();
        for container in &pod.containers {
            self.allocate_container(pod, container, &reusable).await?;
            let holder = Holder {
                pod: pod.uid.clone(),
                container: container.name.clone(),
            };
            let devices = self.devices();
            for (resource, grant) in devices.held().of(&holder) {
                let ids = grant.devices();
                let offered = reusable.entry(resource.clone()).or_default();
                if container.kind == ContainerKind::Init {
                    offered.extend(ids);
                } else {
                    offered.retain(|id| !ids.contains(id));
                }
            }
        }
        Ok(())
    }

    /// Gives one container its devices of every resource that plugins serve.
    pub(crate) async fn allocate_container(
        &self,
        pod: &PodSpec,
        container: &ContainerSpec,
        reusable: &Reusable,
    ) -> Result<(), AllocationError> {
        let mut collected = false;
        let mut granted = false;
        for (resource, amount) in self.in_random_order(pod, container, 0) {
            if !self.devices().serves(resource) {
                continue;
            }
            if !std::mem::replace(&mut collected, true) {
                self.free_ended();
            }
            let holder = Holder {
                pod: pod.uid.clone(),
                container: container.name.clone(),
            };
            let required = usize::try_from(amount).unwrap_or_default();
            let untouchable = self.is_untouchable(pod, container);
            let wish = Wish {
                holder: &holder,
                resource,
                required,
                untouchable,
            };
            let offered = reusable.get(resource).cloned().unwrap_or_default();
            granted |= self.allocate_resource(pod, &wish, &offered).await?;
        }
        if granted {
            self.write_checkpoint();
        }
        Ok(())
    }

    /// A container's plugin resources, in the random order in which a Go map is walked.
    pub(crate) fn in_random_order<'a>(
        &self,
        pod: &PodSpec,
        container: &'a ContainerSpec,
        turn: u32,
    ) -> Vec<(&'a str, i64)> {
        let mut limits: Vec<_> = container
            .limits
            .iter()
            .map(|(name, amount)| (name.as_str(), *amount))
            .collect();
        let mut rng = dice(
            self.config.seed,
            &["resources", &pod.full_name(), &container.name, &turn.to_string()],
        );
        limits.shuffle(&mut rng);
        limits
    }

    /// While pods are still being listed a running container is not looked at; an exited init container is.
    fn is_untouchable(&self, pod: &PodSpec, container: &ContainerSpec) -> bool {
        if self.sources_ready() {
            return false;
        }
        let state = self.runtime.state(&pod.uid, &container.name);
        let exited = matches!(state, Some(RunState::Exited { .. }));
        matches!(state, Some(RunState::Running { .. })) || (exited && !self.config.faults.exited_init_fails)
    }

    async fn allocate_resource(
        &self,
        pod: &PodSpec,
        wish: &Wish<'_>,
        reusable: &BTreeSet<DeviceId>,
    ) -> Result<bool, AllocationError> {
        let mut rng = dice(
            self.config.seed,
            &["devices", &pod.full_name(), &wish.holder.container, wish.resource],
        );
        let choice = self.devices().begin(wish, reusable, &mut rng)?;
        let chosen = match choice {
            Choice::Nothing => return Ok(false),
            Choice::Done(chosen) => chosen,
            Choice::Open(open) => {
                let texts =
                    |ids: &mut dyn Iterator<Item = &DeviceId>| ids.map(|id| id.as_ref().to_owned()).collect();
                let mut available: Vec<String> = texts(&mut open.available.union(&open.taken));
                available.shuffle(&mut rng);
                let request = ContainerPreferredAllocationRequest {
                    available_device_ids: available,
                    must_include_device_ids: texts(&mut open.taken.iter()),
                    allocation_size: i32::try_from(open.required).unwrap_or(i32::MAX),
                };
                let endpoint = self.devices().endpoint(wish.resource).cloned();
                let endpoint =
                    endpoint.ok_or_else(|| AllocationError::UnknownPlugin(wish.resource.to_owned()))?;
                let preferred = endpoint.preferred(request).await?;
                self.devices().finish(wish.resource, open, &preferred, &mut rng)
            }
        };
        let mut ids: Vec<String> = chosen.iter().map(|id| id.as_ref().to_owned()).collect();
        ids.shuffle(&mut rng);
        let endpoint = self.devices().endpoint(wish.resource).cloned();
        let Some(endpoint) = endpoint else {
            self.devices().roll_back();
            return Err(AllocationError::UnknownPlugin(wish.resource.to_owned()));
        };
        self.counts.allocate_calls.fetch_add(1, Ordering::AcqRel);
        self.changed();
        let began = Instant::now();
        match endpoint.allocate(ids).await {
            Ok(response) => {
                self.counts
                    .allocate_took
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(began.elapsed());
                self.devices().grant(wish, &chosen, response);
                Ok(true)
            }
            // kubelet rolls back after a failed call only, not after an answer without containers.
            Err(AllocationError::EmptyAnswer) => Err(AllocationError::EmptyAnswer),
            Err(error) => {
                self.devices().roll_back();
                Err(error)
            }
        }
    }
}

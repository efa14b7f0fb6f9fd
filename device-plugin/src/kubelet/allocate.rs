//! Answers Allocate, never with an error, as kubelet fails the pod for good on that: [`crate::start`] blocks starts instead.
//!
//! In mode `cdi` the answer needs no pod: it names a new CDI device, whose spec is written before the container starts. In mode
//! `envvar` ([`crate::start::envvar`]) the answer names the devices for as long as the container lives.

use proto::kubelet::deviceplugin::{ContainerAllocateRequest, ContainerAllocateResponse};
use tracing::info;

use crate::devices::extended_resource::ExtendedResource;
use crate::inject::cdi::device_of;
use crate::inject::content::{cdi_answer, own_variable};
use crate::inject::mode::Mode;
use crate::start::envvar::answer::allocate_by_variable;
use crate::start::node_state::NodeState;
use crate::start::pod_of_call::log_answer;

/// Answers kubelet's Allocate call for one container, by the injection mode of the node.
pub(crate) async fn allocate(
    node: &NodeState,
    resource: ExtendedResource,
    request: &ContainerAllocateRequest,
) -> ContainerAllocateResponse {
    node.until_injection_decided().await;
    let ids = &request.device_ids;
    let response = match node.mode() {
        Mode::Cdi => {
            // The answer needs no pod: the pre-start check finds the pod, and writes the spec of the CDI device.
            let response = cdi_answer(resource, ids, node.fresh_number());
            log_answer(node, resource, ids, &response);
            response
        }
        // This answer decides the container's devices, so it depends on the pod.
        Mode::Envvar => allocate_by_variable(node, resource, ids).await,
    };
    // kubelet does not name the pod; the log line of the container's start does.
    info!(
        resource = node.settings.names.of(resource),
        count = ids.len(),
        cdi_device = device_of(&response),
        devices = response.envs.get(own_variable(resource)),
        "allocated"
    );
    // With this answer the pod may have all its devices: wakes the task that marks pods assigned.
    node.answered.notify_one();
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;
    use crate::node::pods::NodePods;
    use crate::tests::builders::{fleet, node_state, pods};

    const IDS: [&str; 2] = ["9507230f-0", "9507230f-1"];

    /// The answer to a call that no pod is due for, and the seconds until it comes.
    async fn unmatched(mode: Mode) -> (ContainerAllocateResponse, u64) {
        let (_pods, pods) = watch::channel(pods([]));
        let mut node = node_state(fleet(1), NodePods::default());
        node.pods = pods;
        node.settings.allocate_wait = Duration::from_secs(2);
        node.settings.injection_mode = Some(mode);
        let began = Instant::now();
        let request = ContainerAllocateRequest {
            device_ids: IDS.map(str::to_owned).into(),
        };
        let answer = allocate(&node, ExtendedResource::Memory, &request).await;
        (answer, began.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn with_envvar_a_call_waits_for_its_pod_and_is_then_answered_by_its_ids() {
        let (answer, waited) = unmatched(Mode::Envvar).await;
        assert_eq!(waited, 2);
        let uuid = crate::tests::builders::gpu(0).uuid.to_string();
        assert_eq!(
            answer.envs,
            ["NVIDIA_VISIBLE_DEVICES", "GPUSHARE_GPU_DEVICES"]
                .map(|name| (name.to_owned(), uuid.clone()))
                .into()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn with_cdi_a_call_is_answered_at_once_by_its_ids_alone() {
        let (answer, waited) = unmatched(Mode::Cdi).await;
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

//! Snapshots of the devices that kubelet has allocated: its pod-resources API and its checkpoint at one moment.
//!
//! Starts that are checked at the same time share a snapshot, as kubelet limits the rate of calls. Only calls that came before a
//! snapshot began share it, so it shows every allocation that kubelet had made when it asked for these starts.

use std::sync::Arc;
use std::time::Duration;

use proto::kubelet::podresources::ListPodResourcesResponse;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::start::node_state::NodeState;

use super::owner::{KubeletSnapshot, ListedDevices};

/// Least time from the beginning of one snapshot to that of the next: kubelet answers at most a hundred calls a second.
pub(crate) const PACE: Duration = Duration::from_millis(15);

/// Takes a snapshot of kubelet's allocations.
pub(crate) async fn take_snapshot(node: &NodeState) -> KubeletSnapshot {
    let listed = node.pod_resources.list().await;
    KubeletSnapshot {
        listed: listed.map(|listed| Arc::new(listed_devices(&listed, &node.settings.names))),
        // After the list, so that the checkpoint has every allocation that the list shows.
        allocated: node.checkpoint.read(),
    }
}

/// The device IDs of each container and resource of this plugin. kubelet's answer has one entry per device or NUMA node.
fn listed_devices(response: &ListPodResourcesResponse, names: &ExtendedResourceNames) -> Vec<ListedDevices> {
    let mut listed = Vec::new();
    for pod in &response.pod_resources {
        for container in &pod.containers {
            for resource in ExtendedResource::ALL {
                let mut ids = Vec::new();
                for devices in &container.devices {
                    if names.of(resource) == Some(devices.resource_name.as_str()) {
                        ids.extend(devices.device_ids.iter().cloned());
                    }
                }
                ids.sort_unstable();
                if !ids.is_empty() {
                    listed.push(ListedDevices {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        resource,
                        ids,
                    });
                }
            }
        }
    }
    listed
}

/// Reads a source that changes, and shares each read among all calls that came before it began.
#[derive(Debug)]
pub(crate) struct SharedRead<T> {
    /// The beginning and the result of the last read. Locked by the call that reads, so that later calls wait for it.
    last: Mutex<(Option<Instant>, Option<T>)>,
    /// Least time from the beginning of one read to that of the next.
    pace: Duration,
}

impl<T: Clone> SharedRead<T> {
    /// A shared read without a result yet. Two reads begin at least `pace` apart.
    pub(crate) fn new(pace: Duration) -> Self {
        Self {
            last: Mutex::new((None, None)),
            pace,
        }
    }

    /// Reads, or returns the result of a read that began after this call.
    pub(crate) async fn read(&self, read: impl Future<Output = T>) -> T {
        let called = Instant::now();
        let mut last = self.last.lock().await;
        if let (Some(began), result) = &*last {
            if let Some(result) = result
                && *began > called
            {
                return result.clone();
            }
            sleep_until(*began + self.pace).await;
        }
        // A call that is cancelled during its read leaves no result.
        *last = (Some(Instant::now()), None);
        let result = read.await;
        last.1 = Some(result.clone());
        result
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use proptest::prelude::*;
    use prost::Message;
    use proto::kubelet::podresources::{ContainerDevices, ContainerResources, PodResources};
    use proto::resource::GPU_SHARED;
    use tokio::task::LocalSet;

    use super::*;

    /// Reads of a source that changes all the time, each of which takes 10 ms: their results, and the number of reads.
    async fn run(pace: Duration, called_at: &[u64]) -> (Vec<u64>, u64) {
        let (shared, n_reads) = (Rc::new(SharedRead::new(pace)), Rc::new(Cell::new(0)));
        let began = Instant::now();
        let local = LocalSet::new();
        let tasks: Vec<_> = called_at
            .iter()
            .map(|at| {
                let (shared, n_reads, at) = (Rc::clone(&shared), Rc::clone(&n_reads), *at);
                local.spawn_local(async move {
                    sleep_until(began + Duration::from_millis(at)).await;
                    let read = async {
                        n_reads.set(n_reads.get() + 1);
                        let now = u64::try_from(began.elapsed().as_millis()).unwrap();
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        now
                    };
                    shared.read(read).await
                })
            })
            .collect();
        local.await;
        let mut found = Vec::new();
        for task in tasks {
            found.push(task.await.unwrap());
        }
        (found, n_reads.get())
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_a_read_that_began_after_their_calls() {
        let (found, n_reads) = run(Duration::ZERO, &[0, 1, 5, 9, 30]).await;
        assert_eq!(found, [0, 10, 10, 10, 30]);
        assert_eq!(n_reads, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn reads_are_limited_in_rate() {
        let (found, _) = run(Duration::from_millis(50), &[0, 1, 60]).await;
        assert_eq!(found, [0, 50, 100]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_read_has_no_result() {
        let shared = SharedRead::new(Duration::ZERO);
        let forever = tokio::time::timeout(
            Duration::from_millis(5),
            shared.read(std::future::pending::<u8>()),
        );
        assert!(forever.await.is_err());
        assert_eq!(shared.read(std::future::ready(7)).await, 7);
    }

    /// kubelet's list of a pod with two units of one resource and one of another, as it comes from the socket.
    fn listed_bytes() -> Vec<u8> {
        let devices = |resource: &str, ids: &[&str]| ContainerDevices {
            resource_name: resource.to_owned(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            ..ContainerDevices::default()
        };
        let container = ContainerResources {
            name: "c".to_owned(),
            devices: vec![
                devices(GPU_SHARED, &["0-1"]),
                devices("example.com/nic", &["nic-0"]),
                devices(GPU_SHARED, &["0-0"]),
            ],
            ..ContainerResources::default()
        };
        let pod = PodResources {
            name: "a".to_owned(),
            namespace: "default".to_owned(),
            containers: vec![container],
        };
        ListPodResourcesResponse {
            pod_resources: vec![pod],
        }
        .encode_to_vec()
    }

    proptest! {
        #![proptest_config(fuzz::config(500))]

        /// Every device ID of this plugin's resources is listed once, and none of another's.
        #[test]
        fn no_list_makes_the_reader_panic(bytes in fuzz::damaged(vec![listed_bytes()])) {
            let Ok(response) = ListPodResourcesResponse::decode(bytes.as_slice()) else {
                return Ok(());
            };
            let names = ExtendedResourceNames::default();
            let containers = response.pod_resources.iter().flat_map(|pod| &pod.containers);
            let devices = containers.flat_map(|container| &container.devices);
            let ours = devices.filter(|devices| names.find(&devices.resource_name).is_some());
            let n_ids: usize = ours.map(|devices| devices.device_ids.len()).sum();
            let listed = listed_devices(&response, &names);
            prop_assert_eq!(listed.iter().map(|devices| devices.ids.len()).sum::<usize>(), n_ids);
        }
    }
}

//! One run of the kubelet process: its state, sockets and tasks, which all end with it.
//!
//! Only the [`KubeletMachine`] outlives it. The next run reads everything else from the checkpoint and the API server.

use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use proto::kubelet::deviceplugin::registration_server::RegistrationServer;
use proto::kubelet::podresources::pod_resources_lister_server::PodResourcesListerServer;
use tonic::transport::Server;

use super::container_start::ContainerStarter;
use super::device_manager::{DeviceManager, RegistrationService};
use super::machine::{KubeletMachine, cannot_prepare};
use super::node_status::NodeStatusSync;
use super::pod_resources::PodResourcesService;
use super::pod_table::PodTable;
use super::pod_worker::PodWorkers;
use super::socket;
use super::status_manager::StatusManager;
use super::sync_loop::SyncLoop;
use super::tasks::KubeletTasks;

#[derive(Debug)]
pub(crate) struct KubeletProcess {
    pub(crate) devices: Arc<DeviceManager>,
    pub(crate) pods: Arc<PodTable>,
    tasks: KubeletTasks,
}

impl KubeletProcess {
    /// Removes old sockets, loads the checkpoint, opens the sockets, starts the tasks.
    pub(crate) fn start(machine: &Arc<KubeletMachine>) -> Result<Self> {
        let config = &machine.config;
        let plugin_dir = config.plugin_dir();
        clear_sockets(&plugin_dir).with_context(|| cannot_prepare(&plugin_dir))?;
        let is_new_node = !config.checkpoint().exists();
        let tasks = KubeletTasks::default();
        let pods = Arc::new(PodTable::default());
        let devices = Arc::new(DeviceManager::start(machine, &pods, &tasks));
        let status = Arc::new(StatusManager::new(machine, &pods, &devices, &tasks));
        let node = Arc::new(NodeStatusSync::new(machine, &devices));
        let workers = Arc::new(PodWorkers {
            starter: ContainerStarter {
                machine: Arc::clone(machine),
                devices: Arc::clone(&devices),
            },
            pods: Arc::clone(&pods),
            status: Arc::clone(&status),
            tasks: tasks.clone(),
        });
        let process = Self { devices, pods, tasks };
        process.serve(machine)?;
        let sync_loop = Arc::new(SyncLoop {
            machine: Arc::clone(machine),
            pods: Arc::clone(&process.pods),
            devices: Arc::clone(&process.devices),
            status,
            node: Arc::clone(&node),
            workers,
            tasks: process.tasks.clone(),
        });
        let tasks = process.tasks.clone();
        process.tasks.spawn(async move {
            node.register(is_new_node).await;
            tasks.spawn(async move { node.keep().await });
            sync_loop.run().await;
        });
        Ok(process)
    }

    /// Ends every task and connection, as SIGKILL would.
    pub(crate) async fn stop(&self) {
        self.tasks.stop().await;
    }

    /// Serves kubelet's two sockets: the registration of device plugins, and the pod-resources API.
    fn serve(&self, machine: &Arc<KubeletMachine>) -> Result<()> {
        let registration = RegistrationServer::new(RegistrationService(Arc::clone(&self.devices)));
        let lister =
            PodResourcesListerServer::new(PodResourcesService::new(machine, &self.devices, &self.pods));
        let plugins = self.listen(&machine.config.plugin_socket())?;
        let clients = self.listen(&machine.config.pod_resources_socket())?;
        self.tasks.spawn(async move {
            let router = Server::builder().add_service(registration);
            if let Err(error) = router.serve_with_incoming(plugins).await {
                tracing::error!(%error, "the registration socket failed");
            }
        });
        self.tasks.spawn(async move {
            let router = Server::builder().add_service(lister);
            if let Err(error) = router.serve_with_incoming(clients).await {
                tracing::error!(%error, "the pod-resources socket failed");
            }
        });
        Ok(())
    }

    /// Listens on a socket; its connections break when this kubelet stops.
    fn listen(
        &self,
        path: &Path,
    ) -> Result<impl futures::Stream<Item = io::Result<socket::Severable>> + use<>> {
        socket::listen(path, self.tasks.cancellation()).with_context(|| cannot_prepare(path))
    }
}

/// Removes every socket of a directory and nothing else, as kubelet does when it starts.
fn clear_sockets(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::create_dir_all(dir)?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            socket::remove(&entry.path())?;
        }
    }
    Ok(())
}

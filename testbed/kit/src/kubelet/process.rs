//! Starts one run of the kubelet process: its sockets and tasks.
//!
//! Only the [`KubeletMachine`] outlives it. The next run reads everything else from the checkpoint and the API server.

use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use proto::kubelet::deviceplugin::registration_server::RegistrationServer;
use proto::kubelet::podresources::pod_resources_lister_server::PodResourcesListerServer;
use tonic::transport::Server;
use tonic::transport::server::Router;

use super::container_start::ContainerStarter;
use super::device_manager::{DeviceManager, RegistrationService};
use super::machine::{KubeletMachine, cannot_prepare};
use super::node_status::NodeStatusSync;
use super::pod_resources::PodResourcesService;
use super::pod_worker::PodWorkers;
use super::run::KubeletRun;
use super::socket;
use super::status_manager::StatusManager;
use super::sync_loop::SyncLoop;

#[derive(Debug)]
pub(crate) struct KubeletProcess {
    pub(crate) run: Arc<KubeletRun>,
    pub(crate) devices: Arc<DeviceManager>,
}

impl KubeletProcess {
    /// Removes old sockets, loads the checkpoint, opens the sockets, starts the tasks.
    pub(crate) fn start(machine: &Arc<KubeletMachine>) -> Result<Self> {
        let config = &machine.config;
        let plugin_dir = config.plugin_dir();
        clear_sockets(&plugin_dir).with_context(|| cannot_prepare(&plugin_dir))?;
        let is_new_node = !config.checkpoint().exists();
        let run = Arc::new(KubeletRun::start(machine));
        let devices = Arc::new(DeviceManager::start(&run));
        let status = Arc::new(StatusManager::new(&run, &devices));
        let node = Arc::new(NodeStatusSync::new(machine, &devices));
        let sync_loop = Arc::new(SyncLoop {
            run: Arc::clone(&run),
            devices: Arc::clone(&devices),
            status: Arc::clone(&status),
            node: Arc::clone(&node),
            workers: Arc::new(PodWorkers {
                run: Arc::clone(&run),
                starter: ContainerStarter {
                    run: Arc::clone(&run),
                    devices: Arc::clone(&devices),
                },
                status,
            }),
        });
        let registration = RegistrationServer::new(RegistrationService(Arc::clone(&devices)));
        let router = Server::builder().add_service(registration);
        serve(&run, &config.plugin_socket(), router)?;
        let lister = PodResourcesListerServer::new(PodResourcesService::new(&run, &devices));
        let router = Server::builder().add_service(lister);
        serve(&run, &config.pod_resources_socket(), router)?;
        let tasks = Arc::clone(&run);
        run.spawn(async move {
            node.register(is_new_node).await;
            tasks.spawn(async move { node.keep().await });
            sync_loop.run().await;
        });
        Ok(Self { run, devices })
    }
}

/// Serves one of kubelet's sockets; its connections break when this kubelet stops.
fn serve(run: &KubeletRun, path: &Path, router: Router) -> Result<()> {
    let incoming = socket::listen(path, &run.cancel).with_context(|| cannot_prepare(path))?;
    run.spawn(async move {
        if let Err(error) = router.serve_with_incoming(incoming).await {
            tracing::error!(%error, "a socket of kubelet failed");
        }
    });
    Ok(())
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

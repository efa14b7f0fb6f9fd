//! One life of the kubelet process: its state, its sockets, its tasks.
//!
//! Containers and what was recorded about them live on when it ends; everything else is read anew from the
//! checkpoint and from the API server.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::kubelet::deviceplugin::registration_server::RegistrationServer;
use proto::kubelet::podresources::pod_resources_lister_server::PodResourcesListerServer;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;

use super::active::Pods;
use super::admission::AdmissionLog;
use super::checkpoint;
use super::claims::Claims;
use super::config::{Hold, KubeletConfig};
use super::devices::Devices;
use super::fit::Amounts;
use super::held::Held;
use super::injector::Injector;
use super::node;
use super::nri::Nri;
use super::pod_resources::PodResourcesService;
use super::rate_limit::RateLimit;
use super::registration::{Plugin, RegistrationService};
use super::runtime::Runtime;
use super::socket;
use super::status_writer::StatusWriter;
use super::sync_loop;

/// Why a kubelet cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartupError {
    /// A directory or socket of kubelet cannot be made.
    #[error("cannot prepare {}", path.display())]
    Prepare {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The container runtime cannot watch its CDI specs.
    #[error("cannot watch CDI specs")]
    Watch(#[source] io::Error),
}

/// What outlives the process.
#[derive(Clone, Debug)]
pub(crate) struct Lasting {
    pub(crate) config: Arc<KubeletConfig>,
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) admissions: Arc<AdmissionLog>,
    pub(crate) changed: watch::Sender<()>,
    pub(crate) hold: watch::Sender<Hold>,
    pub(crate) counts: Arc<Counts>,
    /// The container runtime's plugins.
    pub(crate) nri: Option<Arc<Nri>>,
    /// The container runtime's side of CDI; a runtime whose CDI is off reads no spec.
    pub(crate) injector: Option<Arc<Injector>>,
    pub(crate) claims: Arc<Claims>,
}

/// How many there are or were of something, across restarts of the process.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Pods that wait for [`Hold`] to end.
    pub(crate) held: AtomicUsize,
    /// Calls of Allocate that have begun.
    pub(crate) allocate_calls: AtomicUsize,
    /// How long those took that were answered.
    pub(crate) allocate_took: Mutex<Vec<Duration>>,
    /// Calls of List of the pod-resources API, refused ones included.
    pub(crate) lists: AtomicUsize,
    /// Plugins that have registered and could be reached.
    pub(crate) registrations: AtomicUsize,
}

/// A running kubelet process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) config: Arc<KubeletConfig>,
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) admissions: Arc<AdmissionLog>,
    pub(crate) writer: Arc<StatusWriter>,
    /// Wakes the task that keeps node status.
    pub(crate) node_stale: Notify,
    /// There was no checkpoint at the start, so the node counts as new.
    pub(crate) fresh: bool,
    pub(crate) hold: watch::Sender<Hold>,
    pub(crate) counts: Arc<Counts>,
    pub(crate) nri: Option<Arc<Nri>>,
    /// The container runtime's side of CDI, if its CDI is on.
    pub(crate) injector: Option<Arc<Injector>>,
    pub(crate) claims: Arc<Claims>,
    changed: watch::Sender<()>,
    devices: Mutex<Devices>,
    pods: Mutex<Pods>,
    plugins: Mutex<BTreeMap<String, Arc<Plugin>>>,
    allocatable: Mutex<Amounts>,
    sources_ready: AtomicBool,
    cancel: CancellationToken,
    tasks: TaskTracker,
}

impl Process {
    /// Clears the plugin directory of sockets, loads the checkpoint, opens the sockets, starts the tasks.
    pub(crate) fn start(lasting: Lasting) -> Result<Arc<Self>, StartupError> {
        let Lasting {
            config,
            runtime,
            admissions,
            changed,
            hold,
            counts,
            nri,
            injector,
            claims,
        } = lasting;
        let plugin_dir = config.plugin_dir();
        clear_sockets(&plugin_dir).map_err(|source| StartupError::Prepare {
            path: plugin_dir,
            source,
        })?;
        let fresh = !config.checkpoint().exists();
        let data = checkpoint::read(&config.checkpoint()).unwrap_or_else(|error| {
            tracing::error!(%error, "continues without the checkpoint");
            None
        });
        let (entries, registered) = data
            .map(|data| (data.pod_device_entries, data.registered_devices))
            .unwrap_or_default();
        let cancel = CancellationToken::new();
        let tasks = TaskTracker::new();
        let process = Arc::new(Self {
            writer: Arc::new(StatusWriter::new(&config, cancel.clone(), tasks.clone())),
            allocatable: Mutex::new(Amounts::read(&config.capacity)),
            devices: Mutex::new(Devices::restore(Held::restore(entries), registered.into_keys())),
            injector,
            claims,
            config,
            runtime,
            admissions,
            node_stale: Notify::new(),
            fresh,
            hold,
            counts,
            nri,
            changed,
            pods: Mutex::default(),
            plugins: Mutex::default(),
            sources_ready: AtomicBool::new(false),
            cancel,
            tasks,
        });
        process.serve()?;
        let registered = Arc::clone(&process);
        process.spawn(async move {
            node::register(&registered).await;
            let syncing = Arc::clone(&registered);
            registered.spawn(async move { node::keep(&syncing).await });
            sync_loop::run(registered).await;
        });
        Ok(process)
    }

    /// Ends every task and connection, as a kill would.
    pub(crate) async fn stop(&self) {
        self.cancel.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Runs a task until it is done or the process ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cancel = self.cancel.clone();
        self.tasks.spawn(async move {
            cancel.run_until_cancelled(task).await;
        });
    }

    fn serve(self: &Arc<Self>) -> Result<(), StartupError> {
        let open = |path: PathBuf| {
            socket::listen(&path, &self.cancel).map_err(|source| StartupError::Prepare { path, source })
        };
        let registration = RegistrationServer::new(RegistrationService(Arc::clone(self)));
        let incoming = open(self.config.plugin_socket())?;
        self.spawn(async move {
            if let Err(error) = Server::builder()
                .add_service(registration)
                .serve_with_incoming(incoming)
                .await
            {
                tracing::error!(%error, "the registration socket failed");
            }
        });
        let lister = PodResourcesListerServer::new(PodResourcesService {
            process: Arc::clone(self),
            limit: RateLimit::full(),
        });
        let incoming = open(self.config.pod_resources_socket())?;
        self.spawn(async move {
            if let Err(error) = Server::builder()
                .add_service(lister)
                .serve_with_incoming(incoming)
                .await
            {
                tracing::error!(%error, "the pod-resources socket failed");
            }
        });
        Ok(())
    }

    pub(crate) fn devices(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn plugins(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Plugin>>> {
        self.plugins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node's allocatable as the API server shows it.
    pub(crate) fn allocatable(&self) -> Amounts {
        self.allocatable
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn set_allocatable(&self, amounts: Amounts) {
        *self.allocatable.lock().unwrap_or_else(PoisonError::into_inner) = amounts;
    }

    /// Whether the first list of pods has been worked through.
    pub(crate) fn sources_ready(&self) -> bool {
        self.sources_ready.load(Ordering::Acquire)
    }

    pub(crate) fn set_sources_ready(&self) {
        self.sources_ready.store(true, Ordering::Release);
        self.changed();
    }

    /// Forgets what pods hold that are not active any more, once all pods are known.
    pub(crate) fn free_ended(&self) {
        if self.sources_ready() {
            let mut devices = self.devices();
            // Under the lock: devices of a pod that was admitted after the others were counted would be freed.
            let active = self.pods().active_uids();
            devices.free_ended(&active);
        }
    }

    pub(crate) fn write_checkpoint(&self) {
        let devices = self.devices();
        let content = checkpoint::render(&devices);
        // Written under the lock, so that an older state cannot replace a newer one.
        if let Err(error) = checkpoint::write(&self.config.checkpoint(), &content) {
            tracing::error!(%error, "the checkpoint was not written");
        }
    }

    pub(crate) fn devices_changed(&self) {
        self.node_stale.notify_one();
        self.changed();
    }

    /// Wakes whoever waits for a condition on this kubelet.
    pub(crate) fn changed(&self) {
        self.changed.send_replace(());
    }
}

/// Removes every socket of a directory and nothing else.
fn clear_sockets(dir: &std::path::Path) -> io::Result<()> {
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

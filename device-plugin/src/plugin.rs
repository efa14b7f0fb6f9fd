//! kubelet's device plugin protocol: virtual device IDs, registration and the two gRPC services.
//!
//! Nothing here talks to the API server: what is known of pods comes out of [`NodeState`], which
//! watches keep up to date.

pub mod allocate;
pub mod ids;
pub mod preferred;
pub mod registration;
pub mod server;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::memory_unit::MemoryUnit;
use proto::resource::ResourceNames;
use tokio::sync::{Notify, watch};

use crate::fleet::Fleet;
use crate::identity::{Ledger, checkpoint};
use crate::pods::Pods;

/// What every Allocate answer depends on besides pods and devices.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cluster's resource names.
    pub names: ResourceNames,
    /// Bytes of a memory unit.
    pub memory_unit: MemoryUnit,
    /// The variable that tells the container runtime which GPUs a container sees.
    pub visible_devices_env: String,
    /// How long a call waits for its pod to show up.
    pub allocate_wait: Duration,
}

/// Everything that the services of both resources share.
#[derive(Debug)]
pub struct NodeState {
    /// Fixed for the life of the process.
    pub settings: Settings,
    /// The devices and their health.
    pub fleet: watch::Receiver<Arc<Fleet>>,
    /// The pods of this node.
    pub pods: watch::Receiver<Pods>,
    /// Told when a call has been answered.
    pub answered: Notify,
    ledger: Mutex<Ledger>,
    /// The directory with kubelet's checkpoint, if it is to be read again.
    checkpoint_dir: Option<PathBuf>,
}

impl NodeState {
    /// With books that have been begun and are all that is known.
    pub fn new(settings: Settings, fleet: watch::Receiver<Arc<Fleet>>, pods: watch::Receiver<Pods>, ledger: Ledger) -> Self {
        Self { settings, fleet, pods, answered: Notify::new(), ledger: Mutex::new(ledger), checkpoint_dir: None }
    }

    /// With books that begin with kubelet's checkpoint in this directory, and are compared with it when in doubt.
    pub fn beside_kubelet(settings: Settings, fleet: watch::Receiver<Arc<Fleet>>, pods: watch::Receiver<Pods>, dir: PathBuf) -> Self {
        let ledger = Ledger::after(checkpoint::read(&dir, &settings.names));
        Self { checkpoint_dir: Some(dir), ..Self::new(settings, fleet, pods, ledger) }
    }

    /// Brings books that may lack answers up to date with what kubelet has written down.
    fn catch_up(&self, ledger: &mut Ledger, pods: &Pods) {
        ledger.inherit(pods);
        if ledger.is_unsure(pods)
            && let Some(before) = self.read_checkpoint()
        {
            ledger.catch_up(&before, pods);
        }
    }

    /// Before kubelet is told of this plugin again: it may be another kubelet.
    fn resume(&self) {
        // The pods before the books, as everywhere.
        let pods = self.pods.borrow();
        if let Some(before) = self.read_checkpoint() {
            self.ledger().resume(&before, &pods);
        }
    }

    fn read_checkpoint(&self) -> Option<Vec<checkpoint::Allocated>> {
        checkpoint::read(self.checkpoint_dir.as_deref()?, &self.settings.names)
    }

    /// The books of answered calls. Never held across an await.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Every change of the ledger leaves it consistent, so a panic elsewhere does not spoil it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

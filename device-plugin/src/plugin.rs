//! kubelet's device plugin protocol: virtual device IDs, registration and the two gRPC services.
//!
//! Nothing here talks to the API server: what is known of pods comes out of [`NodeState`], which
//! watches keep up to date.

pub mod allocate;
pub mod ids;
pub mod preferred;
pub mod registration;
pub mod server;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::memory_unit::MemoryUnit;
use proto::resource::ResourceNames;
use tokio::sync::{Notify, watch};

use crate::fleet::Fleet;
use crate::identity::Ledger;
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
}

impl NodeState {
    /// With books that have been begun.
    pub fn new(settings: Settings, fleet: watch::Receiver<Arc<Fleet>>, pods: watch::Receiver<Pods>, ledger: Ledger) -> Self {
        Self { settings, fleet, pods, answered: Notify::new(), ledger: Mutex::new(ledger) }
    }

    /// The books of answered calls. Never held across an await.
    pub fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Every change of the ledger leaves it consistent, so a panic elsewhere does not spoil it.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

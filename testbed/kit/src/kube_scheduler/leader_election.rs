//! `testbed kube-scheduler`: the scheduling loop as a process of its own, with leader election by a Lease as client-go does
//! it for kube-scheduler (`leaderelection.go`).
//!
//! With `leaderElection` in its configuration the loop runs while the process holds the Lease. After the loss
//! of the Lease a new loop starts without state: the real process exits, and kubelet starts it again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};

use super::configuration::LeaderElection;
use super::{KubeScheduler, Loop, Options, SchedulerConfiguration};
use crate::cluster::client_of;

/// One process as a candidate in the election.
pub(super) struct SchedulerElector {
    api: Api<Lease>,
    settings: LeaderElection,
    /// Host name and a number that no other process has.
    identity: String,
    /// The Lease as it was read last, and the time at which this version of it was read first.
    observed: Option<(Lease, Instant)>,
}

impl SchedulerElector {
    /// A candidate with a new identity on this host; in a pod the host name is the pod's name.
    pub(super) fn new(client: Client, settings: LeaderElection, host: &str) -> Self {
        let identity = format!("{host}_{:016x}", RandomState::new().build_hasher().finish());
        Self {
            api: Api::namespaced(client, &settings.resource_namespace),
            settings,
            identity,
            observed: None,
        }
    }

    /// Returns when this process holds the Lease.
    pub(super) async fn acquire(&mut self) {
        while !self.try_acquire_or_renew().await {
            sleep(self.settings.retry_period).await;
        }
        info!(identity = self.identity, "a scheduling loop holds the Lease");
    }

    /// Renews the Lease; returns when it could not be renewed for `renew_deadline`, as when another process holds it.
    pub(super) async fn renew(&mut self) {
        let mut renewed = Instant::now();
        while renewed.elapsed() < self.settings.renew_deadline {
            sleep(self.settings.retry_period).await;
            if self.try_acquire_or_renew().await {
                renewed = Instant::now();
            }
        }
        info!(identity = self.identity, "a scheduling loop has lost the Lease");
    }

    /// Releases the Lease if this process holds it, as kube-scheduler does when it is asked to end (`ReleaseOnCancel`).
    pub(super) async fn release(&self) {
        let Some((held, _)) = &self.observed else { return };
        let before = held.spec.clone().unwrap_or_default();
        if before.holder_identity.as_deref() != Some(self.identity.as_str()) {
            return;
        }
        let spec = LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            ..self.lease_spec(Some(&before))
        };
        let lease = Lease {
            spec: Some(spec),
            ..held.clone()
        };
        let params = PostParams::default();
        let released = self.api.replace(&self.settings.resource_name, &params, &lease);
        if timeout(self.settings.renew_deadline, released)
            .await
            .is_ok_and(|released| released.is_ok())
        {
            info!(identity = self.identity, "the Lease is given up");
        }
    }

    /// Tries to get or renew the Lease within the renew deadline; returns true if this process holds it now.
    async fn try_acquire_or_renew(&mut self) -> bool {
        match timeout(self.settings.renew_deadline, self.attempt()).await {
            Ok(Ok(is_held)) => is_held,
            Ok(Err(error)) => {
                debug!(%error, "the Lease cannot be read or written");
                false
            }
            Err(_) => false,
        }
    }

    /// Reads the Lease, and writes it if there is none, if this process holds it or if it has expired.
    async fn attempt(&mut self) -> kube::Result<bool> {
        let Some(found) = self.api.get_opt(&self.settings.resource_name).await? else {
            let metadata = ObjectMeta {
                name: Some(self.settings.resource_name.clone()),
                ..ObjectMeta::default()
            };
            let lease = Lease {
                metadata,
                spec: Some(self.lease_spec(None)),
            };
            let created = self.api.create(&PostParams::default(), &lease).await?;
            self.observe(created);
            return Ok(true);
        };
        self.observe(found.clone());
        let before = found.spec.clone().unwrap_or_default();
        let holder = before.holder_identity.as_deref().unwrap_or_default();
        // isLeaseValid takes the duration that the holder wrote, which may have another configuration.
        let seconds = u64::try_from(before.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        let observed = self.observed.as_ref();
        let is_valid = observed.is_some_and(|(_, since)| since.elapsed() < Duration::from_secs(seconds));
        if !holder.is_empty() && holder != self.identity && is_valid {
            return Ok(false);
        }
        let lease = Lease {
            spec: Some(self.lease_spec(Some(&before))),
            ..found
        };
        let written = self
            .api
            .replace(&self.settings.resource_name, &PostParams::default(), &lease)
            .await?;
        self.observe(written);
        Ok(true)
    }

    /// Remembers the Lease, and the time at which this process first saw this version of it.
    fn observe(&mut self, lease: Lease) {
        let is_same = self
            .observed
            .as_ref()
            .is_some_and(|(seen, _)| seen.spec == lease.spec);
        // Only this process's clock counts (observedTime): the Lease is old once this process has not seen it change for the
        // lease's duration.
        if !is_same {
            self.observed = Some((lease, Instant::now()));
        }
    }

    /// The Lease with this process as holder; the acquire time stays if it held the Lease before.
    fn lease_spec(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let same = before.filter(|before| before.holder_identity.as_deref() == Some(&self.identity));
        let transitions = before.and_then(|before| before.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.settings.lease_duration.as_secs()).ok(),
            acquire_time: same.map_or_else(|| Some(now.clone()), |same| same.acquire_time.clone()),
            renew_time: Some(now),
            lease_transitions: Some(if same.is_some() || before.is_none() {
                transitions
            } else {
                transitions + 1
            }),
            ..LeaseSpec::default()
        }
    }
}

/// Flags of `testbed kube-scheduler`.
#[derive(Clone, Debug, Args)]
pub struct KubeSchedulerArgs {
    /// The cluster, and the account of the process.
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// A `KubeSchedulerConfiguration`.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Host name of the process, by which it holds the Lease: the name of its pod.
    #[arg(long, value_name = "NAME")]
    host_name: String,
}

/// Runs until `stop` completes, and then gives the Lease up; the result is always true, for success.
pub async fn run(args: KubeSchedulerArgs, stop: impl Future<Output = ()>) -> Result<bool> {
    let configuration = SchedulerConfiguration::read(&args.config)?;
    let client = client_of(&args.kubeconfig).await?;
    tokio::pin!(stop);
    let Some(election) = configuration.leader_election.clone() else {
        let _running = KubeScheduler::start(&client, &configuration, Options::default())?;
        stop.await;
        return Ok(true);
    };
    loop {
        let mut elector = SchedulerElector::new(client.clone(), election.clone(), &args.host_name);
        tokio::select! {
            result = lead(&mut elector, &client, &configuration) => result?,
            () = &mut stop => {
                elector.release().await;
                return Ok(true);
            }
        }
    }
}

/// Runs the loop from the time at which the Lease is held until it is lost.
async fn lead(
    elector: &mut SchedulerElector,
    client: &Client,
    configuration: &SchedulerConfiguration,
) -> Result<()> {
    elector.acquire().await;
    let running = Loop::new(client, configuration, Options::default())?;
    tokio::select! {
        () = running.run() => {}
        () = elector.renew() => {}
    }
    Ok(())
}

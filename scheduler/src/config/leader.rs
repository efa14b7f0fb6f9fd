//! Flags about the election of a leader among replicas.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use daemon::duration::parse_duration;

use crate::leader::BIND_TIMEOUT;
use crate::leader::election::LeaseTimes;

/// The election of a leader among replicas.
#[derive(Clone, Debug, Args)]
pub(super) struct LeaderArgs {
    /// Decide only while leading: several replicas elect one of them by a Lease. Needs --pod-name.
    #[arg(long, env = "GPUSHARE_LEADER_ELECT", requires = "pod_name", group = "leading")]
    leader_elect: bool,
    /// Decide only while the kube-scheduler in the same pod holds this Lease, in the pod's namespace: for a second kube-scheduler
    /// with an extender in each of its pods. The Lease is read and never written. Needs --pod-name.
    #[arg(
        long,
        env = "GPUSHARE_KUBE_SCHEDULER_LEASE",
        value_name = "NAME",
        requires = "pod_name",
        group = "leading"
    )]
    kube_scheduler_lease: Option<String>,
    /// Write the object `SchedulerLeader` when this replica takes the lead, and bind nothing before the API server takes its
    /// bindings: the policy gpushare-scheduler-bindings refuses those of all others.
    #[arg(long, env = "GPUSHARE_FENCE_BINDINGS", requires = "leading")]
    fence_bindings: bool,
    /// Time after which other replicas take a Lease that is not renewed; whole seconds. The leader itself gives up after two
    /// thirds of it, and renews the Lease five times as often. Shorten it where the configuration of kube-scheduler has a
    /// shorter one.
    #[arg(long, env = "GPUSHARE_LEASE_DURATION", default_value = "15s", value_parser = parse_duration)]
    lease_duration: Duration,
    /// Name of this replica's pod, which has the label gpushare/leader while it leads.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
}

/// The objects and times by which several replicas elect a leader.
#[derive(Clone, Debug)]
pub struct LeaderElection {
    /// Name of the Lease of the kube-scheduler in this pod, if this replica leads by that one.
    pub(crate) kube_scheduler_lease: Option<String>,
    pub(crate) times: LeaseTimes,
    /// Name of this replica's pod.
    pub(crate) pod: String,
    /// True if an admission policy of the API server lets only the leader bind.
    pub(crate) fences_bindings: bool,
}

impl LeaderArgs {
    /// The election that this replica takes part in; `None` if it is the only replica.
    pub(super) fn leader(self) -> anyhow::Result<Option<LeaderElection>> {
        // The manifest may set the pod's name for a single replica as well.
        let is_one_of_several = self.leader_elect || self.kube_scheduler_lease.is_some();
        let (Some(pod), true) = (self.pod_name, is_one_of_several) else {
            return Ok(None);
        };
        // An environment variable that is set to nothing counts as given.
        if pod.is_empty() {
            bail!("--pod-name is empty");
        }
        if self.kube_scheduler_lease.as_ref().is_some_and(String::is_empty) {
            bail!(
                "--kube-scheduler-lease is empty: give the resourceName in the leaderElection of kube-scheduler's configuration"
            );
        }
        let lease = self.lease_duration;
        // The Lease object has whole seconds, and a leader's last bind must end before another replica leads.
        if lease.subsec_nanos() != 0 || lease < BIND_TIMEOUT * 2 {
            bail!(
                "--lease-duration must be whole seconds, at least {:?}",
                BIND_TIMEOUT * 2
            );
        }
        Ok(Some(LeaderElection {
            kube_scheduler_lease: self.kube_scheduler_lease,
            times: LeaseTimes::new(lease),
            pod,
            fences_bindings: self.fence_bindings,
        }))
    }
}

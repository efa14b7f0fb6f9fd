//! Flags about leadership among replicas.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use daemon::duration::parse_duration;

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
    /// Name of the Lease of --leader-elect, and of the object `SchedulerLeader`.
    #[arg(
        long,
        env = "GPUSHARE_LEASE_NAME",
        value_name = "NAME",
        default_value = "gpushare-scheduler"
    )]
    lease_name: String,
    /// Time for which a Lease that is not renewed is left to its holder; whole seconds.
    #[arg(long, env = "GPUSHARE_LEASE_DURATION", default_value = "15s", value_parser = parse_duration)]
    lease_duration: Duration,
    /// Time for which a leader goes on whose Lease is not renewed; with the time of a bind, not longer than the Lease.
    #[arg(long, env = "GPUSHARE_RENEW_DEADLINE", default_value = "10s", value_parser = parse_duration)]
    renew_deadline: Duration,
    /// Pause between two renewals, or reads, of the Lease.
    #[arg(long, env = "GPUSHARE_RETRY_PERIOD", default_value = "2s", value_parser = parse_duration)]
    retry_period: Duration,
    /// Name of this replica's pod, which bears the label gpushare/leader while it leads.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
    /// Namespace of this replica's pod and of the Lease [default: that of --namespace].
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    pod_namespace: Option<String>,
}

/// The objects and times by which several replicas elect a leader.
#[derive(Clone, Debug)]
pub struct LeaderElection {
    /// Name of the replicas' Lease, and of the object `SchedulerLeader`.
    pub lease: String,
    /// Name of the Lease of the kube-scheduler in this pod, if this replica leads by that one.
    pub kube_scheduler_lease: Option<String>,
    /// The times of the Lease.
    pub times: LeaseTimes,
    /// Name of the replica's pod.
    pub pod: String,
    /// Namespace of the pod and of the Lease, if it is said.
    pub namespace: Option<String>,
    /// True if a policy of the API server admits bindings by the leader alone.
    pub fences_bindings: bool,
}

impl LeaderArgs {
    /// The part of a replica; none if it is the only one.
    pub(super) fn leader(self, bind_timeout: Duration) -> anyhow::Result<Option<LeaderElection>> {
        let is_one_of_several = self.leader_elect || self.kube_scheduler_lease.is_some();
        let Some(pod) = self.pod_name.filter(|_| is_one_of_several) else {
            return Ok(None);
        };
        if pod.is_empty() {
            bail!("--pod-name is empty");
        }
        if self.kube_scheduler_lease.as_ref().is_some_and(String::is_empty) {
            bail!(
                "--kube-scheduler-lease is empty: give the resourceName in the leaderElection of kube-scheduler's configuration"
            );
        }
        let times = LeaseTimes {
            lease: self.lease_duration,
            renew: self.renew_deadline,
            retry: self.retry_period,
        };
        if times.lease.subsec_nanos() != 0 || times.lease < Duration::from_secs(2) {
            bail!("--lease-duration must be whole seconds, at least 2s");
        }
        if times.retry.is_zero() || times.retry * 2 > times.renew {
            bail!("--renew-deadline must be at least twice --retry-period, which must be longer than 0s");
        }
        if times.renew + bind_timeout > times.lease {
            bail!(
                "--renew-deadline and --bind-timeout together must not be longer than --lease-duration: a leader's last bind must end before another begins"
            );
        }
        Ok(Some(LeaderElection {
            lease: self.lease_name,
            kube_scheduler_lease: self.kube_scheduler_lease,
            times,
            pod,
            namespace: self.pod_namespace,
            fences_bindings: self.fence_bindings,
        }))
    }
}

//! Flags about leadership among replicas.

use std::time::Duration;

use anyhow::bail;
use clap::Args;

use super::duration;
use crate::leader::election::Terms;

/// How replicas agree on a leader.
#[derive(Clone, Debug, Args)]
pub(super) struct LeaderArgs {
    /// Decide only while leading: several replicas elect one of them by a Lease. Needs --pod-name.
    #[arg(long, env = "GPUSHARE_LEADER_ELECT", requires = "pod_name")]
    leader_elect: bool,
    /// Write the object `SchedulerLeader`, named as the Lease, when this replica takes the lead, and bind nothing before the API
    /// server takes its bindings: the policy gpushare-scheduler-bindings refuses those of all others.
    #[arg(long, env = "GPUSHARE_FENCE_BINDINGS", requires = "leader_elect")]
    fence_bindings: bool,
    /// Name of the Lease.
    #[arg(long, env = "GPUSHARE_LEASE_NAME", value_name = "NAME", default_value = "gpushare-scheduler")]
    lease_name: String,
    /// How long the other replicas leave a leader alone that does not renew its Lease; whole seconds.
    #[arg(long, env = "GPUSHARE_LEASE_DURATION", default_value = "15s", value_parser = duration)]
    lease_duration: Duration,
    /// How long a leader that cannot renew its Lease goes on; with the time of a bind, not longer than the Lease.
    #[arg(long, env = "GPUSHARE_RENEW_DEADLINE", default_value = "10s", value_parser = duration)]
    renew_deadline: Duration,
    /// How often the Lease is renewed, or looked at.
    #[arg(long, env = "GPUSHARE_RETRY_PERIOD", default_value = "2s", value_parser = duration)]
    retry_period: Duration,
    /// Name of this replica's pod, which bears the label gpushare/leader while it leads.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
    /// Namespace of this replica's pod and of the Lease [default: that of --namespace].
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    pod_namespace: Option<String>,
}

/// How a replica takes part in the election.
#[derive(Clone, Debug)]
pub struct Leader {
    /// Name of the Lease.
    pub lease: String,
    /// For how long what holds.
    pub terms: Terms,
    /// Name of the replica's pod.
    pub pod: String,
    /// Namespace of the pod and of the Lease, if it is said.
    pub namespace: Option<String>,
    /// True if a policy of the API server admits bindings by the leader alone.
    pub fences_bindings: bool,
}

impl LeaderArgs {
    /// Puts them together; none without election.
    pub(super) fn leader(self, bind_timeout: Duration) -> anyhow::Result<Option<Leader>> {
        let Some(pod) = self.pod_name.filter(|_| self.leader_elect) else { return Ok(None) };
        if pod.is_empty() {
            bail!("--leader-elect: --pod-name is empty");
        }
        let terms = Terms { lease: self.lease_duration, renew: self.renew_deadline, retry: self.retry_period };
        if terms.lease.subsec_nanos() != 0 || terms.lease < Duration::from_secs(2) {
            bail!("--lease-duration must be whole seconds, at least 2s");
        }
        if terms.retry.is_zero() || terms.retry * 2 > terms.renew {
            bail!("--renew-deadline must be at least twice --retry-period, which must be longer than 0s");
        }
        if terms.renew + bind_timeout > terms.lease {
            bail!(
                "--renew-deadline and --bind-timeout together must not be longer than --lease-duration: a leader's last bind must end before another begins"
            );
        }
        Ok(Some(Leader { lease: self.lease_name, terms, pod, namespace: self.pod_namespace, fences_bindings: self.fence_bindings }))
    }
}

//! A `KubeSchedulerConfiguration` (`kubescheduler.config.k8s.io/v1`), read as kube-scheduler reads it.
//!
//! It keeps the fields that the model uses: the profiles' names, the back-off, the extenders and the election. Plugins and their
//! arguments are not modelled, and skipped. Every field of an extender is checked, because a misspelt one changes the behaviour.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use crate::connector::{ClientTlsFiles, Connector};
use crate::files;

const API_VERSION: &str = "kubescheduler.config.k8s.io/v1";
const KIND: &str = "KubeSchedulerConfiguration";
const DEFAULT_SCHEDULER: &str = "default-scheduler";
/// The timeout of calls to an extender that names none.
const DEFAULT_HTTP_TIMEOUT: Duration = Duration::from_secs(5);

/// The part of the configuration that the model uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfiguration {
    /// `schedulerName` of every profile; the loop ignores pods of other schedulers.
    pub schedulers: BTreeSet<String>,
    /// The extenders in the order in which they are called.
    pub extenders: Vec<ExtenderConfiguration>,
    /// Wait after a pod's first failed attempt; doubled with each further one.
    pub initial_backoff: Duration,
    /// The longest wait after a failed attempt.
    pub max_backoff: Duration,
    /// `percentageOfNodesToScore` of the first profile that sets it, else of the configuration; 0 for the stock setting.
    pub percentage_of_nodes_to_score: usize,
    /// The leader election. Only `testbed kube-scheduler`, a process of its own, takes part in it.
    pub leader_election: Option<LeaderElection>,
}

/// The Lease and its times, as `leaderElection` of a `KubeSchedulerConfiguration` names them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LeaderElection {
    /// True if the loop runs only while its process holds the Lease.
    pub leader_elect: bool,
    /// Namespace of the Lease.
    pub resource_namespace: String,
    /// Name of the Lease.
    pub resource_name: String,
    /// Time after which other candidates may take the Lease of a holder that does not renew it; counted in whole seconds.
    #[serde(deserialize_with = "duration")]
    pub lease_duration: Duration,
    /// Time after which a holder that cannot renew its Lease stops.
    #[serde(deserialize_with = "duration")]
    pub renew_deadline: Duration,
    /// Pause between attempts to take or renew the Lease.
    #[serde(deserialize_with = "duration")]
    pub retry_period: Duration,
}

impl Default for LeaderElection {
    /// kube-scheduler's defaults (`RecommendedDefaultLeaderElectionConfiguration`).
    fn default() -> Self {
        Self {
            leader_elect: true,
            resource_namespace: "kube-system".to_owned(),
            resource_name: "kube-scheduler".to_owned(),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// One extender.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExtenderConfiguration {
    /// URL of the extender, without the path of a verb.
    pub url_prefix: String,
    /// Path of `filter`; empty if the extender does not filter.
    #[serde(default)]
    pub filter_verb: String,
    /// Path of `preempt`; empty if the extender is not asked about victims.
    #[serde(default)]
    pub preempt_verb: String,
    /// Path of `prioritize`; empty if the extender does not score.
    #[serde(default)]
    pub prioritize_verb: String,
    /// Factor of the extender's scores.
    #[serde(default)]
    pub weight: i64,
    /// Path of `bind`; empty if the extender does not bind.
    #[serde(default)]
    pub bind_verb: String,
    /// True if the extender is reached over TLS.
    #[serde(default, rename = "enableHTTPS")]
    pub enable_https: bool,
    #[serde(default, rename = "tlsConfig")]
    tls_config: Option<TlsConfiguration>,
    /// The extender's address, if the host name of its URL does not resolve on this machine.
    #[serde(skip)]
    address: Option<SocketAddr>,
    /// The timeout of one call.
    #[serde(default = "default_http_timeout", deserialize_with = "http_timeout")]
    pub http_timeout: Duration,
    /// True if the extender receives names of nodes instead of nodes; the model knows no other extender.
    #[serde(default)]
    node_cache_capable: bool,
    /// The resources of which a pod must request one for the extender to be called; empty for all pods.
    #[serde(default)]
    pub managed_resources: Vec<ManagedResource>,
    /// True if scheduling goes on when the extender fails; the model knows no such extender.
    #[serde(default)]
    ignorable: bool,
}

/// The certificate files of `tlsConfig`. Its `insecure` is not supported: the loop always verifies the server.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct TlsConfiguration {
    #[serde(default, rename = "caFile")]
    authorities: PathBuf,
    #[serde(default, rename = "certFile")]
    certificate: PathBuf,
    #[serde(default, rename = "keyFile")]
    key: PathBuf,
}

/// A resource that an extender manages.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ManagedResource {
    /// Name of the resource.
    pub name: String,
    /// True if the loop's own fit check leaves the resource out; the model knows no such resource.
    #[serde(default)]
    ignored_by_scheduler: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    api_version: String,
    kind: String,
    #[serde(default)]
    profiles: Vec<Profile>,
    #[serde(default)]
    extenders: Vec<ExtenderConfiguration>,
    pod_initial_backoff_seconds: Option<u64>,
    pod_max_backoff_seconds: Option<u64>,
    percentage_of_nodes_to_score: Option<usize>,
    leader_election: Option<LeaderElection>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Profile {
    scheduler_name: Option<String>,
    percentage_of_nodes_to_score: Option<usize>,
}

impl SchedulerConfiguration {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        files::read(path)?.parse()
    }

    /// The same configuration with every extender at an `http://` address, without TLS; the path stays.
    #[must_use]
    pub fn with_extenders_at(mut self, origin: &str) -> Self {
        for extender in &mut self.extenders {
            // The parts between the slashes: scheme, nothing, host and port, path.
            let path = extender.url_prefix.splitn(4, '/').nth(3).unwrap_or_default();
            extender.url_prefix = format!("{origin}/{path}");
            extender.enable_https = false;
            extender.tls_config = None;
        }
        self
    }

    /// The same configuration with every extender at this address, and with certificate files in another folder.
    #[must_use]
    pub(crate) fn with_tls_extenders_at(mut self, address: SocketAddr, folder: &Path) -> Self {
        for extender in &mut self.extenders {
            extender.address = Some(address);
            if let Some(tls) = &mut extender.tls_config {
                for file in [&mut tls.authorities, &mut tls.certificate, &mut tls.key] {
                    *file = folder.join(file.file_name().unwrap_or_default());
                }
            }
        }
        self
    }

    pub(crate) fn manage(&mut self, resource: &str) {
        for extender in &mut self.extenders {
            extender.managed_resources.push(ManagedResource {
                name: resource.to_owned(),
                ignored_by_scheduler: false,
            });
        }
    }
}

impl FromStr for SchedulerConfiguration {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let document: Document = serde_yaml_ng::from_str(text).context("not a KubeSchedulerConfiguration")?;
        document.check()?;
        let (mut schedulers, mut profile_percentage) = (BTreeSet::new(), None);
        for profile in document.profiles {
            profile_percentage = profile_percentage.or(profile.percentage_of_nodes_to_score);
            schedulers.insert(profile.scheduler_name.unwrap_or(DEFAULT_SCHEDULER.to_owned()));
        }
        let percentage_of_nodes_to_score = profile_percentage
            .or(document.percentage_of_nodes_to_score)
            .unwrap_or(0);
        if schedulers.is_empty() {
            schedulers.insert(DEFAULT_SCHEDULER.to_owned());
        }
        Ok(Self {
            schedulers,
            extenders: document.extenders,
            initial_backoff: Duration::from_secs(document.pod_initial_backoff_seconds.unwrap_or(1)),
            max_backoff: Duration::from_secs(document.pod_max_backoff_seconds.unwrap_or(10)),
            percentage_of_nodes_to_score,
            leader_election: document.leader_election.filter(|election| election.leader_elect),
        })
    }
}

impl Document {
    /// Checks the rules by which kube-scheduler refuses a configuration, and the limits of the model.
    fn check(&self) -> Result<()> {
        let (version, kind) = (&self.api_version, &self.kind);
        ensure!(
            version == API_VERSION && kind == KIND,
            "apiVersion: is {version} {kind}, not {API_VERSION} {KIND}"
        );
        let mut managed = BTreeSet::new();
        for (idx, extender) in self.extenders.iter().enumerate() {
            if let Err((field, rule)) = extender.check() {
                bail!("extenders[{idx}].{field}: {rule}");
            }
            for ManagedResource { name, .. } in &extender.managed_resources {
                let is_new = managed.insert(name);
                ensure!(
                    is_new,
                    "extenders[{idx}].managedResources: {name} is managed twice"
                );
            }
        }
        // A pod can be bound only once, so kube-scheduler does not start with two binders.
        let n_binders = self
            .extenders
            .iter()
            .filter(|extender| !extender.bind_verb.is_empty())
            .count();
        ensure!(n_binders < 2, "extenders: more than one of them binds");
        Ok(())
    }
}

impl ExtenderConfiguration {
    pub(super) fn connector(&self) -> Result<Connector> {
        let connector = match &self.tls_config {
            Some(tls) if self.enable_https => {
                let files = ClientTlsFiles {
                    authorities: &tls.authorities,
                    certificate: &tls.certificate,
                    key: &tls.key,
                };
                Connector::tls(files).map_err(|error| anyhow!("tlsConfig: {error:#}"))?
            }
            _ => Connector::plain(),
        };
        Ok(match self.address {
            Some(address) => connector.at(address),
            None => connector,
        })
    }

    /// Checks the rules of one extender; the error is the field and the broken rule.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let scheme = if self.enable_https { "https://" } else { "http://" };
        if !self.url_prefix.starts_with(scheme) {
            let text = format!("{:?} does not begin with {scheme}", self.url_prefix);
            return Err(("urlPrefix", text));
        }
        if let Some(plain) = self.managed_resources.iter().find(|m| !m.name.contains('/')) {
            let text = format!("{:?} is no extended resource", plain.name);
            return Err(("managedResources", text));
        }
        let ignores = self.managed_resources.iter().any(|m| m.ignored_by_scheduler);
        let no_weight = "an extender that prioritizes needs a positive weight";
        let not_modelled = "the model needs nodeCacheCapable, and neither ignorable nor ignoredByScheduler";
        for (field, is_right, rule) in [
            (
                "tlsConfig",
                self.enable_https || self.tls_config.is_none(),
                "has no meaning without enableHTTPS",
            ),
            (
                "weight",
                self.prioritize_verb.is_empty() || self.weight > 0,
                no_weight,
            ),
            ("nodeCacheCapable", self.node_cache_capable, not_modelled),
            ("ignorable", !self.ignorable, not_modelled),
            ("managedResources", !ignores, not_modelled),
        ] {
            if !is_right {
                return Err((field, rule.to_owned()));
            }
        }
        Ok(())
    }
}

fn default_http_timeout() -> Duration {
    DEFAULT_HTTP_TIMEOUT
}

/// A timeout of an extender; zero means the default.
fn http_timeout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let parsed = duration(deserializer)?;
    Ok(if parsed.is_zero() {
        DEFAULT_HTTP_TIMEOUT
    } else {
        parsed
    })
}

/// A duration as Go writes it; a negative one is refused.
fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let parsed = kube::core::Duration::deserialize(deserializer)?;
    if parsed.is_negative() {
        return Err(D::Error::custom("a negative duration"));
    }
    Ok(parsed.into())
}

#[cfg(test)]
mod tests;

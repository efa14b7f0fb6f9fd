//! Flags about webhooks and about the certificates that the scheduler creates itself.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Subcommand};
use daemon::duration::parse_time;
use proto::admission::UNRESTRICTED_NAMESPACES;
use proto::resource::ResourceNames;

use super::TlsFiles;
use crate::admission::Rules;

/// The Secret of the command `issue-client-certificate` if the command line names none: that of the shipped manifests.
const DEFAULT_SECRET: &str = "gpushare-scheduler-certificates";
/// Longest lifetime of a server certificate, in days. An authority with less time left does not sign: clients have had half a
/// year to read its successor, which is published a year before the end.
const MAX_DAYS: u64 = 180;

/// Webhooks and certificates.
#[derive(Clone, Debug, Args)]
pub(super) struct WebhookArgs {
    /// Address to serve the admission webhooks on, over TLS, such as 0.0.0.0:9443; nowhere if left out.
    #[arg(long, env = "GPUSHARE_WEBHOOK_LISTEN", value_name = "ADDRESS")]
    webhook_listen: Option<SocketAddr>,
    /// Authorities (PEM); with it webhooks answer only clients with a certificate that one of them signed: the API server's,
    /// which shows one if its --admission-control-config-file says so.
    #[arg(
        long,
        env = "GPUSHARE_WEBHOOK_CLIENT_CA_FILE",
        value_name = "FILE",
        requires = "webhook_listen"
    )]
    webhook_client_ca_file: Option<PathBuf>,
    /// Scheduler that pods asking for GPUs, RDMA or FPGAs are sent to, unless they name one other than the default: with a second
    /// kube-scheduler, so that users need not know its name.
    #[arg(
        long,
        env = "GPUSHARE_WEBHOOK_SCHEDULER_NAME",
        value_name = "NAME",
        requires = "webhook_listen"
    )]
    webhook_scheduler_name: Option<String>,
    /// Place no pod that shares devices and sets `NVIDIA_VISIBLE_DEVICES`, `NVIDIA_GPU_MEMORY_*` or `CUDA_MPS_*`, or runs
    /// privileged.
    #[arg(long, env = "GPUSHARE_DENY_OVERRIDES")]
    deny_overrides: bool,
    /// Refuse bindings of pods asking for our resources that come from other users than these (comma between them).
    #[arg(
        long,
        env = "GPUSHARE_WEBHOOK_GUARD_BINDINGS",
        value_name = "USERS",
        value_delimiter = ',',
        requires = "webhook_listen"
    )]
    webhook_guard_bindings: Option<Vec<String>>,
    /// Let pods see all devices of their node, and charge them for none (annotation gpushare/all-devices); the plugins need it
    /// too.
    #[arg(long, env = "GPUSHARE_ALLOW_ALL_DEVICES")]
    allow_all_devices: bool,
    /// Namespaces whose pods may set `NVIDIA_VISIBLE_DEVICES` and CDI annotations themselves; give the plugins the same.
    #[arg(
        long,
        env = "GPUSHARE_UNRESTRICTED_NAMESPACES",
        default_value = UNRESTRICTED_NAMESPACES,
        value_delimiter = ',',
        value_name = "NAMESPACES"
    )]
    unrestricted_namespaces: Vec<String>,
    /// Secret in which the scheduler creates and renews certificates, for the Services gpushare-webhook and gpushare-scheduler.
    /// The extender uses them on an address that other machines reach, unless --tls-dir is given.
    #[arg(long, env = "GPUSHARE_CERTIFICATE_SECRET", value_name = "NAME", global = true)]
    certificate_secret: Option<String>,
    /// Lifetime of these certificates, for organisations that limit it; they are renewed when a third of it is left.
    #[arg(long, env = "GPUSHARE_CERTIFICATE_LIFETIME", default_value = "90d", value_parser = |text: &str| lifetime(text, 90, MAX_DAYS))]
    certificate_lifetime: Duration,
}

/// A command that the process executes instead of serving.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Write ca.crt, client.crt and client.key for kube-scheduler, signed by the authority in the Secret, and end.
    IssueClientCertificate {
        /// Folder to write to.
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
        /// Namespace of the Secret [default: that of the kubeconfig's context].
        #[arg(long)]
        namespace: Option<String>,
        /// Name of the client.
        #[arg(long, default_value = "kube-scheduler")]
        name: String,
        /// Lifetime of the certificate; it ends with the authority's at the latest.
        #[arg(long, default_value = "365d", value_parser = |text: &str| lifetime(text, 365, 3650))]
        lifetime: Duration,
    },
}

/// The settings of the webhook server.
#[derive(Clone, Debug)]
pub struct Webhooks {
    /// Address of the webhooks.
    pub listen: SocketAddr,
    /// Certificate files; `None` if the certificates come from the Secret.
    pub tls: Option<TlsFiles>,
    /// File with the authorities that sign the certificates of clients; `None` if clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// The certificates that the scheduler creates itself.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// Name of the Secret that holds them.
    pub secret: String,
    /// Lifetime of a server certificate.
    pub lifetime: Duration,
    /// True if the extender is served with these certificates, not only the webhooks.
    pub for_extender: bool,
}

/// The settings of webhooks and certificates.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The rules by which webhooks and the filter refuse pods.
    pub rules: Rules,
    /// Webhooks, if they are served.
    pub webhooks: Option<Webhooks>,
    /// The certificates that the scheduler creates itself, if it does.
    pub certificates: Option<Certificates>,
    /// Name of the Secret with the authority that the command `issue-client-certificate` signs with.
    pub authority: String,
}

impl WebhookArgs {
    /// The checked settings. `tls` are the files of the extender, for webhooks too; `needs_tls` if other machines reach the
    /// extender.
    pub(super) fn admission(
        self,
        names: ResourceNames,
        tls: Option<&TlsFiles>,
        needs_tls: bool,
    ) -> anyhow::Result<Admission> {
        let client_ca = self.webhook_client_ca_file;
        // The clients of webhooks are API servers, whose authority need not be that of kube-scheduler.
        let files = tls.map(|files| TlsFiles {
            client_ca: client_ca.clone(),
            ..files.clone()
        });
        if self.webhook_listen.is_some() && self.certificate_secret.is_none() && files.is_none() {
            bail!(
                "--webhook-listen needs --certificate-secret, or --tls-dir: the API server calls webhooks over TLS only"
            );
        }
        let authority = self
            .certificate_secret
            .as_deref()
            .unwrap_or(DEFAULT_SECRET)
            .to_owned();
        let webhooks = self.webhook_listen.map(|listen| {
            // The Service of the webhooks is among the names in the Secret's certificate, and perhaps not in that of the files.
            let tls = files.filter(|_| self.certificate_secret.is_none());
            Webhooks {
                listen,
                tls,
                client_ca,
            }
        });
        let certificates = self.certificate_secret.map(|secret| Certificates {
            secret,
            lifetime: self.certificate_lifetime,
            for_extender: needs_tls && tls.is_none(),
        });
        let rules = Rules {
            names,
            scheduler_name: self.webhook_scheduler_name,
            allow_all_devices: self.allow_all_devices,
            unrestricted_namespaces: self.unrestricted_namespaces,
            deny_overrides: self.deny_overrides,
            binders: self.webhook_guard_bindings,
        };
        Ok(Admission {
            rules,
            webhooks,
            certificates,
            authority,
        })
    }
}

/// Parses a lifetime from ten seconds to `most` days; an error shows the default as an example.
fn lifetime(text: &str, default: u64, most: u64) -> Result<Duration, String> {
    let units = [("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    match parse_time(text, &units) {
        Some(time) if (10..=most * 86_400).contains(&time.as_secs()) => Ok(time),
        _ => Err(format!(
            "write a whole number and s, m, h or d, such as {default}d; from 10s to {most}d"
        )),
    }
}

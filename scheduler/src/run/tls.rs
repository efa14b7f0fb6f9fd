//! Starts the sources of the servers' certificates: files, or the Secret of the scheduler's own ones.

use daemon::http_server::CurrentTls;
use daemon::supervise::Tasks;
use kube::Client;
use prometheus_client::registry::Registry;

use crate::certificates::files::CertificateFiles;
use crate::certificates::metrics::{CertificateMetrics, WEBHOOK_CLIENT_CA};
use crate::certificates::server_tls::Clients;
use crate::certificates::{CertificateSettings, Keeper};
use crate::config::{Config, TlsFiles};

/// The Services that the scheduler's own certificates are for. kube-scheduler outside of the cluster's network reaches the
/// extender by another address, and names the Service in `tlsConfig.serverName`.
const SERVICES: [&str; 2] = ["gpushare-webhook", "gpushare-scheduler"];

/// Name of the mutating and validating webhook configurations of the shipped manifests, which get the authority's certificate.
const WEBHOOK_CONFIGURATION: &str = "gpushare-scheduler";

pub(super) struct Tls {
    pub(super) extender: Option<CurrentTls>,
    pub(super) webhooks: Option<CurrentTls>,
    /// The metrics that show when the certificates end.
    pub(super) metrics: CertificateMetrics,
}

/// The label values in metrics of a server's certificate from files, and of the authorities of its clients.
const EXTENDER: [&str; 2] = ["extender", "extender-client-ca"];
const WEBHOOK: [&str; 2] = ["webhook", WEBHOOK_CLIENT_CA];

/// Starts the tasks that read certificates from files or keep them in the Secret, and that renew them.
pub(super) fn begin(
    config: &Config,
    client: &Client,
    namespace: &str,
    registry: &mut Registry,
    tasks: &mut Tasks,
) -> anyhow::Result<Tls> {
    let metrics = CertificateMetrics::register(registry);
    let webhooks = config.admission.webhooks.as_ref();
    let webhook_files = webhooks.and_then(|webhooks| webhooks.tls.clone());
    let mut tls = Tls {
        extender: from_files(config.serving.tls.clone(), EXTENDER, &metrics, tasks)?,
        webhooks: from_files(webhook_files, WEBHOOK, &metrics, tasks)?,
        metrics: metrics.clone(),
    };
    if let Some(certificates) = &config.admission.certificates {
        let settings = CertificateSettings {
            secret: certificates.secret.clone(),
            hosts: SERVICES.map(|name| format!("{name}.{namespace}.svc")).into(),
            namespace: namespace.to_owned(),
            lifetime: certificates.lifetime,
            configuration: webhooks.map(|_| WEBHOOK_CONFIGURATION.to_owned()),
        };
        // One certificate for both servers; they differ in the certificates that they ask of their clients.
        let mut keeper = Keeper::new(client.clone(), settings, metrics);
        if let Some(webhooks) = webhooks {
            let clients = webhooks.client_ca.clone().map_or(Clients::Any, Clients::SignedBy);
            tls.webhooks = Some(keeper.add_server(clients)?);
        }
        if certificates.for_extender {
            // The command `issue-client-certificate` issues the certificates of such clients.
            tls.extender = Some(keeper.add_server(Clients::OwnAuthority)?);
        }
        tasks.spawn("renewal of certificates in the Secret", keeper.keep());
    }
    Ok(tls)
}

/// The TLS settings of a server whose certificate comes from files, with a task that reads changed files; `None` without files.
fn from_files(
    files: Option<TlsFiles>,
    labels: [&'static str; 2],
    metrics: &CertificateMetrics,
    tasks: &mut Tasks,
) -> anyhow::Result<Option<CurrentTls>> {
    let Some(files) = files else { return Ok(None) };
    let certificates = CertificateFiles::load(files, metrics.clone(), labels)?;
    let current = certificates.current();
    tasks.spawn("renewal of certificates from files", certificates.follow());
    Ok(Some(current))
}

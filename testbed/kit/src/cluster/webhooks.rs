//! The scheduler's webhooks and its certificates for them and for the extender, as `deploy/components/webhooks`
//! installs them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Result;
use kube::Client;
use tokio::process::Command;

use crate::apiserver::ApiServer;
use crate::connector::{ClientTlsFiles, Connector};
use crate::files;
use crate::manifests;
use crate::polling;
use crate::ports::free_address;

/// Namespace of the scheduler.
const NAMESPACE: &str = "gpushare-system";
/// The Service in front of the webhooks.
const SERVICE: &str = "gpushare-webhook";
/// The Secret of the scheduler's certificates.
pub const SECRET: &str = "gpushare-scheduler-certificates";
/// Name of both webhook configurations.
pub const CONFIGURATION: &str = "gpushare-scheduler";
/// The name that the extender's certificate is for.
const EXTENDER: &str = "gpushare-scheduler.gpushare-system.svc";
/// The parts of `deploy/` that are needed beside the base.
const FILES: [&str; 3] = [
    "components/webhooks/rbac.yaml",
    "components/webhooks/admission.yaml",
    "components/webhook-configurations/webhook-configurations.yaml",
];

/// Webhooks, and TLS for the extender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookSpec {
    /// `--certificate-lifetime`, such as `90d`.
    pub lifetime: &'static str,
}

/// Installed webhooks.
#[derive(Clone, Debug)]
pub(super) struct InstalledWebhooks {
    listen: SocketAddr,
    lifetime: &'static str,
    /// The directory of kube-scheduler's certificate files.
    folder: PathBuf,
}

impl InstalledWebhooks {
    /// Applies the manifests, and routes the webhooks' Service to a port of this machine.
    pub(super) async fn install(
        spec: &WebhookSpec,
        client: &Client,
        api: &ApiServer,
        deploy: &Path,
        dir: &Path,
    ) -> Result<Self> {
        for file in FILES {
            manifests::apply_file(client, &deploy.join(file)).await?;
        }
        let listen = free_address()?;
        api.objects().route_service(NAMESPACE, SERVICE, 443, listen);
        Ok(Self {
            listen,
            lifetime: spec.lifetime,
            folder: dir.join("kube-scheduler"),
        })
    }

    /// Flags of the scheduler.
    pub(super) fn args(&self) -> Vec<String> {
        let listen = self.listen.to_string();
        let args = [
            ["--webhook-listen", listen.as_str()],
            ["--certificate-secret", SECRET],
            ["--certificate-lifetime", self.lifetime],
        ];
        args.into_iter().flatten().map(str::to_owned).collect()
    }

    /// Issues kube-scheduler's client certificate, as `attach/kube-scheduler/certificates.sh` does; waits until
    /// the scheduler has made its authority.
    pub(super) async fn issue(&self, scheduler: &Path, kubeconfig: &Path) -> Result<&Path> {
        let is_issued = async || {
            let mut command = Command::new(scheduler);
            command
                .arg("issue-client-certificate")
                .arg("--out")
                .arg(&self.folder)
                .env("KUBECONFIG", kubeconfig);
            command.args(["--certificate-secret", SECRET]);
            let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
            let missing = "the scheduler has made no authority that a client certificate can come from";
            Ok(output
                .status
                .success()
                .then_some(())
                .ok_or_else(|| missing.to_owned()))
        };
        polling::until_found(Duration::from_secs(30), is_issued).await?;
        Ok(&self.folder)
    }

    /// The URL of a scheduler that serves at this port, by the name that its certificate is for.
    pub(super) fn scheduler_url(port: u16) -> String {
        format!("https://{EXTENDER}:{port}")
    }

    /// Connects to this address as a client that shows no certificate.
    pub(super) fn anonymous(&self, address: SocketAddr) -> Result<Connector> {
        let authorities = files::read(&self.folder.join("ca.crt"))?;
        Ok(Connector::trusting(authorities.as_bytes())?.at(address))
    }

    /// Connects to the webhooks as a client without a certificate, and the URL by which it does.
    pub(super) fn anonymous_to_webhooks(&self) -> Result<(Connector, String)> {
        Ok((
            self.anonymous(self.listen)?,
            format!("https://{SERVICE}.{NAMESPACE}.svc:443"),
        ))
    }

    /// The connection to the extender.
    pub(super) fn connector(&self, extender: SocketAddr) -> Result<Connector> {
        let [authorities, certificate, key] =
            ["ca.crt", "client.crt", "client.key"].map(|file| self.folder.join(file));
        let files = ClientTlsFiles {
            authorities: &authorities,
            certificate: &certificate,
            key: &key,
        };
        Ok(Connector::tls(files)?.at(extender))
    }
}

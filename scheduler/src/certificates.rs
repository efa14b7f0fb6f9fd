//! The scheduler's own certificates: created, kept in one Secret, renewed, and published to the API server.
//!
//! Every replica runs a [`Keeper`]. The replicas agree because each writes the Secret only over the version that it has read.
//! `material` decides what is due. Certificates in files that an operator renews are in [`files`].

pub mod files;
pub mod issue;
mod material;
pub mod metrics;
pub mod server_tls;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use daemon::http_server::CurrentTls;
use http::{Method, Request, header};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tracing::{debug, info, warn};

use material::{Change, Material, SECRET_KEYS};
use metrics::CertificateMetrics;
use server_tls::{Clients, ServerTls};

/// Pause between two reads of the Secret and the webhook configurations.
const INTERVAL: Duration = Duration::from_secs(30);
const RETRY_PAUSE: Duration = Duration::from_secs(3);
const MAX_ATTEMPTS: usize = 5;
/// Names in paths of the two kinds of webhook configurations.
const KINDS: [&str; 2] = ["mutatingwebhookconfigurations", "validatingwebhookconfigurations"];

/// The settings of the certificates, and of the Secret that holds them.
#[derive(Clone, Debug)]
pub struct CertificateSettings {
    /// Name of the Secret.
    pub secret: String,
    /// Namespace of the Secret.
    pub namespace: String,
    /// DNS names and addresses in the certificates.
    pub hosts: Vec<String>,
    /// Lifetime of a server certificate.
    pub lifetime: Duration,
    /// Name of the webhook configurations that get the authorities, if there are webhooks.
    pub configuration: Option<String>,
}

/// Keeps the certificates of one Secret valid, and gives them to servers.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
pub struct Keeper {
    client: Client,
    settings: CertificateSettings,
    metrics: CertificateMetrics,
    /// The content of the Secret that the servers use; `None` before the first read.
    in_use: Option<Material>,
    servers: Vec<ServerTls>,
}

impl Keeper {
    /// A keeper of `settings.secret`, which need not exist yet.
    pub fn new(client: Client, settings: CertificateSettings, metrics: CertificateMetrics) -> Self {
        Self {
            client,
            settings,
            metrics,
            in_use: None,
            servers: Vec::new(),
        }
    }

    /// Adds a server, and returns its TLS settings. No handshake succeeds before there is a certificate.
    ///
    /// # Errors
    /// The authorities of clients cannot be read from their file, or TLS cannot be set up.
    pub fn add_server(&mut self, clients: Clients) -> anyhow::Result<CurrentTls> {
        let server = ServerTls::new(clients)?;
        let current = server.current();
        self.servers.push(server);
        Ok(current)
    }

    /// Renews the certificates whenever it is time, until the task is dropped.
    pub async fn keep(mut self) {
        loop {
            let pause = match self.reconcile(SystemTime::now()).await {
                // The tests of rotation use lifetimes of seconds.
                Ok(()) => (self.settings.lifetime / 10).clamp(Duration::from_secs(1), INTERVAL),
                Err(error) => {
                    warn!(
                        secret = self.settings.secret,
                        error = format!("{error:#}"),
                        "cannot renew certificates, trying again"
                    );
                    RETRY_PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Renews the certificates that are due, gives them to the servers, and writes the authorities into the webhook
    /// configurations.
    pub async fn reconcile(&mut self, now: SystemTime) -> anyhow::Result<()> {
        let material = self.read_or_renew(now).await?;
        // Another replica may have renewed the certificates since the last reconciliation.
        if self.in_use.as_ref().map(Material::data) != Some(material.data()) {
            for server in &mut self.servers {
                server.use_material(&material, &self.metrics)?;
            }
            self.metrics.show_secret(&material);
            // The first content after the start is no rotation.
            if self.in_use.replace(material).is_some() {
                self.metrics.rotations.inc();
            }
        }
        self.reload_authorities();
        // Written also if nothing has changed here: an operator who applies the manifests again empties the trust bundle.
        let (Some(name), Some(in_use)) = (&self.settings.configuration, &self.in_use) else {
            return Ok(());
        };
        let published = publish(&self.client, name, &in_use.authorities()).await;
        published.context("cannot publish the webhooks' authorities to the API server")
    }

    /// Has servers that check clients against a file use its new content if it has changed. A file that cannot be used is read
    /// again later.
    fn reload_authorities(&mut self) {
        let Some(material) = &self.in_use else { return };
        for server in &mut self.servers {
            if !server.has_new_authorities() {
                continue;
            }
            match server.use_material(material, &self.metrics) {
                Ok(()) => {
                    info!(
                        "client authorities have changed; new connections are checked against the new ones"
                    );
                }
                Err(error) => warn!(
                    error = format!("{error:#}"),
                    "changed client authorities cannot be used; the old ones stay in use"
                ),
            }
        }
    }

    /// Reads the Secret, renews the certificates that are due and writes them; all again if another replica has written
    /// meanwhile.
    async fn read_or_renew(&self, now: SystemTime) -> anyhow::Result<Material> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.settings.namespace);
        for _ in 0..MAX_ATTEMPTS {
            let found = api.get_opt(&self.settings.secret).await;
            let found = found.context("cannot read the Secret")?;
            let data = match &found {
                Some(secret) => secret.data.clone().unwrap_or_default(),
                None => BTreeMap::new(),
            };
            // Read in each attempt: another replica that has written meanwhile has most likely renewed the same certificates.
            let read = Material::read(&data)
                .with_context(|| format!("Secret {}/{}", self.settings.namespace, self.settings.secret))?;
            // A Secret that was deleted is written again with the content that it had, since clients trust its authority.
            let held = read.or_else(|| self.in_use.clone());
            let (material, changes) =
                Material::renewed(held, &self.settings.hosts, self.settings.lifetime, now)?;
            let mut wanted = data.clone();
            // Keys of other owners, which a person may have added, stay.
            wanted.retain(|key, _| !SECRET_KEYS.contains(&key.as_str()));
            wanted.extend(material.data());
            // No certificate is due, as in almost every reconciliation.
            if wanted == data {
                return Ok(material);
            }
            if self.write(&api, found, wanted).await? {
                self.log_write(&material, &changes);
                return Ok(material);
            }
        }
        anyhow::bail!("other writers changed the Secret before each write")
    }

    /// Writes `data` over the Secret that was read, or into a new one. Returns false if another writer has changed the Secret.
    async fn write(
        &self,
        api: &Api<Secret>,
        found: Option<Secret>,
        data: BTreeMap<String, ByteString>,
    ) -> anyhow::Result<bool> {
        let (name, params) = (&self.settings.secret, PostParams::default());
        let written = if let Some(mut secret) = found {
            secret.data = Some(data);
            // With the resource version that was read, so the API server refuses a write over a newer one.
            api.replace(name, &params, &secret).await
        } else {
            let mut secret = Secret::default();
            secret.metadata.name = Some(name.clone());
            secret.metadata.labels =
                Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into());
            secret.data = Some(data);
            api.create(&params, &secret).await
        };
        match written {
            Ok(_) => Ok(true),
            // 404: the Secret was deleted since it was read.
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(false),
            Err(error) => Err(error).context("cannot write the Secret"),
        }
    }

    fn log_write(&self, material: &Material, changes: &[Change]) {
        let (authority, certificate) = material.ends();
        let date = |time: SystemTime| chrono::DateTime::<chrono::Utc>::from(time).to_rfc3339();
        let certificate = certificate.map(date).unwrap_or_default();
        info!(
            secret = self.settings.secret,
            ?changes,
            authority_ends = date(authority),
            certificate_ends = certificate,
            "certificates written"
        );
    }
}

/// Writes these authorities (PEM) into those webhook configurations of this name that exist.
async fn publish(client: &Client, name: &str, authorities: &str) -> anyhow::Result<()> {
    let bundle = json!(ByteString(authorities.as_bytes().to_vec()));
    // The API server trusts old and new authorities together, so the order of the two writes does not matter.
    for kind in KINDS {
        let path = format!("/apis/admissionregistration.k8s.io/v1/{kind}/{name}");
        let object = || format!("{kind} {name}");
        let configuration: Value = match client.request(Request::get(&path).body(Vec::new())?).await {
            Ok(configuration) => configuration,
            // The operator may have installed one of the two only.
            Err(kube::Error::Api(status)) if status.code == 404 => {
                debug!(kind, name, "there is no such configuration");
                continue;
            }
            Err(error) => return Err(error).with_context(object),
        };
        let changes = changes(&configuration, &bundle);
        if !changes.is_empty() {
            let request = Request::builder()
                .method(Method::PATCH)
                .uri(&path)
                .header(header::CONTENT_TYPE, "application/json-patch+json");
            let _: Value = client
                .request(request.body(serde_json::to_vec(&changes)?)?)
                .await
                .with_context(object)?;
            info!(kind, name, "the webhooks' authorities are written");
        }
    }
    Ok(())
}

/// The JSON patch that writes `bundle` into each webhook of a configuration that lacks it.
fn changes(configuration: &Value, bundle: &Value) -> Vec<Value> {
    let mut changes = Vec::new();
    let webhooks = configuration.get("webhooks").and_then(Value::as_array);
    for (idx, webhook) in webhooks.into_iter().flatten().enumerate() {
        if webhook.pointer("/clientConfig/caBundle") == Some(bundle) {
            continue;
        }
        let path = format!("/webhooks/{idx}");
        // Tests the webhook's name first, since the order of the list may change meanwhile.
        changes.push(json!({"op": "test", "path": format!("{path}/name"), "value": webhook.get("name")}));
        changes.push(json!({"op": "add", "path": format!("{path}/clientConfig/caBundle"), "value": bundle}));
    }
    changes
}

//! The scheduler's own certificates: made, kept in one Secret, renewed, and made known to the API server.
//!
//! Every replica does the same and all agree, as the Secret is only ever written over the version that was read. What is
//! due is decided in [`material`]; this file reads and writes. Certificates that somebody else makes come from files and
//! pass by here.

pub mod issue;
pub mod material;
mod publish;
pub mod shown;
pub mod validity;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use tracing::{info, warn};

use crate::serve::tls::Current;
use material::{Change, Material, PARTS, Terms};
use shown::{Clients, Metrics, Shown};

/// How often the Secret and the webhook configurations are looked at.
const LOOK: Duration = Duration::from_secs(30);
/// Pause after a look that failed.
const PAUSE: Duration = Duration::from_secs(3);
/// How often a write is tried again that met somebody else's.
const ATTEMPTS: usize = 5;

/// What is kept and where.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the Secret.
    pub secret: String,
    /// Its namespace.
    pub namespace: String,
    /// DNS names and addresses that certificates are for.
    pub hosts: Vec<String>,
    /// How long a certificate is valid.
    pub lifetime: Duration,
    /// Name of the webhook configurations that are told the authorities, if there are webhooks.
    pub configuration: Option<String>,
}

/// Keeps the certificates of one Secret.
pub struct Keeper {
    client: Client,
    settings: Settings,
    metrics: Metrics,
    held: Option<Material>,
    shown: Vec<Shown>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Whether a write got through.
enum Written {
    Yes,
    /// Somebody else was faster.
    Overtaken,
}

impl Keeper {
    /// Keeps certificates in `settings.secret`, which need not exist yet.
    pub fn new(client: Client, settings: Settings, metrics: Metrics) -> Self {
        Self {
            client,
            settings,
            metrics,
            held: None,
            shown: Vec::new(),
        }
    }

    /// What a server shows from now on: no handshake succeeds before there is a certificate.
    ///
    /// # Errors
    /// If TLS cannot be set up at all.
    pub fn serve(&mut self, clients: Clients) -> anyhow::Result<Current> {
        let shown = Shown::nothing(clients)?;
        let current = shown.current();
        self.shown.push(shown);
        Ok(current)
    }

    /// Does what is due, for ever.
    pub async fn keep(mut self) {
        loop {
            let pause = match self.look(SystemTime::now()).await {
                Ok(()) => (self.settings.lifetime / 10).clamp(Duration::from_secs(1), LOOK),
                Err(error) => {
                    warn!(
                        secret = self.settings.secret,
                        error = format!("{error:#}"),
                        "certificates cannot be kept up, trying again"
                    );
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Does what is due now, shows the outcome to clients and tells the API server whom to trust.
    ///
    /// # Errors
    /// If the Secret cannot be read, holds nonsense or cannot be written; or the API server cannot be told.
    pub async fn look(&mut self, now: SystemTime) -> anyhow::Result<()> {
        let material = self.agree(now).await?;
        let is_new = self
            .held
            .as_ref()
            .is_none_or(|held| held.data() != material.data());
        if is_new {
            for shown in &mut self.shown {
                shown.show(&material)?;
                shown.publish_ends(&self.metrics);
            }
            self.metrics.show(&material);
            if self.held.replace(material).is_some() {
                self.metrics.rotated();
            }
        }
        self.show_other_authorities();
        let (Some(name), Some(held)) = (&self.settings.configuration, &self.held) else {
            return Ok(());
        };
        let told = publish::publish(&self.client, name, &held.authorities()).await;
        told.context("cannot tell the API server whom webhooks are trusted by")
    }

    /// Takes in files of authorities that have changed; one that cannot be used is tried again, and the old ones stay.
    fn show_other_authorities(&mut self) {
        let Some(held) = &self.held else { return };
        for shown in self
            .shown
            .iter_mut()
            .filter(|shown| shown.has_other_authorities())
        {
            match shown.show(held) {
                Ok(()) => {
                    shown.publish_ends(&self.metrics);
                    info!("authorities of clients have changed, new connections meet the new ones");
                }
                Err(error) => {
                    warn!(
                        error = format!("{error:#}"),
                        "authorities of clients have changed and cannot be used, the old ones stay"
                    );
                }
            }
        }
    }

    /// Reads the Secret and writes what is due, until all replicas agree.
    async fn agree(&self, now: SystemTime) -> anyhow::Result<Material> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.settings.namespace);
        for _ in 0..ATTEMPTS {
            let there = api
                .get_opt(&self.settings.secret)
                .await
                .context("cannot read the Secret")?;
            let data = there
                .as_ref()
                .and_then(|secret| secret.data.clone())
                .unwrap_or_default();
            let read = Material::read(&data)
                .with_context(|| format!("Secret {}/{}", self.settings.namespace, self.settings.secret))?;
            // A Secret that somebody deleted comes back as it was: clients know its authority.
            let held = read.or_else(|| self.held.clone());
            let (material, changes) = Material::kept(
                held,
                &self.settings.hosts,
                Terms::new(self.settings.lifetime),
                now,
            )?;
            let mut due = data.clone();
            due.retain(|part, _| !PARTS.contains(&part.as_str()));
            due.extend(material.data());
            if due == data {
                return Ok(material);
            }
            if let Written::Yes = self.write(&api, there, due).await? {
                self.tell(&material, &changes);
                return Ok(material);
            }
        }
        anyhow::bail!("the Secret changed whenever it was written")
    }

    async fn write(
        &self,
        api: &Api<Secret>,
        there: Option<Secret>,
        data: BTreeMap<String, ByteString>,
    ) -> anyhow::Result<Written> {
        let written = if let Some(mut secret) = there {
            secret.data = Some(data);
            // The resource version that was read goes along: a write over anything newer is refused.
            api.replace(&self.settings.secret, &PostParams::default(), &secret)
                .await
        } else {
            let metadata = ObjectMeta {
                name: Some(self.settings.secret.clone()),
                namespace: Some(self.settings.namespace.clone()),
                labels: Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into()),
                ..ObjectMeta::default()
            };
            api.create(
                &PostParams::default(),
                &Secret {
                    metadata,
                    data: Some(data),
                    ..Secret::default()
                },
            )
            .await
        };
        match written {
            Ok(_) => Ok(Written::Yes),
            // Not found: it was deleted since it was read.
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(Written::Overtaken),
            Err(error) => Err(error).context("cannot write the Secret"),
        }
    }

    fn tell(&self, material: &Material, changes: &[Change]) {
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

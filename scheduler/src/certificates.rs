//! The scheduler's own certificates: made, kept in one Secret, renewed, and made known to the API server.
//!
//! Every replica does the same and all agree, as the Secret is only ever written over the version that was read. What is
//! due is decided in [`material`]; this file reads and writes. Certificates that somebody else makes come from files and
//! pass by here.

pub mod issue;
pub mod material;
mod publish;
pub mod validity;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tracing::{info, warn};

use material::{Change, Material, Terms};

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
    held: Option<Arc<Material>>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper").field("settings", &self.settings).finish_non_exhaustive()
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
    pub fn new(client: Client, settings: Settings) -> Self {
        Self { client, settings, held: None }
    }

    /// Does what is due for ever, and tells `served` what to show and whom to trust.
    pub async fn keep(mut self, served: watch::Sender<Option<Arc<Material>>>) {
        loop {
            let pause = match self.look(SystemTime::now()).await {
                Ok(material) => {
                    served.send_if_modified(|shown| {
                        let is_new = !shown.as_ref().is_some_and(|shown| Arc::ptr_eq(shown, &material));
                        *shown = Some(material);
                        is_new
                    });
                    self.publish().await
                }
                Err(error) => {
                    warn!(secret = self.settings.secret, error = format!("{error:#}"), "certificates cannot be kept up, trying again");
                    PAUSE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Reads the Secret, does what is due and says what holds now: the same material as before if nothing changed.
    ///
    /// # Errors
    /// If the Secret cannot be read, holds nonsense or cannot be written.
    pub async fn look(&mut self, now: SystemTime) -> anyhow::Result<Arc<Material>> {
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.settings.namespace);
        for _ in 0..ATTEMPTS {
            let there = api.get_opt(&self.settings.secret).await.context("cannot read the Secret")?;
            let data = there.as_ref().and_then(|secret| secret.data.clone()).unwrap_or_default();
            let read = Material::read(&data).with_context(|| format!("Secret {}/{}", self.settings.namespace, self.settings.secret))?;
            // A Secret that somebody deleted comes back as it was: clients know its authority.
            let held = read.or_else(|| self.held.as_deref().cloned());
            let (material, changes) = Material::kept(held, &self.settings.hosts, Terms::new(self.settings.lifetime), now)?;
            let due = material.data();
            if due != data {
                match self.write(&api, there, due.clone()).await? {
                    Written::Overtaken => continue,
                    Written::Yes => self.tell(&material, &changes),
                }
            }
            let same = self.held.as_ref().filter(|held| held.data() == due).cloned();
            let held = same.unwrap_or_else(|| Arc::new(material));
            self.held = Some(Arc::clone(&held));
            return Ok(held);
        }
        anyhow::bail!("the Secret changed whenever it was written")
    }

    async fn write(&self, api: &Api<Secret>, there: Option<Secret>, data: BTreeMap<String, ByteString>) -> anyhow::Result<Written> {
        let written = if let Some(mut secret) = there {
            secret.data = Some(data);
            // The resource version that was read goes along: a write over anything newer is refused.
            api.replace(&self.settings.secret, &PostParams::default(), &secret).await
        } else {
            let metadata = ObjectMeta {
                name: Some(self.settings.secret.clone()),
                namespace: Some(self.settings.namespace.clone()),
                labels: Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into()),
                ..ObjectMeta::default()
            };
            api.create(&PostParams::default(), &Secret { metadata, data: Some(data), ..Secret::default() }).await
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

    /// Tells the webhook configurations whom to trust; how long to wait until the next look.
    async fn publish(&self) -> Duration {
        let look = (self.settings.lifetime / 10).clamp(Duration::from_secs(1), LOOK);
        let (Some(name), Some(held)) = (&self.settings.configuration, &self.held) else { return look };
        match publish::publish(&self.client, name, &held.authorities()).await {
            Ok(()) => look,
            Err(error) => {
                warn!(
                    configuration = name,
                    error = format!("{error:#}"),
                    "the API server cannot be told the webhooks' authority, trying again"
                );
                PAUSE.min(look)
            }
        }
    }
}

//! The TLS settings of a server whose certificate comes from the Secret, and the metrics of all certificates.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;
use daemon::http_server::CurrentTls;
use daemon::x509::not_after;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::ResolvesServerCertUsingSni;
use rustls::sign::SingleCertAndKey;
use tokio::sync::watch;

use super::files::{Bytes, client_verifier, read, server_settings, verifier_of};
use super::material::Material;

/// The label value for the authorities of the webhooks' clients in metrics.
pub const WEBHOOK_CLIENT_CA: &str = "webhook-client-ca";

/// The label values for all certificates in metrics.
const NAMES: [&str; 6] = [
    "authority",
    "server",
    "extender",
    "extender-client-ca",
    "webhook",
    WEBHOOK_CLIENT_CA,
];

/// The clients that a server lets in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clients {
    /// All clients; none is asked for a certificate.
    Any,
    /// All clients. A certificate that the authority in the Secret signed marks a client as authenticated.
    OwnAuthority,
    /// All clients. A certificate that an authority in this file (PEM) signed marks a client as authenticated. The file is read
    /// again when it changes.
    SignedBy(PathBuf),
}

/// The metrics of certificates.
#[derive(Clone, Debug)]
pub struct CertificateMetrics {
    ends: Family<Labels, Gauge>,
    rotations: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    certificate: &'static str,
}

impl CertificateMetrics {
    /// Registers the metrics of certificates.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            ends: Family::default(),
            rotations: Counter::default(),
        };
        registry.register_with_unit(
            "certificate_expiry_timestamp",
            "When a certificate ends",
            Unit::Seconds,
            metrics.ends.clone(),
        );
        registry.register(
            "certificate_rotations",
            "Times that the certificate that servers show was replaced",
            metrics.rotations.clone(),
        );
        metrics
    }

    /// Shows the ends of the certificates in the Secret.
    pub(super) fn show(&self, material: &Material) {
        let (authority, certificate) = material.ends();
        self.show_end("authority", Some(authority));
        self.show_end("server", certificate);
    }

    /// Shows the earliest end of these certificates under a label value.
    pub fn show_ends(&self, name: &'static str, certificates: &[CertificateDer<'_>]) {
        self.show_end(
            name,
            certificates
                .iter()
                .filter_map(|certificate| not_after(certificate))
                .min(),
        );
    }

    /// Shows an end under a label value; no end as 0, so that an alert on certificates that end fires.
    fn show_end(&self, name: &'static str, ends: Option<SystemTime>) {
        let since_epoch = ends
            // A certificate that ended before 1970 is shown as 0 too.
            .and_then(|ends| ends.duration_since(SystemTime::UNIX_EPOCH).ok())
            .unwrap_or_default();
        let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
        self.ends
            .get_or_create(&Labels { certificate: name })
            .set(seconds);
    }

    /// The end of each certificate in unix seconds, with the certificate's label value.
    pub fn all_ends(&self) -> Vec<(&'static str, i64)> {
        let mut ends = Vec::new();
        // The family cannot list its own labels.
        for certificate in NAMES {
            if let Some(end) = self.ends.get(&Labels { certificate }) {
                ends.push((certificate, end.get()));
            }
        }
        ends
    }

    /// Counts a replacement of the certificates in the Secret.
    pub(super) fn count_rotation(&self) {
        self.rotations.inc();
    }
}

/// The TLS settings of one server.
#[derive(Debug)]
pub(super) struct ServerTls {
    clients: Clients,
    /// The file of client authorities as it was read last; `None` if clients are not checked against a file.
    authorities: Option<Bytes>,
    settings: watch::Sender<Arc<ServerConfig>>,
}

impl ServerTls {
    /// Settings without a certificate, with which handshakes fail until [`Self::use_material`].
    pub(super) fn new(clients: Clients) -> anyhow::Result<Self> {
        // A file that cannot be used is an error at the start; later on the old authorities stay in use.
        if let Clients::SignedBy(path) = &clients {
            client_verifier(&read(path), path)?;
        }
        // A resolver without certificates: the server can listen before the Secret has been read.
        let settings = server_settings(Arc::new(ResolvesServerCertUsingSni::new()), None)?;
        Ok(Self {
            clients,
            authorities: None,
            settings: watch::Sender::new(settings),
        })
    }

    /// A receiver of the settings, for the server.
    pub(super) fn current(&self) -> CurrentTls {
        self.settings.subscribe()
    }

    /// Serves new connections with these certificates.
    pub(super) fn use_material(&mut self, material: &Material) -> anyhow::Result<()> {
        let key = Arc::new(SingleCertAndKey::from(material.certified_key()?));
        let authorities = self.read_authorities();
        let verifier = match (&self.clients, &authorities) {
            (Clients::SignedBy(path), Some(authorities)) => Some(client_verifier(authorities, path)?),
            (Clients::OwnAuthority, _) => {
                Some(verifier_of(material.roots()).context("authorities of clients")?)
            }
            _ => None,
        };
        self.settings.send_replace(server_settings(key, verifier)?);
        // Only now, so that a file that cannot be used is read again.
        self.authorities = authorities;
        Ok(())
    }

    /// Shows the earliest end of the client authorities in the file, if there is one.
    pub(super) fn publish_ends(&self, metrics: &CertificateMetrics) {
        let authorities = self
            .authorities
            .iter()
            .flatten()
            .flat_map(|pem| CertificateDer::pem_slice_iter(pem).flatten());
        let authorities: Vec<_> = authorities.collect();
        if !authorities.is_empty() {
            metrics.show_ends(WEBHOOK_CLIENT_CA, &authorities);
        }
    }

    /// Returns true if the file of authorities has changed since it was read.
    pub(super) fn has_new_authorities(&self) -> bool {
        self.read_authorities() != self.authorities
    }

    /// Reads the file of client authorities; `None` if clients are not checked against a file. A file that cannot be read is `Some`
    /// of the kind of error, which is compared with the previous read like a content.
    fn read_authorities(&self) -> Option<Bytes> {
        let Clients::SignedBy(path) = &self.clients else {
            return None;
        };
        Some(read(path))
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};

    use super::*;

    /// An alert needs a metric for certificates from files too.
    #[test]
    fn the_earliest_expiry_of_several_certificates_is_shown() {
        let ending = |year: i32| {
            let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            params.not_after = date_time_ymd(year, 1, 1);
            params
                .self_signed(&KeyPair::generate().unwrap())
                .unwrap()
                .der()
                .clone()
        };
        let mut registry = Registry::default();
        let metrics = CertificateMetrics::register(&mut registry);
        metrics.show_ends("extender", &[ending(2031), ending(2030), ending(2052)]);
        metrics.show_ends("webhook", &[CertificateDer::from(b"nonsense".to_vec())]);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains("certificate_expiry_timestamp_seconds{certificate=\"extender\"} 1893456000\n"),
            "{text}"
        );
        assert!(
            text.contains("certificate_expiry_timestamp_seconds{certificate=\"webhook\"} 0\n"),
            "an alert sees it: {text}"
        );
    }
}

//! The metrics of all certificates, and of the authorities that the servers trust.

use std::time::SystemTime;

use daemon::x509::not_after;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use rustls::pki_types::CertificateDer;

use super::material::Material;

/// The label value for the authorities of the webhooks' clients.
pub(crate) const WEBHOOK_CLIENT_CA: &str = "webhook-client-ca";

const LABEL_VALUES: [&str; 6] = [
    "authority",
    "server",
    "extender",
    "extender-client-ca",
    "webhook",
    WEBHOOK_CLIENT_CA,
];

/// The metrics of certificates.
#[derive(Clone, Debug)]
pub struct CertificateMetrics {
    /// The expiry of each certificate in unix seconds.
    ends: Family<[(&'static str, &'static str); 1], Gauge>,
    pub(super) rotations: Counter,
}

impl CertificateMetrics {
    /// Registers the metrics of certificates.
    pub fn register(registry: &mut Registry) -> Self {
        let (ends, rotations) = (Family::default(), Counter::default());
        let (name, help) = ("certificate_expiry_timestamp", "When a certificate ends");
        registry.register_with_unit(name, help, Unit::Seconds, ends.clone());
        let help = "Times that the certificate that servers show was replaced";
        registry.register("certificate_rotations", help, rotations.clone());
        Self { ends, rotations }
    }

    pub(super) fn show_secret(&self, material: &Material) {
        let (authority, certificate) = material.ends();
        self.show_end("authority", Some(authority));
        self.show_end("server", certificate);
    }

    /// Shows the earliest expiry (`notAfter`) of these certificates under a label value.
    pub(super) fn show_ends(&self, name: &'static str, certificates: &[CertificateDer<'_>]) {
        let ends = certificates.iter().filter_map(|der| not_after(der));
        self.show_end(name, ends.min());
    }

    /// Shows an expiry under a label value; 0 if there is none, so that an alert on certificates that end fires.
    fn show_end(&self, name: &'static str, ends: Option<SystemTime>) {
        let since_epoch = ends.and_then(|ends| ends.duration_since(SystemTime::UNIX_EPOCH).ok());
        let seconds = i64::try_from(since_epoch.unwrap_or_default().as_secs()).unwrap_or(i64::MAX);
        self.ends.get_or_create(&[("certificate", name)]).set(seconds);
    }

    /// The label value of each certificate, and its expiry in unix seconds.
    pub(crate) fn all_ends(&self) -> Vec<(&'static str, i64)> {
        let mut ends = Vec::new();
        // The family cannot list its own labels.
        for certificate in LABEL_VALUES {
            if let Some(end) = self.ends.get(&[("certificate", certificate)]) {
                ends.push((certificate, end.get()));
            }
        }
        ends
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

//! Certificates, keys and authorities in files that an operator renews: read at the start, and again whenever they change.
//!
//! Files that cannot be used change nothing: the last good content stays in use.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use daemon::http_server::{ALPN_PROTOCOLS, CurrentTls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;
use tracing::{info, warn};

use super::metrics::CertificateMetrics;
use crate::config::TlsFiles;

const INTERVAL: Duration = Duration::from_secs(30);

/// The files of one server, and the certificates in them that it uses.
#[expect(missing_debug_implementations, reason = "it holds a private key")]
pub struct CertificateFiles {
    files: TlsFiles,
    /// The content of the files that was read last, usable or not.
    seen: Contents,
    /// The TLS settings for new connections.
    current: watch::Sender<Arc<ServerConfig>>,
    metrics: CertificateMetrics,
    /// The label values in metrics of the server's certificate, and of the authorities of its clients.
    labels: [&'static str; 2],
}

impl CertificateFiles {
    /// Reads the files, and shows in `metrics` when their certificates expire.
    ///
    /// # Errors
    /// A file cannot be read or used; the error names it.
    pub fn load(
        files: TlsFiles,
        metrics: CertificateMetrics,
        labels: [&'static str; 2],
    ) -> anyhow::Result<Self> {
        let seen = Contents::read(&files);
        let loaded = Self {
            current: watch::Sender::new(seen.settings(&files)?),
            files,
            seen,
            metrics,
            labels,
        };
        loaded.show_ends();
        Ok(loaded)
    }

    /// A receiver of the TLS settings, for the server.
    pub fn current(&self) -> CurrentTls {
        self.current.subscribe()
    }

    /// Reads the files every half minute, until the task is dropped.
    pub async fn follow(mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.reload();
        }
    }

    /// Reads the files, and uses their content if it has changed.
    fn reload(&mut self) {
        // The contents are compared, since kubelet replaces the files of a Secret by links whose times and names say nothing.
        // Small files on a local mount are not worth a thread.
        let seen = Contents::read(&self.files);
        if seen == self.seen {
            return;
        }
        // Kept also if it cannot be used, so that the warning comes once.
        self.seen = seen;
        match self.seen.settings(&self.files) {
            Ok(settings) => {
                self.current.send_replace(settings);
                self.show_ends();
                info!(certificate = %self.files.cert.display(), "certificates have changed; new connections get the new ones");
            }
            Err(error) => warn!(
                error = format!("{error:#}"),
                "changed certificates cannot be used; the old ones stay in use"
            ),
        }
    }

    fn show_ends(&self) {
        let TlsFiles { cert, client_ca, .. } = &self.files;
        let [server, clients] = self.labels;
        if let Ok(chain) = certificates(&self.seen.cert, cert) {
            self.metrics.show_ends(server, &chain);
        }
        if let (Some(pem), Some(path)) = (&self.seen.client_ca, client_ca)
            && let Ok(authorities) = certificates(pem, path)
        {
            self.metrics.show_ends(clients, &authorities);
        }
    }
}

#[derive(PartialEq, Eq)]
struct Contents {
    cert: FileContent,
    key: FileContent,
    client_ca: Option<FileContent>,
}

/// The content of a file, or the reason for which it could not be read.
pub(crate) type FileContent = Result<Vec<u8>, io::ErrorKind>;

/// Reads a file. A failed read is a value too: the next read is compared with it, so that the files count as changed only if the
/// content, or the kind of failure, differs.
pub(crate) fn read(path: &Path) -> FileContent {
    // The kind can be compared with that of the next read, the error cannot.
    std::fs::read(path).map_err(|error| error.kind())
}

impl Contents {
    fn read(files: &TlsFiles) -> Self {
        Self {
            cert: read(&files.cert),
            key: read(&files.key),
            client_ca: files.client_ca.as_deref().map(read),
        }
    }

    /// The TLS settings with these certificates and keys. Errors name `files`.
    fn settings(&self, files: &TlsFiles) -> anyhow::Result<Arc<ServerConfig>> {
        let chain = certificates(&self.cert, &files.cert)?;
        let key = private_key(&self.key, &files.key)?;
        let provider = rustls::crypto::ring::default_provider();
        // Fails if the key does not belong to the certificate, as between two writes of a tool that renews both.
        let key = CertifiedKey::from_der(chain, key, &provider).with_context(|| {
            format!(
                "certificate {} with key {}",
                files.cert.display(),
                files.key.display()
            )
        })?;
        let clients = match (&self.client_ca, &files.client_ca) {
            (Some(authorities), Some(path)) => Some(client_verifier(authorities, path)?),
            _ => None,
        };
        server_settings(Arc::new(SingleCertAndKey::from(key)), clients)
    }
}

/// The TLS settings of a server that shows `key` and, with a verifier, checks the certificates of clients.
pub(crate) fn server_settings(
    key: Arc<dyn ResolvesServerCert>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
) -> anyhow::Result<Arc<ServerConfig>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(verifier),
    };
    // A resolver, since the certificates of the Secret come after the start.
    let mut settings = builder.with_cert_resolver(key);
    settings.alpn_protocols = ALPN_PROTOCOLS.map(<[u8]>::to_vec).into();
    Ok(Arc::new(settings))
}

/// Checks the certificates of clients against the authorities that were read from a file, see [`verifier_of`].
pub(crate) fn client_verifier(
    authorities: &FileContent,
    path: &Path,
) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
    let context = || format!("authorities in {}", path.display());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authorities, path)? {
        roots.add(certificate).with_context(context)?;
    }
    verifier_of(roots).with_context(context)
}

/// Checks the certificates of clients against these authorities. Lets in clients without one, which may have bearer tokens for
/// the read API; the extender's verbs refuse them.
pub(crate) fn verifier_of(roots: RootCertStore) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    Ok(builder.allow_unauthenticated().build()?)
}

/// The bytes of a file, or the error of its read.
fn bytes_of(content: &FileContent) -> io::Result<&[u8]> {
    content.as_deref().map_err(|kind| (*kind).into())
}

/// The certificates in the content of a file (PEM). An error, also for a file without certificates, names the file.
fn certificates(pem: &FileContent, path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let context = || format!("certificates {}", path.display());
    let pem = bytes_of(pem).with_context(context)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.with_context(context)?;
    anyhow::ensure!(!certificates.is_empty(), "{}: the file holds none", context());
    Ok(certificates)
}

/// The private key in the content of a file (PEM). An error, also for a file without a key, names the file.
fn private_key(pem: &FileContent, path: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    let context = || format!("private key {}", path.display());
    let pem = bytes_of(pem).with_context(context)?;
    PrivateKeyDer::from_pem_slice(pem).with_context(context)
}

#[cfg(test)]
mod tests;

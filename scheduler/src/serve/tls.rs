//! Certificates, keys and authorities in files: read at the start, and again whenever they change.
//!
//! Files that cannot be used change nothing: the last good content stays in use. Open connections keep their certificates.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tracing::{info, warn};

use super::H2;
use crate::config::TlsFiles;

/// Pause between two reads of the files.
const INTERVAL: Duration = Duration::from_secs(30);

/// Reads the files again and again. Names and times of mounted Secrets are not reliable, so the contents are compared.
#[expect(missing_debug_implementations, reason = "a function has none")]
pub struct CertificateFiles {
    files: TlsFiles,
    /// The last content, good or not.
    seen: Contents,
    current: watch::Sender<Arc<ServerConfig>>,
    /// Called with the certificates in use whenever they change.
    on_change: Option<Listener>,
}

/// Receives the certificates in use.
type Listener = Box<dyn Fn(&InUse) + Send + Sync>;

/// The certificates that are in use.
#[derive(Debug)]
pub struct InUse {
    /// The certificates that the server shows, its own first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Authorities of clients.
    pub client_authorities: Vec<CertificateDer<'static>>,
}

/// The TLS settings of new connections.
#[derive(Clone, Debug)]
pub struct CurrentTls(watch::Receiver<Arc<ServerConfig>>);

impl CurrentTls {
    /// The settings at the time of a connection.
    pub fn new(settings: watch::Receiver<Arc<ServerConfig>>) -> Self {
        Self(settings)
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.borrow()))
    }
}

impl CertificateFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// Names the file that cannot be read or used.
    pub fn load(files: TlsFiles) -> anyhow::Result<Self> {
        let seen = Contents::read(&files);
        let (current, _) = watch::channel(seen.settings(&files)?);
        Ok(Self {
            files,
            seen,
            current,
            on_change: None,
        })
    }

    /// The same, with a listener that receives the certificates in use, now and after every change.
    #[must_use]
    pub fn on_change(self, listener: impl Fn(&InUse) + Send + Sync + 'static) -> Self {
        self.seen.in_use(&self.files).iter().for_each(&listener);
        Self {
            on_change: Some(Box::new(listener)),
            ..self
        }
    }

    /// The TLS settings of new connections.
    pub fn current(&self) -> CurrentTls {
        CurrentTls(self.current.subscribe())
    }

    /// Reads the files every half minute, until the task is dropped.
    pub async fn follow(mut self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.reload();
        }
    }

    /// Reads the files, and uses their content if it is new.
    fn reload(&mut self) {
        // Small files on a local mount: not worth a thread.
        let seen = Contents::read(&self.files);
        if seen == self.seen {
            return;
        }
        match seen.settings(&self.files) {
            Ok(settings) => {
                self.current.send_replace(settings);
                if let Some((listener, in_use)) = self.on_change.as_ref().zip(seen.in_use(&self.files)) {
                    listener(&in_use);
                }
                info!(certificate = %self.files.cert.display(), "certificates have changed; new connections get the new ones");
            }
            Err(error) => warn!(
                error = format!("{error:#}"),
                "changed certificates cannot be used; the old ones stay in use"
            ),
        }
        self.seen = seen;
    }
}

/// The content of the files.
#[derive(PartialEq, Eq)]
struct Contents {
    cert: Bytes,
    key: Bytes,
    client_ca: Option<Bytes>,
}

/// The content of a file, or the reason for which it could not be read.
pub(crate) type Bytes = Result<Vec<u8>, io::ErrorKind>;

pub(crate) fn read(path: &Path) -> Bytes {
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

    /// The certificates, if they can be read.
    fn in_use(&self, files: &TlsFiles) -> Option<InUse> {
        let authorities = self.client_ca.as_ref().zip(files.client_ca.as_deref());
        let client_authorities = authorities
            .map(|(pem, path)| certificates(pem, path))
            .transpose()
            .ok()?
            .unwrap_or_default();
        Some(InUse {
            chain: certificates(&self.cert, &files.cert).ok()?,
            client_authorities,
        })
    }

    fn settings(&self, files: &TlsFiles) -> anyhow::Result<Arc<ServerConfig>> {
        let chain = certificates(&self.cert, &files.cert)?;
        let key = private_key(&self.key, &files.key)?;
        let at = || {
            format!(
                "certificate {} with key {}",
                files.cert.display(),
                files.key.display()
            )
        };
        let provider = rustls::crypto::ring::default_provider();
        let key = CertifiedKey::from_der(chain, key, &provider).with_context(at)?;
        let clients = match self.client_ca.as_ref().zip(files.client_ca.as_deref()) {
            None => None,
            Some((authorities, path)) => Some(client_verifier(authorities, path)?),
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
    let mut settings = builder.with_cert_resolver(key);
    settings.alpn_protocols = vec![H2.to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(settings))
}

/// Checks the certificates of clients against the authorities that were read from a file; lets in clients without one.
///
/// # Errors
/// Names the file if it could not be read or holds no authority.
pub(crate) fn client_verifier(
    authorities: &Bytes,
    path: &Path,
) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
    let at = || format!("authorities in {}", path.display());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authorities, path)? {
        roots.add(certificate).with_context(at)?;
    }
    verifier_of(roots).with_context(at)
}

/// Checks the certificates of clients against authorities. Clients of the views have none, so the verbs refuse, not the handshake.
///
/// # Errors
/// There is no authority.
pub(crate) fn verifier_of(roots: RootCertStore) -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .allow_unauthenticated()
            .build()?,
    )
}

fn certificates(pem: &Bytes, path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let at = || format!("certificates {}", path.display());
    let pem = pem
        .as_ref()
        .map_err(|kind| io::Error::from(*kind))
        .with_context(at)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.with_context(at)?;
    anyhow::ensure!(
        !certificates.is_empty(),
        "certificates {}: the file holds none",
        path.display()
    );
    Ok(certificates)
}

fn private_key(pem: &Bytes, path: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    let at = || format!("private key {}", path.display());
    let pem = pem
        .as_ref()
        .map_err(|kind| io::Error::from(*kind))
        .with_context(at)?;
    PrivateKeyDer::from_pem_slice(pem).with_context(at)
}

#[cfg(test)]
mod tests;

//! The TLS settings of a server whose certificate comes from the Secret.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use daemon::http_server::CurrentTls;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::ResolvesServerCertUsingSni;
use rustls::sign::SingleCertAndKey;
use tokio::sync::watch;

use super::files::{FileContent, client_verifier, read, server_settings, verifier_of};
use super::material::Material;
use super::metrics::{CertificateMetrics, WEBHOOK_CLIENT_CA};

/// The certificates that a server asks of its clients. A client without one is let in all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clients {
    /// None.
    Any,
    /// A certificate that the authority in the Secret signed marks a client as authenticated.
    OwnAuthority,
    /// A certificate that an authority in this file (PEM) signed marks a client as authenticated. The file is read again when it
    /// changes.
    SignedBy(PathBuf),
}

#[derive(Debug)]
pub(super) struct ServerTls {
    clients: Clients,
    /// The file of client authorities as it was read last; `None` if clients are not checked against a file.
    authorities: Option<FileContent>,
    /// The settings for new connections.
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

    pub(super) fn current(&self) -> CurrentTls {
        self.settings.subscribe()
    }

    /// Serves new connections with these certificates, and shows the earliest end of the client authorities from a file.
    pub(super) fn use_material(
        &mut self,
        material: &Material,
        metrics: &CertificateMetrics,
    ) -> anyhow::Result<()> {
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
        if let Some(Ok(pem)) = &authorities {
            let authorities: Vec<_> = CertificateDer::pem_slice_iter(pem).flatten().collect();
            metrics.show_ends(WEBHOOK_CLIENT_CA, &authorities);
        }
        // Only now: after an error the file counts as changed, and is read again.
        self.authorities = authorities;
        Ok(())
    }

    /// Returns true if the file of authorities has changed since it was read.
    pub(super) fn has_new_authorities(&self) -> bool {
        self.read_authorities() != self.authorities
    }

    /// Reads the file of client authorities, if clients are checked against one.
    fn read_authorities(&self) -> Option<FileContent> {
        match &self.clients {
            Clients::SignedBy(path) => Some(read(path)),
            Clients::Any | Clients::OwnAuthority => None,
        }
    }
}

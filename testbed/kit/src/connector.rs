//! Connections of HTTP clients: plain, or over TLS with given authorities and certificate. All host names may
//! lead to one address, without DNS.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};

use anyhow::Context as _;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;

use crate::files;

/// Connects to the host of a URL.
#[derive(Clone, Default)]
pub struct Connector {
    tls: Option<TlsConnector>,
    address: Option<SocketAddr>,
    source: Option<Ipv4Addr>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector")
            .field("tls", &self.tls.is_some())
            .field("address", &self.address)
            .field("source", &self.source)
            .finish()
    }
}

/// Files (PEM) for TLS.
#[derive(Clone, Copy, Debug)]
pub struct ClientTlsFiles<'a> {
    /// Authorities that the server's certificate must come from.
    pub authorities: &'a Path,
    /// The client's certificate.
    pub certificate: &'a Path,
    /// Its key.
    pub key: &'a Path,
}

impl Connector {
    /// Plain HTTP.
    pub fn plain() -> Self {
        Self::default()
    }

    /// TLS by these files, which are read now and never again, as kube-scheduler does.
    pub fn tls(files: ClientTlsFiles<'_>) -> anyhow::Result<Self> {
        let authorities = files::read(files.authorities)?;
        let own = CertificateDer::pem_file_iter(files.certificate)
            .with_context(|| format!("cannot read {}", files.certificate.display()))?;
        let own = own.collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_file(files.key)
            .with_context(|| format!("cannot read {}", files.key.display()))?;
        Self::by_tls(authorities.as_bytes(), Some((own, key)))
    }

    /// TLS that trusts these authorities (PEM) and shows no client certificate.
    pub fn trusting(authorities: &[u8]) -> anyhow::Result<Self> {
        Self::by_tls(authorities, None)
    }

    fn by_tls(
        authorities: &[u8],
        own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    ) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authorities) {
            roots.add(certificate?)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = config.with_root_certificates(roots);
        let config = match own {
            Some((certificate, key)) => config.with_client_auth_cert(certificate, key)?,
            None => config.with_no_client_auth(),
        };
        Ok(Self {
            tls: Some(TlsConnector::from(Arc::new(config))),
            ..Self::default()
        })
    }

    /// The same connector, but every host name leads to this address.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        Self {
            address: Some(address),
            ..self
        }
    }

    /// The same connector, but its connections to a fixed address ([`Self::at`]) come from this address of the machine.
    #[must_use]
    pub fn coming_from(self, source: Ipv4Addr) -> Self {
        Self {
            source: Some(source),
            ..self
        }
    }

    /// The same connector, but it offers HTTP/2 only.
    #[must_use]
    pub fn offering_http2(self) -> Self {
        let tls = self.tls.map(|tls| {
            let mut config = ClientConfig::clone(tls.config());
            config.alpn_protocols = vec![b"h2".to_vec()];
            TlsConnector::from(Arc::new(config))
        });
        Self { tls, ..self }
    }

    /// Connects to the host of a URL, or to the fixed address, with TLS if the scheme is `https`.
    async fn connect(self, uri: Uri) -> io::Result<TokioIo<Box<dyn Stream>>> {
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let stream = match (self.address, self.source) {
            (Some(address), Some(source)) => connect_from(source, address).await?,
            (Some(address), None) => TcpStream::connect(address).await?,
            // `coming_from` is for a fixed address.
            (None, _) => TcpStream::connect((host.as_str(), uri.port_u16().unwrap_or(80))).await?,
        };
        stream.set_nodelay(true)?;
        let stream: Box<dyn Stream> = match (uri.scheme_str(), self.tls) {
            (Some("https"), Some(tls)) => {
                let name = ServerName::try_from(host)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
                Box::new(tls.connect(name, stream).await?)
            }
            (Some("https"), None) => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "this client knows no authorities for TLS",
                ));
            }
            _ => Box::new(stream),
        };
        Ok(TokioIo::new(stream))
    }
}

/// Connects to an address from one of the machine's own.
pub async fn connect_from(source: Ipv4Addr, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(IpAddr::V4(source), 0))?;
    socket.connect(address).await
}

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Box<dyn Stream>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        self.clone().connect(uri).boxed()
    }
}

/// A connection, in the clear or over TLS.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Connection for Box<dyn Stream> {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

//! An authority, its successor, and the server certificate that the authority signed: what exists, and what is due.
//!
//! Pure except for the creation of keys: callers bring the time. Clients such as kube-scheduler read an authority only once, so
//! it lives long, and its successor is published a year before it signs anything.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use daemon::x509::not_after;
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;

/// Certificates of the authorities to trust (PEM). The first one signs; the second one signs next if [`SUCCESSOR_KEY`] exists.
const AUTHORITIES: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
/// Private key of the authority that signs next.
const SUCCESSOR_KEY: &str = "ca-next.key";
/// The certificate that the servers present.
const CERTIFICATE: &str = "tls.crt";
const CERTIFICATE_KEY: &str = "tls.key";

/// All keys of the Secret that the scheduler writes.
pub(super) const SECRET_KEYS: [&str; 5] = [
    AUTHORITIES,
    AUTHORITY_KEY,
    SUCCESSOR_KEY,
    CERTIFICATE,
    CERTIFICATE_KEY,
];

const CANNOT_ISSUE: &str = "cannot create a certificate";

/// Lifetime of an authority: clients such as kube-scheduler read it only at their start.
const AUTHORITY_LIFETIME: Duration = DAY.saturating_mul(3650);
/// Time between the publication of an authority's successor and the end of the authority.
const OVERLAP: Duration = DAY.saturating_mul(365);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Time by which the clock of a client may be behind: certificates are valid from this long before their creation.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// The certificates and keys of the Secret.
#[derive(Clone)]
pub(super) struct Material {
    signer: Authority,
    /// The authority that will sign next. It is published a year early, so that clients trust it when it begins to sign.
    successor: Option<Authority>,
    /// Authorities that no longer sign and are still valid, as certificates in use may be signed by them.
    former: Vec<Certificate>,
    /// The server certificate; `None` until it is created.
    leaf: Option<Leaf>,
}

/// A certificate, as PEM text and as DER.
#[derive(Clone)]
struct Certificate {
    pem: String,
    der: CertificateDer<'static>,
    /// The time at which it expires (`notAfter`).
    ends: SystemTime,
}

/// An authority: its certificate, and the key with which it signs.
#[derive(Clone)]
struct Authority {
    certificate: Certificate,
    key: Arc<KeyPair>,
}

/// A certificate of a server or a client, which an authority signed, with its private key.
#[derive(Clone)]
struct Leaf {
    certificate: Certificate,
    key_pem: String,
}

/// A change of the Secret, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    NewAuthority,
    NewSuccessor,
    /// The successor of the authority signs from now on.
    Succession,
    NewCertificate,
}

impl fmt::Debug for Material {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Material")
            // Never the private keys, which would end up in a log.
            .field("signer_ends", &self.signer.certificate.ends)
            .finish_non_exhaustive()
    }
}

impl Material {
    /// Reads the data of a Secret; `None` if it has none of the keys in [`SECRET_KEYS`].
    pub(super) fn read(data: &BTreeMap<String, ByteString>) -> anyhow::Result<Option<Self>> {
        if !SECRET_KEYS.iter().any(|part| data.contains_key(*part)) {
            return Ok(None);
        }
        let bytes = |part: &str| Some(data.get(part)?.0.as_slice());
        // The order of the certificates says which key belongs to which: first the signer's, then its successor's if there is
        // one.
        let certificates = read_certificates(bytes(AUTHORITIES).unwrap_or_default());
        let certificates = certificates.context("ca.crt holds something that is no certificate")?;
        let mut certificates = certificates.into_iter();
        let certificate = certificates.next().context("ca.crt is missing or empty")?;
        let key = read_key(AUTHORITY_KEY, bytes(AUTHORITY_KEY).context("ca.key is missing")?)?;
        let signer = Authority { certificate, key };
        let mut successor = None;
        if let Some(pem) = bytes(SUCCESSOR_KEY) {
            let certificate = certificates.next();
            let certificate = certificate.context("ca.crt lacks the certificate of ca-next.key")?;
            let key = read_key(SUCCESSOR_KEY, pem)?;
            successor = Some(Authority { certificate, key });
        }
        // Unlike an authority, a damaged server certificate is simply replaced: no client has to trust it.
        let leaf = bytes(CERTIFICATE).zip(bytes(CERTIFICATE_KEY));
        let leaf = leaf.and_then(|(certificate, key)| Leaf::read(certificate, key));
        Ok(Some(Self {
            signer,
            successor,
            former: certificates.collect(),
            leaf,
        }))
    }

    pub(super) fn data(&self) -> BTreeMap<String, ByteString> {
        let mut texts = vec![
            (AUTHORITIES, self.authorities()),
            (AUTHORITY_KEY, self.signer.key.serialize_pem()),
        ];
        if let Some(successor) = &self.successor {
            texts.push((SUCCESSOR_KEY, successor.key.serialize_pem()));
        }
        if let Some(leaf) = &self.leaf {
            texts.push((CERTIFICATE, leaf.certificate.pem.clone()));
            texts.push((CERTIFICATE_KEY, leaf.key_pem.clone()));
        }
        let texts = texts.into_iter();
        let data = texts.map(|(part, text)| (part.to_owned(), ByteString(text.into_bytes())));
        data.collect()
    }

    /// Creates the authority and the server certificate if they are missing, and renews those that are due at the time `now`.
    /// `held` is the present content of the Secret. `lifetime` is that of a server certificate, which is renewed when a third of
    /// it is left.
    pub(super) fn renewed(
        held: Option<Self>,
        hosts: &[String],
        lifetime: Duration,
        now: SystemTime,
    ) -> anyhow::Result<(Self, Vec<Change>)> {
        let mut changes = Vec::new();
        let mut material = if let Some(material) = held {
            material
        } else {
            changes.push(Change::NewAuthority);
            Self {
                signer: Authority::new(now).context("cannot create an authority")?,
                successor: None,
                former: Vec::new(),
                leaf: None,
            }
        };
        let left = material.signer.certificate.time_left(now);
        // Published long before it signs, so that clients that read the authorities at their start trust it in time.
        if left < OVERLAP && material.successor.is_none() {
            material.successor = Some(Authority::new(now).context("cannot create an authority")?);
            changes.push(Change::NewSuccessor);
        }
        // A certificate ends with its authority at the latest, so the successor signs as soon as the authority would cut one
        // short.
        if left < lifetime
            && let Some(successor) = material.successor.take()
        {
            let former = std::mem::replace(&mut material.signer, successor);
            // Servers of other replicas may show a certificate of the former authority until they read the Secret.
            material.former.insert(0, former.certificate);
            changes.push(Change::Succession);
        }
        material.former.retain(|former| former.ends > now);
        let (signer, held) = (&material.signer, material.leaf.as_ref());
        if !held.is_some_and(|leaf| leaf.is_current(signer, hosts, lifetime, now)) {
            let leaf = signer.issue(hosts, lifetime, ExtendedKeyUsagePurpose::ServerAuth, now);
            let leaf = leaf.context(CANNOT_ISSUE)?;
            // A person may have put a key into the Secret that does not belong to the authority.
            leaf.verify(signer, hosts, now).with_context(|| {
                let hosts = hosts.join(", ");
                format!("the certificate for {hosts} is not accepted with {AUTHORITIES}: is {AUTHORITY_KEY} its key?")
            })?;
            material.leaf = Some(leaf);
            changes.push(Change::NewCertificate);
        }
        Ok((material, changes))
    }

    /// The authorities that clients should trust, as PEM.
    pub(super) fn authorities(&self) -> String {
        self.trusted().map(|certificate| &*certificate.pem).collect()
    }

    /// The authorities that clients should trust, as roots of rustls.
    pub(super) fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        // rustls has parsed each of them before, when the Secret was read or the certificate was created.
        roots.add_parsable_certificates(self.trusted().map(|certificate| certificate.der.clone()));
        roots
    }

    /// The authorities that clients should trust: the present one, the next one and former ones.
    fn trusted(&self) -> impl Iterator<Item = &Certificate> {
        let authorities = std::iter::once(&self.signer).chain(&self.successor);
        authorities.map(|own| &own.certificate).chain(&self.former)
    }

    pub(super) fn certified_key(&self) -> anyhow::Result<CertifiedKey> {
        let leaf = self.leaf.as_ref().context("tls.key is missing")?;
        let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).context(CERTIFICATE_KEY)?;
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(vec![leaf.certificate.der.clone()], key, &provider).context(CERTIFICATE_KEY)
    }

    /// The times at which the signing authority and the server certificate expire.
    pub(super) fn ends(&self) -> (SystemTime, Option<SystemTime>) {
        let leaf = self.leaf.as_ref();
        (
            self.signer.certificate.ends,
            leaf.map(|leaf| leaf.certificate.ends),
        )
    }

    /// Issues a certificate for a client of this name. Returns the certificate and its key, as PEM.
    pub(super) fn client_certificate(
        &self,
        name: &str,
        lifetime: Duration,
        now: SystemTime,
    ) -> anyhow::Result<(String, String)> {
        let names = [name.to_owned()];
        let leaf = self
            .signer
            .issue(&names, lifetime, ExtendedKeyUsagePurpose::ClientAuth, now);
        let leaf = leaf.context(CANNOT_ISSUE)?;
        Ok((leaf.certificate.pem, leaf.key_pem))
    }
}

impl Authority {
    /// Creates an authority: a new key, and a certificate for it that the key signs itself.
    fn new(now: SystemTime) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = Self::params(&key);
        set_period(&mut params, now, now + AUTHORITY_LIFETIME);
        let certificate = Certificate::from_rcgen(&params.self_signed(&key)?)?;
        let key = Arc::new(key);
        Ok(Self { certificate, key })
    }

    /// The parameters of an authority's certificate, except for its period. They follow from the key alone: rcgen needs them for
    /// each certificate that the authority signs, and the Secret does not have them.
    fn params(key: &KeyPair) -> CertificateParams {
        let mut params = CertificateParams::default();
        let mut key_id = 0_u64;
        for byte in params.key_identifier(key).iter().take(6) {
            key_id = key_id << 8 | u64::from(*byte);
        }
        // Part of the name, so that it differs from the successor's: clients find the authority of a certificate by its name.
        let name = format!("gpushare authority {key_id:012x}");
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        // The authority signs certificates of servers and clients, and no further authorities.
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    /// Issues a certificate with a new key, for a server or a client of these names, which ends with the authority at the latest.
    fn issue(
        &self,
        names: &[String],
        lifetime: Duration,
        usage: ExtendedKeyUsagePurpose,
        now: SystemTime,
    ) -> Result<Leaf, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        // Clients refuse a certificate that is valid for longer than its authority.
        set_period(&mut params, now, (now + lifetime).min(self.certificate.ends));
        params.distinguished_name = DistinguishedName::new();
        let name = names.first().map(String::as_str).unwrap_or_default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        // Several authorities are trusted at one time; the identifier says which of them signed.
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::new(Self::params(&self.key), &*self.key);
        Ok(Leaf {
            certificate: Certificate::from_rcgen(&params.signed_by(&key, &issuer)?)?,
            key_pem: key.serialize_pem(),
        })
    }
}

impl Leaf {
    /// Reads a server certificate and its private key (PEM); `None` if one of them is invalid.
    fn read(certificate: &[u8], key: &[u8]) -> Option<Self> {
        let certificate = read_certificates(certificate)?.into_iter().next()?;
        let key_pem = String::from_utf8(key.to_vec()).ok()?;
        // Parsed only to check that it is a key.
        KeyPair::from_pem(&key_pem).ok()?;
        Some(Self { certificate, key_pem })
    }

    /// Returns true if the certificate has a third of its lifetime left, has all these names, and is signed by this authority.
    fn is_current(&self, signer: &Authority, hosts: &[String], lifetime: Duration, now: SystemTime) -> bool {
        self.certificate.time_left(now) >= lifetime / 3 && self.verify(signer, hosts, now).is_ok()
    }

    /// Checks the certificate as a client that trusts `signer` does when it connects to each of the hosts.
    fn verify(&self, signer: &Authority, hosts: &[String], now: SystemTime) -> Result<(), rustls::Error> {
        // The same checks as in a client: without them, only kube-scheduler would notice a wrong key.
        let certificate = ParsedCertificate::try_from(&self.certificate.der)?;
        let mut roots = RootCertStore::empty();
        roots.add(signer.certificate.der.clone())?;
        let now = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms;
        verify_server_cert_signed_by_trust_anchor(&certificate, &roots, &[], now, algorithms.all)?;
        for host in hosts {
            let name = ServerName::try_from(host.as_str())
                .map_err(|error| rustls::Error::General(error.to_string()))?;
            verify_server_name(&certificate, &name)?;
        }
        Ok(())
    }
}

impl Certificate {
    /// Parses a certificate (PEM); `None` if it is invalid.
    fn new(pem: String) -> Option<Self> {
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
        let ends = not_after(&der)?;
        Some(Self { pem, der, ends })
    }

    fn from_rcgen(certificate: &rcgen::Certificate) -> Result<Self, rcgen::Error> {
        Self::new(certificate.pem()).ok_or(rcgen::Error::CouldNotParseCertificate)
    }

    fn time_left(&self, now: SystemTime) -> Duration {
        self.ends.duration_since(now).unwrap_or_default()
    }
}

/// Reads a private key (PEM), which the Secret has under the key `part`.
fn read_key(part: &str, pem: &[u8]) -> anyhow::Result<Arc<KeyPair>> {
    match std::str::from_utf8(pem).map(KeyPair::from_pem) {
        Ok(Ok(key)) => Ok(Arc::new(key)),
        _ => anyhow::bail!("{part} is no private key"),
    }
}

/// Reads all certificates of a PEM text; `None` if one of them cannot be read.
fn read_certificates(pem: &[u8]) -> Option<Vec<Certificate>> {
    // The PEM text of each certificate is kept as it is, so that an unchanged Secret is not written again.
    const END: &str = "-----END CERTIFICATE-----\n";
    // Editors on Windows write carriage returns.
    let text = std::str::from_utf8(pem).ok()?.replace('\r', "");
    let mut certificates = Vec::new();
    for block in text.split_inclusive(END).map(str::trim_start) {
        if !block.is_empty() {
            certificates.push(Certificate::new(block.to_owned())?);
        }
    }
    Some(certificates)
}

/// Sets the validity from a little before `now` until `end`.
fn set_period(params: &mut CertificateParams, now: SystemTime, end: SystemTime) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let since_epoch = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // A client whose clock is slow would refuse a certificate that begins now.
    params.not_before = epoch + since_epoch(now).saturating_sub(MAX_CLOCK_SKEW);
    params.not_after = epoch + since_epoch(end);
}

#[cfg(test)]
mod tests;

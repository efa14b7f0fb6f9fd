//! An authority, its successor, and the server certificate that the authority signed: what exists, and what is due.
//!
//! Pure except for the creation of keys: callers bring the time. Clients such as kube-scheduler read an authority only once, so
//! it lives long, and its successor is published a year before it signs anything.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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
pub const AUTHORITIES: &str = "ca.crt";
/// Private key of the authority that signs.
pub const AUTHORITY_KEY: &str = "ca.key";
/// Private key of the authority that signs next.
pub const SUCCESSOR_KEY: &str = "ca-next.key";
/// The certificate that the servers present.
pub const CERTIFICATE: &str = "tls.crt";
/// Private key of the certificate that the servers present.
pub const CERTIFICATE_KEY: &str = "tls.key";

/// All keys of the Secret that the scheduler writes.
pub const SECRET_KEYS: [&str; 5] = [
    AUTHORITIES,
    AUTHORITY_KEY,
    SUCCESSOR_KEY,
    CERTIFICATE,
    CERTIFICATE_KEY,
];

/// Lifetime of an authority: clients such as kube-scheduler read it only at their start.
const AUTHORITY_LIFETIME: Duration = DAY.saturating_mul(3650);
/// Time between the publication of an authority's successor and the end of the authority.
const OVERLAP: Duration = DAY.saturating_mul(365);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// Time by which the clock of a client may be behind: certificates are valid from this long before their creation.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// The certificates and keys of the Secret.
#[derive(Clone)]
pub struct Material {
    /// The authority that signs.
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
pub enum Change {
    /// The first authority was created.
    NewAuthority,
    /// A successor of the authority was created, since the authority ends within a year.
    NewSuccessor,
    /// The successor of the authority signs from now on.
    Succession,
    /// A server certificate was created.
    NewCertificate,
}

/// The reason for which the Secret's content cannot be used, or renewed.
#[derive(Debug, thiserror::Error)]
pub enum MaterialError {
    /// A key of the Secret has an invalid value.
    #[error("{part} {rule}")]
    Part {
        /// The key in the Secret.
        part: &'static str,
        /// The rule that its value breaks.
        rule: String,
    },
    /// A certificate cannot be created.
    #[error("cannot create {what}")]
    Make {
        /// The kind of certificate.
        what: &'static str,
        /// The reason.
        #[source]
        source: rcgen::Error,
    },
    /// A server certificate that was just created does not verify.
    #[error("the certificate for {hosts} is not accepted with {AUTHORITIES}: is {AUTHORITY_KEY} its key?")]
    Unverified {
        /// The names in the certificate.
        hosts: String,
        /// The reason.
        #[source]
        source: rustls::Error,
    },
}

/// For `map_err`: the error that a certificate of this kind cannot be created.
fn cannot_make(what: &'static str) -> impl Fn(rcgen::Error) -> MaterialError {
    move |source| MaterialError::Make { what, source }
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
    ///
    /// # Errors
    /// The value of a key cannot be read. A server certificate that cannot be read is no error, since the next renewal replaces
    /// it.
    pub fn read(data: &BTreeMap<String, ByteString>) -> Result<Option<Self>, MaterialError> {
        if !SECRET_KEYS.iter().any(|part| data.contains_key(*part)) {
            return Ok(None);
        }
        let fail = |part, rule: &str| MaterialError::Part {
            part,
            rule: rule.to_owned(),
        };
        let bytes = |part: &'static str| data.get(part).map(|bytes| bytes.0.as_slice());
        // The order of the certificates says which key belongs to which: first the signer's, then its successor's if there is
        // one.
        let mut certificates = read_certificates(bytes(AUTHORITIES).unwrap_or_default())
            .ok_or_else(|| fail(AUTHORITIES, "holds something that is no certificate"))?
            .into_iter();
        let key = |part, pem: &[u8]| {
            let key = std::str::from_utf8(pem)
                .ok()
                .and_then(|pem| KeyPair::from_pem(pem).ok());
            key.map(Arc::new).ok_or_else(|| fail(part, "is no private key"))
        };
        let certificate = certificates
            .next()
            .ok_or_else(|| fail(AUTHORITIES, "is missing or empty"))?;
        let signer = Authority {
            certificate,
            key: key(
                AUTHORITY_KEY,
                bytes(AUTHORITY_KEY).ok_or_else(|| fail(AUTHORITY_KEY, "is missing"))?,
            )?,
        };
        let successor = match bytes(SUCCESSOR_KEY) {
            None => None,
            Some(pem) => {
                let certificate = certificates
                    .next()
                    .ok_or_else(|| fail(AUTHORITIES, "lacks the certificate of ca-next.key"))?;
                Some(Authority {
                    certificate,
                    key: key(SUCCESSOR_KEY, pem)?,
                })
            }
        };
        // Unlike an authority, a damaged server certificate is simply replaced: no client has to trust it.
        let leaf = bytes(CERTIFICATE)
            .zip(bytes(CERTIFICATE_KEY))
            .and_then(|(certificate, key)| Leaf::read(certificate, key));
        Ok(Some(Self {
            signer,
            successor,
            former: certificates.collect(),
            leaf,
        }))
    }

    /// The content of the Secret, by its keys.
    pub fn data(&self) -> BTreeMap<String, ByteString> {
        let mut data = BTreeMap::new();
        let mut put = |part: &str, text: String| {
            data.insert(part.to_owned(), ByteString(text.into_bytes()));
        };
        put(AUTHORITIES, self.authorities());
        put(AUTHORITY_KEY, self.signer.key.serialize_pem());
        if let Some(successor) = &self.successor {
            put(SUCCESSOR_KEY, successor.key.serialize_pem());
        }
        if let Some(leaf) = &self.leaf {
            put(CERTIFICATE, leaf.certificate.pem.clone());
            put(CERTIFICATE_KEY, leaf.key_pem.clone());
        }
        data
    }

    /// Creates the authority and the server certificate if they are missing, and renews those that are due at the time `now`.
    /// `held` is the present content of the Secret. `lifetime` is that of a server certificate, which is renewed when a third of
    /// it is left.
    ///
    /// # Errors
    /// A certificate cannot be created, or does not verify.
    pub fn renewed(
        held: Option<Self>,
        hosts: &[String],
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<(Self, Vec<Change>), MaterialError> {
        let mut changes = Vec::new();
        let mut material = if let Some(material) = held {
            material
        } else {
            changes.push(Change::NewAuthority);
            Self {
                signer: Authority::new(AUTHORITY_LIFETIME, now)?,
                successor: None,
                former: Vec::new(),
                leaf: None,
            }
        };
        let left = material.signer.certificate.time_left(now);
        // Published long before it signs, so that clients that read the authorities at their start trust it in time.
        if left < OVERLAP && material.successor.is_none() {
            material.successor = Some(Authority::new(AUTHORITY_LIFETIME, now)?);
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
        material
            .former
            .retain(|certificate| !certificate.time_left(now).is_zero());
        if !material
            .leaf
            .as_ref()
            .is_some_and(|leaf| leaf.is_current(&material.signer, hosts, lifetime, now))
        {
            let leaf = material
                .signer
                .issue(hosts, lifetime, ExtendedKeyUsagePurpose::ServerAuth, now)?;
            let refused = |source| MaterialError::Unverified {
                hosts: hosts.join(", "),
                source,
            };
            // A person may have put a key into the Secret that does not belong to the authority.
            leaf.verify(&material.signer, hosts, now).map_err(refused)?;
            material.leaf = Some(leaf);
            changes.push(Change::NewCertificate);
        }
        Ok((material, changes))
    }

    /// The authorities that clients should trust, as PEM.
    pub fn authorities(&self) -> String {
        self.trusted()
            .map(|certificate| certificate.pem.as_str())
            .collect()
    }

    /// The authorities that clients should trust, as roots of rustls.
    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        // rustls has parsed each of them before, when the Secret was read or the certificate was created.
        roots.add_parsable_certificates(self.trusted().map(|certificate| certificate.der.clone()));
        roots
    }

    /// The authorities that clients should trust: the present one, the next one and former ones.
    fn trusted(&self) -> impl Iterator<Item = &Certificate> {
        let successor = self.successor.as_ref().map(|successor| &successor.certificate);
        [&self.signer.certificate]
            .into_iter()
            .chain(successor)
            .chain(&self.former)
    }

    /// The server certificate with its key.
    ///
    /// # Errors
    /// There is no certificate, or the key does not match it.
    pub fn certified_key(&self) -> Result<CertifiedKey, MaterialError> {
        let fail = |rule: String| MaterialError::Part {
            part: CERTIFICATE_KEY,
            rule,
        };
        let leaf = self.leaf.as_ref().ok_or_else(|| fail("is missing".to_owned()))?;
        let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes())
            .map_err(|error| fail(error.to_string()))?;
        let provider = rustls::crypto::ring::default_provider();
        CertifiedKey::from_der(vec![leaf.certificate.der.clone()], key, &provider)
            .map_err(|error| fail(error.to_string()))
    }

    /// The times at which the signing authority and the server certificate expire.
    pub fn ends(&self) -> (SystemTime, Option<SystemTime>) {
        (
            self.signer.certificate.ends,
            self.leaf.as_ref().map(|leaf| leaf.certificate.ends),
        )
    }

    /// Issues a certificate for a client of this name. Returns the certificate and its key, as PEM.
    ///
    /// # Errors
    /// The certificate cannot be created.
    pub fn client_certificate(
        &self,
        name: &str,
        lifetime: Duration,
        now: SystemTime,
    ) -> Result<(String, String), MaterialError> {
        let leaf = self.signer.issue(
            &[name.to_owned()],
            lifetime,
            ExtendedKeyUsagePurpose::ClientAuth,
            now,
        )?;
        Ok((leaf.certificate.pem.clone(), leaf.key_pem))
    }
}

impl Authority {
    /// Creates an authority: a new key, and a certificate for it that the key signs itself.
    fn new(lifetime: Duration, now: SystemTime) -> Result<Self, MaterialError> {
        let make = cannot_make("an authority");
        let key = KeyPair::generate().map_err(&make)?;
        let mut params = Self::params(&key);
        set_period(&mut params, now, now + lifetime);
        let certificate = params
            .self_signed(&key)
            .and_then(|certificate| Certificate::from_rcgen(&certificate))
            .map_err(&make)?;
        Ok(Self {
            certificate,
            key: Arc::new(key),
        })
    }

    /// The parameters of an authority's certificate, except for its period. They follow from the key alone: rcgen needs them for
    /// each certificate that the authority signs, and the Secret does not have them.
    fn params(key: &KeyPair) -> CertificateParams {
        let mut params = CertificateParams::default();
        let key_id = params
            .key_identifier(key)
            .iter()
            .take(6)
            .fold(0_u64, |id, byte| id << 8 | u64::from(*byte));
        // Part of the name, so that it differs from the successor's: clients find the authority of a certificate by its name.
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("gpushare authority {key_id:012x}"));
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
    ) -> Result<Leaf, MaterialError> {
        let make = cannot_make("a certificate");
        let key = KeyPair::generate().map_err(&make)?;
        let mut params = CertificateParams::new(names).map_err(&make)?;
        // Clients refuse a certificate that is valid for longer than its authority.
        set_period(&mut params, now, (now + lifetime).min(self.certificate.ends));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(
            DnType::CommonName,
            names.first().map(String::as_str).unwrap_or_default(),
        );
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        // Several authorities are trusted at one time; the identifier says which of them signed.
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::new(Self::params(&self.key), &*self.key);
        let certificate = params
            .signed_by(&key, &issuer)
            .and_then(|certificate| Certificate::from_rcgen(&certificate))
            .map_err(&make)?;
        Ok(Leaf {
            certificate,
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

    /// The time for which the certificate is still valid.
    fn time_left(&self, now: SystemTime) -> Duration {
        self.ends.duration_since(now).unwrap_or_default()
    }
}

/// Reads all certificates of a PEM text; `None` if one of them cannot be read.
fn read_certificates(pem: &[u8]) -> Option<Vec<Certificate>> {
    // The PEM text of each certificate is kept as it is, so that an unchanged Secret is not written again.
    const END: &str = "-----END CERTIFICATE-----\n";
    // Editors on Windows write carriage returns.
    let text = std::str::from_utf8(pem).ok()?.replace('\r', "");
    let blocks = text
        .split_inclusive(END)
        .map(str::trim_start)
        .filter(|block| !block.is_empty());
    blocks.map(|block| Certificate::new(block.to_owned())).collect()
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

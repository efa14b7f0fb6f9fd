//! Renewal of the authority and of certificates over years.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use rstest::rstest;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::{AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, CERTIFICATE_KEY, Change, DAY, Material, SUCCESSOR_KEY};
use daemon::x509::common_name;

const LIFETIME: Duration = Duration::from_secs(90 * 24 * 3600);

fn hosts() -> Vec<String> {
    ["gpushare-webhook.gpushare-system.svc", "127.0.0.1"]
        .map(str::to_owned)
        .into()
}

fn start() -> SystemTime {
    SystemTime::UNIX_EPOCH + 20_000 * DAY
}

/// Renews the certificates that are due at `now`.
fn keep(held: Option<Material>, now: SystemTime) -> (Material, Vec<Change>) {
    Material::renewed(held, &hosts(), LIFETIME, now).unwrap()
}

/// The same content, written into a Secret and read again.
fn read(material: &Material) -> Material {
    Material::read(&material.data()).unwrap().unwrap()
}

/// True if a client that trusts only these authorities accepts the server's certificate.
fn accepts(authorities: &Material, shown: &Material, now: SystemTime) -> bool {
    let leaf = shown.leaf.as_ref().unwrap();
    let known = authorities.trusted().map(|certificate| certificate.der.clone());
    let roots = known.map(|der| {
        let mut signer = shown.signer.clone();
        signer.certificate.der = der;
        signer
    });
    roots
        .into_iter()
        .any(|signer| leaf.verify(&signer, &hosts(), now).is_ok())
}

#[test]
fn the_first_check_creates_all_certificates_and_the_next_none() {
    let (material, changes) = keep(None, start());
    assert_eq!(changes, [Change::NewAuthority, Change::NewCertificate]);
    assert_eq!(material.ends(), (start() + 3650 * DAY, Some(start() + LIFETIME)));
    let (again, changes) = keep(Some(read(&material)), start() + 59 * DAY);
    assert_eq!((changes, again.data() == material.data()), (vec![], true));
    assert_eq!(material.certified_key().unwrap().cert.len(), 1);
}

#[test]
fn a_certificate_is_renewed_when_a_third_is_left_and_the_authority_stays() {
    let (first, _) = keep(None, start());
    let (second, changes) = keep(Some(read(&first)), start() + 61 * DAY);
    assert_eq!(changes, [Change::NewCertificate]);
    assert_eq!(
        (
            first.data()[AUTHORITIES].clone(),
            first.data()[AUTHORITY_KEY].clone()
        ),
        (
            second.data()[AUTHORITIES].clone(),
            second.data()[AUTHORITY_KEY].clone()
        )
    );
    assert_ne!(first.data()[CERTIFICATE], second.data()[CERTIFICATE]);
    assert!(accepts(&first, &second, start() + 61 * DAY));
}

#[test]
fn other_names_need_another_certificate() {
    let (material, _) = keep(None, start());
    let (more, changes) =
        Material::renewed(Some(material), &["other.example".to_owned()], LIFETIME, start()).unwrap();
    assert_eq!(changes, [Change::NewCertificate]);
    let (_, changes) = Material::renewed(
        Some(read(&more)),
        &["other.example".to_owned()],
        LIFETIME,
        start(),
    )
    .unwrap();
    assert_eq!(changes, []);
}

/// A client that has read the authorities at any time accepts the server's certificates for 200 days, whatever is renewed
/// meanwhile.
#[test]
fn clients_that_reload_the_authorities_every_200_days_stay_connected_for_30_years() {
    let mut now = start();
    let (mut material, _) = keep(None, now);
    let mut learnt: Vec<(SystemTime, Material)> = Vec::new();
    let mut successions = 0;
    for _ in 0..30 * 365 / 10 {
        now += 10 * DAY;
        let (next, changes) = keep(Some(read(&material)), now);
        successions += changes
            .iter()
            .filter(|change| **change == Change::Succession)
            .count();
        if changes.contains(&Change::NewSuccessor) {
            assert!(
                !changes.contains(&Change::Succession),
                "published before it signs"
            );
        }
        material = next;
        learnt.retain(|(then, _)| *then + 200 * DAY > now);
        learnt.push((now, material.clone()));
        assert!(
            learnt.iter().all(|(_, known)| accepts(known, &material, now)),
            "{now:?}"
        );
        assert!(material.trusted().count() <= 2);
    }
    assert_eq!(successions, 3);
}

#[test]
fn a_certificate_that_expired_years_ago_is_renewed() {
    let (material, _) = keep(None, start());
    let now = start() + 20 * 365 * DAY;
    let (material, changes) = keep(Some(read(&material)), now);
    assert_eq!(
        changes,
        [Change::NewSuccessor, Change::Succession, Change::NewCertificate]
    );
    assert!(accepts(&material, &material, now));
    assert_eq!(material.trusted().count(), 1, "what has ended is dropped");
}

#[rstest]
#[case::no_authority(AUTHORITIES, None, "ca.crt is missing or empty")]
#[case::authority(
    AUTHORITIES,
    Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
    "ca.crt holds something that is no certificate"
)]
#[case::no_key(AUTHORITY_KEY, None, "ca.key is missing")]
#[case::key(AUTHORITY_KEY, Some("secret"), "ca.key is no private key")]
#[case::successor(SUCCESSOR_KEY, Some("secret"), "ca.crt lacks the certificate of ca-next.key")]
fn a_malformed_secret_is_refused_with_the_field(
    #[case] part: &str,
    #[case] value: Option<&str>,
    #[case] expected: &str,
) {
    let mut data = keep(None, start()).0.data();
    match value {
        Some(text) => drop(data.insert(part.to_owned(), ByteString(text.into()))),
        None => drop(data.remove(part)),
    }
    assert_eq!(Material::read(&data).unwrap_err().to_string(), expected);
}

#[test]
fn a_key_that_does_not_match_the_authority_is_refused() {
    let (mut data, other) = (keep(None, start()).0.data(), keep(None, start()).0.data());
    data.insert(AUTHORITY_KEY.to_owned(), other[AUTHORITY_KEY].clone());
    data.remove(CERTIFICATE);
    let error = Material::renewed(Material::read(&data).unwrap(), &hosts(), LIFETIME, start()).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("is not accepted with ca.crt: is ca.key its key?"),
        "{error}"
    );
}

#[rstest]
fn a_missing_or_malformed_certificate_is_issued_again(
    #[values(CERTIFICATE, CERTIFICATE_KEY)] part: &str,
    #[values(true, false)] lost: bool,
) {
    let (material, _) = keep(None, start());
    let mut data = material.data();
    data.insert(part.to_owned(), ByteString(b"nonsense".to_vec()));
    if lost {
        data.remove(part);
    }
    let (mended, changes) = keep(Material::read(&data).unwrap(), start());
    assert_eq!(changes, [Change::NewCertificate]);
    assert_eq!(mended.authorities(), material.authorities());
}

#[test]
fn an_empty_secret_counts_as_none() {
    assert!(Material::read(&BTreeMap::new()).unwrap().is_none());
    assert!(
        Material::read(&BTreeMap::from([("note".to_owned(), ByteString::default())]))
            .unwrap()
            .is_none()
    );
}

#[test]
fn the_common_name_of_a_client() {
    let (material, _) = keep(None, start());
    let (chain, _) = material
        .client_certificate("kube-scheduler", LIFETIME, start())
        .unwrap();
    let certificate = CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
    assert_eq!(common_name(&certificate).as_deref(), Some("kube-scheduler"));
}

#[test]
fn debug_output_holds_no_key() {
    let (material, _) = keep(None, start());
    assert!(!format!("{material:?}").contains("PRIVATE"));
}

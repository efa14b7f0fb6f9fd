//! Reads two fields of X.509 certificates that rustls does not expose: the end of the validity, and the common name of the
//! subject. For bytes that are no certificate the result is `None`.

use std::time::{Duration, SystemTime};

use chrono::NaiveDateTime;

// Tags of DER elements.
const INTEGER: u8 = 0x02;
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// The identifier of the common name (2.5.4.3), with its tag and length.
const COMMON_NAME: &[u8] = &[0x06, 0x03, 0x55, 0x04, 0x03];
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Tag of the version field, which certificates of version 1 leave out.
const VERSION: u8 = 0xa0;

/// The end of the validity of a certificate (DER); `None` if the bytes are no certificate.
pub fn not_after(certificate: &[u8]) -> Option<SystemTime> {
    let (validity, _) = element(validity_and_rest(certificate)?, SEQUENCE)?;
    let (_, rest) = time(validity)?;
    let (end, _) = time(rest)?;
    Some(end)
}

/// The common name of the subject of a certificate (DER); `None` if it has none, or the bytes are no certificate.
pub fn common_name(certificate: &[u8]) -> Option<String> {
    let (_, rest) = element(validity_and_rest(certificate)?, SEQUENCE)?;
    let (mut subject, _) = element(rest, SEQUENCE)?;
    while !subject.is_empty() {
        let (set, rest) = element(subject, SET)?;
        let (attribute, _) = element(set, SEQUENCE)?;
        if let Some(value) = attribute.strip_prefix(COMMON_NAME) {
            // Several kinds of string are allowed, each with a tag of its own.
            let (text, _) = element(value, *value.first()?)?;
            return String::from_utf8(text.to_vec()).ok();
        }
        subject = rest;
    }
    None
}

/// The bytes of a certificate's fields from its validity on.
fn validity_and_rest(certificate: &[u8]) -> Option<&[u8]> {
    let (certificate, _) = element(certificate, SEQUENCE)?;
    let (mut fields, _) = element(certificate, SEQUENCE)?;
    if let Some((_, rest)) = element(fields, VERSION) {
        fields = rest;
    }
    // Skips serial number, signature algorithm and issuer.
    for tag in [INTEGER, SEQUENCE, SEQUENCE] {
        (_, fields) = element(fields, tag)?;
    }
    Some(fields)
}

/// Splits off a DER element with this tag: its content, and the bytes after it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (length, rest) = length(bytes.strip_prefix(&[tag])?)?;
    rest.split_at_checked(length)
}

/// Splits off the length of a DER element: the number, and the bytes after it.
fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (first, rest) = bytes.split_first()?;
    if *first < 0x80 {
        return Some((usize::from(*first), rest));
    }
    let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
    // DER forbids an indefinite length, which has no digits, and no certificate needs more than four.
    if digits.is_empty() || digits.len() > 4 {
        return None;
    }
    let mut length = 0;
    for digit in digits {
        length = length << 8 | usize::from(*digit);
    }
    Some((length, rest))
}

/// Splits off a DER time: the time, and the bytes after it.
fn time(bytes: &[u8]) -> Option<(SystemTime, &[u8])> {
    let (text, rest) = if let Some((text, rest)) = element(bytes, UTC_TIME) {
        let text = std::str::from_utf8(text).ok()?;
        // RFC 5280: two digits of the year stand for 1950 to 2049.
        let century = if text.get(..2)? < "50" { "20" } else { "19" };
        (format!("{century}{text}"), rest)
    } else {
        let (text, rest) = element(bytes, GENERALIZED_TIME)?;
        (std::str::from_utf8(text).ok()?.to_owned(), rest)
    };
    let time = NaiveDateTime::parse_from_str(&text, "%Y%m%d%H%M%SZ").ok()?;
    let seconds = u64::try_from(time.and_utc().timestamp()).ok()?;
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
    Some((time, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;

    fn certificate() -> Vec<u8> {
        let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::OrganizationName, "o");
        params
            .distinguished_name
            .push(DnType::CommonName, "kube-scheduler");
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn both_fields_of_a_certificate_are_read() {
        let certificate = certificate();
        assert_eq!(common_name(&certificate).as_deref(), Some("kube-scheduler"));
        assert!(not_after(&certificate).unwrap() > SystemTime::now());
    }

    proptest! {
        #![proptest_config(fuzz::config(2000))]

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = (common_name(&bytes), not_after(&bytes));
        }

        #[test]
        fn no_damaged_certificate_makes_the_reader_panic(bytes in fuzz::damaged(vec![certificate()])) {
            let _ = (common_name(&bytes), not_after(&bytes));
        }
    }
}

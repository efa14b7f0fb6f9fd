//! Names: the legal ones of each resource, and generated names and UIDs.

use std::collections::hash_map::RandomState;
use std::fmt::Write as _;
use std::hash::{BuildHasher, Hasher};

use serde_json::Value;

use super::object;
use super::resource::Resource;
use super::status::InvalidField;

const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
    and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
    start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
    '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";

/// True if text is a DNS-1123 label.
pub(crate) fn is_label(text: &str) -> bool {
    let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
    let bytes = text.as_bytes();
    text.len() <= 63 && edge(bytes.first().copied()) && edge(bytes.last().copied()) && text.bytes().all(inner)
}

/// True if text is a DNS-1123 subdomain.
pub(crate) fn is_subdomain(text: &str) -> bool {
    let part = |p: &str| {
        let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        edge(p.bytes().next()) && edge(p.bytes().next_back()) && p.bytes().all(inner)
    };
    text.len() <= 253 && text.split('.').all(part)
}

/// Why a name is not acceptable for a resource.
pub(crate) fn check_name(resource: &Resource, name: &str) -> Option<InvalidField> {
    let bad = |why: &str| Some(InvalidField::invalid("metadata.name", name, why));
    let label_only = matches!(resource.plural.as_str(), "namespaces" | "services");
    if resource.group == "rbac.authorization.k8s.io" {
        let legal = !name.contains(['/', '%']) && !matches!(name, "." | "..");
        return if legal {
            None
        } else {
            bad("may not contain '/' or '%'")
        };
    }
    if label_only {
        return if is_label(name) { None } else { bad(LABEL) };
    }
    if is_subdomain(name) { None } else { bad(SUBDOMAIN) }
}

/// The problems of labels and annotations.
pub(crate) fn check_metadata(object: &Value) -> Vec<InvalidField> {
    let mut errors = Vec::new();
    for (key, value) in object::object(object, "/metadata/labels").into_iter().flatten() {
        check_key("metadata.labels", key, &mut errors);
        let value = value.as_str().unwrap_or_default();
        if !value.is_empty() && !is_qualified_part(value) {
            let why = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', \
                and must start and end with an alphanumeric character";
            errors.push(InvalidField::invalid("metadata.labels", value, why));
        }
    }
    let annotations = object::object(object, "/metadata/annotations");
    for key in annotations.into_iter().flat_map(|a| a.keys()) {
        check_key("metadata.annotations", &key.to_lowercase(), &mut errors);
    }
    let size: usize = annotations
        .into_iter()
        .flatten()
        .map(|(k, v)| k.len() + v.as_str().map_or(0, str::len))
        .sum();
    if size > 256 * 1024 {
        errors.push(InvalidField::forbidden(
            "metadata.annotations",
            "may not be more than 262144 bytes",
        ));
    }
    errors
}

fn check_key(field: &str, key: &str, errors: &mut Vec<InvalidField>) {
    let (prefix, name) = match key.rsplit_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    if !is_qualified_part(name) || prefix.is_some_and(|p| !is_subdomain(p)) {
        let why = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
            alphanumeric character";
        errors.push(InvalidField::invalid(field, key, why));
    }
}

fn is_qualified_part(text: &str) -> bool {
    let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    text.len() <= 63 && edge(text.bytes().next()) && edge(text.bytes().next_back()) && text.bytes().all(inner)
}

/// A name from `generateName`: the prefix and five random characters without vowels.
pub(crate) fn generated(prefix: &str) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let end = prefix
        .char_indices()
        .map(|(i, _)| i)
        .find(|i| *i >= 58)
        .unwrap_or(prefix.len());
    let mut name = prefix.get(..end).unwrap_or(prefix).to_owned();
    for byte in random().to_be_bytes().into_iter().take(5) {
        let letter = ALPHABET
            .get(usize::from(byte) % ALPHABET.len())
            .copied()
            .unwrap_or(b'x');
        name.push(char::from(letter));
    }
    name
}

/// A fresh version-4 uid.
pub(crate) fn uid() -> String {
    let random = (u128::from(random()) << 64) | u128::from(random());
    let bits = (random & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let mut uid = String::with_capacity(36);
    for (i, byte) in bits.to_be_bytes().iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            uid.push('-');
        }
        // Writing to a String cannot fail.
        let _ = write!(uid, "{byte:02x}");
    }
    uid
}

/// 64 random bits: every new hasher state is keyed differently, from the system's entropy.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

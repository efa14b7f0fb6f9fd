//! Names: the rules for names, labels and annotations of objects, and generated names and UIDs.

use std::collections::hash_map::RandomState;
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

/// Returns true if a text has at most `longest` characters, all of them accepted by `edge` or listed in
/// `inner`, and begins and ends with ones that `edge` accepts.
fn is_made_of(text: &str, longest: usize, edge: fn(u8) -> bool, inner: &[u8]) -> bool {
    let bytes = text.as_bytes();
    let is_edge = |byte: Option<&u8>| byte.copied().is_some_and(edge);
    text.len() <= longest
        && is_edge(bytes.first())
        && is_edge(bytes.last())
        && bytes.iter().all(|byte| edge(*byte) || inner.contains(byte))
}

fn is_lower_alphanumeric(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}

/// True if text is a DNS-1123 label.
pub(crate) fn is_label(text: &str) -> bool {
    is_made_of(text, 63, is_lower_alphanumeric, b"-")
}

/// True if text is a DNS-1123 subdomain.
pub(crate) fn is_subdomain(text: &str) -> bool {
    let mut labels = text.split('.');
    text.len() <= 253 && labels.all(|label| is_made_of(label, 253, is_lower_alphanumeric, b"-"))
}

/// Returns the error of a name that is illegal for a resource.
pub(crate) fn check_name(resource: &Resource, name: &str) -> Option<InvalidField> {
    // Names of namespaces and Services become parts of DNS names; names of roles only have to fit a URL path.
    let (is_legal, why) = if resource.group == "rbac.authorization.k8s.io" {
        let is_path = name.contains(['/', '%']) || matches!(name, "." | "..");
        (!is_path, "may not contain '/' or '%'")
    } else if matches!(resource.plural.as_str(), "namespaces" | "services") {
        (is_label(name), LABEL)
    } else {
        (is_subdomain(name), SUBDOMAIN)
    };
    (!is_legal).then(|| InvalidField::invalid("metadata.name", name, why))
}

/// Lists the rules that the labels and annotations of an object break.
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
    let mut size = 0;
    for (key, value) in object::object(object, "/metadata/annotations")
        .into_iter()
        .flatten()
    {
        check_key("metadata.annotations", &key.to_lowercase(), &mut errors);
        size += key.len() + value.as_str().map_or(0, str::len);
    }
    // ValidateAnnotationsSize: the limit is for keys and values of all annotations together.
    if size > 256 * 1024 {
        let why = "may not be more than 262144 bytes";
        errors.push(InvalidField::forbidden("metadata.annotations", why));
    }
    errors
}

/// Adds an error if a key of labels or annotations is not a legal qualified name.
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

/// Returns true if a text may be the name part of a key, or the value of a label.
fn is_qualified_part(text: &str) -> bool {
    is_made_of(text, 63, |byte| byte.is_ascii_alphanumeric(), b"-_.")
}

/// A name from `generateName`: the prefix and five random characters without vowels.
pub(crate) fn generated(prefix: &str) -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    // simpleNameGenerator: a prefix of 58 characters and five random ones fill a label's 63.
    let mut name: String = prefix.chars().take(58).collect();
    for byte in random().to_be_bytes().into_iter().take(5) {
        let letter = ALPHABET.get(usize::from(byte) % ALPHABET.len());
        name.extend(letter.copied().map(char::from));
    }
    name
}

/// A fresh version-4 uid.
pub(crate) fn uid() -> String {
    let random = (u128::from(random()) << 64) | u128::from(random());
    // RFC 9562: four bits hold the version, and two the variant.
    let bits = (random & !(0xf << 76) & !(0x3 << 62)) | (0x4 << 76) | (0x2 << 62);
    let mut uid = format!("{bits:032x}");
    for dash in [8, 13, 18, 23] {
        uid.insert(dash, '-');
    }
    uid
}

/// 64 random bits: every new hasher state is keyed differently, from the system's entropy.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

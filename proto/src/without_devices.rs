//! Pods of one node that kubelet has admitted and that have no device: an annotation of the node's Device object.
//!
//! Written by a node's plugin that lets no container start on a device without room, about pods of which the scheduler could
//! otherwise not know it: their records, or what they ask for, speak of devices. An object without the annotation is that of a
//! node whose plugin reports nothing of the kind. kubelet gives devices at admission alone, so an entry is true for good.

use std::collections::{BTreeMap, BTreeSet};

/// The annotation: a JSON list of UIDs.
pub const PODS_WITHOUT_DEVICES: &str = "gpushare/pods-without-devices";

/// Longest annotation that is read or written, in bytes; the API server allows 256 KiB of annotations in all.
pub const MAX_BYTES: usize = 16 * 1024;

/// UIDs of pods.
pub type Uids = BTreeSet<Box<str>>;

/// The annotation cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {PODS_WITHOUT_DEVICES} {0}")]
pub struct WithoutDevicesError(String);

/// Reads the annotations of a Device object; `None` if its plugin does not report such pods.
///
/// # Errors
/// The annotation is no JSON list of strings, or is longer than [`MAX_BYTES`].
pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Option<Uids>, WithoutDevicesError> {
    let Some(text) = annotations.and_then(|annotations| annotations.get(PODS_WITHOUT_DEVICES)) else {
        return Ok(None);
    };
    if text.len() > MAX_BYTES {
        return Err(WithoutDevicesError(format!("is longer than {MAX_BYTES} bytes")));
    }
    serde_json::from_str(text)
        .map(Some)
        .map_err(|cause| WithoutDevicesError(format!("does not parse: {cause}")))
}

/// Returns the annotation's value; leaves out UIDs that would make it too long, so that the scheduler still counts those pods.
pub fn write<'a>(uids: impl IntoIterator<Item = &'a str>) -> String {
    let mut n_bytes = 2;
    let mut fits = |uid: &&str| {
        // Two quotes and a comma; a UID has no characters that JSON escapes, and one that has is too long a moment sooner.
        n_bytes += uid.len() + 3;
        n_bytes <= MAX_BYTES
            && uid
                .bytes()
                .all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\')
    };
    let uids: BTreeSet<&str> = uids.into_iter().collect();
    let written: Vec<&str> = uids.into_iter().filter(|uid| fits(uid)).collect();
    serde_json::json!(written).to_string()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn annotated(text: &str) -> BTreeMap<String, String> {
        [(PODS_WITHOUT_DEVICES.to_owned(), text.to_owned())].into()
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(read(None), Ok(None), "nothing is reported");
        assert_eq!(
            read(Some(&annotated(&write([])))),
            Ok(Some(Uids::new())),
            "there are none"
        );
        let read = read(Some(&annotated(&write(["b", "a", "b"])))).unwrap().unwrap();
        assert_eq!(read.iter().map(|uid| &**uid).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn too_many_are_left_out() {
        let many: Vec<String> = (0..1000).map(|n| format!("{n:036}")).collect();
        let text = write(many.iter().map(String::as_str));
        assert!(text.len() <= MAX_BYTES);
        assert!((400..1000).contains(&read(Some(&annotated(&text))).unwrap().unwrap().len()));
    }

    #[rstest]
    #[case::no_list("{}")]
    #[case::no_texts("[1]")]
    #[case::cut_short("[\"a\"")]
    fn bad_ones_are_refused(#[case] text: &str) {
        assert!(
            read(Some(&annotated(text)))
                .unwrap_err()
                .to_string()
                .contains("does not parse")
        );
        assert!(
            read(Some(&annotated(&"[".repeat(MAX_BYTES + 1))))
                .unwrap_err()
                .to_string()
                .contains("longer")
        );
    }
}

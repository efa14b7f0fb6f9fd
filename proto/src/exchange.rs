//! Records that pods of one node have exchanged: an annotation of the node's Device object.
//!
//! kubelet may admit equal pods in another order than they were assumed, so that each sees the other's devices. Then the
//! node's plugin exchanges their records by one write that names both pods, and the pods' own annotations follow. From
//! that write on a pod's effective record is its entry here, if it has one, and else what its annotations say. Written by
//! the node's plugin alone; read by the scheduler too.

use std::collections::BTreeMap;

use crate::record::DeviceAllocations;

/// The annotation: JSON of [`Exchanged`].
pub const EXCHANGED_RECORDS: &str = "gpushare/exchanged-records";

/// Longest annotation that is read or written, in bytes; the API server allows 256 KiB of annotations in all.
pub const MAX_BYTES: usize = 96 * 1024;

/// Most pods that are read: kubelet runs a few hundred.
const MAX_PODS: usize = 1024;

/// Longest UID of a pod that is read.
const MAX_UID_BYTES: usize = 128;

/// The effective record of each pod that has exchanged its own, by UID.
pub type Exchanged = BTreeMap<String, DeviceAllocations>;

/// The annotation cannot be read, or not be written. What it said before must then be kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {EXCHANGED_RECORDS} {0}")]
pub struct ExchangeError(String);

/// Reads the annotations of a Device object; nobody has exchanged anything if it is not there.
///
/// # Errors
/// It does not parse, is longer than anybody writes it, or names no devices for a pod.
pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Exchanged, ExchangeError> {
    let Some(text) = annotations.and_then(|annotations| annotations.get(EXCHANGED_RECORDS)) else {
        return Ok(Exchanged::new());
    };
    if text.len() > MAX_BYTES {
        return Err(ExchangeError(format!("is longer than {MAX_BYTES} bytes")));
    }
    let exchanged: Exchanged =
        serde_json::from_str(text).map_err(|cause| ExchangeError(format!("does not parse: {cause}")))?;
    check(&exchanged)?;
    Ok(exchanged)
}

/// The annotation's value.
///
/// # Errors
/// It would be longer than is read, or says what is not accepted.
pub fn write(exchanged: &Exchanged) -> Result<String, ExchangeError> {
    check(exchanged)?;
    let text = serde_json::to_string(exchanged)
        .map_err(|cause| ExchangeError(format!("cannot be written: {cause}")))?;
    if text.len() > MAX_BYTES {
        return Err(ExchangeError(format!("would be longer than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

fn check(exchanged: &Exchanged) -> Result<(), ExchangeError> {
    if exchanged.len() > MAX_PODS {
        return Err(ExchangeError(format!("names more than {MAX_PODS} pods")));
    }
    for (uid, record) in exchanged {
        if uid.is_empty() || uid.len() > MAX_UID_BYTES {
            return Err(ExchangeError(
                "has an entry whose name is not the UID of a pod".to_owned(),
            ));
        }
        if record.values().all(Vec::is_empty) {
            return Err(ExchangeError(format!(
                "names no device for the pod with UID {uid}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn annotations(text: &str) -> BTreeMap<String, String> {
        [(EXCHANGED_RECORDS.to_owned(), text.to_owned())].into()
    }

    #[test]
    fn nothing_is_exchanged_without_the_annotation() {
        assert_eq!(read(None), Ok(Exchanged::new()));
        assert_eq!(read(Some(&BTreeMap::new())), Ok(Exchanged::new()));
    }

    #[test]
    fn what_is_written_is_read() {
        let text = json!({
            "u1": {"gpu": [{"minor": 1, "id": "GPU-b", "resources": {"koordinator.sh/gpu-memory": "4Gi"}}]},
            "u2": {"gpu": [{"minor": 0}]},
        });
        let exchanged = read(Some(&annotations(&text.to_string()))).unwrap();
        assert_eq!(
            (
                exchanged["u1"]["gpu"][0].id.as_str(),
                exchanged["u2"]["gpu"][0].minor
            ),
            ("GPU-b", 0)
        );
        assert_eq!(
            read(Some(&annotations(&write(&exchanged).unwrap()))),
            Ok(exchanged)
        );
    }

    #[rstest]
    #[case::no_json("{", "does not parse")]
    #[case::another_form(r#"["u1"]"#, "does not parse")]
    #[case::no_devices(r#"{"u1": {"gpu": []}}"#, "names no device for the pod with UID u1")]
    #[case::no_record(r#"{"u1": {}}"#, "names no device for the pod with UID u1")]
    #[case::no_uid(r#"{"": {"gpu": [{"minor": 0}]}}"#, "whose name is not the UID")]
    #[case::too_long(&" ".repeat(MAX_BYTES + 1), "is longer than")]
    fn nonsense_is_refused(#[case] text: &str, #[case] problem: &str) {
        let error = read(Some(&annotations(text))).unwrap_err().to_string();
        assert!(
            error.starts_with("annotation gpushare/exchanged-records ") && error.contains(problem),
            "{error}"
        );
    }

    #[test]
    fn too_many_pods_are_not_written() {
        let record: DeviceAllocations = serde_json::from_value(json!({"gpu": [{"minor": 0}]})).unwrap();
        let many: Exchanged = (0..=MAX_PODS)
            .map(|n| (format!("u{n}"), record.clone()))
            .collect();
        assert!(write(&many).is_err());
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(text in ".{0,200}") {
            let _ = read(Some(&annotations(&text)));
        }
    }
}

//! Annotations of a plugin survive being written and read; any other text is read or refused.

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use super::*;

#[test]
fn the_selector_has_every_name_of_the_plugins_pods() {
    let names = PLUGIN_NAMES.join(",");
    assert_eq!(PLUGIN_SELECTOR, format!("app.kubernetes.io/name in ({names})"));
}

fn annotated(key: &str, text: &str) -> Annotations {
    [(key.to_owned(), text.to_owned())].into()
}

fn read_swapped(text: &str) -> Result<SwappedRecords, AnnotationError> {
    read_swapped_records(Some(&annotated(EXCHANGED_RECORDS, text)))
}

fn read_pods(text: &str) -> Result<Option<PodUids>, AnnotationError> {
    read_pods_without_devices(Some(&annotated(PODS_WITHOUT_DEVICES, text)))
}

fn read_state(text: &str) -> Result<Option<PluginState>, AnnotationError> {
    PluginState::read(Some(&annotated(PLUGIN_STATE, text)))
}

#[test]
fn no_record_is_swapped_without_the_annotation() {
    assert_eq!(read_swapped_records(None), Ok(SwappedRecords::new()));
    assert_eq!(
        read_swapped_records(Some(&BTreeMap::new())),
        Ok(SwappedRecords::new())
    );
}

#[test]
fn written_records_are_read() {
    let text = json!({
        "u1": {"gpu": [{"minor": 1, "id": "GPU-b", "resources": {"koordinator.sh/gpu-memory": "4Gi"}}]},
        "u2": {"gpu": [{"minor": 0}]},
    });
    let swapped = read_swapped(&text.to_string()).unwrap();
    assert_eq!(
        (swapped["u1"]["gpu"][0].id.as_str(), swapped["u2"]["gpu"][0].minor),
        ("GPU-b", 0)
    );
    assert_eq!(
        read_swapped(&write_swapped_records(&swapped).unwrap()),
        Ok(swapped)
    );
}

#[rstest]
#[case::no_json("{", "does not parse")]
#[case::another_form(r#"["u1"]"#, "does not parse")]
#[case::no_devices(r#"{"u1": {"gpu": []}}"#, "no device for the pod with UID u1")]
#[case::no_record(r#"{"u1": {}}"#, "no device for the pod with UID u1")]
#[case::no_uid(r#"{"": {"gpu": [{"minor": 0}]}}"#, "whose name is not the UID")]
#[case::too_long(&" ".repeat(MAX_SWAPPED_BYTES + 1), "longer than")]
fn bad_records_are_refused(#[case] text: &str, #[case] problem: &str) {
    let error = read_swapped(text).unwrap_err().to_string();
    assert!(
        error.starts_with("annotation gpushare/exchanged-records: ") && error.contains(problem),
        "{error}"
    );
}

#[test]
fn too_many_records_are_not_written() {
    let record: DeviceAllocations = serde_json::from_value(json!({"gpu": [{"minor": 0}]})).unwrap();
    let many: SwappedRecords = (0..=MAX_SWAPPED_PODS)
        .map(|n| (format!("u{n}"), record.clone()))
        .collect();
    assert!(write_swapped_records(&many).is_err());
}

#[test]
fn written_pods_are_read() {
    assert_eq!(
        read_pods_without_devices(None),
        Ok(None),
        "the plugin reports none"
    );
    assert_eq!(
        read_pods(&write_pods_without_devices([])),
        Ok(Some(PodUids::new())),
        "there are none"
    );
    let uids = read_pods(&write_pods_without_devices(["b", "a", "b"]))
        .unwrap()
        .unwrap();
    assert_eq!(uids.iter().map(|uid| &**uid).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn too_many_pods_are_left_out() {
    let many: Vec<String> = (0..1000).map(|n| format!("{n:036}")).collect();
    let text = write_pods_without_devices(many.iter().map(String::as_str));
    assert!(text.len() <= MAX_PODS_BYTES);
    assert!((400..1000).contains(&read_pods(&text).unwrap().unwrap().len()));
}

#[rstest]
#[case::no_list("{}")]
#[case::no_texts("[1]")]
#[case::cut_short("[\"a\"")]
fn bad_pods_are_refused(#[case] text: &str) {
    let error = read_pods(text).unwrap_err().to_string();
    assert!(error.contains("does not parse"), "{error}");
    let error = read_pods(&"[".repeat(MAX_PODS_BYTES + 1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("longer"), "{error}");
}

#[test]
fn a_written_state_is_read() {
    let since = "2026-11-23T05:44:19.123456Z".parse().unwrap();
    let state = PluginState {
        serving: true,
        since,
        pod: Some("u".to_owned()),
    };
    let text = r#"{"serving":true,"since":"2026-11-23T05:44:19.123456Z","pod":"u"}"#;
    assert_eq!(state.patch()["metadata"]["annotations"][PLUGIN_STATE], text);
    assert_eq!(read_state(text), Ok(Some(state)));
    assert_eq!(PluginState::read(None), Ok(None));
}

#[rstest]
#[case::no_object("[]")]
#[case::no_time(r#"{"serving":true,"since":"today"}"#)]
#[case::cut_short(r#"{"serving":true"#)]
fn bad_states_are_refused(#[case] text: &str) {
    let error = read_state(text).unwrap_err().to_string();
    assert!(error.contains("does not parse"), "{error}");
    let error = read_state(&text.repeat(MAX_STATE_BYTES)).unwrap_err().to_string();
    assert!(error.contains("longer"), "{error}");
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _ = (read_swapped(&text), read_pods(&text), read_state(&text));
    }
}

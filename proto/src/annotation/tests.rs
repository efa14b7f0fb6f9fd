//! Every annotation whose value is JSON, with its keys in any case; values in quotes.

use std::collections::BTreeMap;
use std::fmt::Debug;

use proptest::prelude::*;
use rstest::rstest;
use serde_json::json;

use crate::excerpt::quoted;
use crate::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use crate::plugin_reports::{EXCHANGED_RECORDS, PluginState, read_swapped_records};
use crate::pod::Pod;
use crate::record::{DEVICE_ALLOCATED, Record};
use crate::request::hints::{ALLOCATE_HINT, HINTS, Hints, JOINT_ALLOCATE, PARTITION_SPEC};
use crate::topology::{GPU_LINKS, GPU_PARTITIONS, read_links, read_partitions};

/// An annotation: its key, its reader, and a valid value with every key of its types behind a tilde.
type Annotation = (&'static str, fn(&str, &str) -> String, &'static str);

/// Every annotation whose value is JSON with keys.
const ALL: [Annotation; 9] = [
    (
        ALLOCATE_HINT,
        hints,
        r#"{"rdma": {"~selector": {"~matchLabels": {"type": "fakeW"}}, "~vfSelector": {"~matchExpressions": [
            {"~key": "type", "~operator": "In", "~values": ["general"]}]}, "~allocateStrategy": "RequestsAsCount",
            "~requiredTopologyScope": "PCIe", "~exclusivePolicy": "PCIeLevel"}}"#,
    ),
    (
        JOINT_ALLOCATE,
        hints,
        r#"{"~deviceTypes": ["gpu", "rdma"], "~requiredScope": "SamePCIe"}"#,
    ),
    (
        PARTITION_SPEC,
        hints,
        r#"{"~allocatePolicy": "Restricted", "~ringBusBandwidth": "200Gi"}"#,
    ),
    (
        DEVICE_ALLOCATED,
        |key, text| shown(&Record::read(&of(key, text)).map(|record| functions(record.unwrap_or_default()))),
        r#"{"rdma": [{"~minor": 1, "~resources": {"koordinator.sh/rdma": 1}, "~id": "0000:1a:00.0", "~extension": {
            "~vfs": [{"~minor": 2, "~busID": "0000:1a:00.2"}]}}]}"#,
    ),
    (
        EXCHANGED_RECORDS,
        |key, text| shown(&read_swapped_records(Some(&of(key, text)))),
        r#"{"a-uid": {"gpu": [{"~minor": 1, "~resources": {"koordinator.sh/gpu-core": 1}, "~id": "GPU-1"}]}}"#,
    ),
    (
        "gpushare/device-plugin",
        |key, text| shown(&PluginState::read(Some(&of(key, text)))),
        r#"{"~serving": true, "~since": "2026-11-27T10:00:00.5Z", "~pod": "a-uid"}"#,
    ),
    (
        DEVICES_CHECKPOINTS,
        |key, text| shown(&KubeletAllocations::read(&of(key, text))),
        r#"[{"~podUID": "a-uid", "~containerName": "c", "~resourceName": "nvidia.com/gpu", "~deviceIDs": ["GPU-1"],
            "~allocResp": "aGk="}]"#,
    ),
    (
        GPU_PARTITIONS,
        |_, text| shown(&read_partitions(text)),
        r#"{"2": [{"~minors": [0, 1], "~gpuLinkType": "NVLink", "~ringBusBandwidth": "1Gi", "~allocationScore": 3}]}"#,
    ),
    (
        GPU_LINKS,
        |_, text| shown(&read_links(text)),
        r#"[{"~minors": [0, 1], "~links": 18}]"#,
    ),
];

fn of(key: &str, text: &str) -> BTreeMap<String, String> {
    [(key.to_owned(), text.to_owned())].into()
}

fn hints(key: &str, text: &str) -> String {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"annotations": of(key, text)}})).unwrap();
    shown(&Hints::read(&pod))
}

/// A record and its virtual functions, of which the extension keeps the keys of its writer.
fn functions(mut record: Record) -> impl Debug {
    let mut functions = Vec::new();
    for allocation in record.allocations.values_mut().flatten() {
        functions.extend(allocation.functions());
        allocation.extension = None;
    }
    (record, functions)
}

fn shown<T: Debug, E: Debug>(read: &Result<T, E>) -> String {
    format!("{read:?}")
}

/// The text with the case of the letters of each key, which a tilde marks, as the bits say.
fn respelt(text: &str, bits: &[bool]) -> String {
    let (mut respelt, mut is_key) = (String::new(), false);
    for (at, letter) in text.chars().enumerate() {
        match letter {
            '~' => is_key = true,
            '"' => {
                is_key = false;
                respelt.push('"');
            }
            letter if is_key && bits[at % bits.len()] => {
                respelt.push(if letter.is_ascii_lowercase() {
                    letter.to_ascii_uppercase()
                } else {
                    letter.to_ascii_lowercase()
                });
            }
            letter => respelt.push(letter),
        }
    }
    respelt
}

proptest! {
    /// Go's `encoding/json` takes any spelling, so Koordinator does.
    #[test]
    fn keys_are_read_in_any_case(bits in prop::collection::vec(any::<bool>(), 64..400)) {
        for (key, read, text) in ALL {
            let expected = read(key, &respelt(text, &[false]));
            prop_assert_eq!(read(key, &respelt(text, &bits)), expected, "{}", key);
        }
    }
}

/// Each key of the table means something: without it the value reads otherwise, or not at all.
#[test]
fn every_key_is_read() {
    for (key, read, text) in ALL {
        let expected = read(key, &respelt(text, &[false]));
        assert!(expected.starts_with("Ok("), "{key}: {expected}");
        for (at, _) in text.match_indices('~') {
            let other = format!("{}x-{}", &text[..at], &text[at + 1..]);
            assert_ne!(read(key, &respelt(&other, &[false])), expected, "{key}: {other}");
        }
    }
}

#[test]
fn the_table_has_every_hint() {
    for hint in HINTS {
        assert!(ALL.iter().any(|(key, ..)| *key == hint), "{hint}");
    }
}

#[rstest]
#[case::word("one", r#""one""#)]
#[case::json(r#"{"gpu":{}}"#, r#"'{"gpu":{}}'"#)]
#[case::both_quotes(r#"{"it's":1}"#, r#""{\"it's\":1}""#)]
#[case::control_characters("{\"gpu\":\n{}}", r#""{\"gpu\":\n{}}""#)]
#[case::escape("{\"\u{1b}[31m\"}", r#""{\"\u{1b}[31m\"}""#)]
#[case::backslash(r#"{"a\"b"}"#, r#""{\"a\\\"b\"}""#)]
fn values(#[case] value: &str, #[case] expected: &str) {
    assert_eq!(quoted(value), expected);
}

#[test]
fn a_long_value_is_cut() {
    assert_eq!(quoted(&"1".repeat(65)), format!("\"{}…\"", "1".repeat(64)));
}

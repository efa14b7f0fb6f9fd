//! Annotations that are read, refused and written.

use proptest::prelude::*;
use rstest::rstest;

use super::*;

/// The proposal's example.
const EXAMPLE: &str = r#"[{"podUID": "fa8983dc-bb76-4eeb-8dcc-556fbd44d7ce", "containerName": "cuda-container",
    "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-36b27e44-b086-46f7-f2dc-73c36dc65991"]}]"#;

fn read(key: &str, text: &str) -> Result<Option<KubeletAllocations>, String> {
    KubeletAllocations::read(&[(key.to_owned(), text.to_owned())].into()).map_err(|error| error.to_string())
}

#[rstest]
#[case::annotation_of_the_definition(DEVICES_CHECKPOINTS)]
#[case::annotation_of_the_example(GPU_CHECKPOINTS)]
fn the_example_of_the_proposal_is_read(#[case] key: &str) {
    let entry = read(key, EXAMPLE).unwrap().unwrap().entries.remove(0);
    assert_eq!(
        (entry.pod_uid.as_str(), entry.container_name.as_str()),
        ("fa8983dc-bb76-4eeb-8dcc-556fbd44d7ce", "cuda-container")
    );
    assert_eq!(
        (entry.resource_name.as_str(), entry.alloc_resp),
        ("nvidia.com/gpu", None)
    );
    assert_eq!(entry.device_ids, ["GPU-36b27e44-b086-46f7-f2dc-73c36dc65991"]);
}

#[test]
fn the_annotation_of_all_devices_comes_before_the_one_of_gpus() {
    let both = [
        (DEVICES_CHECKPOINTS.to_owned(), "[]".to_owned()),
        (GPU_CHECKPOINTS.to_owned(), EXAMPLE.to_owned()),
    ];
    assert_eq!(
        KubeletAllocations::read(&both.into()),
        Ok(Some(KubeletAllocations::default()))
    );
    assert_eq!(KubeletAllocations::read(&BTreeMap::new()), Ok(None));
}

#[rstest]
#[case::null("null", 0)]
#[case::nothing_known("[{}]", 1)]
#[case::null_ids(r#"[{"podUID":"u","deviceIDs":null}]"#, 1)]
#[case::more_fields(r#"[{"podUID":"u","deviceIDs":["a"],"node":7}]"#, 1)]
fn json_of_go_is_read(#[case] text: &str, #[case] n_entries: usize) {
    assert_eq!(
        read(DEVICES_CHECKPOINTS, text).unwrap().unwrap().entries.len(),
        n_entries
    );
}

#[rstest]
#[case::empty("", "does not parse: EOF while parsing a value at line 1 column 0")]
#[case::object("{}", "does not parse: invalid type: map, expected a sequence")]
#[case::word(
    "[{}, 7]",
    "entry 1: invalid type: integer `7`, expected struct KubeletAllocation"
)]
#[case::one_id(
    r#"[{"deviceIDs":"GPU-a"}]"#,
    r#"entry 0: deviceIDs: invalid type: string "GPU-a", expected a sequence"#
)]
#[case::number(
    r#"[{"podUID":1}]"#,
    "entry 0: podUID: invalid type: integer `1`, expected a string"
)]
fn unreadable_annotations_are_refused_by_name(#[case] text: &str, #[case] rule: &str) {
    assert_eq!(
        read(GPU_CHECKPOINTS, text),
        Err(format!("annotation {GPU_CHECKPOINTS}: {rule}"))
    );
}

#[test]
fn a_list_beyond_the_length_limit_is_refused() {
    let long = format!("[{}]", " ".repeat(MAX_BYTES));
    assert_eq!(
        read(DEVICES_CHECKPOINTS, &long),
        Err(format!(
            "annotation {DEVICES_CHECKPOINTS}: longer than 131072 bytes"
        ))
    );
}

#[rstest]
#[case::uuid("GPU-a", "GPU-a")]
#[case::replica("GPU-a::3", "GPU-a")]
#[case::instance("MIG-5c9e", "MIG-5c9e")]
#[case::replica_of_an_instance("MIG-5c9e::0", "MIG-5c9e")]
#[case::old_instance("MIG-GPU-a/1/0", "GPU-a")]
#[case::replica_of_an_old_instance("MIG-GPU-a/1/0::2", "GPU-a")]
#[case::index("3", "3")]
#[case::index_replica("3::1", "3")]
#[case::instance_of_an_index("0:1", "0:1")]
#[case::empty("", "")]
fn the_physical_device_of_an_id(#[case] id: &str, #[case] expected: &str) {
    assert_eq!(physical_id(id), expected);
}

#[test]
fn no_allocations_are_written_as_no_annotation() {
    assert_eq!(KubeletAllocations::default().annotation(), None);
}

fn entry() -> impl Strategy<Value = KubeletAllocation> {
    let word = || "[a-z\"\\\\/é0-9:-]{0,12}";
    let ids = prop::collection::vec(word(), 0..4);
    (
        word(),
        word(),
        word(),
        ids,
        prop::option::of("[A-Za-z0-9+/]{0,8}"),
    )
        .prop_map(
            |(pod_uid, container_name, resource_name, ids, answer)| KubeletAllocation {
                pod_uid,
                container_name,
                resource_name,
                device_ids: ids,
                alloc_resp: answer,
            },
        )
}

proptest! {
    #[test]
    fn written_allocations_are_read_back(entries in prop::collection::vec(entry(), 1..6)) {
        let written = KubeletAllocations { entries };
        prop_assert_eq!(read(DEVICES_CHECKPOINTS, &written.annotation().unwrap()), Ok(Some(written)));
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _ = read(DEVICES_CHECKPOINTS, &text);
    }

    #[test]
    fn any_id_has_a_physical_device(id in "(MIG-|GPU-|/|::|[0-9a-f]){0,8}") {
        let physical = physical_id(&id);
        prop_assert!(id.contains(physical) && !physical.contains(REPLICA));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// An annotation of any number of entries can be read again and has every device.
    #[test]
    fn a_long_list_is_shortened_without_losing_a_device(n_entries in 1_usize..40, words in 1_usize..20_000) {
        let entry = |at: usize| KubeletAllocation {
            pod_uid: "u".repeat(words),
            resource_name: "nvidia.com/gpu".to_owned(),
            device_ids: vec![format!("GPU-{}", at % 16)],
            alloc_resp: Some("A".repeat(words)),
            ..KubeletAllocation::default()
        };
        let all = KubeletAllocations { entries: (0..n_entries).map(entry).collect() };
        let text = all.annotation().unwrap();
        prop_assert!(text.len() <= MAX_BYTES);
        let read = read(DEVICES_CHECKPOINTS, &text).unwrap().unwrap();
        let devices = |checkpoints: &KubeletAllocations| {
            checkpoints.entries.iter().flat_map(|entry| entry.device_ids.clone()).collect::<BTreeSet<_>>()
        };
        prop_assert_eq!(devices(&read), devices(&all));
    }
}

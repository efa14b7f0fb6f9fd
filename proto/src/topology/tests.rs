//! Annotations about topology that are read or refused.

use rstest::rstest;

use super::{
    GPU_LINKS, GPU_PARTITIONS, GpuLinks, GpuPartition, GpuPartitionPolicy, GpuPartitionTable, read_links,
    read_partitions,
};

#[test]
fn a_table_as_koordinator_writes_it_is_read_and_written_alike() {
    let text =
        r#"{"2":[{"minors":[0,1],"gpuLinkType":"NVLink","ringBusBandwidth":"200Gi","allocationScore":10}]}"#;
    let pair = GpuPartition {
        minors: vec![0, 1],
        gpu_link_type: "NVLink".to_owned(),
        ring_bus_bandwidth: Some("200Gi".parse().unwrap()),
        allocation_score: 10,
    };
    let table = GpuPartitionTable::from([(2, vec![pair])]);
    assert_eq!(read_partitions(text), Ok(table.clone()));
    assert_eq!(
        read_partitions(&serde_json::to_string(&table).unwrap()),
        Ok(table)
    );
}

/// The proposal's own spellings: a score as a string, and three names of the bandwidth.
#[rstest]
#[case::score_in_quotes(r#"{"1":[{"minors":[3],"allocationScore":"-7"}]}"#, None, -7)]
#[case::minors_in_quotes(r#"{"1":[{"minors":["3"],"allocationScore":5}]}"#, None, 5)]
#[case::bandwidth(r#"{"1":[{"minors":[3],"ringBusBandwidth":"4Gi"}]}"#, Some("4Gi"), 0)]
#[case::third_spelling(r#"{"1":[{"minors":[3],"ringAllReduceBandwidth":"4Gi"}]}"#, Some("4Gi"), 0)]
#[case::third_spelling_in_any_case(
    r#"{"1":[{"minors":[3],"RingAllReduceBandwidth":"4Gi"}]}"#,
    Some("4Gi"),
    0
)]
#[case::bandwidth_as_a_number(r#"{"1":[{"minors":[3],"ringAllReduceBandwidth":400}]}"#, Some("400"), 0)]
fn every_spelling_of_the_proposal_is_read(
    #[case] text: &str,
    #[case] bandwidth: Option<&str>,
    #[case] score: i64,
) {
    let expected = GpuPartition {
        minors: vec![3],
        ring_bus_bandwidth: bandwidth.map(|bandwidth| bandwidth.parse().unwrap()),
        allocation_score: score,
        ..GpuPartition::default()
    };
    assert_eq!(
        read_partitions(text),
        Ok(GpuPartitionTable::from([(1, vec![expected])]))
    );
}

#[rstest]
#[case::no_json("Invalid JSON format", "does not parse: expected value at line 1 column 1")]
#[case::score_in_words(
    r#"{"1":[{"minors":[0],"allocationScore":"best"}]}"#,
    r#"does not parse: 1[0].allocationScore: invalid value: string "best", expected a whole number"#
)]
#[case::minor_in_words(
    r#"{"1":[{"minors":["a"]}]}"#,
    r#"does not parse: 1[0].minors[0]: invalid value: string "a", expected a whole number"#
)]
#[case::negative_minor(
    r#"{"1":[{"minors":["-1"]}]}"#,
    r#"does not parse: 1[0].minors[0]: invalid value: string "-1", expected a whole number"#
)]
#[case::two_spellings(
    r#"{"1":[{"minors":[0],"ringBusBandwidth":"1Gi","ringAllReduceBandwidth":"1Gi"}]}"#,
    "does not parse: duplicate field `ringBusBandwidth`"
)]
#[case::no_number(
    r#"{"two":[{"minors":[0,1]}]}"#,
    r#"does not parse: "two" is no number of GPUs"#
)]
#[case::size(r#"{"2":[{"minors":[0]}]}"#, "the set [0] under 2 is of another size")]
#[case::twice(r#"{"2":[{"minors":[3,3]}]}"#, "the set [3, 3] under 2 names a GPU twice")]
#[case::bandwidth(
    r#"{"1":[{"minors":[0],"ringBusBandwidth":"-1"}]}"#,
    "the set [0] under 1 has a ringBusBandwidth that is not a whole number up to 2^50"
)]
fn a_table_that_makes_no_sense_is_refused(#[case] text: &str, #[case] rule: &str) {
    assert_eq!(
        read_partitions(text).unwrap_err().to_string(),
        format!("annotation {GPU_PARTITIONS}: {rule}")
    );
}

#[test]
fn links_between_gpus_are_read() {
    let groups = vec![GpuLinks {
        minors: vec![0, 1, 2],
        links: 18,
    }];
    assert_eq!(read_links(r#"[{"minors":[0,1,2],"links":18}]"#), Ok(groups));
    let error = read_links(r#"[{"minors":[1,1],"links":18}]"#).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("annotation {GPU_LINKS}: the group [1, 1] names a GPU twice")
    );
}

#[rstest]
#[case::honor(Some("Honor"), GpuPartitionPolicy::Honor)]
#[case::prefer(Some("Prefer"), GpuPartitionPolicy::Prefer)]
#[case::anything_else(Some("honor"), GpuPartitionPolicy::Prefer)]
#[case::none(None, GpuPartitionPolicy::Prefer)]
fn partition_policies_are_read(#[case] label: Option<&str>, #[case] expected: GpuPartitionPolicy) {
    assert_eq!(GpuPartitionPolicy::read(label), expected);
}

/// A filter compares every set with every other.
#[test]
fn tables_beyond_the_limits_are_refused() {
    let of = |entry: &str, n: usize| vec![entry; n].join(",");
    let table = |n| {
        read_partitions(&format!(r#"{{"1":[{}]}}"#, of(r#"{"minors":[0]}"#, n))).map(|table| table[&1].len())
    };
    assert_eq!(table(512), Ok(512));
    assert_eq!(
        table(513).unwrap_err().to_string(),
        format!("annotation {GPU_PARTITIONS}: more than 512 sets")
    );
    let links =
        |n| read_links(&format!("[{}]", of(r#"{"minors":[0,1],"links":1}"#, n))).map(|groups| groups.len());
    assert_eq!(links(512), Ok(512));
    assert_eq!(
        links(513).unwrap_err().to_string(),
        format!("annotation {GPU_LINKS}: more than 512 groups")
    );
}

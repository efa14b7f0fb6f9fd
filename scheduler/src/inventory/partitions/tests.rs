//! Partition tables of Device objects and of GPU models; places, labels and virtual functions of devices.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{DeviceAttributes, DeviceLocation, Inventory, LinkGroup, VirtualFunction};
use proto::node::Node;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::super::{DeviceReport, NodeReport, report, trim};

const TABLE: &str = r#"{"2": [{"minors": [4, 5], "gpuLinkType": "NVLink", "ringBusBandwidth": "200Gi", "allocationScore": 10}, {"minors": [0, 1]}], "1": [{"minors": [3]}]}"#;

fn eight() -> Value {
    (0..8)
        .map(|minor| json!({"type": "gpu", "id": format!("GPU-{minor}"), "minor": minor, "health": true, "resources": {"koordinator.sh/gpu-memory": "16Gi"}}))
        .collect()
}

fn read(node: &Value, metadata: &Value, devices: &Value) -> NodeReport {
    let names = ResourceNames::default();
    let node: Node = serde_json::from_value(json!({"metadata": node})).unwrap();
    let metadata: ObjectMeta = serde_json::from_value(metadata.clone()).unwrap();
    report(
        &trim(&node, &names),
        Some(&DeviceReport::of(&metadata, &json!({"devices": devices}))),
        &names,
    )
    .unwrap()
}

/// True if the table binds, and its sets.
fn shown(inventory: &Inventory) -> Option<(bool, Vec<&[u32]>)> {
    let table = inventory.partitions.as_ref()?;
    Some((
        table.is_binding,
        table
            .partitions
            .iter()
            .map(|partition| partition.minors.as_slice())
            .collect(),
    ))
}

#[rstest]
#[case::preferred(json!({}), false)]
#[case::honored(json!({"node.koordinator.sh/gpu-partition-policy": "Honor"}), true)]
#[case::any_other_word_prefers(json!({"node.koordinator.sh/gpu-partition-policy": "honor"}), false)]
fn the_partition_policy_of_a_node_decides_if_its_table_binds(
    #[case] labels: Value,
    #[case] is_binding: bool,
) {
    let metadata =
        json!({"labels": labels, "annotations": {"scheduling.koordinator.sh/gpu-partitions": TABLE}});
    let node = json!({"labels": {"node.koordinator.sh/gpu-partition-policy": "Honor", "node.koordinator.sh/gpu-model": "H800"}});
    let report = read(&node, &metadata, &eight());
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!(
        shown(&report.inventory),
        Some((is_binding, vec![&[3][..], &[4, 5], &[0, 1]]))
    );
    let partition = &report.inventory.partitions.unwrap().partitions[1];
    assert_eq!((partition.bandwidth, partition.score), (Some(200 << 30), 10));
}

/// A node with a table of its own does not get the table of its model.
#[rstest]
#[case::no_json("{", "EOF")]
#[case::score_is_text(
    r#"{"1": [{"minors": [0], "allocationScore": "best"}]}"#,
    "invalid value: string"
)]
#[case::another_size(r#"{"2": [{"minors": [0]}]}"#, "is of another size")]
fn a_malformed_table_is_dropped_and_reported(#[case] table: &str, #[case] expected: &str) {
    let metadata = json!({"labels": {"node.koordinator.sh/gpu-model": "H800"}, "annotations": {"scheduling.koordinator.sh/gpu-partitions": table}});
    let report = read(&json!({}), &metadata, &eight());
    assert_eq!(report.inventory.partitions, None);
    assert_eq!(report.inventory.gpus.len(), 8, "the rest is used");
    let [problem] = report.problems.as_slice() else {
        panic!("{:?}", report.problems)
    };
    assert!(
        problem.starts_with("Device object: annotation scheduling.koordinator.sh/gpu-partitions: "),
        "{problem}"
    );
    assert!(
        expected.split('|').any(|expected| problem.contains(expected)),
        "{problem}"
    );
}

/// A set with a GPU that is not there is left out of the table, and the table counts without it.
#[rstest]
#[case::one_set(
    r#"{"2": [{"minors": [6, 8], "allocationScore": 10}, {"minors": [0, 1]}], "1": [{"minors": [3]}]}"#,
    &[&[3][..], &[0, 1]],
    "the set [6, 8] names minor 8, which no GPU of the object has; the set does not count"
)]
#[case::several_sets(
    r#"{"2": [{"minors": [6, 8]}, {"minors": [9, 1]}], "1": [{"minors": [3]}]}"#,
    &[&[3][..]],
    "the set [6, 8] names minor 8, which no GPU of the object has; 2 such sets do not count"
)]
#[case::all_sets(
    r#"{"1": [{"minors": [8]}]}"#,
    &[],
    "the set [8] names minor 8, which no GPU of the object has; the set does not count"
)]
fn a_missing_gpu_makes_its_sets_invalid(#[case] table: &str, #[case] sets: &[&[u32]], #[case] problem: &str) {
    let labels = json!({"node.koordinator.sh/gpu-partition-policy": "Honor"});
    let metadata =
        json!({"labels": labels, "annotations": {"scheduling.koordinator.sh/gpu-partitions": table}});
    let report = read(&json!({}), &metadata, &eight());
    assert_eq!(shown(&report.inventory), Some((true, sets.to_vec())));
    let problem = format!("annotation scheduling.koordinator.sh/gpu-partitions: {problem}");
    assert_eq!(report.problems, [format!("Device object: {problem}")]);
    assert_eq!(report.table_problem, Some(problem));
}

/// A node whose policy allows only partitions must not allocate anything else because its table has a mistake.
#[rstest]
#[case::no_json("{")]
#[case::empty("{}")]
#[case::another_size(r#"{"2": [{"minors": [0]}]}"#)]
fn a_malformed_table_that_binds_leaves_no_partition(#[case] table: &str) {
    let labels =
        json!({"node.koordinator.sh/gpu-model": "H800", "node.koordinator.sh/gpu-partition-policy": "Honor"});
    let metadata =
        json!({"labels": labels, "annotations": {"scheduling.koordinator.sh/gpu-partitions": table}});
    assert_eq!(
        shown(&read(&json!({}), &metadata, &eight()).inventory),
        Some((true, vec![]))
    );
}

#[rstest]
#[case::labels_of_the_node(json!({"node.koordinator.sh/gpu-model": "H100"}), json!({}), Some(false))]
#[case::labels_of_the_object(json!({}), json!({"node.koordinator.sh/gpu-model": "H20", "node.koordinator.sh/gpu-vendor": "nvidia"}), Some(false))]
#[case::as_the_driver_calls_it(json!({"node.koordinator.sh/gpu-model": "H100-80GB-HBM3"}), json!({}), Some(false))]
#[case::the_node_may_honor_it(json!({"node.koordinator.sh/gpu-model": "H800", "node.koordinator.sh/gpu-partition-policy": "Honor"}), json!({}), Some(true))]
#[case::no_switches(json!({"node.koordinator.sh/gpu-model": "H100-PCIe"}), json!({}), None)]
#[case::another_vendor(json!({"node.koordinator.sh/gpu-model": "H100", "node.koordinator.sh/gpu-vendor": "other"}), json!({}), None)]
#[case::no_model(json!({"node.koordinator.sh/gpu-partition-policy": "Honor"}), json!({}), None)]
fn a_known_gpu_model_has_its_table(
    #[case] node: Value,
    #[case] object: Value,
    #[case] is_binding: Option<bool>,
) {
    let report = read(&json!({"labels": node}), &json!({"labels": object}), &eight());
    let sets: Vec<&[u32]> = vec![
        &[0],
        &[1],
        &[2],
        &[3],
        &[4],
        &[5],
        &[6],
        &[7],
        &[0, 1],
        &[2, 3],
        &[4, 5],
        &[6, 7],
        &[0, 1, 2, 3],
        &[4, 5, 6, 7],
        &[0, 1, 2, 3, 4, 5, 6, 7],
    ];
    assert_eq!(
        shown(&report.inventory),
        is_binding.map(|is_binding| (is_binding, sets))
    );
}

/// If a GPU is missing, the minor numbers do not show the places of the others on the board.
#[test]
fn the_table_of_a_model_is_for_whole_boards() {
    let mut seven = eight();
    seven.as_array_mut().unwrap().remove(3);
    let report = read(
        &json!({"labels": {"node.koordinator.sh/gpu-model": "H100"}}),
        &json!({}),
        &seven,
    );
    assert_eq!(report.inventory.partitions, None);
}

#[test]
fn links_are_read_and_malformed_ones_are_reported() {
    let links = |text: &str| {
        read(
            &json!({}),
            &json!({"annotations": {"gpushare/gpu-links": text}}),
            &eight(),
        )
    };
    let good = links(r#"[{"minors": [0, 1], "links": 12}]"#);
    assert_eq!(
        good.inventory.links,
        [LinkGroup {
            minors: vec![0, 1],
            n_links: 12
        }]
    );
    let bad = links(r#"[{"minors": [0, 0], "links": 12}]"#);
    assert_eq!(bad.inventory.links, []);
    assert_eq!(
        bad.problems,
        ["Device object: annotation gpushare/gpu-links: the group [0, 0] names a GPU twice"]
    );
}

#[rstest]
#[case::known(json!({"socketID": -1, "nodeID": 1, "pcieID": "0000:3a:00.0", "busID": "0000:3b:00.0"}), Some((Some(1), Some("0000:3a:00.0"))))]
#[case::no_numa_node(json!({"socketID": -1, "nodeID": -1, "pcieID": "pci0000:3a"}), Some((None, Some("pci0000:3a"))))]
#[case::no_switch(json!({"socketID": 0, "nodeID": 0, "pcieID": ""}), Some((Some(0), None)))]
#[case::nothing(json!({"socketID": -1, "nodeID": -1, "pcieID": "-1"}), None)]
#[case::silent(Value::Null, None)]
fn topology_of_devices_is_read(
    #[case] topology: Value,
    #[case] expected: Option<(Option<u32>, Option<&str>)>,
) {
    let mut devices = json!([eight()[0], {"type": "rdma", "id": "0000:3c:00.0", "minor": 0, "health": true}]);
    for at in 0..2 {
        devices[at]["topology"] = topology.clone();
    }
    let inventory = read(&json!({}), &json!({}), &devices).inventory;
    let expected = expected.map(|(numa, switch)| DeviceLocation {
        numa,
        switch: switch.map(Into::into),
    });
    assert_eq!(inventory.gpus[0].attributes.location, expected);
    assert_eq!(
        inventory.other_devices.unwrap()[0].devices[0].attributes.location,
        expected
    );
}

#[test]
fn an_assumed_numa_node_is_none() {
    let mut devices = json!([eight()[0]]);
    devices[0]["topology"] = json!({"socketID": -1, "nodeID": 0, "pcieID": "0000:3a:00.0"});
    devices[0]["labels"] = json!({"gpushare/numa-node": "unknown"});
    let inventory = read(&json!({}), &json!({}), &devices).inventory;
    assert_eq!(
        inventory.gpus[0].attributes.location,
        Some(DeviceLocation {
            numa: None,
            switch: Some("0000:3a:00.0".into())
        })
    );
}

#[test]
fn labels_and_virtual_functions_are_read() {
    let groups = json!([
        {"labels": {"type": "general"}, "vfs": [{"minor": -1, "busID": "0000:1f:00.3"}, {"minor": 4, "busID": "0000:1f:00.2"}, {"minor": 5}]},
        {"labels": null, "vfs": null},
    ]);
    let nic = json!({"type": "rdma", "id": "0000:1f:00.0", "minor": 0, "health": true, "labels": {"type": "fakeW"}, "vfGroups": groups});
    let inventory = read(&json!({}), &json!({}), &json!([nic])).inventory;
    let DeviceAttributes {
        labels,
        location: place,
        function_groups,
        ..
    } = &inventory.other_devices.as_ref().unwrap()[0].devices[0].attributes;
    assert_eq!(
        (labels.get("type").map(|label| &**label), place),
        (Some("fakeW"), &None)
    );
    let function = |id: &str, minor| VirtualFunction { id: id.into(), minor };
    assert_eq!(function_groups.len(), 1);
    assert_eq!(
        function_groups[0].functions,
        [function("0000:1f:00.3", -1), function("0000:1f:00.2", 4)]
    );
    assert_eq!(
        function_groups[0].labels.get("type").map(|label| &**label),
        Some("general")
    );
}

//! Documents of every contract with random edits: none makes a reader panic, and an accepted document survives being written
//! and read again.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::collections::BTreeMap;
use std::fmt::Debug;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proto::admission::AdmissionReview;
use proto::device::RawDevice;
use proto::extender::{ExtenderArgs, ExtenderBindingArgs};
use proto::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::plugin_reports::{EXCHANGED_RECORDS, read_swapped_records, write_swapped_records};
use proto::pod::Pod;
use proto::pod_group::{GROUP_DOMAIN, GROUP_DOMAIN_POLICY, GroupWish, PodGroup};
use proto::record::{DEVICE_ALLOCATED, Record};
use proto::request::PodRequest;
use proto::resource::ResourceNames;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// One change of a document.
#[derive(Clone, Debug)]
enum Edit {
    Replace(Value),
    Remove,
    /// Adds a list's first element to it again; turns any other value into a list of two.
    Double,
}

fn edits() -> impl Strategy<Value = Vec<(Index, Edit)>> {
    let value = prop_oneof![
        4 => select(vec![
            Value::Null, json!(true), json!(-1), json!(0), json!(i64::MIN), json!(u64::MAX), json!(1e300), json!(0.1), json!(""),
            json!("-16Gi"), json!("1e30"), json!("9".repeat(40)), json!("GPU-a"), json!("\u{0}\u{fffd}"), json!([]), json!({}), json!([[]]),
        ]),
        1 => "\\PC{0,12}".prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
    ];
    let edit =
        prop_oneof![4 => value.prop_map(Edit::Replace), 1 => Just(Edit::Remove), 1 => Just(Edit::Double)];
    prop::collection::vec((any::<Index>(), edit), 0..4)
}

/// Pointers to every value in a document.
fn places(value: &Value, here: &str, found: &mut Vec<String>) {
    found.push(here.to_owned());
    match value {
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(at, item)| places(item, &format!("{here}/{at}"), found)),
        Value::Object(fields) => {
            let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
            fields
                .iter()
                .for_each(|(name, field)| places(field, &format!("{here}/{}", escaped(name)), found));
        }
        _ => {}
    }
}

fn edited(mut document: Value, edits: &[(Index, Edit)]) -> Value {
    for (at, edit) in edits {
        let mut found = Vec::new();
        places(&document, "", &mut found);
        let place = at.get(&found);
        match edit {
            Edit::Replace(value) => *document.pointer_mut(place).unwrap() = value.clone(),
            Edit::Remove => remove(&mut document, place),
            Edit::Double => match document.pointer_mut(place).unwrap() {
                Value::Array(items) => items.extend(items.first().cloned()),
                other => *other = json!([other, other]),
            },
        }
    }
    document
}

fn remove(document: &mut Value, place: &str) {
    let Some((parent, name)) = place.rsplit_once('/') else {
        return;
    };
    match document.pointer_mut(parent) {
        Some(Value::Object(fields)) => drop(fields.remove(&name.replace("~1", "/").replace("~0", "~"))),
        Some(Value::Array(items)) => drop(items.remove(name.parse().unwrap())),
        _ => {}
    }
}

/// Reads a document, if it is valid; it must survive being written and read again.
fn reads_what_it_prints<T: DeserializeOwned + Serialize + PartialEq + Debug>(document: &Value) -> Option<T> {
    let read: T = serde_json::from_str(&document.to_string()).ok()?;
    let printed = serde_json::to_string(&read).unwrap();
    assert_eq!(
        serde_json::from_str::<T>(&printed).unwrap(),
        read,
        "printed as {printed}"
    );
    Some(read)
}

fn metadata() -> Value {
    json!({"name": "p", "namespace": "ns", "uid": "u", "labels": {"a": "b"}, "annotations": {"gpushare/all-devices": "true"}})
}

fn device() -> Value {
    json!({
        "apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device", "metadata": metadata(),
        "spec": {"devices": [{
            "type": "gpu", "id": "GPU-a", "minor": 0, "moduleID": 1, "health": true, "labels": {"gpushare/sharing": "disabled"},
            "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "16Gi", "kubernetes.io/gpu-memory-ratio": 100},
            "topology": {"socketID": 0, "nodeID": 1, "pcieID": "2", "busID": "0000:3b:00.0"},
            "vfGroups": [{"labels": {"a": "b"}, "vfs": [{"minor": 1, "busID": "0000:3b:00.1"}]}],
            "conditions": [{"type": "Healthy", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z", "reason": "Ok", "message": ""}],
        }]},
    })
}

fn pod() -> Value {
    let resources = json!({"limits": {"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory": "2Gi", "example.com/npu": 1}});
    json!({
        "metadata": metadata(),
        "spec": {
            "nodeName": "n1", "initContainers": [{"name": "i", "restartPolicy": "Always", "resources": resources}],
            "containers": [{"name": "c", "resources": resources}, {"name": "d", "resources": {"requests": {"koordinator.sh/gpu-core": "10"}}}],
        },
        "status": {"phase": "Running", "startTime": "2026-01-02T03:04:05Z"},
    })
}

fn node() -> Value {
    let amounts = json!({"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": 2, "cpu": "500m"});
    let status = json!({"capacity": amounts, "allocatable": amounts, "nodeInfo": {"containerRuntimeVersion": "containerd://2.1.9"}});
    json!({"metadata": metadata(), "spec": {"podCIDR": "10.0.0.0/24"}, "status": status})
}

fn record() -> Value {
    json!({"gpu": [{"minor": 1, "id": "GPU-b", "resources": {"koordinator.sh/gpu-memory": "4Gi", "kubernetes.io/gpu-core": 50}}], "npu": [{"minor": 0}]})
}

/// With the fields of all APIs.
fn pod_group() -> Value {
    let annotations = json!({GROUP_DOMAIN: "link", GROUP_DOMAIN_POLICY: "required"});
    json!({
        "metadata": {"name": "g", "namespace": "ns", "annotations": annotations},
        "spec": {"schedulingPolicy": {"gang": {"minCount": 4}}, "minMember": 4},
    })
}

fn annotation(key: &str, value: &Value) -> BTreeMap<String, String> {
    [(key.to_owned(), value.to_string())].into()
}

proptest! {
    #[test]
    fn edited_device_objects_are_read_or_refused(edits in edits()) {
        if let Some(device) = reads_what_it_prints::<RawDevice>(&edited(device(), &edits))
            && let Ok(spec) = device.read()
        {
            let again = RawDevice { spec: serde_json::to_value(&spec).unwrap(), ..RawDevice::default() };
            prop_assert_eq!(again.read().unwrap(), spec);
        }
    }

    #[test]
    fn edited_nodes_are_read_or_refused(edits in edits()) {
        if let Some(node) = reads_what_it_prints::<Node>(&edited(node(), &edits)) {
            let _ = (node.capacity("aliyun.com/gpu-mem"), node.capacity("aliyun.com/gpu-count"));
        }
    }

    #[test]
    fn edited_pods_are_read_or_refused(edits in edits()) {
        if let Some(pod) = reads_what_it_prints::<Pod>(&edited(pod(), &edits)) {
            let names = ResourceNames::default();
            let _ = (PodRequest::read(&pod, &names), PodRequest::read_new(&pod, &names));
            let _ = (pod.is_terminal(), pod.display_name());
        }
    }

    #[test]
    fn edited_pod_groups_are_read_or_refused(edits in edits()) {
        if let Ok(group) = serde_json::from_value::<PodGroup>(edited(pod_group(), &edits)) {
            let _ = (group.key(), group.min_count());
            if let Ok(Some(wish)) = GroupWish::read(group.metadata.annotations.as_ref()) {
                let names = [(GROUP_DOMAIN, wish.domain.as_str()), (GROUP_DOMAIN_POLICY, wish.policy.as_str())];
                let written = names.map(|(key, name)| (key.to_owned(), name.to_owned())).into();
                prop_assert_eq!(GroupWish::read(Some(&written)), Ok(Some(wish)));
            }
        }
    }

    #[test]
    fn edited_requests_of_the_extender_are_read_or_refused(edits in edits(), whole in any::<bool>()) {
        let document = if whole {
            json!({"Pod": pod(), "Nodes": {"metadata": {}, "items": [node(), node()]}, "NodeNames": null})
        } else {
            json!({"Pod": pod(), "Nodes": null, "NodeNames": ["n1", "n\u{e9}\"2"]})
        };
        let document = edited(document, &edits);
        let text = document.to_string();
        if let Ok(args) = serde_json::from_str::<ExtenderArgs<'_>>(&text) {
            let sent = document["Nodes"]["items"].as_array().cloned().unwrap_or_default();
            let kept = args.nodes.map(|nodes| nodes.items.into_iter().map(|node| node.raw).collect::<Vec<_>>()).unwrap_or_default();
            prop_assert_eq!(kept, sent);
        }
    }

    #[test]
    fn edited_bindings_of_the_extender_are_read_or_refused(edits in edits()) {
        let document = json!({"PodName": "p", "PodNamespace": "ns", "PodUID": "u", "Node": "n1"});
        let _ = reads_what_it_prints::<ExtenderBindingArgs>(&edited(document, &edits));
    }

    #[test]
    fn edited_admission_reviews_are_read_or_refused(edits in edits()) {
        let request = json!({
            "uid": "u", "resource": {"group": "", "version": "v1", "resource": "pods"}, "subResource": null, "name": "p", "namespace": "ns",
            "operation": "UPDATE", "userInfo": {"username": "a-user"}, "object": pod(), "oldObject": pod(),
        });
        let document = edited(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}), &edits);
        if let Ok(review) = serde_json::from_value::<AdmissionReview>(document.clone()) {
            prop_assert_eq!(Some(review.request.uid.as_str()), document["request"]["uid"].as_str());
        }
    }

    #[test]
    fn edited_records_are_read_or_refused(edits in edits()) {
        if let Ok(Some(record)) = Record::read(&annotation(DEVICE_ALLOCATED, &edited(record(), &edits)))
            && !record.allocations.is_empty()
        {
            prop_assert_eq!(Record::read(&record.annotations()).unwrap(), Some(record));
        }
    }

    #[test]
    fn edited_swapped_records_are_read_or_refused(edits in edits()) {
        let document = edited(json!({"u1": record(), "u2": record()}), &edits);
        if let Ok(exchanged) = read_swapped_records(Some(&annotation(EXCHANGED_RECORDS, &document))) {
            let text = write_swapped_records(&exchanged).unwrap();
            prop_assert_eq!(read_swapped_records(Some(&[(EXCHANGED_RECORDS.to_owned(), text)].into())).unwrap(), exchanged);
        }
    }

    #[test]
    fn edited_checkpoints_are_read_or_refused(edits in edits()) {
        let entry = json!({"podUID": "u", "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ["GPU-a"], "allocResp": "AA=="});
        let document = edited(json!([entry, entry]), &edits);
        if let Ok(Some(checkpoints)) = KubeletAllocations::read(&annotation(DEVICES_CHECKPOINTS, &document))
            && let Some(text) = checkpoints.annotation()
        {
            prop_assert_eq!(KubeletAllocations::read(&[(DEVICES_CHECKPOINTS.to_owned(), text)].into()).unwrap(), Some(checkpoints));
        }
    }

    #[test]
    fn edited_memory_units_are_read_or_refused(text in "([0-9]{1,7}[KMGTP]?i?|[MG]iB|\\PC{0,8})") {
        if let Ok(unit) = text.parse::<MemoryUnit>() {
            prop_assert_eq!(unit.to_string().parse::<MemoryUnit>().unwrap(), unit);
            prop_assert_eq!(MemoryUnit::from_bytes(unit.bytes()), Some(unit));
        }
    }
}

/// The unedited documents are valid, so that edits start from accepted ones.
#[test]
fn unedited_documents_are_accepted() {
    assert_eq!(
        reads_what_it_prints::<RawDevice>(&device())
            .unwrap()
            .read()
            .unwrap()
            .devices
            .len(),
        1
    );
    assert!(
        reads_what_it_prints::<Node>(&node())
            .unwrap()
            .capacity("aliyun.com/gpu-mem")
            == Some(30)
    );
    assert!(reads_what_it_prints::<Pod>(&pod()).is_some());
    let group: PodGroup = serde_json::from_value(pod_group()).unwrap();
    assert_eq!(group.min_count(), Some(4));
    assert!(
        Record::read(&annotation(DEVICE_ALLOCATED, &record()))
            .unwrap()
            .is_some()
    );
}

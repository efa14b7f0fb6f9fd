//! The schema equals Koordinator's, and objects that it does not allow are read too.

use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::*;

/// The schema without descriptions.
fn without_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            if fields.get("description").is_some_and(Value::is_string) {
                fields.remove("description");
            }
            fields.values_mut().for_each(without_descriptions);
        }
        Value::Array(all) => all.iter_mut().for_each(without_descriptions),
        _ => {}
    }
}

fn list(items: &Value) -> Value {
    json!({"type": "array", "items": items})
}

fn labels() -> Value {
    json!({"type": "object", "additionalProperties": {"type": "string"}})
}

/// Koordinator's definition at commit a7a1b76b, field by field.
fn shipped() -> Value {
    let (text, number) = (
        json!({"type": "string"}),
        json!({"type": "integer", "format": "int32"}),
    );
    let quantity = json!({
        "x-kubernetes-int-or-string": true,
        "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
    });
    let condition = json!({
        "type": "object",
        "required": ["lastTransitionTime", "message", "reason", "status", "type"],
        "properties": {
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "message": {"type": "string", "maxLength": 32768},
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0.0},
            "reason": {"type": "string", "minLength": 1, "maxLength": 1024, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "type": {
                "type": "string", "maxLength": 316,
                "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
            },
        },
    });
    let topology = json!({
        "type": "object",
        "required": ["nodeID", "pcieID", "socketID"],
        "properties": {"busID": text, "nodeID": number, "pcieID": text, "socketID": number},
    });
    let function =
        json!({"type": "object", "required": ["minor"], "properties": {"busID": text, "minor": number}});
    let group = json!({"type": "object", "properties": {"labels": labels(), "vfs": list(&function)}});
    let device = json!({
        "type": "object",
        "required": ["health"],
        "properties": {
            "conditions": list(&condition), "health": {"type": "boolean", "default": false}, "id": text, "labels": labels(),
            "minor": number, "moduleID": number, "resources": {"type": "object", "additionalProperties": quantity},
            "topology": topology, "type": text, "vfGroups": list(&group),
        },
    });
    let entry = json!({"type": "object", "properties": {"minors": list(&number), "name": text, "namespace": text, "uuid": text}});
    let allocation = json!({"type": "object", "properties": {"entries": list(&entry), "type": text}});
    json!({
        "spec": {"type": "object", "properties": {"devices": list(&device)}},
        "status": {"type": "object", "properties": {"allocations": list(&allocation)}, "nullable": true},
    })
}

#[test]
fn the_schema_is_the_one_that_koordinator_ships() {
    let crd = serde_json::to_value(Device::crd()).unwrap();
    let mut schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"].clone();
    without_descriptions(&mut schema);
    assert_eq!(
        serde_json::to_string_pretty(&schema).unwrap(),
        serde_json::to_string_pretty(&shipped()).unwrap()
    );
}

#[test]
fn the_definition_has_descriptions_and_printer_columns() {
    let crd = serde_json::to_value(Device::crd()).unwrap();
    let version = &crd["spec"]["versions"][0];
    let description = version["schema"]["openAPIV3Schema"]["description"]
        .as_str()
        .unwrap();
    assert!(
        description.starts_with("The devices of the node of the same name"),
        "{description}"
    );
    let columns: Vec<&str> = version["additionalPrinterColumns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["jsonPath"].as_str().unwrap())
        .collect();
    let path = |label: &str| format!(".metadata.labels.{}", label.replace('.', r"\."));
    assert_eq!(
        columns,
        [
            path(GPU_VENDOR_LABEL),
            path(GPU_MODEL_LABEL),
            path(GPU_DRIVER_LABEL),
            ".metadata.creationTimestamp".to_owned()
        ]
    );
}

/// An object of Koordinator's tools with every field survives being read and written.
#[test]
fn every_field_is_kept() {
    let spec = json!({"devices": [
        {
            "type": "gpu", "id": "GPU-6b1ff724", "minor": 0, "moduleID": 6, "health": true, "labels": {"a": "b"},
            "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "83201216Ki"},
            "topology": {"socketID": 0, "nodeID": 0, "pcieID": "0", "busID": "0000:08:00.0"},
            "conditions": [{
                "type": "Healthy", "status": "False", "reason": "Xid79", "message": "", "observedGeneration": 3,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
        {
            "type": "rdma", "id": "0000:09:00.0", "minor": 1, "health": false,
            "vfGroups": [{"labels": {"type": "fakeG"}, "vfs": [{"minor": -1, "busID": "0000:09:00.3"}]}],
        },
    ]});
    let read: DeviceSpec = serde_json::from_value(spec.clone()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), spec);
}

#[test]
fn missing_and_null_fields_are_read() {
    let spec = json!({"devices": [{"health": true, "labels": null, "resources": null, "conditions": null, "vfGroups": [{"vfs": null}]}]});
    let read: DeviceSpec = serde_json::from_value(spec).unwrap();
    let expected = DeviceInfo {
        health: true,
        vf_groups: vec![VirtualFunctionGroup::default()],
        ..DeviceInfo::default()
    };
    assert_eq!(read.devices, [expected]);
    assert_eq!(
        serde_json::from_value::<DeviceSpec>(json!({"devices": null})).unwrap(),
        DeviceSpec::default()
    );
}

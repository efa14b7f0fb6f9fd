//! A node with devices, pods that hold some of them, and the scheduler's own state that has seen both.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use placement::{Policies, ResourceWeights};
use proto::device::SERVES_VENDOR_LABEL;
use proto::node::Node;
use proto::pod::Pod;
use proto::record::{DEVICE_ALLOCATED, Record};
use proto::resource::ResourceNames;
use scheduler::accounting::PodFacts;
use scheduler::bind::PodId;
use scheduler::index::{AssumeError, Assumed, Index, RawDevice};
use scheduler::watch::ObjectStore;
use serde_json::{Map, Value, json};

use super::requests::Amounts;
use super::webhooks::mutated;

/// The node's name.
pub(crate) const NODE: &str = "test-node";

/// Amounts by type of device and minor.
pub(crate) type Allocations = BTreeMap<String, BTreeMap<i64, Amounts>>;

/// Addresses and numbers of virtual functions, by type of device and minor.
pub(crate) type Functions = BTreeMap<(String, i64), Vec<(String, i64)>>;

/// The scheduler's state.
pub(crate) struct World {
    pub(crate) index: Index,
}

/// The annotations that a bind writes.
pub(crate) struct Placed {
    /// The pod's new annotations.
    pub(crate) annotations: BTreeMap<String, String>,
    /// The pod's new labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// The devices that they name.
    pub(crate) allocations: Allocations,
    /// The virtual functions of those.
    pub(crate) functions: Functions,
}

/// Why a pod is not placed.
pub(crate) enum Refused {
    /// It has no business here; why.
    Request(String),
    /// There is no room.
    NoRoom(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(why) => write!(f, "refused for its request: {why}"),
            Self::NoRoom(why) => write!(f, "no room: {why}"),
        }
    }
}

impl World {
    /// A state that has seen a node with these labels and no devices.
    pub(crate) fn new(labels: &Value, policies: Policies, weights: ResourceWeights) -> Self {
        let mut index =
            Index::new(ResourceNames::default(), policies, Duration::from_secs(30)).with_weights(weights);
        let node = json!({"metadata": {"name": NODE, "labels": labels}, "status": {}});
        list::<Node>(&mut index, node);
        list::<RawDevice>(&mut index, Value::Null);
        list::<Pod>(&mut index, Value::Null);
        Self { index }
    }

    /// A state for cases that are not about the order of devices.
    pub(crate) fn plain() -> Self {
        Self::new(&Value::Null, Policies::default(), ResourceWeights::default())
    }

    /// The node's devices, in place of any that it had.
    ///
    /// Whole GPUs in a vendor's name are handed out by this project's own plugin here, as Koordinator knows no other way.
    pub(crate) fn set_device(&mut self, device: &Value) {
        let mut labels = strings(&device["labels"]);
        labels.insert(SERVES_VENDOR_LABEL.to_owned(), json!("true"));
        let metadata =
            json!({"name": NODE, "labels": labels, "annotations": strings(&device["annotations"])});
        self.index.apply(read::<RawDevice>(
            json!({"metadata": metadata, "spec": {"devices": device["devices"]}}),
        ));
    }

    /// The node's Device object is gone.
    pub(crate) fn delete_device(&mut self) {
        ObjectStore::<RawDevice>::delete(
            &mut self.index,
            &read(json!({"metadata": {"name": NODE}, "spec": {}})),
        );
    }

    /// A pod of this name holds a part of one device, by its record.
    pub(crate) fn hold(&mut self, name: &str, kind: &str, minor: i64, resources: &Value) -> Pod {
        self.hold_functions(name, kind, minor, resources, &Value::Null)
    }

    /// The same by virtual functions, if there are any.
    pub(crate) fn hold_functions(
        &mut self,
        name: &str,
        kind: &str,
        minor: i64,
        resources: &Value,
        functions: &Value,
    ) -> Pod {
        let mut entry = json!({"minor": minor, "resources": resources});
        if !functions.is_null() {
            entry["extension"] = json!({"vfs": functions});
        }
        let record = json!({kind: [entry]}).to_string();
        let pod: Pod = read(json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "annotations": {DEVICE_ALLOCATED: record}},
            "spec": {"nodeName": NODE}, "status": {"phase": "Running"}}));
        self.index.apply(pod.clone());
        pod
    }

    /// Places a pod on the node, after the mutating webhook has seen it, and says what the bind writes.
    pub(crate) fn place(&mut self, pod: &Value) -> Result<Placed, Refused> {
        self.place_on(NODE, pod)
    }

    /// Places a pod on a node of this name.
    pub(crate) fn place_on(&mut self, node: &str, pod: &Value) -> Result<Placed, Refused> {
        let pod: Pod = read(mutated(pod, "CREATE").map_err(Refused::Request)?);
        let facts = PodFacts::of(&pod, self.index.names())
            .ok_or_else(|| Refused::Request("asks for no device".to_owned()))?;
        let id = PodId {
            namespace: "default".to_owned(),
            name: "p".to_owned(),
            uid: "p".to_owned(),
        };
        match self.index.assume(&id, &facts, node, 1, Instant::now()) {
            Ok(Assumed::Write { binding: order, .. }) => {
                let record = Record::read(&order.annotations).unwrap().unwrap_or_default();
                let (annotations, labels) = (order.annotations, order.labels);
                let record = json!(record.allocations);
                let functions = functions_of(&record, |entry| &entry["extension"]["vfs"]);
                Ok(Placed {
                    allocations: allocations_of(&record),
                    functions,
                    annotations,
                    labels,
                })
            }
            Ok(Assumed::AlreadyBound) => Err(Refused::Request("is bound already".to_owned())),
            Err(AssumeError::NoRoom { reason, .. }) => Err(Refused::NoRoom(reason.to_string())),
            Err(error) => Err(Refused::Request(error.to_string())),
        }
    }
}

/// A pod with one container.
pub(crate) fn pod(amounts: &Value, labels: &Value) -> Value {
    let container = json!({"name": "c", "resources": {"limits": amounts, "requests": amounts}});
    json!({"metadata": {"name": "p", "namespace": "default", "uid": "p", "labels": labels}, "spec": {"containers": [container]}})
}

/// Allocations of a case or of a record; amounts of a device that is named twice are not summed.
pub(crate) fn allocations_of(allocations: &Value) -> Allocations {
    let by_type = allocations.as_object().into_iter().flatten();
    let devices = |devices: &Value| {
        let devices = devices.as_array().into_iter().flatten();
        devices
            .map(|device| {
                (
                    device["minor"].as_i64().unwrap(),
                    super::requests::amounts(&device["resources"]),
                )
            })
            .collect()
    };
    by_type
        .map(|(kind, list)| (kind.clone(), devices(list)))
        .collect()
}

/// Virtual functions of allocations, where entries list them there.
pub(crate) fn functions_of(allocations: &Value, listed: impl Fn(&Value) -> &Value) -> Functions {
    let mut functions = Functions::new();
    for (kind, entries) in allocations.as_object().into_iter().flatten() {
        for entry in entries.as_array().into_iter().flatten() {
            let list = listed(entry).as_array().into_iter().flatten();
            let list: Vec<_> = list
                .map(|vf| {
                    (
                        vf["busID"].as_str().unwrap().to_owned(),
                        vf["minor"].as_i64().unwrap(),
                    )
                })
                .collect();
            if !list.is_empty() {
                functions.insert((kind.clone(), entry["minor"].as_i64().unwrap()), list);
            }
        }
    }
    functions
}

/// The pod with annotations, whose values are texts or stand for their JSON.
pub(crate) fn annotated(mut pod: Value, annotations: &Value) -> Value {
    pod["metadata"]["annotations"] = Value::Object(strings(annotations));
    pod
}

/// An object of texts, whatever it was given as.
fn strings(object: &Value) -> Map<String, Value> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    object
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| (key.clone(), json!(text(value))))
        .collect()
}

/// An object as a watch would hand it over.
pub(crate) fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn list<K: serde::de::DeserializeOwned>(index: &mut Index, object: Value)
where
    Index: ObjectStore<K>,
{
    ObjectStore::<K>::begin_list(index);
    if !object.is_null() {
        index.apply(read(object));
    }
    ObjectStore::<K>::end_list(index);
}

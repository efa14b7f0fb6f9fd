//! `managedFields`: the managers that own the fields of an object.
//!
//! Ownership is recorded from an object's first server-side apply on. Fields that are older belong to the
//! manager `before-first-apply`, as in kube-apiserver.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::fields::{FieldSet, differing};
use super::strategic::Schema;
use crate::apiserver::object;

/// The operation by which a manager came to own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ManagerOperation {
    Apply,
    Update,
}

/// One entry of `managedFields`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Manager {
    pub(crate) name: String,
    pub(crate) operation: ManagerOperation,
    pub(crate) subresource: String,
    pub(crate) api_version: String,
    pub(crate) time: Value,
    pub(crate) fields: FieldSet,
}

/// The manager of a write, with the API version and the time of the write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldWriter<'a> {
    pub(crate) manager: &'a str,
    pub(crate) subresource: &'a str,
    pub(crate) api_version: &'a str,
    pub(crate) now: DateTime<Utc>,
}

impl Manager {
    /// A manager that a write makes the owner of these fields.
    pub(crate) fn new(writer: FieldWriter<'_>, operation: ManagerOperation, fields: FieldSet) -> Self {
        Self {
            name: writer.manager.to_owned(),
            operation,
            subresource: writer.subresource.to_owned(),
            api_version: writer.api_version.to_owned(),
            time: object::timestamp(writer.now),
            fields,
        }
    }

    /// Returns true if the entry is that of this writer and operation.
    pub(crate) fn is(&self, writer: FieldWriter<'_>, operation: ManagerOperation) -> bool {
        self.name == writer.manager && self.operation == operation && self.subresource == writer.subresource
    }

    /// Reads an entry of `metadata.managedFields`.
    fn from_value(value: &Value) -> Self {
        let operation = match object::text(value, "/operation") {
            "Apply" => ManagerOperation::Apply,
            _ => ManagerOperation::Update,
        };
        Self {
            name: object::text(value, "/manager").to_owned(),
            operation,
            subresource: object::text(value, "/subresource").to_owned(),
            api_version: object::text(value, "/apiVersion").to_owned(),
            time: value.get("time").cloned().unwrap_or_default(),
            fields: FieldSet::from_root(value.get("fieldsV1").unwrap_or(&Value::Null)),
        }
    }

    /// The manager as an entry of `metadata.managedFields`.
    fn to_value(&self) -> Value {
        let mut entry = json!({
            "manager": self.name, "operation": format!("{:?}", self.operation), "apiVersion": self.api_version, "time": self.time,
            "fieldsType": "FieldsV1", "fieldsV1": self.fields.to_value(),
        });
        if !self.subresource.is_empty() {
            let subresource = Value::from(self.subresource.clone());
            object::set(object::make_object(&mut entry), "subresource", Some(subresource));
        }
        entry
    }
}

/// The managers recorded in an object.
pub(crate) fn read(object: &Value) -> Vec<Manager> {
    object::array(object, "/metadata/managedFields")
        .iter()
        .map(Manager::from_value)
        .collect()
}

/// Records the managers in an object, leaving out those that own nothing.
pub(crate) fn write(object: &mut Value, managers: &[Manager]) {
    let owners = managers.iter().filter(|m| !m.fields.is_empty());
    let entries: Vec<Value> = owners.map(Manager::to_value).collect();
    let recorded = (!entries.is_empty()).then_some(Value::from(entries));
    object::set(object::meta(object), "managedFields", recorded);
}

/// Updates the record after a write that was not an apply: changed fields go to the writer.
pub(crate) fn track_update(old: &Value, new: &mut Value, writer: FieldWriter<'_>, schema: &Schema) {
    let mut managers = read(old);
    // skipNonAppliedManager: updates are tracked only once the object has been applied, which keeps managedFields out of most objects.
    if managers.is_empty() {
        object::meta(new).remove("managedFields");
        return;
    }
    let (before, after) = (owned(old, schema), owned(new, schema));
    let mut gone = before.clone();
    gone.subtract(&after);
    let mut changed = differing(&after, &contents(old), &contents(new), schema);
    let mut fresh = after;
    fresh.subtract(&before);
    changed.union(&fresh);
    for manager in &mut managers {
        manager.fields.subtract(&gone);
        if !manager.is(writer, ManagerOperation::Update) {
            manager.fields.subtract(&changed);
        }
    }
    if !changed.is_empty() {
        grant_changed_fields(&mut managers, writer, &changed);
    }
    write(new, &managers);
}

/// Makes the writer of an update the owner of the fields that it changed.
fn grant_changed_fields(managers: &mut Vec<Manager>, writer: FieldWriter<'_>, changed: &FieldSet) {
    let own = managers
        .iter_mut()
        .find(|m| m.is(writer, ManagerOperation::Update));
    match own {
        Some(own) => {
            own.fields.union(changed);
            own.time = object::timestamp(writer.now);
        }
        None => managers.push(Manager::new(writer, ManagerOperation::Update, changed.clone())),
    }
}

/// Metadata that only the server changes after an object's creation.
pub(crate) const SERVER_METADATA: [&str; 9] = [
    "name",
    "namespace",
    "generateName",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "resourceVersion",
];

/// The fields of an object that can have owners.
pub(crate) fn owned(object: &Value, schema: &Schema) -> FieldSet {
    FieldSet::of(&contents(object), schema)
}

/// A copy of an object without the fields that the server itself maintains, which have no owners.
pub(crate) fn contents(object: &Value) -> Value {
    let mut contents = object.clone();
    let map = object::make_object(&mut contents);
    map.remove("apiVersion");
    map.remove("kind");
    if let Some(Value::Object(meta)) = map.get_mut("metadata") {
        for field in SERVER_METADATA.iter().chain(&["managedFields", "selfLink"]) {
            meta.remove(*field);
        }
        if meta.is_empty() {
            map.remove("metadata");
        }
    }
    contents
}

/// The manager that owns all fields from before the first apply.
pub(crate) fn before_first_apply(object: &Value, writer: FieldWriter<'_>, schema: &Schema) -> Manager {
    let whose = FieldWriter {
        manager: "before-first-apply",
        subresource: "",
        ..writer
    };
    Manager::new(whose, ManagerOperation::Update, owned(object, schema))
}

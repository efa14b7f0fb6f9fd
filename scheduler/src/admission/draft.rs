//! A JSON object that is being changed, and the patch that makes the same changes.

use proto::admission::PatchOperation;
use serde_json::{Map, Value};

/// An object as it is so far, with the changes that led there.
#[derive(Debug)]
pub(super) struct Draft {
    object: Value,
    patch: Vec<PatchOperation>,
}

impl Draft {
    /// Begins with an object as it came.
    pub(super) fn new(object: Value) -> Self {
        Self {
            object,
            patch: Vec::new(),
        }
    }

    /// The changes so far.
    pub(super) fn into_patch(self) -> Vec<PatchOperation> {
        self.patch
    }

    /// A field, by JSON pointer of what holds it and its name.
    pub(super) fn get(&self, parent: &str, key: &str) -> Option<&Value> {
        self.object
            .pointer(parent)?
            .get(key)
            .filter(|value| !value.is_null())
    }

    /// How many entries a list has.
    pub(super) fn len(&self, list: &str) -> usize {
        self.object
            .pointer(list)
            .and_then(Value::as_array)
            .map_or(0, Vec::len)
    }

    /// Sets a field; objects on the way to it come into being.
    pub(super) fn put(&mut self, parent: &str, key: &str, value: Value) {
        self.make_object(parent);
        if let Some(Value::Object(fields)) = self.object.pointer_mut(parent)
            && fields.get(key) != Some(&value)
        {
            fields.insert(key.to_owned(), value.clone());
            self.patch.push(PatchOperation::Add {
                path: format!("{parent}/{}", escape(key)),
                value,
            });
        }
    }

    /// Removes a field if it is there, and says what it was.
    pub(super) fn remove(&mut self, parent: &str, key: &str) -> Option<Value> {
        let removed = self.object.pointer_mut(parent)?.as_object_mut()?.remove(key)?;
        self.patch.push(PatchOperation::Remove {
            path: format!("{parent}/{}", escape(key)),
        });
        Some(removed)
    }

    fn make_object(&mut self, pointer: &str) {
        if self.object.pointer(pointer).is_some_and(Value::is_object) {
            return;
        }
        // Our pointers have no escapes but in the last part of a path, so the key is as it is written.
        if let Some((parent, key)) = pointer.rsplit_once('/') {
            self.put(parent, key, Value::Object(Map::new()));
        }
    }
}

/// A key as part of a JSON pointer.
fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

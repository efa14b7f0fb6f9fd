//! Namespaces: deletion empties them first; the last object to go takes the namespace along.

use std::sync::Arc;

use serde_json::{Value, json};

use super::delete::{DeleteOptions, Deleted, mark};
use super::{State, Target};
use crate::apiserver::object;
use crate::apiserver::resource::NAMESPACES;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::{Key, Version};

impl State {
    pub(super) fn delete_namespace(
        &mut self,
        target: &Target,
        current: &Arc<Version>,
        options: &DeleteOptions,
    ) -> Result<Deleted, ApiError> {
        if matches!(target.name.as_str(), "default" | "kube-system" | "kube-public") {
            return Err(ApiError::forbidden(
                "namespaces",
                &target.name,
                "this namespace may not be deleted",
            ));
        }
        let mut marked = Value::clone(&current.value);
        mark(&mut marked, 0, options.now);
        object::make_object(&mut marked).insert("status".to_owned(), json!({"phase": "Terminating"}));
        let version = self.keep(target, marked, false);
        let contents: Vec<_> = self.registry.namespaced().cloned().collect();
        let each = DeleteOptions {
            now: options.now,
            ..DeleteOptions::default()
        };
        for resource in contents {
            for key in self.keys(&resource.storage, Some(&target.name)) {
                let inner = Target {
                    resource: Arc::clone(&resource),
                    namespace: key.namespace,
                    name: key.name,
                    status: false,
                };
                self.delete(&inner, &each)?;
            }
        }
        self.end_namespace_if_empty(&target.name);
        Ok(Deleted {
            version,
            removed: false,
        })
    }

    pub(super) fn end_namespace_if_empty(&mut self, name: &str) {
        let key = Key::new("", name);
        let ending = self
            .store
            .get(NAMESPACES, &key)
            .is_some_and(|n| object::is_deleting(&n.value));
        if !ending {
            return;
        }
        let owned = name.to_owned();
        let empty = self
            .registry
            .namespaced()
            .all(|r| self.keys(&r.storage, Some(&owned)).is_empty());
        let held = self
            .store
            .get(NAMESPACES, &key)
            .is_some_and(|n| object::has_finalizers(&n.value));
        if empty && !held {
            self.store.remove(NAMESPACES, &key, None);
        }
    }
}

//! The API for callers in this process: the same rules as over HTTP, without HTTP.
//!
//! Objects are untyped and shared. Access control, admission webhooks, audit and injected faults belong to the HTTP layer
//! and do not apply here.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use serde_json::{Value, json};

use super::admission::ParamInformers;
use super::patch::PatchFormat;
use super::read::ListQuery;
use super::resource::{Registry, Resource};
use super::status::ApiError;
use super::store::Store;
use super::verbs::{ApiState, RequestTarget, binding, create, delete, patch, update};
use super::{object, read};

/// A cheap handle to one API; clones share it.
#[derive(Debug, Clone)]
pub struct ApiObjects(Arc<SharedState>);

#[derive(Debug)]
struct SharedState {
    state: RwLock<ApiState>,
    /// The output of containers, which the log subresource serves, by the UID of the pod and the container's name.
    logs: Mutex<HashMap<(String, String), String>>,
    services: LocalPorts,
    pod_ports: LocalPorts,
}

/// Addresses on this machine that stand for ports of Services or of pods, by namespace, name and port.
type LocalPorts = Mutex<HashMap<(String, String, u16), SocketAddr>>;

/// Namespaces that every cluster has.
const NAMESPACES: &[&str] = &["default", "kube-node-lease", "kube-public", "kube-system"];

impl ApiObjects {
    /// A cluster without objects but for its namespaces. Watches may start up to `event_window` changes per resource ago.
    pub fn new(event_window: usize) -> Self {
        let state = ApiState {
            store: Store::new(event_window),
            registry: Registry::new(),
            params: ParamInformers::default(),
        };
        let objects = Self(Arc::new(SharedState {
            state: RwLock::new(state),
            logs: Mutex::default(),
            services: LocalPorts::default(),
            pod_ports: LocalPorts::default(),
        }));
        for name in NAMESPACES {
            let namespace = json!({"metadata": {"name": name}});
            if let Err(error) = objects.create("namespaces", namespace) {
                tracing::error!(%error, name, "cannot create a namespace");
            }
        }
        objects
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, ApiState> {
        self.0.state.read()
    }

    pub(crate) fn state_mut(&self) -> RwLockWriteGuard<'_, ApiState> {
        self.0.state.write()
    }

    pub(crate) fn service(&self, namespace: &str, name: &str, port: u16) -> Option<SocketAddr> {
        let key = (namespace.to_owned(), name.to_owned(), port);
        self.0.services.lock().get(&key).copied()
    }

    /// Sets the address on this machine that webhooks behind a Service are called at.
    pub fn route_service(&self, namespace: &str, name: &str, port: u16, address: SocketAddr) {
        let key = (namespace.to_owned(), name.to_owned(), port);
        self.0.services.lock().insert(key, address);
    }

    pub(crate) fn pod_port(&self, namespace: &str, pod: &str, port: u16) -> Option<SocketAddr> {
        let key = (namespace.to_owned(), pod.to_owned(), port);
        self.0.pod_ports.lock().get(&key).copied()
    }

    /// Sets the address on this machine that `port-forward` to a pod's port connects to.
    pub fn route_pod_port(&self, namespace: &str, pod: &str, port: u16, address: SocketAddr) {
        let key = (namespace.to_owned(), pod.to_owned(), port);
        self.0.pod_ports.lock().insert(key, address);
    }

    /// The resource named `plural` or `plural.group`.
    pub(crate) fn resource(&self, name: &str) -> Result<Arc<Resource>, ApiError> {
        let found = self.state().registry.named(name);
        found.ok_or_else(|| ApiError::new(404, format!("the server doesn't have a resource type \"{name}\"")))
    }

    /// The target of a call for the object of this name; the namespace is ignored for cluster-scoped resources.
    fn target(&self, resource: &str, namespace: &str, name: &str) -> Result<RequestTarget, ApiError> {
        let resource = self.resource(resource)?;
        let namespace = if resource.namespaced {
            namespace.to_owned()
        } else {
            String::new()
        };
        Ok(RequestTarget {
            resource,
            namespace,
            name: name.to_owned(),
            subresource: String::new(),
        })
    }

    /// An object; the namespace is ignored for cluster-scoped resources.
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let target = self.target(resource, namespace, name)?;
        let version = self.state().current(&target)?;
        Ok(Arc::clone(&version.value))
    }

    /// All objects of a resource, in all namespaces or in one, ordered by namespace and name.
    pub fn list(&self, resource: &str, namespace: Option<&str>) -> Result<Vec<Arc<Value>>, ApiError> {
        let resource = self.resource(resource)?;
        let query = ListQuery {
            namespace: namespace.unwrap_or_default().to_owned(),
            ..ListQuery::default()
        };
        let page = read::list(&self.state().store, &resource.storage, &query)?;
        Ok(page.items.iter().map(|v| Arc::clone(&v.value)).collect())
    }

    /// Creates an object; `apiVersion`, `kind` and the namespace `default` are filled in where missing.
    pub fn create(&self, resource: &str, mut value: Value) -> Result<Arc<Value>, ApiError> {
        let target = self.target_of(resource, &mut value)?;
        let unnamed = RequestTarget {
            name: String::new(),
            ..target
        };
        let created = create::create(&mut self.state_mut(), &unnamed, value)?;
        Ok(Arc::clone(&created.value))
    }

    /// Replaces an object, status excepted.
    pub fn update(&self, resource: &str, mut value: Value) -> Result<Arc<Value>, ApiError> {
        let target = self.target_of(resource, &mut value)?;
        self.change(&target, |live| update::draft_update(&target, live, value))
    }

    /// The target that an object itself names. `apiVersion`, `kind` and namespace are filled in where they are missing.
    fn target_of(&self, resource: &str, value: &mut Value) -> Result<RequestTarget, ApiError> {
        let mut target = self.target(resource, "", object::text(value, "/metadata/name"))?;
        let map = object::make_object(value);
        object::default(map, "apiVersion", target.resource.api_version());
        object::default(map, "kind", target.resource.kind.clone());
        if target.resource.namespaced {
            object::default(object::meta(value), "namespace", "default");
            object::text(value, "/metadata/namespace").clone_into(&mut target.namespace);
        }
        Ok(target)
    }

    /// Patches an object by JSON merge patch.
    pub fn patch(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let target = self.target(resource, namespace, name)?;
        self.change(&target, |live| {
            patch::draft_patch(&target, live, PatchFormat::Merge, patch, "")
        })
    }

    /// Patches an object's status: `patch` is the new part of the status itself. Lists with merge keys, such as
    /// conditions, merge by key for built-in kinds.
    pub fn patch_status(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<Arc<Value>, ApiError> {
        let target = RequestTarget {
            subresource: "status".to_owned(),
            ..self.target(resource, namespace, name)?
        };
        let format = if target.resource.custom {
            PatchFormat::Merge
        } else {
            PatchFormat::Strategic
        };
        let patch = json!({"status": patch});
        self.change(&target, |live| {
            patch::draft_patch(&target, live, format, patch, "")
        })
    }

    /// Stores the change that `draft` makes of an object, and returns the object as it is afterwards.
    fn change(
        &self,
        target: &RequestTarget,
        draft: impl FnOnce(Option<&Value>) -> Result<Value, ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        let mut state = self.state_mut();
        let before = state.current(target)?;
        let new = update::settle(target, &before.value, draft(Some(&before.value))?)?;
        let changed = update::store_settled(&mut state, target, before, new, false)?;
        Ok(Arc::clone(&changed.value))
    }

    /// Deletes an object, a pod with this grace period (or its own for `None`). Returns true if it is removed already.
    pub fn delete(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        grace_seconds: Option<i64>,
    ) -> Result<bool, ApiError> {
        let target = self.target(resource, namespace, name)?;
        let deletion = DeleteOptions {
            grace_period_seconds: grace_seconds,
            ..DeleteOptions::default()
        };
        let deleted = delete::delete(&mut self.state_mut(), &target, &deletion)?;
        Ok(deleted.removed)
    }

    /// Binds a pod with a Binding object, as `POST pods/{name}/binding` does.
    pub fn bind(&self, namespace: &str, pod: &str, binding: &Value) -> Result<Arc<Value>, ApiError> {
        let target = self.target("pods", namespace, pod)?;
        let version = binding::bind(&mut self.state_mut(), &target, binding, false)?;
        Ok(Arc::clone(&version.value))
    }

    /// The revision of the latest write.
    pub fn revision(&self) -> u64 {
        self.state().store.revision()
    }

    /// Forgets all past changes, as a compaction of etcd does: watches and `continue` tokens from earlier revisions get 410.
    pub fn compact(&self) {
        self.state_mut().store.compact();
    }

    /// Adds text to a container's log. It belongs to the pod that has the name now; a later pod of this name has its own log.
    pub fn append_log(&self, namespace: &str, pod: &str, container: &str, text: &str) {
        let pod = self.get("pods", namespace, pod).unwrap_or_default();
        let key = (
            object::text(&pod, "/metadata/uid").to_owned(),
            container.to_owned(),
        );
        self.0.logs.lock().entry(key).or_default().push_str(text);
    }

    /// The log of a container of the pod with this UID; empty if the container has printed nothing.
    pub(crate) fn log(&self, uid: &str, container: &str) -> String {
        let logs = self.0.logs.lock();
        let log = logs.get(&(uid.to_owned(), container.to_owned()));
        log.cloned().unwrap_or_default()
    }
}

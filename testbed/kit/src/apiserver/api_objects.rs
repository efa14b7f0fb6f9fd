//! The API for callers in this process: the same rules as over HTTP, without HTTP.
//!
//! Objects are untyped and shared. Access control, admission webhooks, audit and injected faults belong to the HTTP layer
//! and do not apply here.

use std::net::SocketAddr;
use std::sync::Arc;

use chrono::Utc;
use parking_lot::{RwLockReadGuard, RwLockWriteGuard};
use serde_json::{Value, json};

use super::admission::{LocalPorts, ParamInformers};
use super::patch::PatchFormat;
use super::pod_log::PodLogs;
use super::read::ListQuery;
use super::resource::{Registry, Resource};
use super::status::ApiError;
use super::store::{Key, Store};
use super::verbs::delete::DeleteOptions;
use super::verbs::{
    ApiState, RequestTarget, SharedState, WriteOptions, WrittenPart, binding, create, delete, patch, update,
};
use super::{object, read};

/// A cheap handle to one API; clones share it.
#[derive(Debug, Clone)]
pub struct ApiObjects {
    inner: Arc<ApiObjectState>,
}

#[derive(Debug)]
struct ApiObjectState {
    state: SharedState,
    logs: PodLogs,
    services: Arc<LocalPorts>,
    pod_ports: LocalPorts,
}

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
        let inner = ApiObjectState {
            state: SharedState::new(state),
            logs: PodLogs::default(),
            services: Arc::default(),
            pod_ports: LocalPorts::default(),
        };
        let objects = Self {
            inner: Arc::new(inner),
        };
        for name in NAMESPACES {
            let namespace = json!({"metadata": {"name": name}});
            if let Err(error) = objects.create("namespaces", namespace) {
                tracing::error!(%error, name, "cannot create a namespace");
            }
        }
        objects
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, ApiState> {
        self.inner.state.read()
    }

    pub(crate) fn state_mut(&self) -> RwLockWriteGuard<'_, ApiState> {
        self.inner.state.write()
    }

    pub(crate) fn shared_state(&self) -> &SharedState {
        &self.inner.state
    }

    pub(crate) fn logs(&self) -> &PodLogs {
        &self.inner.logs
    }

    pub(crate) fn services(&self) -> &Arc<LocalPorts> {
        &self.inner.services
    }

    /// Sets the address on this machine that webhooks behind a Service are called at.
    pub fn route_service(&self, namespace: &str, name: &str, port: u16, address: SocketAddr) {
        self.inner.services.set(namespace, name, port, address);
    }

    pub(crate) fn pod_ports(&self) -> &LocalPorts {
        &self.inner.pod_ports
    }

    /// Sets the address on this machine that `port-forward` to a pod's port connects to.
    pub fn route_pod_port(&self, namespace: &str, pod: &str, port: u16, address: SocketAddr) {
        self.inner.pod_ports.set(namespace, pod, port, address);
    }

    /// The resource named `plural` or `plural.group`.
    pub fn resource(&self, name: &str) -> Result<Arc<Resource>, ApiError> {
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
            part: WrittenPart::Object,
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
            namespace: namespace.map(str::to_owned),
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
        let written = create::create(&mut self.state_mut(), &unnamed, value, &options())?;
        Ok(Arc::clone(&written.version.value))
    }

    /// Replaces an object, status excepted.
    pub fn update(&self, resource: &str, mut value: Value) -> Result<Arc<Value>, ApiError> {
        let target = self.target_of(resource, &mut value)?;
        let written = update::update(&mut self.state_mut(), &target, value, &options())?;
        Ok(Arc::clone(&written.version.value))
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
        self.apply_patch(&target, PatchFormat::Merge, patch)
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
            part: WrittenPart::Status,
            ..self.target(resource, namespace, name)?
        };
        let format = if target.resource.custom {
            PatchFormat::Merge
        } else {
            PatchFormat::Strategic
        };
        self.apply_patch(&target, format, json!({"status": patch}))
    }

    /// Patches an object and returns it as it is afterwards.
    fn apply_patch(
        &self,
        target: &RequestTarget,
        format: PatchFormat,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let written = patch::patch(&mut self.state_mut(), target, format, patch, &options())?;
        Ok(Arc::clone(&written.version.value))
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
            grace: grace_seconds,
            now: Utc::now(),
            ..DeleteOptions::default()
        };
        let deleted = delete::delete(&mut self.state_mut(), &target, &deletion)?;
        Ok(deleted.removed)
    }

    /// Binds a pod with a Binding object, as `POST pods/{name}/binding` does.
    pub fn bind(&self, namespace: &str, pod: &str, binding: &Value) -> Result<Arc<Value>, ApiError> {
        let target = self.target("pods", namespace, pod)?;
        let version = binding::bind(&mut self.state_mut(), &target, binding, &options())?;
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
        let key = Key::new(namespace, pod);
        let uid = self
            .get("pods", namespace, pod)
            .map(|p| object::text(&p, "/metadata/uid").to_owned());
        self.inner
            .logs
            .append(key, uid.unwrap_or_default(), container, text);
    }
}

/// The options of all writes by callers in this process.
fn options() -> WriteOptions {
    WriteOptions {
        dry_run: false,
        manager: String::new(),
        is_apply: false,
        now: Utc::now(),
    }
}

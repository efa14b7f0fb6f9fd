//! Pods for tests and scenarios: a builder, their creation and deletion, and the output of their containers.
//!
//! On a real cluster a container counts as running before it has printed, and its lines arrive one by one: a
//! log that is read too early is empty or ends in the middle. `read_log` therefore waits for the whole output.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::api::{Api, DeleteParams, ListParams, LogParams, PostParams};
use kube::{Client, ResourceExt};
use proto::resource::{GPU_MEM, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

/// Limits of a container, by resource name.
pub type Limits<'a> = [(&'a str, &'a str)];

/// Builds a Pod object. Its containers print their environment, sorted, and then sleep, unless a method says otherwise.
#[derive(Clone, Debug)]
pub struct PodBuilder(Value);

impl PodBuilder {
    /// A pod whose one container has these limits.
    pub fn new(name: &str, limits: &Limits<'_>) -> Self {
        Self(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 1, "containers": [container("main", limits)]},
        }))
    }

    /// A pod whose one container requests memory units of one GPU, as the first gpushare's pods did.
    pub fn units(name: &str, units: impl std::fmt::Display) -> Self {
        Self::new(name, &[(GPU_MEM, &units.to_string())])
    }

    /// A pod whose one container requests a percentage of one GPU's memory, in Koordinator's words.
    pub fn share(name: &str, percent: impl std::fmt::Display) -> Self {
        let percent = percent.to_string();
        Self::new(name, &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, &percent)])
    }

    /// A pod whose one container runs a program of an image to its end, and prints nothing else. It tolerates all taints,
    /// as nodes with GPUs often have some.
    pub fn of_program(name: &str, image: &str, command: &[String], limits: &Limits<'_>) -> Self {
        let mut pod = Self(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 1, "restartPolicy": "Never", "automountServiceAccountToken": false,
                "tolerations": [{"operator": "Exists"}],
            },
        }));
        pod.push("containers", program("main", image, command, limits));
        pod
    }

    /// With an init container that runs a program of an image to its end.
    #[must_use]
    pub fn init_program(mut self, name: &str, image: &str, command: &[String], limits: &Limits<'_>) -> Self {
        self.push("initContainers", program(name, image, command, limits));
        self
    }

    /// With one more container.
    #[must_use]
    pub fn container(mut self, name: &str, limits: &Limits<'_>) -> Self {
        self.push("containers", container(name, limits));
        self
    }

    /// With an init container that prints its environment and ends.
    #[must_use]
    pub fn init(mut self, name: &str, limits: &Limits<'_>) -> Self {
        let mut init = container(name, limits);
        set(&mut init, "command", json!(["sh", "-c", "env | sort"]));
        self.push("initContainers", init);
        self
    }

    /// With a sidecar.
    #[must_use]
    pub fn sidecar(mut self, name: &str, limits: &Limits<'_>) -> Self {
        let mut sidecar = container(name, limits);
        set(&mut sidecar, "restartPolicy", json!("Always"));
        self.push("initContainers", sidecar);
        self
    }

    /// With one more container, of this image, that requests no resource.
    #[must_use]
    pub fn idle(mut self, name: &str, image: &str) -> Self {
        let mut idle = container(name, &[]);
        set(&mut idle, "image", json!(image));
        self.push("containers", idle);
        self
    }

    /// For one node only, by its hostname label.
    #[must_use]
    pub fn on(mut self, node: &str) -> Self {
        self.set_spec("nodeSelector", json!({"kubernetes.io/hostname": node}));
        self
    }

    /// With annotations.
    #[must_use]
    pub fn annotated(mut self, annotations: &BTreeMap<String, String>) -> Self {
        if let Some(metadata) = self.0.get_mut("metadata") {
            set(metadata, "annotations", json!(annotations));
        }
        self
    }

    /// With one annotation beside those that it has.
    #[must_use]
    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        if let Some(Value::Object(metadata)) = self.0.get_mut("metadata") {
            let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
            set(annotations, key, json!(value));
        }
        self
    }

    /// With one label.
    #[must_use]
    pub fn labelled(mut self, key: &str, value: &str) -> Self {
        if let Some(metadata) = self.0.get_mut("metadata") {
            set(metadata, "labels", json!({key: value}));
        }
        self
    }

    /// Sets a field of its first container.
    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Self {
        if let Some(container) = self.0.pointer_mut("/spec/containers/0") {
            set(container, field, value);
        }
        self
    }

    /// Sets a field by its JSON pointer, whose parent exists.
    #[must_use]
    pub fn at(mut self, pointer: &str, value: Value) -> Self {
        if let Some((parent, field)) = pointer.rsplit_once('/')
            && let Some(parent) = self.0.pointer_mut(parent)
        {
            set(parent, field, value);
        }
        self
    }

    /// With a `ResourceClaim` that its first container uses.
    #[must_use]
    pub fn claiming(mut self, claim: &str) -> Self {
        let claims = json!([{"name": "gpu", "resourceClaimName": claim}]);
        self.set_spec("resourceClaims", claims);
        self.with("resources", json!({"claims": [{"name": "gpu"}]}))
    }

    /// With a volume by a `PersistentVolumeClaim` of its namespace.
    #[must_use]
    pub fn storing(mut self, claim: &str) -> Self {
        let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
        self.set_spec("volumes", volumes);
        self
    }

    /// As a member of a `PodGroup` of its namespace.
    #[must_use]
    pub fn member_of(mut self, group: &str) -> Self {
        self.set_spec("schedulingGroup", json!({"podGroupName": group}));
        self
    }

    /// With a `PriorityClass` and its priority, which the testbed's API server does not fill in.
    #[must_use]
    pub fn priority(mut self, class: &str, priority: i32) -> Self {
        self.set_spec("priorityClassName", json!(class));
        self.set_spec("priority", json!(priority));
        self
    }

    /// For another scheduler than the default one.
    #[must_use]
    pub fn scheduler(mut self, name: &str) -> Self {
        self.set_spec("schedulerName", json!(name));
        self
    }

    /// The object.
    pub fn pod(&self) -> Result<Pod> {
        serde_json::from_value(self.0.clone()).context("a pod is malformed")
    }

    /// Sets a field of the spec.
    pub fn set_spec(&mut self, field: &str, value: Value) {
        if let Some(spec) = self.0.get_mut("spec") {
            set(spec, field, value);
        }
    }

    /// Adds a container to a list of the spec: `containers` or `initContainers`.
    fn push(&mut self, list: &str, container: Value) {
        let Some(Value::Object(spec)) = self.0.get_mut("spec") else {
            return;
        };
        if let Value::Array(items) = spec.entry(list).or_insert_with(|| json!([])) {
            items.push(container);
        }
    }
}

/// Sets a field of an object.
pub fn set(object: &mut Value, field: &str, value: Value) {
    if let Value::Object(map) = object {
        map.insert(field.to_owned(), value);
    }
}

/// Sets a field of an object inside another, such as a label map of `metadata`; does nothing if there is no such object.
pub fn set_in(object: &mut Value, parent: &str, field: &str, value: Value) {
    if let Some(parent) = object.get_mut(parent) {
        set(parent, field, value);
    }
}

fn container(name: &str, limits: &Limits<'_>) -> Value {
    let limits: BTreeMap<&str, &str> = limits.iter().copied().collect();
    json!({
        "name": name, "image": "busybox:1.36", "command": ["sh", "-c", "env | sort; sleep 3600"],
        "resources": {"limits": limits},
        "env": [{"name": LAST_VARIABLE, "value": "1"}],
    })
}

fn program(name: &str, image: &str, command: &[String], limits: &Limits<'_>) -> Value {
    let limits: BTreeMap<&str, &str> = limits.iter().copied().collect();
    json!({"name": name, "image": image, "command": command, "resources": {"limits": limits}})
}

/// Pods of one namespace.
#[derive(Clone, Debug)]
pub struct NamespacePods {
    api: Api<Pod>,
}

impl NamespacePods {
    /// The pods of this namespace.
    pub fn of(client: &Client, namespace: &str) -> Self {
        Self {
            api: Api::namespaced(client.clone(), namespace),
        }
    }

    /// Creates a pod.
    pub async fn create(&self, spec: &PodBuilder) -> Result<Pod> {
        let pod = spec.pod()?;
        let created = self.api.create(&PostParams::default(), &pod).await;
        created.with_context(|| format!("cannot create pod {}", pod.name_any()))
    }

    /// Asks for a pod's deletion; one that is gone already is no error.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.delete_with(name, &DeleteParams::default()).await
    }

    /// Removes a pod without waiting for its kubelet.
    pub async fn delete_now(&self, name: &str) -> Result<()> {
        let params = DeleteParams::default().grace_period(0);
        self.delete_with(name, &params).await
    }

    /// Asks for the deletion of every pod of the namespace, those included that no watch has shown yet.
    pub async fn delete_all(&self) -> Result<()> {
        self.delete_all_with(&DeleteParams::default()).await
    }

    /// Removes every pod of the namespace without waiting for kubelets.
    pub async fn delete_all_now(&self) -> Result<()> {
        let params = DeleteParams::default().grace_period(0);
        self.delete_all_with(&params).await
    }

    async fn delete_all_with(&self, params: &DeleteParams) -> Result<()> {
        let deleted = self.api.delete_collection(params, &ListParams::default()).await;
        deleted.map(drop).context("cannot delete all pods")
    }

    /// Deletes a pod; it is no error if there is none.
    async fn delete_with(&self, name: &str, params: &DeleteParams) -> Result<()> {
        match self.api.delete(name, params).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error).with_context(|| format!("cannot delete pod {name}")),
        }
    }

    /// The API itself.
    pub fn api(&self) -> &Api<Pod> {
        &self.api
    }
}

/// A variable that sorts behind all others of a container: a log that shows it has the whole environment.
pub(crate) const LAST_VARIABLE: &str = "zz_last";

/// The longest time that a container may take to print its environment.
const PRINT_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause between reads of a log that is not complete yet.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// The log of a started container. If the container has `LAST_VARIABLE`, waits until the log is complete.
///
/// # Errors
/// The API server's error, 404 if the pod has gone. A container that prints too little in half a minute is no error.
pub async fn read_log(api: &Api<Pod>, pod: &str, container: &Container) -> kube::Result<String> {
    // The container is named, since a pod with several containers has no log of its own.
    let params = LogParams {
        container: Some(container.name.clone()),
        ..LogParams::default()
    };
    let mut variables = container.env.iter().flatten();
    let is_marked = variables.any(|variable| variable.name == LAST_VARIABLE);
    let deadline = Instant::now() + PRINT_TIMEOUT;
    loop {
        // Each read starts from the beginning: following the log would need a stream per container, and few reads are repeated.
        let log = api.logs(pod, &params).await?;
        let mut values = log.lines().filter_map(|line| line.strip_prefix(LAST_VARIABLE));
        let is_whole = values.any(|value| value.starts_with('='));
        if !is_marked || is_whole || Instant::now() >= deadline {
            return Ok(log);
        }
        sleep(READ_PAUSE).await;
    }
}

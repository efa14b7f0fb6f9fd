//! The table of built-in resources, and the registry to which custom resource definitions add theirs.
//!
//! Every built-in resource is one line of [`BUILTIN`]; nothing else lists them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::object;

/// One served resource in one version.
#[derive(Debug)]
pub(crate) struct Resource {
    /// Empty for core.
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) plural: String,
    pub(crate) kind: String,
    pub(crate) namespaced: bool,
    pub(crate) short_names: Vec<String>,
    /// True if it has a status subresource.
    pub(crate) status: bool,
    /// True if a `CustomResourceDefinition` made it.
    pub(crate) custom: bool,
    /// The name of the collection in the store that has its objects.
    pub(crate) storage: String,
    /// `openAPIV3Schema` of the definition; null for built-in resources.
    pub(crate) schema: Value,
    /// `additionalPrinterColumns` of the definition, which `kubectl get` prints.
    pub(crate) columns: Vec<Value>,
}

impl Resource {
    /// `group/version`, or `version` for core.
    pub(crate) fn api_version(&self) -> String {
        group_version(&self.group, &self.version)
    }

    /// Plural qualified by group, as error messages name resources.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.clone()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// Returns true if this is the resource of that group and plural name, in any version.
    pub(crate) fn is(&self, group: &str, plural: &str) -> bool {
        self.group == group && self.plural == plural
    }

    pub(crate) fn is_pod(&self) -> bool {
        self.is("", "pods")
    }

    /// The subresources of the resource besides `status`, such as `binding` and `log` of pods.
    pub(crate) fn actions(&self) -> &'static [&'static str] {
        if self.is_pod() {
            &[
                "binding",
                "ephemeralcontainers",
                "eviction",
                "exec",
                "log",
                "portforward",
                "resize",
            ]
        } else if self.is("", "namespaces") {
            &["finalize"]
        } else {
            &[]
        }
    }

    /// Returns true for review kinds, such as `TokenReview`: the server answers a creation and stores nothing.
    pub(crate) fn is_review(&self) -> bool {
        [AUTHENTICATION, AUTHORIZATION].contains(&self.group.as_str())
    }

    /// Returns true if the server counts `metadata.generation` of this kind.
    pub(crate) fn counts_generations(&self) -> bool {
        self.custom || self.is_pod() || matches!(self.group.as_str(), "apps" | "batch" | "policy")
    }
}

/// `group/version`, or `version` for core.
pub(crate) fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    }
}

const AUTHENTICATION: &str = "authentication.k8s.io";
const AUTHORIZATION: &str = "authorization.k8s.io";

/// The built-in resources, a line each: group and version, plural, kind, scope, `status` where there is such a subresource,
/// short names. A dash is none.
const BUILTIN: &str = "\
v1                              bindings                          Binding                          namespaced -      -
v1                              configmaps                        ConfigMap                        namespaced -      cm
v1                              endpoints                         Endpoints                        namespaced -      ep
v1                              events                            Event                            namespaced -      ev
v1                              namespaces                        Namespace                        cluster    status ns
v1                              nodes                             Node                             cluster    status no
v1                              persistentvolumeclaims            PersistentVolumeClaim            namespaced status pvc
v1                              persistentvolumes                 PersistentVolume                 cluster    status pv
v1                              pods                              Pod                              namespaced status po
v1                              replicationcontrollers            ReplicationController            namespaced status rc
v1                              resourcequotas                    ResourceQuota                    namespaced status quota
v1                              secrets                           Secret                           namespaced -      -
v1                              serviceaccounts                   ServiceAccount                   namespaced -      sa
v1                              services                          Service                          namespaced status svc
admissionregistration.k8s.io/v1 mutatingwebhookconfigurations     MutatingWebhookConfiguration     cluster    -      -
admissionregistration.k8s.io/v1 validatingadmissionpolicies       ValidatingAdmissionPolicy        cluster    status -
admissionregistration.k8s.io/v1 validatingadmissionpolicybindings ValidatingAdmissionPolicyBinding cluster    -      -
admissionregistration.k8s.io/v1 validatingwebhookconfigurations   ValidatingWebhookConfiguration   cluster    -      -
apiextensions.k8s.io/v1         customresourcedefinitions         CustomResourceDefinition         cluster    status crd,crds
apps/v1                         daemonsets                        DaemonSet                        namespaced status ds
apps/v1                         deployments                       Deployment                       namespaced status deploy
apps/v1                         replicasets                       ReplicaSet                       namespaced status rs
apps/v1                         statefulsets                      StatefulSet                      namespaced status sts
authentication.k8s.io/v1        tokenreviews                      TokenReview                      cluster    -      -
authorization.k8s.io/v1         subjectaccessreviews              SubjectAccessReview              cluster    -      -
batch/v1                        jobs                              Job                              namespaced status -
coordination.k8s.io/v1          leases                            Lease                            namespaced -      -
flowcontrol.apiserver.k8s.io/v1 flowschemas                       FlowSchema                       cluster    status -
flowcontrol.apiserver.k8s.io/v1 prioritylevelconfigurations       PriorityLevelConfiguration       cluster    status -
networking.k8s.io/v1            networkpolicies                   NetworkPolicy                    namespaced -      netpol
policy/v1                       poddisruptionbudgets              PodDisruptionBudget              namespaced status pdb
rbac.authorization.k8s.io/v1    clusterrolebindings               ClusterRoleBinding               cluster    -      -
rbac.authorization.k8s.io/v1    clusterroles                      ClusterRole                      cluster    -      -
rbac.authorization.k8s.io/v1    rolebindings                      RoleBinding                      namespaced -      -
rbac.authorization.k8s.io/v1    roles                             Role                             namespaced -      -
resource.k8s.io/v1              resourceclaims                    ResourceClaim                    namespaced status -
node.k8s.io/v1                  runtimeclasses                    RuntimeClass                     cluster    -      -
scheduling.k8s.io/v1            priorityclasses                   PriorityClass                    cluster    -      pc
scheduling.k8s.io/v1alpha2      podgroups                         PodGroup                         namespaced status -
storage.k8s.io/v1               csidrivers                        CSIDriver                        cluster    -      -
storage.k8s.io/v1               csinodes                          CSINode                          cluster    -      -
storage.k8s.io/v1               csistoragecapacities              CSIStorageCapacity               namespaced -      -
storage.k8s.io/v1               storageclasses                    StorageClass                     cluster    -      sc
storage.k8s.io/v1               volumeattachments                 VolumeAttachment                 cluster    status -";
/// Group of the webhook configurations.
pub(crate) const ADMISSION: &str = "admissionregistration.k8s.io";
pub(crate) const CRD_GROUP: &str = "apiextensions.k8s.io";
pub(crate) const CRD_PLURAL: &str = "customresourcedefinitions";
/// The `storage` of the resource `namespaces`.
pub(crate) const NAMESPACES: &str = "/namespaces";

/// The resource of a line of [`BUILTIN`]; none if a cell is missing.
fn builtin_resource(line: &str) -> Option<Resource> {
    let cells: Vec<&str> = line.split_whitespace().collect();
    let [api_version, plural, kind, scope, status, short] = cells.try_into().ok()?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    Some(Resource {
        group: group.to_owned(),
        version: version.to_owned(),
        plural: plural.to_owned(),
        kind: kind.to_owned(),
        namespaced: scope == "namespaced",
        short_names: short
            .split(',')
            .filter(|name| *name != "-")
            .map(str::to_owned)
            .collect(),
        status: status == "status",
        custom: false,
        storage: format!("{group}/{plural}"),
        schema: Value::Null,
        columns: Vec::new(),
    })
}

/// The resources served now, in order of registration.
#[derive(Debug)]
pub(crate) struct Registry(Vec<Arc<Resource>>);

impl Registry {
    /// The built-in resources.
    pub(crate) fn new() -> Self {
        let resources = BUILTIN.lines().filter_map(builtin_resource);
        Self(resources.map(Arc::new).collect())
    }

    /// The resource at a path.
    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        let mut resources = self.0.iter();
        let found = resources.find(|found| found.is(group, plural) && found.version == version);
        found.cloned()
    }

    /// The resource that in-process callers name `plural` or `plural.group`. A plural alone finds a resource of the core
    /// group first, as kubectl does.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Resource>> {
        let (plural, group) = name.split_once('.').unwrap_or((name, ""));
        let mut found = self.0.iter().find(|found| found.is(group, plural));
        if found.is_none() && group.is_empty() {
            found = self.0.iter().find(|found| found.plural == plural);
        }
        found.cloned()
    }

    pub(crate) fn all(&self) -> &[Arc<Resource>] {
        &self.0
    }

    /// Resources with objects in namespaces.
    pub(crate) fn namespaced(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.0.iter().filter(|r| r.namespaced)
    }

    /// Serves the resource of a custom resource definition, in place of an earlier version of it.
    pub(crate) fn define(&mut self, definition: &Value) {
        // A definition that was changed may have lost a version.
        self.undefine(definition);
        for version in object::array(definition, "/spec/versions") {
            if object::is_true(version, "/served") {
                self.0.push(Arc::new(custom_resource(definition, version)));
            }
        }
    }

    /// Stops serving the resource of a custom resource definition.
    pub(crate) fn undefine(&mut self, definition: &Value) {
        let group = object::text(definition, "/spec/group");
        let plural = object::text(definition, "/spec/names/plural");
        self.0.retain(|r| !(r.custom && r.is(group, plural)));
    }
}

/// The status of a `CustomResourceDefinition` that kube-apiserver has accepted.
pub(crate) fn established(definition: &Value) -> Value {
    let condition = |kind: &str, reason: &str, message: &str| {
        json!({"type": kind, "status": "True", "reason": reason, "message": message,
               "lastTransitionTime": object::text(definition, "/metadata/creationTimestamp")})
    };
    let mut versions = object::array(definition, "/spec/versions").iter();
    let stored = versions.find(|version| object::is_true(version, "/storage"));
    json!({
        "acceptedNames": definition.pointer("/spec/names").cloned().unwrap_or_default(),
        // Exactly one version is stored.
        "storedVersions": [stored.map(|version| object::text(version, "/name"))],
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    })
}

/// The resource that one version of a `CustomResourceDefinition` defines. Objects are not converted between versions.
fn custom_resource(definition: &Value, version: &Value) -> Resource {
    let group = object::text(definition, "/spec/group").to_owned();
    let name_of = |field: &str| object::text(definition, &format!("/spec/names/{field}")).to_owned();
    let short_names = object::array(definition, "/spec/names/shortNames").iter();
    Resource {
        storage: format!("{group}/{}", name_of("plural")),
        version: object::text(version, "/name").to_owned(),
        plural: name_of("plural"),
        kind: name_of("kind"),
        namespaced: object::text(definition, "/spec/scope") == "Namespaced",
        short_names: short_names.filter_map(Value::as_str).map(str::to_owned).collect(),
        status: version.pointer("/subresources/status").is_some(),
        custom: true,
        schema: version
            .pointer("/schema/openAPIV3Schema")
            .cloned()
            .unwrap_or_default(),
        columns: object::array(version, "/additionalPrinterColumns").to_vec(),
        group,
    }
}

//! Evaluates the RBAC objects of a deployment, and lists the requests that the daemons need.
//!
//! It leaves out aggregated roles and wildcards inside a group's name. Tests check that a deployment allows all
//! listed requests, and that daemons send no others.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Context, Result};
use k8s_openapi::api::rbac::v1::{PolicyRule, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::apiserver::object;

/// API group of the Device objects.
const DEVICES_GROUP: &str = "scheduling.koordinator.sh";
/// API group of the webhook configurations.
const ADMISSION: &str = "admissionregistration.k8s.io";

/// The access that a request needs: a verb on a kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Permission<'a> {
    /// API group, empty for the core group.
    pub group: &'a str,
    /// Plural name of the kind.
    pub resource: &'a str,
    /// Subresource, empty for the object itself.
    pub subresource: &'a str,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: &'a str,
}

/// The object that a request is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RbacTarget<'a> {
    /// Its namespace; empty for cluster-wide requests.
    pub namespace: &'a str,
    /// Its name; empty where a request names none.
    pub name: &'a str,
}

/// A table of permissions: for each group, kind and subresource, its verbs.
macro_rules! permissions {
    ($($group:expr, $resource:literal, $subresource:literal: $($verb:literal)+;)+) => {
        &[$($(Permission {
            group: $group,
            resource: $resource,
            subresource: $subresource,
            verb: $verb,
        }),+),+]
    };
}

/// The access that the scheduler needs in the whole cluster.
pub const SCHEDULER: &[Permission<'static>] = permissions! {
    "", "nodes", "": "list" "watch";
    "", "pods", "": "get" "list" "watch";
    "", "pods", "binding": "create";
    DEVICES_GROUP, "devices", "": "list" "watch";
    "authentication.k8s.io", "tokenreviews", "": "create";
    "authorization.k8s.io", "subjectaccessreviews", "": "create";
    "policy", "poddisruptionbudgets", "": "list" "watch";
    "scheduling.k8s.io", "podgroups", "": "list" "watch";
    "scheduling.x-k8s.io", "podgroups", "": "list" "watch";
};

/// The scheduler's further requests in its own namespace, where its replicas elect a leader.
pub const SCHEDULER_LEADER: &[Permission<'static>] = permissions! {
    "coordination.k8s.io", "leases", "": "create" "get" "update";
    "gpushare.io", "schedulerleaders", "": "create" "get" "update";
    "", "events", "": "create" "patch";
    "", "pods", "": "patch";
};

/// The scheduler's further requests in its own namespace, for the `CSIStorageCapacity` by which it makes kube-scheduler
/// retry refused pods.
pub const SCHEDULER_ROOM: &[Permission<'static>] = permissions! {
    "storage.k8s.io", "csistoragecapacities", "": "create" "patch";
};

/// The scheduler's further requests in its own namespace, for the Secret of its certificates.
pub const SCHEDULER_CERTIFICATES: &[Permission<'static>] = permissions! {
    "", "secrets", "": "create" "get" "update";
};

/// The scheduler's further requests for its webhook configurations, into which it writes its certificate authority.
pub const SCHEDULER_WEBHOOKS: &[Permission<'static>] = permissions! {
    ADMISSION, "mutatingwebhookconfigurations", "": "get" "patch";
    ADMISSION, "validatingwebhookconfigurations", "": "get" "patch";
};

/// The access that a node's device plugin needs.
pub const DEVICE_PLUGIN: &[Permission<'static>] = permissions! {
    "", "nodes", "": "list" "watch" "patch";
    "", "nodes", "status": "patch";
    "", "pods", "": "list" "watch" "patch";
    DEVICES_GROUP, "devices", "": "get" "list" "watch" "create" "patch";
    "", "events", "": "create" "patch";
    "resource.k8s.io", "resourceclaims", "": "get";
};

/// The roles and bindings of a deployment.
#[derive(Clone, Debug, Default)]
pub struct Rbac {
    roles: Vec<NamedRole>,
    bindings: Vec<SubjectBinding>,
}

/// A Role, or a `ClusterRole`, which has no namespace.
#[derive(Clone, Debug, Deserialize)]
struct NamedRole {
    metadata: ObjectMeta,
    rules: Option<Vec<PolicyRule>>,
}

/// A `RoleBinding`, or a `ClusterRoleBinding`, which has no namespace.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SubjectBinding {
    metadata: ObjectMeta,
    role_ref: RoleRef,
    subjects: Option<Vec<Subject>>,
}

impl Rbac {
    /// Reads the roles and bindings among the objects of a deployment.
    pub fn of(objects: &[Value]) -> Result<Self> {
        let mut rbac = Self::default();
        for object in objects {
            match object::text(object, "/kind") {
                "ClusterRole" | "Role" => rbac.roles.push(parse(object)?),
                "ClusterRoleBinding" | "RoleBinding" => rbac.bindings.push(parse(object)?),
                _ => {}
            }
        }
        Ok(rbac)
    }

    /// True if a user, such as `system:serviceaccount:gpushare-system:gpushare-scheduler`, may send this request.
    pub fn allows(&self, user: &str, access: Permission<'_>, target: RbacTarget<'_>) -> bool {
        for (namespace, rule) in self.rules_of(user) {
            // A ClusterRole bound by a RoleBinding holds in the binding's namespace only.
            let is_in_scope = namespace.is_empty() || namespace == target.namespace;
            if is_in_scope && allows_name(rule, target.name) && rule_allows(rule, access) {
                return true;
            }
        }
        false
    }

    /// True if a rule names this path outside the API groups and this verb for a user; wildcards are not known here.
    pub(crate) fn allows_path(&self, user: &str, verb: &str, path: &str) -> bool {
        for (namespace, rule) in self.rules_of(user) {
            let paths = rule.non_resource_urls.as_deref().unwrap_or_default();
            if namespace.is_empty() && is_listed(paths, path) && is_listed(&rule.verbs, verb) {
                return true;
            }
        }
        false
    }

    /// All kinds of access that a user has, to any object in any namespace.
    pub fn granted(&self, user: &str) -> BTreeSet<Permission<'_>> {
        let mut granted = BTreeSet::new();
        for (_, rule) in self.rules_of(user) {
            granted.extend(permissions_of(rule));
        }
        granted
    }

    /// The rules of a user, each with the namespace that it is confined to; empty if it holds everywhere.
    fn rules_of(&self, user: &str) -> Vec<(&str, &PolicyRule)> {
        let groups = groups_of(user);
        let mut rules = Vec::new();
        for binding in &self.bindings {
            let mut subjects = binding.subjects.iter().flatten();
            if !subjects.any(|subject| is_subject(subject, user, &groups)) {
                continue;
            }
            let namespace = binding.metadata.namespace.as_deref().unwrap_or_default();
            for role in self.roles.iter().filter(|role| binding.refers_to(role)) {
                rules.extend(role.rules.iter().flatten().map(|rule| (namespace, rule)));
            }
        }
        rules
    }
}

impl SubjectBinding {
    /// Returns true if the binding grants this role.
    fn refers_to(&self, role: &NamedRole) -> bool {
        let namespace = match self.role_ref.kind.as_str() {
            "Role" => self.metadata.namespace.as_ref(),
            _ => None,
        };
        role.metadata.name.as_ref() == Some(&self.role_ref.name)
            && role.metadata.namespace.as_ref() == namespace
    }
}

impl fmt::Display for Permission<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if !self.subresource.is_empty() {
            write!(f, "/{}", self.subresource)?;
        }
        if !self.group.is_empty() {
            write!(f, " of {}", self.group)?;
        }
        Ok(())
    }
}

fn parse<T: DeserializeOwned>(object: &Value) -> Result<T> {
    let (kind, name) = (
        object::text(object, "/kind"),
        object::text(object, "/metadata/name"),
    );
    T::deserialize(object).with_context(|| format!("{kind} {name:?} is not what its kind says"))
}

/// The user of requests without a token, where the API server requires none.
pub(crate) const ANONYMOUS: &str = "system:anonymous";

/// The groups that the API server gives a user by the name alone.
pub(crate) fn groups_of(user: &str) -> Vec<String> {
    let mut groups = Vec::new();
    let account = user.strip_prefix("system:serviceaccount:");
    if let Some((namespace, _)) = account.and_then(|account| account.split_once(':')) {
        groups.push("system:serviceaccounts".to_owned());
        groups.push(format!("system:serviceaccounts:{namespace}"));
    }
    let group = match user {
        ANONYMOUS => "system:unauthenticated",
        _ => "system:authenticated",
    };
    groups.push(group.to_owned());
    groups
}

/// Returns true if a subject of a binding is the user or one of the user's groups.
fn is_subject(subject: &Subject, user: &str, groups: &[String]) -> bool {
    match subject.kind.as_str() {
        "ServiceAccount" => {
            let namespace = subject.namespace.as_deref().unwrap_or_default();
            user.strip_prefix("system:serviceaccount:") == Some(&format!("{namespace}:{}", subject.name))
        }
        "User" => subject.name == user,
        "Group" => groups.contains(&subject.name),
        _ => false,
    }
}

fn allows_name(rule: &PolicyRule, name: &str) -> bool {
    let names = rule.resource_names.as_deref().unwrap_or_default();
    // A rule with `resourceNames` allows no request without a name, such as a list or a creation.
    names.is_empty() || is_listed(names, name)
}

fn is_listed(words: &[String], wanted: &str) -> bool {
    words.iter().any(|word| word == wanted)
}

fn rule_allows(rule: &PolicyRule, access: Permission<'_>) -> bool {
    let (groups, resources) = (rule.api_groups.as_deref(), rule.resources.as_deref());
    let resources = resources.unwrap_or_default();
    let resource = match access.subresource {
        "" => access.resource.to_owned(),
        subresource => format!("{}/{subresource}", access.resource),
    };
    // `*/scale` means the subresource of every kind.
    let any_parent = format!("*/{}", access.subresource);
    is_allowed(groups.unwrap_or_default(), access.group)
        && (is_allowed(resources, &resource) || is_listed(resources, &any_parent))
        && is_allowed(&rule.verbs, access.verb)
}

/// Returns true if a list of a rule has this word, or the wildcard.
fn is_allowed(words: &[String], wanted: &str) -> bool {
    is_listed(words, wanted) || is_listed(words, "*")
}

/// The permissions that a rule lists, one for each combination of group, resource and verb.
fn permissions_of(rule: &PolicyRule) -> Vec<Permission<'_>> {
    let mut all = Vec::new();
    for group in rule.api_groups.iter().flatten() {
        for resource in rule.resources.iter().flatten() {
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            all.extend(rule.verbs.iter().map(|verb| Permission {
                group,
                resource,
                subresource,
                verb,
            }));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::{Permission, Rbac, RbacTarget};

    const READER: &str = "system:serviceaccount:team:reader";

    fn objects() -> Vec<Value> {
        let subject = json!([{"kind": "ServiceAccount", "name": "reader", "namespace": "team"}]);
        let role = |kind: &str, name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name});
        vec![
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "read"}, "rules": [
                {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["get", "list"]},
                {"apiGroups": ["apps"], "resources": ["*"], "verbs": ["*"], "resourceNames": ["mine"]}]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
                "metadata": {"name": "lead", "namespace": "team"}, "rules": [
                {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["update"], "resourceNames": ["a"]}]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "read"},
                "roleRef": role("ClusterRole", "read"), "subjects": subject}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
                "metadata": {"name": "lead", "namespace": "team"}, "roleRef": role("Role", "lead"), "subjects": subject}),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}}),
        ]
    }

    #[rstest]
    #[case::object(READER, ["get", "", "pods", ""], ["other", "p"], true)]
    #[case::subresource(READER, ["get", "", "pods", "status"], ["other", "p"], true)]
    #[case::other_subresource(READER, ["get", "", "pods", "binding"], ["other", "p"], false)]
    #[case::other_verb(READER, ["delete", "", "pods", ""], ["other", "p"], false)]
    #[case::other_group(READER, ["get", "apps", "pods", ""], ["other", "p"], false)]
    #[case::other_user("system:serviceaccount:team:writer", ["get", "", "pods", ""], ["other", "p"], false)]
    #[case::same_name_elsewhere("system:serviceaccount:other:reader", ["get", "", "pods", ""], ["other", "p"], false)]
    #[case::wildcard(READER, ["delete", "apps", "deployments", ""], ["other", "mine"], true)]
    #[case::wildcard_other_name(READER, ["delete", "apps", "deployments", ""], ["other", "yours"], false)]
    #[case::role(READER, ["update", "coordination.k8s.io", "leases", ""], ["team", "a"], true)]
    #[case::role_elsewhere(READER, ["update", "coordination.k8s.io", "leases", ""], ["other", "a"], false)]
    #[case::role_without_name(READER, ["update", "coordination.k8s.io", "leases", ""], ["team", ""], false)]
    fn allows(
        #[case] user: &str,
        #[case] access: [&str; 4],
        #[case] target: [&str; 2],
        #[case] expected: bool,
    ) {
        let rbac = Rbac::of(&objects()).unwrap();
        let ([verb, group, resource, subresource], [namespace, name]) = (access, target);
        let access = Permission {
            group,
            resource,
            subresource,
            verb,
        };
        assert_eq!(
            rbac.allows(user, access, RbacTarget { namespace, name }),
            expected,
            "{access}"
        );
    }

    #[test]
    fn all_rules_of_a_user_are_listed() {
        let rbac = Rbac::of(&objects()).unwrap();
        let granted: Vec<String> = rbac.granted(READER).iter().map(ToString::to_string).collect();
        let expected = [
            "get pods",
            "list pods",
            "get pods/status",
            "list pods/status",
            "* * of apps",
        ];
        assert_eq!(
            granted,
            [&expected[..], &["update leases of coordination.k8s.io"]].concat()
        );
        assert!(rbac.granted("system:serviceaccount:team:writer").is_empty());
    }

    #[test]
    fn the_error_names_a_malformed_role() {
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "r"}, "rules": 3});
        assert_eq!(
            Rbac::of(&[role]).unwrap_err().to_string(),
            "Role \"r\" is not what its kind says"
        );
    }
}

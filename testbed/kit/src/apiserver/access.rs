//! Authentication by bearer tokens, the kubeconfig files that carry them, and the record of the access that was used.
//!
//! The server has no authorisation: it allows every request of an authenticated caller. Tests compare the recorded requests of a
//! deployment with its RBAC rules.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};

use super::object;
use super::status::ApiError;
use crate::rbac::{ANONYMOUS, Permission, Rbac, RbacTarget, groups_of};

/// An authenticated caller.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// Name, such as `system:serviceaccount:default:scheduler`.
    pub name: String,
    /// Groups that are set for the token; `all_groups` adds those that follow from the name.
    pub groups: Vec<String>,
    /// Extra attributes of the user, such as the pod that a service-account token was made for.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// The groups of the token, and those that authentication adds by the user's name.
    pub(crate) fn all_groups(&self) -> Vec<String> {
        [self.groups.clone(), groups_of(&self.name)].concat()
    }
}

/// A verb on a resource that a user has used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsedAccess {
    /// Name of the user; `system:anonymous` where tokens are off.
    pub user: String,
    /// RBAC verb: get, list, watch, create, update, patch, delete or deletecollection.
    pub verb: String,
    /// API group; empty for core.
    pub api_group: String,
    /// Plural resource name.
    pub resource: String,
    /// Subresource; empty for the object itself.
    pub subresource: String,
}

/// Tokens and their users. Without any token every request is accepted as `system:anonymous`.
#[derive(Debug)]
pub(crate) struct Tokens(RwLock<HashMap<String, User>>);

impl Tokens {
    pub(crate) fn new(tokens: HashMap<String, User>) -> Self {
        Self(RwLock::new(tokens))
    }

    pub(crate) fn add(&self, token: String, user: User) {
        self.0.write().insert(token, user);
    }

    /// A token of a user; any of them, if there are several.
    pub(crate) fn token_of(&self, user: &str) -> Option<String> {
        let tokens = self.0.read();
        tokens
            .iter()
            .find(|(_, u)| u.name == user)
            .map(|(token, _)| token.clone())
    }

    /// Answers a `TokenReview` by the tokens, and a `SubjectAccessReview` by the roles and their bindings.
    pub(crate) fn review(&self, mut review: Value, roles: &Rbac) -> Value {
        let token = review.pointer("/spec/token").and_then(Value::as_str);
        let status = if let Some(token) = token {
            match self.0.read().get(token) {
                Some(user) => {
                    json!({"authenticated": true, "user": {"username": user.name, "groups": user.all_groups()}})
                }
                None => json!({"authenticated": false, "error": "invalid bearer token"}),
            }
        } else {
            let groups = review.pointer("/spec/groups").and_then(Value::as_array);
            // kube-apiserver lets this group do anything before it looks at any role.
            let is_master = groups.is_some_and(|groups| groups.iter().any(|group| group == "system:masters"));
            json!({"allowed": is_master || is_granted(&review, roles)})
        };
        object::make_object(&mut review).insert("status".to_owned(), status);
        review
    }

    /// The caller behind an Authorization header.
    pub(crate) fn authenticate(&self, header: Option<&str>) -> Result<User, ApiError> {
        let tokens = self.0.read();
        // Tests that are not about access should not need tokens, so authentication begins with the first token.
        if tokens.is_empty() {
            return Ok(User {
                name: ANONYMOUS.to_owned(),
                ..User::default()
            });
        }
        let token = header.and_then(|h| h.strip_prefix("Bearer ")).map(str::trim);
        let user = token.and_then(|t| tokens.get(t)).cloned();
        user.ok_or_else(|| ApiError::new(401, "Unauthorized"))
    }
}

/// Returns true if a role gives the user of a `SubjectAccessReview` what it asks for.
fn is_granted(review: &Value, roles: &Rbac) -> bool {
    let text = |field: &str| review.pointer(field).and_then(Value::as_str).unwrap_or_default();
    let user_name = text("/spec/user");
    if review.pointer("/spec/resourceAttributes").is_none() {
        let path = text("/spec/nonResourceAttributes/path");
        return roles.allows_path(user_name, text("/spec/nonResourceAttributes/verb"), path);
    }
    let access = Permission {
        group: text("/spec/resourceAttributes/group"),
        resource: text("/spec/resourceAttributes/resource"),
        subresource: text("/spec/resourceAttributes/subresource"),
        verb: text("/spec/resourceAttributes/verb"),
    };
    let target = RbacTarget {
        namespace: text("/spec/resourceAttributes/namespace"),
        name: text("/spec/resourceAttributes/name"),
    };
    roles.allows(user_name, access, target)
}

/// The access that requests have used so far, each kind once.
#[derive(Debug, Default)]
pub(crate) struct Audit(Mutex<BTreeSet<UsedAccess>>);

impl Audit {
    pub(crate) fn record(&self, access: UsedAccess) {
        self.0.lock().insert(access);
    }

    pub(crate) fn snapshot(&self) -> BTreeSet<UsedAccess> {
        self.0.lock().clone()
    }
}

/// The text of a kubeconfig file for this server and user.
pub(crate) fn kubeconfig(url: &str, user: &str, token: Option<&str>) -> String {
    let credentials = token.map_or_else(|| json!({}), |token| json!({"token": token}));
    // A service account works in its own namespace, as a pod's does.
    let namespace = user
        .strip_prefix("system:serviceaccount:")
        .and_then(|account| account.split(':').next());
    let namespace = namespace.unwrap_or("default");
    let config: Value = json!({
        "apiVersion": "v1", "kind": "Config", "preferences": {}, "current-context": "testbed",
        "clusters": [{"name": "testbed", "cluster": {"server": url}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user, "namespace": namespace}}],
        "users": [{"name": user, "user": credentials}],
    });
    // JSON is YAML, and every client reads it.
    format!("{config:#}\n")
}

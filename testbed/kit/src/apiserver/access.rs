//! Authentication by bearer tokens, the kubeconfig files that carry them, and the record of the access that was used.
//!
//! The server has no authorisation: it allows every request of an authenticated caller. Tests compare the recorded requests of a
//! deployment with its RBAC rules.

use std::collections::{BTreeMap, HashMap};

use parking_lot::RwLock;
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
#[derive(Debug, Default)]
pub(crate) struct Tokens(RwLock<HashMap<String, User>>);

impl Tokens {
    pub(crate) fn add(&self, token: String, user: User) {
        self.0.write().insert(token, user);
    }

    /// A token of a user; any of them, if there are several.
    pub(crate) fn token_of(&self, user: &str) -> Option<String> {
        let tokens = self.0.read();
        let (token, _) = tokens.iter().find(|(_, found)| found.name == user)?;
        Some(token.clone())
    }

    /// Answers a `TokenReview` by the tokens, and a `SubjectAccessReview` by the roles and their bindings.
    pub(crate) fn review(&self, mut review: Value, roles: &Rbac) -> Value {
        let status = if let Some(token) = review.pointer("/spec/token").and_then(Value::as_str) {
            match self.0.read().get(token) {
                Some(user) => {
                    json!({"authenticated": true, "user": {"username": user.name, "groups": user.all_groups()}})
                }
                None => json!({"authenticated": false, "error": "invalid bearer token"}),
            }
        } else {
            let mut groups = object::array(&review, "/spec/groups").iter();
            // kube-apiserver lets this group do anything before it looks at any role.
            let is_master = groups.any(|group| group == "system:masters");
            json!({"allowed": is_master || is_granted(&review, roles)})
        };
        object::make_object(&mut review).insert("status".to_owned(), status);
        review
    }

    /// The caller behind an Authorization header.
    pub(crate) fn authenticate(&self, header: &str) -> Result<User, ApiError> {
        let tokens = self.0.read();
        // Tests that are not about access should not need tokens, so authentication begins with the first token.
        if tokens.is_empty() {
            return Ok(User {
                name: ANONYMOUS.to_owned(),
                ..User::default()
            });
        }
        let token = header.strip_prefix("Bearer ").unwrap_or_default().trim();
        let user = tokens.get(token).cloned();
        user.ok_or_else(|| ApiError::new(401, "Unauthorized"))
    }
}

/// Returns true if a role gives the user of a `SubjectAccessReview` what it asks for.
fn is_granted(review: &Value, roles: &Rbac) -> bool {
    let text = |pointer: &str| object::text(review, pointer);
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

/// The text of a kubeconfig file for this server and user.
pub(crate) fn kubeconfig(url: &str, user: &str, token: Option<&str>) -> String {
    let credentials = match token {
        Some(token) => json!({"token": token}),
        None => json!({}),
    };
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

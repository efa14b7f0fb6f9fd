//! Who calls, and what callers have used: bearer tokens, and the audit record.
//!
//! Nothing is authorised here. The record exists so that a test can hold the RBAC rules of a deployment against
//! what its programs really do.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError, RwLock};

use super::status::ApiError;

/// An authenticated caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name, such as `system:serviceaccount:default:scheduler`.
    pub name: String,
    /// Groups.
    pub groups: Vec<String>,
}

/// One kind of access that somebody has used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Access {
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

/// Tokens and the users they stand for; without any, everybody may call.
#[derive(Debug)]
pub(crate) struct Tokens(RwLock<HashMap<String, User>>);

impl Tokens {
    pub(crate) fn new(tokens: HashMap<String, User>) -> Self {
        Self(RwLock::new(tokens))
    }

    pub(crate) fn add(&self, token: String, user: User) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(token, user);
    }

    /// Some token of a user.
    pub(crate) fn of(&self, user: &str) -> Option<String> {
        let tokens = self.0.read().unwrap_or_else(PoisonError::into_inner);
        tokens.iter().find(|(_, u)| u.name == user).map(|(token, _)| token.clone())
    }

    /// The caller behind an Authorization header.
    pub(crate) fn authenticate(&self, header: Option<&str>) -> Result<String, ApiError> {
        let tokens = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if tokens.is_empty() {
            return Ok("system:anonymous".to_owned());
        }
        let token = header.and_then(|h| h.strip_prefix("Bearer ")).map(str::trim);
        let user = token.and_then(|t| tokens.get(t)).map(|u| u.name.clone());
        user.ok_or_else(|| ApiError::new(401, "Unauthorized"))
    }
}

/// What has been used so far.
#[derive(Debug)]
pub(crate) struct Audit(Mutex<BTreeSet<Access>>);

impl Audit {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(BTreeSet::new()))
    }

    pub(crate) fn record(&self, access: Access) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(access);
    }

    pub(crate) fn snapshot(&self) -> BTreeSet<Access> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

//! Paths and queries, parsed to the resource, object and verb of a request.

use std::sync::Arc;

use http::Method;
use percent_encoding::percent_decode_str;

use crate::apiserver::api_objects::ApiObjects;
use crate::apiserver::resource::Resource;
use crate::apiserver::status::ApiError;
use crate::apiserver::verbs::{RequestTarget, WrittenPart};

#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    /// Decodes the parameters in the query of a URL.
    pub(super) fn parse(text: &str) -> Self {
        Self(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    /// The value of a query parameter; an empty value counts as none.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(k, v)| k == key && !v.is_empty())
            .map(|(_, v)| v.as_str())
    }

    pub(super) fn all(&self, key: &str) -> Vec<&str> {
        let given = self.0.iter().filter(|(k, _)| k == key);
        given.map(|(_, value)| value.as_str()).collect()
    }

    pub(super) fn is_set(&self, key: &str) -> bool {
        matches!(self.get(key), Some("true" | "1"))
    }

    /// The number in a parameter, or an error that names the parameter.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>, ApiError> {
        let parse = |text: &str| {
            text.parse().map_err(|_| {
                ApiError::bad_request(format!("{key}: Invalid value: {text:?}: must be a number"))
            })
        };
        self.get(key).map(parse).transpose()
    }
}

/// The verb of a request, and the object or collection that it is for.
#[derive(Debug)]
pub(super) struct Route {
    /// RBAC verb.
    pub(super) verb: &'static str,
    pub(super) resource: Arc<Resource>,
    /// `None` for cluster-scoped resources, and for a collection in all namespaces.
    pub(super) namespace: Option<String>,
    /// Empty for collections.
    pub(super) name: String,
    pub(super) subresource: String,
}

impl Route {
    /// Finds the resource, object, subresource and verb that an HTTP method and path stand for.
    pub(super) fn parse(
        objects: &ApiObjects,
        method: &Method,
        path: &str,
        query: &Query,
    ) -> Result<Self, ApiError> {
        let decoded = percent_decode_str(path).decode_utf8_lossy();
        let parts: Vec<&str> = decoded.split('/').collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return Err(ApiError::unknown_path()),
        };
        let (namespace, plural, rest) = match rest {
            // A path below `namespaces/{name}` is usually a collection in that namespace, but `status` and `finalize` are
            // subresources of the Namespace itself.
            ["namespaces", rest @ ..] if matches!(rest, [_, "status" | "finalize"]) => {
                (None, "namespaces", rest)
            }
            ["namespaces", namespace, plural, rest @ ..] => (Some((*namespace).to_owned()), *plural, rest),
            [plural, rest @ ..] => (None, *plural, rest),
            [] => return Err(ApiError::unknown_path()),
        };
        let found = objects.state().registry.find(group, version, plural);
        let resource = found.ok_or_else(ApiError::unknown_path)?;
        let (name, subresource) = match rest {
            [] => (String::new(), String::new()),
            [name] => ((*name).to_owned(), String::new()),
            [name, subresource] => ((*name).to_owned(), (*subresource).to_owned()),
            _ => return Err(ApiError::unknown_path()),
        };
        let route = Self {
            verb: verb(method, &name, query)?,
            resource,
            namespace,
            name,
            subresource,
        };
        route.check()
    }

    /// Refuses a path whose subresource does not exist or whose namespace does not fit the resource's scope.
    fn check(self) -> Result<Self, ApiError> {
        let resource = &self.resource;
        let has_subresource = match self.subresource.as_str() {
            "" => true,
            "status" => resource.status,
            other => resource.actions().contains(&other),
        };
        let fits_scope = if resource.namespaced {
            self.namespace.is_some() || (self.name.is_empty() && matches!(self.verb, "list" | "watch"))
        } else {
            self.namespace.is_none()
        };
        if !has_subresource {
            return Err(ApiError::unknown_path());
        }
        if !fits_scope && self.namespace.is_some() {
            return Err(ApiError::unknown_path());
        }
        if !fits_scope {
            return Err(ApiError::method_not_allowed(&resource.qualified(), self.verb));
        }
        Ok(self)
    }

    /// The object or collection that the route names.
    pub(super) fn target(&self) -> RequestTarget {
        RequestTarget {
            resource: Arc::clone(&self.resource),
            namespace: self.namespace.clone().unwrap_or_default(),
            name: self.name.clone(),
            part: WrittenPart::of(&self.subresource),
        }
    }
}

/// The RBAC verb of an HTTP method on an object, or on a collection if the name is empty.
fn verb(method: &Method, name: &str, query: &Query) -> Result<&'static str, ApiError> {
    let on_collection = name.is_empty();
    match *method {
        Method::GET if query.is_set("watch") => Ok("watch"),
        Method::GET | Method::HEAD if on_collection => Ok("list"),
        Method::GET | Method::HEAD => Ok("get"),
        Method::POST => Ok("create"),
        Method::PUT if !on_collection => Ok("update"),
        Method::PATCH if !on_collection => Ok("patch"),
        Method::DELETE if on_collection => Ok("deletecollection"),
        Method::DELETE => Ok("delete"),
        _ => Err(ApiError::new(
            405,
            "the server does not allow this method on the requested resource",
        )),
    }
}

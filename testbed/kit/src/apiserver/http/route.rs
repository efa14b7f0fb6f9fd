//! Paths and queries, parsed to the resource, object and verb of a request.

use http::Method;
use percent_encoding::percent_decode_str;

use crate::apiserver::api_objects::ApiObjects;
use crate::apiserver::status::ApiError;
use crate::apiserver::verbs::RequestTarget;

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
        let Some(text) = self.get(key) else {
            return Ok(None);
        };
        let why = || format!("{key}: Invalid value: {text:?}: must be a number");
        text.parse().map(Some).map_err(|_| ApiError::bad_request(why()))
    }
}

/// Finds the verb, in RBAC's words, and the object or collection that an HTTP method and path stand for.
pub(super) fn parse_path(
    objects: &ApiObjects,
    method: &Method,
    path: &str,
    query: &Query,
) -> Result<(&'static str, RequestTarget), ApiError> {
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
        ["namespaces", rest @ ..] if matches!(rest, [_, "status" | "finalize"]) => ("", "namespaces", rest),
        ["namespaces", namespace, plural, rest @ ..] => (*namespace, *plural, rest),
        [plural, rest @ ..] => ("", *plural, rest),
        [] => return Err(ApiError::unknown_path()),
    };
    let (name, subresource) = match rest {
        [] => ("", ""),
        [name] => (*name, ""),
        [name, subresource] => (*name, *subresource),
        _ => return Err(ApiError::unknown_path()),
    };
    let found = objects.state().registry.find(group, version, plural);
    let resource = found.ok_or_else(ApiError::unknown_path)?;
    let verb = verb(method, name, query)?;
    let has_subresource = match subresource {
        "" => true,
        "status" => resource.status,
        other => resource.actions().contains(&other),
    };
    if !has_subresource || (!resource.namespaced && !namespace.is_empty()) {
        return Err(ApiError::unknown_path());
    }
    let spans_namespaces = name.is_empty() && matches!(verb, "list" | "watch");
    if resource.namespaced && namespace.is_empty() && !spans_namespaces {
        return Err(ApiError::method_not_allowed(&resource.qualified(), verb));
    }
    let target = RequestTarget {
        resource,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        subresource: subresource.to_owned(),
    };
    Ok((verb, target))
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

//! Requests for one object: get, create, update, patch, delete, and the subresources of pods.

use axum::response::Response;
use serde_json::{Value, json};

use super::Server;
use super::admitted;
use super::request::ApiRequest;
use super::route::Query;
use super::{json_answer, text_answer};
use crate::apiserver::object;
use crate::apiserver::patch::PatchFormat;
use crate::apiserver::status::{ApiError, success};
use crate::rbac::Rbac;

pub(super) fn get(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let version = server.objects.state().current(&request.target)?;
    Ok(request.object_answer(200, &version))
}

/// Answers a `create`, which for some resources is an action: a Binding binds a pod, a review is only answered.
pub(super) async fn create(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let resource = &request.target.resource;
    if !request.target.name.is_empty() {
        return Err(ApiError::method_not_allowed(&resource.qualified(), "create"));
    }
    if resource.is("", "bindings") {
        return bind(server, request).await;
    }
    if resource.is_review() {
        let review = server.tokens.review(request.read_body()?, &roles(server)?);
        return Ok(json_answer(201, &review));
    }
    let created = admitted::create(server, request, request.read_body()?).await?;
    Ok(request.object_answer(201, &created))
}

/// The roles and bindings of the cluster.
fn roles(server: &Server) -> Result<Rbac, ApiError> {
    let mut objects = Vec::new();
    for plural in ["clusterroles", "clusterrolebindings", "roles", "rolebindings"] {
        let listed = server.objects.list(plural, None)?;
        objects.extend(listed.iter().map(|object| Value::clone(object)));
    }
    Rbac::of(&objects).map_err(|error| ApiError::bad_request(error.to_string()))
}

pub(super) async fn update(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let updated = admitted::update(server, request, request.read_body()?).await?;
    Ok(request.object_answer(200, &updated))
}

/// Answers a `patch`; the content type of the request says which kind of patch it is.
pub(super) async fn patch(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let format = PatchFormat::of(&request.content_type, request.target.resource.custom)?;
    let (patched, is_new) = admitted::patch(server, request, format, request.read_body()?).await?;
    Ok(request.object_answer(if is_new { 201 } else { 200 }, &patched))
}

pub(super) async fn delete(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let resource = &request.target.resource;
    let deleted = admitted::delete(server, request, &request.target, &options).await?;
    // The answer for a removed pod is the pod itself, for an object of another kind a Status that has the UID.
    if !deleted.removed || resource.is_pod() {
        return Ok(request.object_answer(200, &deleted.version));
    }
    let details = json!({
        "name": request.target.name, "group": resource.group, "kind": resource.plural,
        "uid": object::text(&deleted.version.value, "/metadata/uid"),
    });
    Ok(json_answer(200, &success(200, Some(details))))
}

/// Binds a pod, by the `binding` subresource of the pod or by a POST to `/namespaces/NS/bindings`.
pub(super) async fn bind(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let body = request.read_body()?;
    admitted::bind(server, request, body).await?;
    Ok(json_answer(201, &success(201, None)))
}

pub(super) async fn evict(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    admitted::evict(server, request, request.read_body()?).await?;
    Ok(json_answer(201, &success(201, None)))
}

/// Answers the `log` subresource of a pod: the log of one container, or its last lines.
pub(super) fn log(server: &Server, request: &ApiRequest) -> Result<Response, ApiError> {
    let pod = server.objects.state().current(&request.target)?;
    let container = choose_container(&request.query, &request.target.name, &pod.value)?;
    // kube-apiserver asks the node's kubelet for the log; a pod without a node has none.
    if object::text(&pod.value, "/spec/nodeName").is_empty() {
        return Ok(text_answer(String::new()));
    }
    let uid = object::text(&pod.value, "/metadata/uid");
    let text = server.objects.log(uid, container);
    let Some(n_lines) = request.query.number("tailLines")? else {
        return Ok(text_answer(text));
    };
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let skipped = lines
        .len()
        .saturating_sub(usize::try_from(n_lines).unwrap_or(usize::MAX));
    Ok(text_answer(lines.into_iter().skip(skipped).collect()))
}

/// The container of a request for a log or a program: the one that the request names, else the only app container.
pub(super) fn choose_container<'a>(
    query: &Query,
    pod_name: &str,
    pod: &'a Value,
) -> Result<&'a str, ApiError> {
    let names: Vec<&str> = ["/spec/containers", "/spec/initContainers"]
        .into_iter()
        .flat_map(|list| object::array(pod, list))
        .map(|c| object::text(c, "/name"))
        .collect();
    match (query.get("container"), names.as_slice()) {
        (Some(asked), _) => names.iter().find(|n| **n == asked).copied().ok_or_else(|| {
            ApiError::bad_request(format!("container {asked} is not valid for pod {pod_name}"))
        }),
        (None, [first, ..]) if object::array(pod, "/spec/containers").len() == 1 => Ok(*first),
        (None, _) => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {pod_name}, choose one of: [{}]",
            names.join(" ")
        ))),
    }
}

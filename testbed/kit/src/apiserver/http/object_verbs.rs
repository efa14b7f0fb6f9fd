//! Requests for one object: get, create, update, patch, delete, and the subresources of pods.

use std::sync::Arc;

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
use crate::apiserver::verbs::RequestTarget;
use crate::rbac::Rbac;

pub(super) fn get(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let version = server.objects.state().current(&request.route.target())?;
    request.object_answer(200, &version)
}

/// Answers a `create`, which for some resources is an action: a Binding binds a pod, a review is only answered.
pub(super) async fn create(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    if !request.route.name.is_empty() {
        return Err(ApiError::method_not_allowed(
            &request.route.resource.qualified(),
            "create",
        ));
    }
    if request.route.resource.is("", "bindings") {
        return bind(server, request).await;
    }
    if request.route.resource.is_review() {
        let review = server.tokens.review(request.read_body()?, &roles(server)?);
        return Ok(json_answer(201, &review));
    }
    // A form of answer that this server does not have is refused (406) before anything is written.
    request.view()?;
    let (target, body, options) = (
        request.route.target(),
        request.read_body()?,
        request.write_options(),
    );
    let written = admitted::create(server, request, &target, body, &options).await?;
    request.object_answer(201, &written.version)
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

pub(super) async fn update(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    // A form of answer that this server does not have is refused (406) before anything is written.
    request.view()?;
    let body = request.read_body()?;
    let written = admitted::update(server, request, body, &request.write_options()).await?;
    request.object_answer(200, &written.version)
}

/// Answers a `patch`; the content type of the request says which kind of patch it is.
pub(super) async fn patch(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    // A form of answer that this server does not have is refused (406) before anything is written.
    request.view()?;
    let format = PatchFormat::of(&request.content_type).ok_or_else(|| {
        ApiError::new(
            415,
            "the body of the request was in an unknown format - accepted media types include: \
             application/json-patch+json, application/merge-patch+json, \
             application/strategic-merge-patch+json, application/apply-patch+yaml",
        )
    })?;
    let (body, options) = (request.read_body()?, request.write_options());
    let written = admitted::patch(server, request, format, body, &options).await?;
    let code = if written.created { 201 } else { 200 };
    request.object_answer(code, &written.version)
}

pub(super) async fn delete(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let resource = &request.route.resource;
    let deleted = admitted::delete(server, request, &request.route.target(), &options).await?;
    // The answer for a removed pod is the pod itself, for an object of another kind a Status that has the UID.
    if !deleted.removed || resource.is_pod() {
        return request.object_answer(200, &deleted.version);
    }
    let details = json!({
        "name": request.route.name, "group": resource.group, "kind": resource.plural,
        "uid": object::text(&deleted.version.value, "/metadata/uid"),
    });
    Ok(json_answer(200, &success(200, Some(details))))
}

/// Binds a pod, by the `binding` subresource of the pod or by a POST to `/namespaces/NS/bindings`.
pub(super) async fn bind(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let body = request.read_body()?;
    let target = pod_target(server, request, &body)?;
    admitted::bind(server, request, &target, body, &request.write_options()).await?;
    Ok(json_answer(201, &success(201, None)))
}

/// The pod to bind. A POST to `/namespaces/NS/bindings` names it in the body, one to `pods/NAME/binding` in the URL.
fn pod_target(server: &Arc<Server>, request: &ApiRequest, body: &Value) -> Result<RequestTarget, ApiError> {
    let mut target = request.route.target();
    if target.name.is_empty() {
        object::text(body, "/metadata/name").clone_into(&mut target.name);
        target.resource = server.objects.resource("pods")?;
    }
    Ok(target)
}

pub(super) async fn evict(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    admitted::evict(server, request, request.read_body()?, &request.write_options()).await?;
    Ok(json_answer(201, &success(201, None)))
}

/// Answers the `log` subresource of a pod: the log of one container, or its last lines.
pub(super) fn log(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let target = request.route.target();
    let pod = server.objects.state().current(&target)?;
    let container = choose_container(&request.query, &request.route.name, &pod.value)?;
    // kube-apiserver asks the node's kubelet for the log; a pod without a node has none.
    if object::text(&pod.value, "/spec/nodeName").is_empty() {
        return Ok(text_answer(String::new()));
    }
    let uid = object::text(&pod.value, "/metadata/uid");
    let text = server.objects.logs().read(&target.key(), uid, container);
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

//! Requests for one object: get, create, update, patch, delete, and the pods' own subresources.

use std::sync::Arc;

use axum::response::Response;
use chrono::Utc;
use serde_json::{Value, json};

use super::admitted::AdmittedWrite;
use super::{ApiRequest, Server};
use super::{bytes_answer, json_answer, text_answer, warned};
use crate::apiserver::object;
use crate::apiserver::patch::Format;
use crate::apiserver::render::{self, View};
use crate::apiserver::resource::Resource;
use crate::apiserver::status::{ApiError, success};
use crate::apiserver::store::Version;
use crate::apiserver::verbs::delete::DeleteOptions;
use crate::apiserver::verbs::{Target, WriteOptions};

impl ApiRequest {
    /// The view the client prefers.
    pub(super) fn view(&self) -> Result<View, ApiError> {
        View::negotiate(&self.accept, self.query.get("includeObject")).ok_or_else(|| {
            ApiError::new(
                406,
                "only the following media types are accepted: application/json",
            )
        })
    }

    fn write_options(&self) -> WriteOptions {
        let agent = self.user_agent.split('/').next().unwrap_or_default();
        let default = if self.content_type.starts_with("application/apply-patch") {
            ""
        } else {
            agent
        };
        WriteOptions {
            dry_run: self.query.get("dryRun") == Some("All"),
            manager: self.query.get("fieldManager").unwrap_or(default).to_owned(),
            force: self.query.is_set("force"),
            now: Utc::now(),
        }
    }

    fn one(&self, code: u16, resource: &Resource, version: &Version) -> Result<Response, ApiError> {
        Ok(bytes_answer(code, render::one(self.view()?, resource, version)))
    }

    /// The options of a deletion: from the body, and from the query where the body says nothing.
    pub(super) fn delete_options(&self) -> Result<DeleteOptions, ApiError> {
        let body = if self.body.is_empty() {
            Value::Null
        } else {
            self.read_body()?
        };
        let mut options = DeleteOptions::read(&body, Utc::now());
        if let Some(text) = self.query.get("gracePeriodSeconds") {
            let parsed = text
                .parse()
                .map_err(|_| ApiError::bad_request("gracePeriodSeconds must be an integer"))?;
            options.grace = options.grace.or(Some(parsed));
        }
        options.dry_run |= self.query.get("dryRun") == Some("All");
        Ok(options)
    }
}

pub(super) fn get(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let version = server.objects.state().current(&request.route.target())?;
    request.one(200, &request.route.resource, &version)
}

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
        return Ok(json_answer(201, &server.tokens.review(request.read_body()?)));
    }
    request.view()?;
    let options = WriteOptions {
        force: false,
        ..request.write_options()
    };
    let AdmittedWrite { done, warnings } = server.create(request, request.read_body()?, &options).await?;
    Ok(warned(
        request.one(201, &request.route.resource, &done.version)?,
        &warnings,
    ))
}

pub(super) async fn update(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    request.view()?;
    let body = request.read_body()?;
    let AdmittedWrite { done, warnings } = server.update(request, body, &request.write_options()).await?;
    Ok(warned(
        request.one(200, &request.route.resource, &done.version)?,
        &warnings,
    ))
}

pub(super) async fn patch(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    request.view()?;
    let format = Format::of(&request.content_type).ok_or_else(|| {
        ApiError::new(
            415,
            "the body of the request was in an unknown format - accepted media types include: \
             application/json-patch+json, application/merge-patch+json, \
             application/strategic-merge-patch+json, application/apply-patch+yaml",
        )
    })?;
    let AdmittedWrite { done, warnings } = server
        .patch(request, format, request.read_body()?, &request.write_options())
        .await?;
    let code = if done.created { 201 } else { 200 };
    Ok(warned(
        request.one(code, &request.route.resource, &done.version)?,
        &warnings,
    ))
}

pub(super) async fn delete(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let options = request.delete_options()?;
    let resource = &request.route.resource;
    let AdmittedWrite {
        done: deleted,
        warnings,
    } = server.delete(request, &options).await?;
    if !deleted.removed || resource.is_pod() {
        return Ok(warned(request.one(200, resource, &deleted.version)?, &warnings));
    }
    let details = json!({
        "name": request.route.name, "group": resource.group, "kind": resource.plural,
        "uid": object::text(&deleted.version.value, "/metadata/uid"),
    });
    Ok(warned(json_answer(200, &success(200, Some(details))), &warnings))
}

pub(super) async fn bind(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let body = request.read_body()?;
    let target = pod_target(server, request, &body)?;
    let passed = server
        .bind(request, &target, body, &request.write_options())
        .await?;
    Ok(warned(json_answer(201, &success(201, None)), &passed.warnings))
}

/// The pod of a binding; `POST bindings` names it in the body only.
fn pod_target(server: &Arc<Server>, request: &ApiRequest, body: &Value) -> Result<Target, ApiError> {
    let mut target = request.route.target();
    if target.name.is_empty() {
        object::text(body, "/metadata/name").clone_into(&mut target.name);
        target.resource = server.objects.resource("pods")?;
    }
    Ok(target)
}

pub(super) async fn evict(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let passed = server
        .evict(request, request.read_body()?, &request.write_options())
        .await?;
    Ok(warned(json_answer(201, &success(201, None)), &passed.warnings))
}

pub(super) fn log(server: &Arc<Server>, request: &ApiRequest) -> Result<Response, ApiError> {
    let target = request.route.target();
    let pod = server.objects.state().current(&target)?;
    let names: Vec<&str> = ["/spec/containers", "/spec/initContainers"]
        .into_iter()
        .flat_map(|list| object::array(&pod.value, list))
        .map(|c| object::text(c, "/name"))
        .collect();
    let container = choose_container(request, &pod.value, &names)?;
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

fn choose_container<'a>(request: &ApiRequest, pod: &Value, names: &[&'a str]) -> Result<&'a str, ApiError> {
    let pod_name = &request.route.name;
    match (request.query.get("container"), names) {
        (Some(asked), _) => names.iter().find(|n| **n == asked).copied().ok_or_else(|| {
            ApiError::bad_request(format!("container {asked} is not valid for pod {pod_name}"))
        }),
        (None, [only]) => Ok(*only),
        (None, [first, ..]) if object::array(pod, "/spec/containers").len() == 1 => Ok(*first),
        (None, _) => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {pod_name}, choose one of: [{}]",
            names.join(" ")
        ))),
    }
}

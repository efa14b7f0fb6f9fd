//! A request for a resource, and the options in its query and body.

use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::DeleteOptions;
use serde_json::Value;

use super::route::Query;
use super::{header_text, json_bytes_answer, parse_body};
use crate::apiserver::access::User;
use crate::apiserver::object;
use crate::apiserver::read::ListQuery;
use crate::apiserver::render::{self, View};
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::verbs::RequestTarget;
use crate::apiserver::verbs::delete::read_options;

/// The largest request body, 3 MiB as in kube-apiserver (`MaxRequestBodyBytes`).
const MAX_BODY: usize = 3 * 1024 * 1024;

/// A request for a resource, with its body read.
#[derive(Debug)]
pub(super) struct ApiRequest {
    /// RBAC verb.
    pub(super) verb: &'static str,
    pub(super) target: RequestTarget,
    pub(super) query: Query,
    pub(super) content_type: String,
    /// The representation that the client accepts: object, metadata or table.
    pub(super) view: View,
    body: Bytes,
    pub(super) user: User,
}

impl ApiRequest {
    /// Reads the body of a request whose path and user are known.
    pub(super) async fn read(
        request: Request,
        (verb, target): (&'static str, RequestTarget),
        query: Query,
        user: User,
    ) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let content_type = header_text(&head.headers, CONTENT_TYPE)
            .split(';')
            .next()
            .unwrap_or_default();
        // Refused before anything is written.
        let why = "only the following media types are accepted: application/json";
        let view = View::negotiate(header_text(&head.headers, ACCEPT));
        let view = view.ok_or_else(|| ApiError::new(406, why))?;
        let body = Limited::new(body, MAX_BODY).collect().await.map_err(|error| {
            if error.downcast_ref::<LengthLimitError>().is_some() {
                ApiError::new(413, format!("Request entity too large: limit is {MAX_BODY}"))
            } else {
                ApiError::bad_request(format!("cannot read the request body: {error}"))
            }
        })?;
        Ok(Self {
            verb,
            target,
            query,
            content_type: content_type.trim().to_owned(),
            view,
            body: body.to_bytes(),
            user,
        })
    }

    /// The name that faults are matched with: the name in the path or, for a creation, in the body.
    pub(super) fn fault_name(&self) -> String {
        if !self.target.name.is_empty() || self.verb != "create" {
            return self.target.name.clone();
        }
        let body = self.read_body().unwrap_or_default();
        object::text(&body, "/metadata/name").to_owned()
    }

    pub(super) fn read_body(&self) -> Result<Value, ApiError> {
        parse_body(&self.content_type, &self.body)
    }

    pub(super) fn selectors(&self) -> Result<Selectors, ApiError> {
        let text = |key| self.query.get(key).unwrap_or_default();
        let selectors = Selectors::parse(text("labelSelector"), text("fieldSelector"))?;
        // A watch on the path of one object is a watch on the collection with a field selector.
        Ok(match self.target.name.as_str() {
            "" => selectors,
            name => selectors.named(name),
        })
    }

    /// The parameters of a list. Every list shows the newest objects, whatever `resourceVersionMatch` says.
    pub(super) fn list_query(&self) -> Result<ListQuery, ApiError> {
        let limit = self.query.number("limit")?;
        Ok(ListQuery {
            namespace: self.target.namespace.clone(),
            selectors: self.selectors()?,
            limit: limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX)),
            token: self.query.get("continue").map(str::to_owned),
            revision: self.query.number("resourceVersion")?,
        })
    }

    /// True if the query asks for a dry run.
    pub(super) fn dry_run(&self) -> bool {
        self.query.get("dryRun") == Some("All")
    }

    /// Answers with an object in the form that the client accepts: as it is, as metadata only, or as a table.
    pub(super) fn object_answer(&self, code: u16, version: &ObjectVersion) -> Response {
        let body = render::render_object(self.view, &self.target.resource, version);
        json_bytes_answer(code, body)
    }

    /// The options of a deletion: from the body, and from the query where the body says nothing.
    pub(super) fn delete_options(&self) -> Result<DeleteOptions, ApiError> {
        let body = if self.body.is_empty() {
            Value::Null
        } else {
            self.read_body()?
        };
        let mut options = read_options(&body)?;
        if let Some(text) = self.query.get("gracePeriodSeconds") {
            let parsed = text
                .parse()
                .map_err(|_| ApiError::bad_request("gracePeriodSeconds must be an integer"))?;
            // Options in the body win over those in the query.
            options.grace_period_seconds.get_or_insert(parsed);
        }
        if self.dry_run() {
            options.dry_run = Some(vec!["All".to_owned()]);
        }
        Ok(options)
    }
}

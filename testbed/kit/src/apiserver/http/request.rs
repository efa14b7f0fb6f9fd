//! A request for a resource, and the options in its query and body.

use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use chrono::Utc;
use http::header::{ACCEPT, CONTENT_TYPE};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use super::route::{Query, Route};
use super::{json_bytes_answer, parse_body};
use crate::apiserver::access::User;
use crate::apiserver::object;
use crate::apiserver::read::ListQuery;
use crate::apiserver::render::{self, View};
use crate::apiserver::selector::Selectors;
use crate::apiserver::status::ApiError;
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::verbs::WriteOptions;
use crate::apiserver::verbs::delete::DeleteOptions;

/// The largest request body, 3 MiB as in kube-apiserver (`MaxRequestBodyBytes`).
const MAX_BODY: usize = 3 * 1024 * 1024;

/// A request for a resource, with its body read.
#[derive(Debug)]
pub(super) struct ApiRequest {
    pub(super) route: Route,
    pub(super) query: Query,
    pub(super) content_type: String,
    accept: String,
    pub(super) body: Bytes,
    pub(super) user: User,
}

impl ApiRequest {
    /// Reads the body of a request whose path and user are known.
    pub(super) async fn read(
        request: Request,
        route: Route,
        query: Query,
        user: User,
    ) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let header = |name| {
            head.headers
                .get(name)
                .and_then(|h| h.to_str().ok())
                .unwrap_or_default()
                .to_owned()
        };
        let content_type = header(CONTENT_TYPE)
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned();
        let accept = header(ACCEPT);
        let body = Limited::new(body, MAX_BODY).collect().await.map_err(|error| {
            if error.downcast_ref::<LengthLimitError>().is_some() {
                ApiError::new(413, format!("Request entity too large: limit is {MAX_BODY}"))
            } else {
                ApiError::bad_request(format!("cannot read the request body: {error}"))
            }
        })?;
        Ok(Self {
            route,
            query,
            content_type,
            accept,
            body: body.to_bytes(),
            user,
        })
    }

    /// The name that faults are matched with: the name in the path or, for a creation, in the body.
    pub(super) fn fault_name(&self) -> String {
        if !self.route.name.is_empty() || self.route.verb != "create" {
            return self.route.name.clone();
        }
        self.read_body()
            .map(|body| object::text(&body, "/metadata/name").to_owned())
            .unwrap_or_default()
    }

    pub(super) fn read_body(&self) -> Result<Value, ApiError> {
        parse_body(&self.content_type, &self.body)
    }

    pub(super) fn selectors(&self) -> Result<Selectors, ApiError> {
        let text = |key| self.query.get(key).unwrap_or_default();
        let selectors = Selectors::parse(text("labelSelector"), text("fieldSelector"))?;
        // A watch on the path of one object is a watch on the collection with a field selector.
        Ok(match self.route.name.as_str() {
            "" => selectors,
            name => selectors.named(name),
        })
    }

    /// The parameters of a list. Every list shows the newest objects, whatever `resourceVersionMatch` says.
    pub(super) fn list_query(&self) -> Result<ListQuery, ApiError> {
        let limit = self
            .query
            .number("limit")?
            .map(|l| usize::try_from(l).unwrap_or(usize::MAX));
        Ok(ListQuery {
            namespace: self.route.namespace.clone(),
            selectors: self.selectors()?,
            limit,
            token: self.query.get("continue").map(str::to_owned),
            revision: self.query.number("resourceVersion")?,
        })
    }

    /// The representation that the client accepts: object, metadata or table.
    pub(super) fn view(&self) -> Result<View, ApiError> {
        View::negotiate(&self.accept, self.query.get("includeObject")).ok_or_else(|| {
            ApiError::new(
                406,
                "only the following media types are accepted: application/json",
            )
        })
    }

    /// The options of a write, from the query and the headers.
    pub(super) fn write_options(&self) -> WriteOptions {
        WriteOptions {
            dry_run: self.query.get("dryRun") == Some("All"),
            manager: self.query.get("fieldManager").unwrap_or_default().to_owned(),
            is_apply: false,
            now: Utc::now(),
        }
    }

    /// Answers with an object in the form that the client accepts: as it is, as metadata only, or as a table.
    pub(super) fn object_answer(&self, code: u16, version: &ObjectVersion) -> Result<Response, ApiError> {
        let body = render::render_object(self.view()?, &self.route.resource, version);
        Ok(json_bytes_answer(code, body))
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
            // Options in the body win over those in the query.
            options.grace = options.grace.or(Some(parsed));
        }
        options.dry_run |= self.query.get("dryRun") == Some("All");
        Ok(options)
    }
}

//! The webhooks' HTTP routes: reads `AdmissionReview`s, asks [`crate::admission`], answers.
//!
//! On an address of their own: the API server shows webhooks no certificate, while filter, prioritize and bind may demand
//! one. Here are no verbs, so nobody who gets in here can bind a pod. Decides nothing itself.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use proto::admission::{API_VERSION, AdmissionAnswer, AdmissionQuestion, KIND};
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use crate::admission::{Rules, Unreadable, Verdict};
use crate::bind::shorten;
use crate::index::{Index, Shared};

/// Largest review: the API server takes objects of 3 MiB, and a change holds the old one and the new one.
const MAX_BODY: usize = 7 << 20;
/// Most reviews in work at one time, so that they cannot fill the memory.
const CONCURRENCY: usize = 32;
/// Longest time in which a review must have come in: the API server itself waits no longer.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Everything that reviews are answered with.
#[derive(Debug)]
pub struct Webhooks {
    rules: Rules,
    index: Shared<Index>,
    reviews: Family<ReviewLabels, Counter>,
    working: Semaphore,
}

/// Which webhook is asked.
#[derive(Clone, Copy, Debug)]
enum Webhook {
    Mutate,
    Validate,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    webhook: &'static str,
    verdict: &'static str,
}

/// A review that is not answered; what becomes of the request then, the webhook's configuration says.
#[derive(Debug, thiserror::Error)]
enum ReviewFailure {
    #[error("not an {KIND} of {API_VERSION}: {0}")]
    Malformed(String),
    #[error("{0:#}")]
    Unreadable(anyhow::Error),
    #[error("the review is larger than {MAX_BODY} bytes")]
    TooLarge,
    #[error("the review did not arrive: {0}")]
    Broken(String),
}

impl IntoResponse for ReviewFailure {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Malformed(_) | Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken(_) => StatusCode::REQUEST_TIMEOUT,
        };
        warn!(status = status.as_u16(), error = %self, "review not answered");
        (status, format!("{self}\n")).into_response()
    }
}

impl From<Unreadable> for ReviewFailure {
    fn from(error: Unreadable) -> Self {
        Self::Unreadable(error.into())
    }
}

impl Webhooks {
    /// Judges by `rules`; `index` knows which pods ask for our resources.
    pub fn new(rules: Rules, index: Shared<Index>, registry: &mut Registry) -> Self {
        let reviews = Family::default();
        registry.register("admission_reviews", "Reviews by webhook and verdict", reviews.clone());
        Self { rules, index, reviews, working: Semaphore::new(CONCURRENCY) }
    }

    async fn review(&self, webhook: Webhook, request: Request<Body>) -> Response {
        let _permit = self.working.acquire().await;
        let judged = match receive(request).await {
            Ok(body) => self.judge(webhook, &body),
            Err(failure) => Err(failure),
        };
        let (verdict, response) = match judged {
            Ok((verdict, answer)) => (verdict, answer_with(&answer)),
            Err(failure) => ("malformed", failure.into_response()),
        };
        self.reviews.get_or_create(&ReviewLabels { webhook: webhook.label(), verdict }).inc();
        response
    }

    fn judge(&self, webhook: Webhook, body: &[u8]) -> Result<(&'static str, AdmissionAnswer), ReviewFailure> {
        let malformed = |error: &str| ReviewFailure::Malformed(shorten(error));
        let question: AdmissionQuestion = serde_json::from_slice(body).map_err(|error| malformed(&error.to_string()))?;
        if (question.api_version.as_str(), question.kind.as_str()) != (API_VERSION, KIND) {
            return Err(malformed(&format!("it is a {} of {}", question.kind, question.api_version)));
        }
        let request = question.request;
        let verdict = match webhook {
            Webhook::Mutate => self.rules.mutate(&request)?,
            Webhook::Validate => self.rules.validate(&request, &self.index)?,
        };
        let label = label(&verdict);
        let (namespace, name) = (&request.namespace, &request.name);
        debug!(webhook = webhook.label(), namespace, name, user = request.user_info.username, verdict = label, "reviewed");
        Ok((label, AdmissionAnswer::new(verdict.response(request.uid))))
    }
}

impl Webhook {
    const fn label(self) -> &'static str {
        match self {
            Self::Mutate => "mutate",
            Self::Validate => "validate",
        }
    }
}

fn label(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Refused(_) => "refused",
        Verdict::Allowed { patch, .. } if patch.is_empty() => "allowed",
        Verdict::Allowed { .. } => "patched",
    }
}

async fn receive(request: Request<Body>) -> Result<Bytes, ReviewFailure> {
    match tokio::time::timeout(READ_TIMEOUT, Limited::new(request.into_body(), MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ReviewFailure::TooLarge),
        Ok(Err(error)) => Err(ReviewFailure::Broken(error.to_string())),
        Err(_) => Err(ReviewFailure::Broken(format!("it took longer than {READ_TIMEOUT:?}"))),
    }
}

fn answer_with(answer: &AdmissionAnswer) -> Response {
    match serde_json::to_vec(answer) {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// The two routes, under the configured prefix.
pub fn router(webhooks: Arc<Webhooks>, prefix: &str) -> Router {
    Router::new()
        .route(&format!("{prefix}/webhook/mutate"), post(mutate))
        .route(&format!("{prefix}/webhook/validate"), post(validate))
        .with_state(webhooks)
}

async fn mutate(State(webhooks): State<Arc<Webhooks>>, request: Request<Body>) -> Response {
    webhooks.review(Webhook::Mutate, request).await
}

async fn validate(State(webhooks): State<Arc<Webhooks>>, request: Request<Body>) -> Response {
    webhooks.review(Webhook::Validate, request).await
}

#[cfg(test)]
mod tests;

//! The webhooks' HTTP routes: reads `AdmissionReview`s, has [`Rules`] decide, answers.
//!
//! The webhooks have an address of their own, which serves no verb of the extender: the API server shows webhooks no client
//! certificate unless it is configured to, while filter, prioritize and bind demand one of kube-scheduler's authority.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use proto::admission::{API_VERSION, AdmissionRequest, AdmissionReview, AdmissionReviewReply, KIND};
use tokio::sync::{Semaphore, SemaphorePermit};
use tracing::{debug, warn};

use crate::api_server::shorten;
use crate::index::{Index, Shared};
use daemon::http_server::ClientCertificate;
use daemon::log_limit::LogLimit;

use super::{Rules, Unreadable, Verdict};

/// Largest review, in bytes: the API server accepts objects of 3 MiB, and the review of an update has two.
const MAX_REVIEW: usize = 7 << 20;
/// Most reviews that are decided at one time. A review counts from the end of its body, so slow clients hold up no other review.
const MAX_DECIDING: usize = 32;
/// Bytes of a body that every request may have in memory at any time: ten times a usual pod.
const SMALL_BODY: usize = 64 << 10;
/// Most bodies longer than [`SMALL_BODY`] in memory at one time: together they stay below 56 MiB.
const MAX_LARGE_BODIES: usize = 8;
/// Longest time for a review to arrive. The API server does not wait longer for the answer (`timeoutSeconds`, as shipped).
const READ_TIMEOUT: Duration = Duration::from_secs(2);

static NOT_ANSWERED: LogLimit = LogLimit::new();

/// The two webhooks, and the limits of their requests.
#[derive(Debug)]
pub struct Webhooks {
    rules: Rules,
    index: Shared<Index>,
    /// Metric: the number of reviews, by webhook and verdict.
    reviews: Family<[(&'static str, &'static str); 2], Counter>,
    /// A permit for each review that may be decided now.
    deciding: Semaphore,
    /// A permit for each body longer than [`SMALL_BODY`] that may be in memory now.
    large_bodies: Semaphore,
    /// True if only clients with a certificate of the configured authorities are answered.
    demands_certificate: bool,
}

type Decide = fn(&Webhooks, &AdmissionRequest) -> Result<Verdict, Unreadable>;

/// The reason for which a review is not answered. The `failurePolicy` of the webhook's configuration then decides.
#[derive(Debug, thiserror::Error)]
enum ReviewFailure {
    #[error("not an {KIND} of {API_VERSION}: {0}")]
    Malformed(String),
    #[error("{0:#}")]
    Unreadable(anyhow::Error),
    #[error("the review is larger than {MAX_REVIEW} bytes")]
    TooLarge,
    #[error("the review did not arrive: {0}")]
    Broken(String),
    #[error(
        "the client showed no certificate that --webhook-client-ca-file signed; name one for this webhook in the API server's \
         --admission-control-config-file"
    )]
    NoCertificate,
}

impl IntoResponse for ReviewFailure {
    fn into_response(self) -> Response {
        // Any status but 200 is a failure to the API server; the code is for people who read logs.
        let status = match self {
            Self::Malformed(_) | Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken(_) => StatusCode::REQUEST_TIMEOUT,
            Self::NoCertificate => StatusCode::FORBIDDEN,
        };
        if let Some(left_out) = NOT_ANSWERED.next_line() {
            warn!(status = status.as_u16(), error = %self, left_out, "review not answered");
        }
        (status, format!("{self}\n")).into_response()
    }
}

impl From<Unreadable> for ReviewFailure {
    fn from(error: Unreadable) -> Self {
        Self::Unreadable(error.into())
    }
}

impl Webhooks {
    /// Webhooks that answer by `rules`, with the pods of `index`; registers their metric. With `demands_certificate` they answer
    /// only clients with a certificate of the configured authorities.
    pub fn new(
        rules: Rules,
        index: Shared<Index>,
        demands_certificate: bool,
        registry: &mut Registry,
    ) -> Self {
        let reviews = Family::default();
        registry.register(
            "admission_reviews",
            "Reviews by webhook and verdict",
            reviews.clone(),
        );
        // Two limits: many small reviews must not wait for few large ones.
        let (deciding, large_bodies) = (Semaphore::new(MAX_DECIDING), Semaphore::new(MAX_LARGE_BODIES));
        Self {
            rules,
            index,
            reviews,
            deciding,
            large_bodies,
            demands_certificate,
        }
    }

    /// Answers one admission review for the webhook with this label in metrics.
    async fn review(&self, webhook: &'static str, decide: Decide, request: Request<Body>) -> Response {
        let decision = match self.receive(request).await {
            // The permit of a large body lives until the review is decided.
            Ok((body, _body_permit)) => {
                let _deciding = self.deciding.acquire().await;
                self.decide(webhook, decide, &body)
            }
            Err(failure) => Err(failure),
        };
        let (verdict, response) = match decision {
            Ok((verdict, answer)) => {
                // Structs of texts and numbers always serialize.
                let json = serde_json::to_vec(&answer).unwrap_or_default();
                let content_type = [(header::CONTENT_TYPE, "application/json")];
                (verdict, (content_type, json).into_response())
            }
            // The metric has one verdict for every review that is not answered.
            Err(failure) => ("malformed", failure.into_response()),
        };
        let labels = [("webhook", webhook), ("verdict", verdict)];
        self.reviews.get_or_create(&labels).inc();
        response
    }

    /// Reads the body of a request in time. A large body comes with the permit that it needs while it is in memory.
    async fn receive(
        &self,
        request: Request<Body>,
    ) -> Result<(Vec<u8>, Option<SemaphorePermit<'_>>), ReviewFailure> {
        // Checked before the body is read: the body of a client without a certificate costs nothing.
        if self.demands_certificate && request.extensions().get::<ClientCertificate>().is_none() {
            return Err(ReviewFailure::NoCertificate);
        }
        match tokio::time::timeout(READ_TIMEOUT, self.collect(request.into_body())).await {
            Ok(received) => received,
            Err(_) => Err(ReviewFailure::Broken(format!(
                "it took longer than {READ_TIMEOUT:?}"
            ))),
        }
    }

    /// Receives the body of a review. A body above `SMALL_BODY` waits for a permit, which limits the memory of large bodies in
    /// all; the permit is held until the caller drops it.
    async fn collect(&self, body: Body) -> Result<(Vec<u8>, Option<SemaphorePermit<'_>>), ReviewFailure> {
        let mut body = Limited::new(body, MAX_REVIEW);
        let (mut bytes, mut permit) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let frame = match frame {
                Ok(frame) => frame,
                Err(error) if error.is::<LengthLimitError>() => return Err(ReviewFailure::TooLarge),
                Err(error) => return Err(ReviewFailure::Broken(error.to_string())),
            };
            // A frame without data has trailers.
            let Ok(data) = frame.into_data() else { continue };
            if permit.is_none() && bytes.len() + data.len() > SMALL_BODY {
                permit = self.large_bodies.acquire().await.ok();
            }
            bytes.extend_from_slice(&data);
        }
        Ok((bytes, permit))
    }

    /// Decides a review; returns the verdict's label for the metric, and the answer.
    fn decide(
        &self,
        webhook: &'static str,
        decide: Decide,
        body: &[u8],
    ) -> Result<(&'static str, AdmissionReviewReply), ReviewFailure> {
        let malformed = |error: &str| ReviewFailure::Malformed(shorten(error));
        let AdmissionReview {
            api_version,
            kind,
            request,
        } = serde_json::from_slice(body).map_err(|error| malformed(&error.to_string()))?;
        // v1beta1 had other fields; no API server that is supported sends it.
        if (api_version.as_str(), kind.as_str()) != (API_VERSION, KIND) {
            return Err(malformed(&format!("it is a {kind} of {api_version}")));
        }
        let verdict = decide(self, &request)?;
        let label = verdict_label(&verdict);
        let (namespace, name) = (&request.namespace, &request.name);
        // At debug level: a busy cluster reviews thousands of pods a minute.
        debug!(
            webhook,
            namespace,
            name,
            user = request.user_info.username,
            verdict = label,
            "reviewed"
        );
        Ok((label, AdmissionReviewReply::new(verdict.response(request.uid))))
    }
}

/// The label of a verdict in the metric of reviews.
fn verdict_label(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Refused(_) => "refused",
        Verdict::Allowed { patch, .. } if patch.is_empty() => "allowed",
        Verdict::Allowed { .. } => "patched",
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
    let decide: Decide = |webhooks, request| webhooks.rules.mutate(request);
    webhooks.review("mutate", decide, request).await
}

async fn validate(State(webhooks): State<Arc<Webhooks>>, request: Request<Body>) -> Response {
    let decide: Decide = |webhooks, request| webhooks.rules.validate(request, &webhooks.index);
    webhooks.review("validate", decide, request).await
}

#[cfg(test)]
mod tests;

//! Access to the views: for clients with a certificate of the configured authorities, and for those with a bearer token
//! of a user to whom the cluster's RBAC gives `get` on the views' path.
//!
//! The API server answers both questions (`TokenReview`, `SubjectAccessReview`); the answers are kept for a few seconds, and
//! no more of them than a fixed number. Knows no view.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, Request, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::Extender;
use crate::metrics::{Ending, Verb};
use crate::serve::ClientCertificate;

/// The time for which an answer of the API server counts; a right that was taken away may still be used for as long.
const TTL: Duration = Duration::from_secs(10);
/// Most answers that are kept.
const MOST_KNOWN: usize = 256;
/// Longest token, in bytes: those of service accounts have about 1 KiB.
const MAX_TOKEN: usize = 8 << 10;
/// Most tokens that the API server is asked about at one time.
const ASKING: usize = 4;
/// Longest time that a client waits for the API server's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Decides who may read the views.
pub(super) struct Access {
    /// True if clients have to authenticate themselves.
    demands: bool,
    /// The path that the right to read is given for; one right for all views.
    path: String,
    /// Asks the API server about tokens; without one only certificates count.
    client: Option<Client>,
    /// The answers of the API server about tokens, and the times at which they came.
    known: Mutex<HashMap<Box<str>, (Instant, Verdict)>>,
    asking: Semaphore,
}

/// An answer of the API server about a token.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// The token belongs to no user.
    Unknown,
    /// The user may not read the views.
    Forbidden(Arc<str>),
}

/// The reason for which a client may not read the views.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    /// It shows neither a certificate nor a token.
    #[error(
        "views demand a client certificate of the configured authorities, or a bearer token of a user who may get {path}"
    )]
    NoCredentials {
        /// The path that the right is given for.
        path: String,
    },
    /// The API server does not know the token.
    #[error("the API server does not know this bearer token, or it has expired")]
    UnknownToken,
    /// The API server knows the user.
    #[error(
        "user {user:?} may not get {path}; give a ClusterRole with nonResourceURLs [{path:?}] and the verb get"
    )]
    Forbidden {
        /// The user that the token belongs to.
        user: Arc<str>,
        /// The path that the right is given for.
        path: String,
    },
    /// The API server does not say.
    #[error("the API server does not say whether this bearer token may read: {reason}")]
    Unanswered {
        /// The failure of the review.
        reason: String,
    },
}

impl Denied {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoCredentials { .. } | Self::UnknownToken => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::Unanswered { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        tracing::debug!(status = self.status().as_u16(), error = %self, "view refused");
        let mut response = (self.status(), format!("{self}\n")).into_response();
        if self.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(
                header::WWW_AUTHENTICATE,
                header::HeaderValue::from_static("Bearer"),
            );
        }
        response
    }
}

impl fmt::Debug for Access {
    /// Shows no token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("demands", &self.demands)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl Access {
    /// Demands nothing, or certificates alone, for views under this prefix.
    pub(super) fn new(demands: bool, prefix: &str) -> Self {
        let (known, asking) = (Mutex::default(), Semaphore::new(ASKING));
        Self {
            demands,
            path: format!("{prefix}/inspect"),
            client: None,
            known,
            asking,
        }
    }

    /// The same, with an API server to ask about tokens.
    pub(super) fn asking(self, client: Client) -> Self {
        Self {
            client: Some(client),
            ..self
        }
    }

    /// Checks that a client may read the views.
    async fn check(&self, has_certificate: bool, headers: &HeaderMap) -> Result<(), Denied> {
        if !self.demands || has_certificate {
            return Ok(());
        }
        let (Some(token), Some(client)) = (bearer(headers), self.client.as_ref()) else {
            return Err(Denied::NoCredentials {
                path: self.path.clone(),
            });
        };
        let verdict = match self.recall(token) {
            Some(verdict) => verdict,
            None => self.ask(client, token).await?,
        };
        match verdict {
            Verdict::Allowed => Ok(()),
            Verdict::Unknown => Err(Denied::UnknownToken),
            Verdict::Forbidden(user) => Err(Denied::Forbidden {
                user,
                path: self.path.clone(),
            }),
        }
    }

    async fn ask(&self, client: &Client, token: &str) -> Result<Verdict, Denied> {
        let answer = async {
            let _permit = self.asking.acquire().await;
            // Another request with the same token may have asked meanwhile.
            if let Some(verdict) = self.recall(token) {
                return Ok(verdict);
            }
            let verdict = self.review(client, token).await?;
            self.keep(token, verdict.clone());
            Ok(verdict)
        };
        let unanswered = |reason: String| Denied::Unanswered { reason };
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(verdict) => verdict.map_err(|error: kube::Error| unanswered(error.to_string())),
            Err(_) => Err(unanswered(format!("it took longer than {ANSWER_TIMEOUT:?}"))),
        }
    }

    async fn review(&self, client: &Client, token: &str) -> Result<Verdict, kube::Error> {
        let spec = TokenReviewSpec {
            token: token.to_owned(),
            ..TokenReviewSpec::default()
        };
        let review = TokenReview {
            metadata: ObjectMeta::default(),
            spec,
            status: None,
        };
        let reviewed = Api::<TokenReview>::all(client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        let user = reviewed
            .status
            .filter(|status| status.authenticated == Some(true))
            .and_then(|status| status.user);
        let Some(user) = user else {
            return Ok(Verdict::Unknown);
        };
        let name: Arc<str> = user.username.clone().unwrap_or_default().into();
        let review = SubjectAccessReview {
            metadata: ObjectMeta::default(),
            spec: self.question(user),
            status: None,
        };
        let reviewed = Api::<SubjectAccessReview>::all(client.clone())
            .create(&PostParams::default(), &review)
            .await?;
        let is_allowed = reviewed.status.is_some_and(|status| status.allowed);
        Ok(if is_allowed {
            Verdict::Allowed
        } else {
            Verdict::Forbidden(name)
        })
    }

    fn question(&self, user: UserInfo) -> SubjectAccessReviewSpec {
        let attributes = NonResourceAttributes {
            path: Some(self.path.clone()),
            verb: Some("get".to_owned()),
        };
        SubjectAccessReviewSpec {
            user: user.username,
            uid: user.uid,
            groups: user.groups,
            extra: user.extra,
            non_resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        }
    }

    fn recall(&self, token: &str) -> Option<Verdict> {
        let known = self.known();
        let (since, verdict) = known.get(token)?;
        (since.elapsed() < TTL).then(|| verdict.clone())
    }

    fn keep(&self, token: &str, verdict: Verdict) {
        let mut known = self.known();
        if known.len() >= MOST_KNOWN {
            known.retain(|_, (since, _)| since.elapsed() < TTL);
        }
        if known.len() >= MOST_KNOWN {
            let oldest = known
                .iter()
                .min_by_key(|(_, (since, _))| *since)
                .map(|(token, _)| token.clone());
            oldest.and_then(|token| known.remove(&token));
        }
        known.insert(token.into(), (Instant::now(), verdict));
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Box<str>, (Instant, Verdict)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The token that a client shows, if it may be one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers
        .get(header::AUTHORIZATION)?
        .to_str()
        .ok()?
        .split_once(' ')?;
    let token = token.trim();
    let is_plain =
        !token.is_empty() && token.len() <= MAX_TOKEN && token.bytes().all(|byte| byte.is_ascii_graphic());
    (scheme.eq_ignore_ascii_case("bearer") && is_plain).then_some(token)
}

/// Lets a request for a view through, or answers it with why not.
pub(super) async fn admit(
    State(extender): State<Arc<Extender>>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let has_certificate = request.extensions().get::<ClientCertificate>().is_some();
    match extender.access.check(has_certificate, request.headers()).await {
        Ok(()) => next.run(request).await,
        Err(denied) => {
            extender.metrics.time(Verb::Inspect).ending = Ending::Refused;
            denied.into_response()
        }
    }
}

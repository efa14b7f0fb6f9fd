//! Access to the views: for clients with a certificate of the configured authorities, and for bearer tokens of users whom the
//! cluster's RBAC gives `get` on the path of the views.
//!
//! The API server authenticates and authorizes tokens (`TokenReview`, `SubjectAccessReview`). Its answers about a limited number
//! of tokens are cached for a few seconds.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::future::join_all;
use http::{HeaderMap, Request, StatusCode, header};
use k8s_openapi::api::authentication::v1::{TokenReview, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::config::PREFIX;
use crate::extender::Extender;
use crate::metrics::{Ending, Verb};
use daemon::http_server::ClientCertificate;

/// The time for which an answer is cached; a right that was withdrawn may be used for as long.
const CACHED_FOR: Duration = Duration::from_secs(10);
const MAX_CACHED: usize = 256;
/// Longest token, in bytes: those of service accounts have about 1 KiB.
const MAX_TOKEN: usize = 8 << 10;
const MAX_REVIEWS: usize = 4;
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// The API server's answers about one token.
#[derive(Clone, Debug)]
struct ReviewedToken {
    /// The time of the `TokenReview`.
    since: Instant,
    /// The token's user, unless it belongs to none.
    user: Option<Arc<UserInfo>>,
    /// The reviewed rights, each with true if the user has it.
    rights: HashMap<Right, bool>,
}

/// Authorizes clients of the views.
pub(crate) struct Access {
    is_required: bool,
    /// The API server that reviews tokens; without one only certificates count.
    pub(super) client: Option<Client>,
    cache: Mutex<HashMap<Box<str>, ReviewedToken>>,
    reviews: Semaphore,
}

/// A right of a user, which a `SubjectAccessReview` asks about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Right {
    Views,
    /// To list the pods of a namespace, or of all.
    ListPods(Option<Arc<str>>),
}

/// The reason that a client may not read the views. RBAC rules name one path for all views.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Denied {
    #[error(
        "views demand a client certificate of the configured authorities, or a bearer token of a user who may get {PREFIX}/inspect"
    )]
    NoCredentials,
    #[error("the API server does not know this bearer token, or it has expired")]
    UnknownToken,
    #[error(
        "user {0:?} may not get {PREFIX}/inspect; give a ClusterRole with nonResourceURLs [\"{PREFIX}/inspect\"] and the verb get"
    )]
    Forbidden(String),
    #[error("the API server did not review this bearer token: {0}")]
    Unreviewed(String),
}

impl Denied {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoCredentials | Self::UnknownToken => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::Unreviewed(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for Denied {
    /// The answer to a client without access.
    fn into_response(self) -> Response {
        let status = self.status();
        tracing::debug!(status = status.as_u16(), error = %self, "view refused");
        let text = format!("{self}\n");
        // HTTP demands this header with status 401: it asks the client for a bearer token.
        if status == StatusCode::UNAUTHORIZED {
            return (status, [(header::WWW_AUTHENTICATE, "Bearer")], text).into_response();
        }
        (status, text).into_response()
    }
}

impl Access {
    /// Access to the views: for clients with a certificate if `is_required`, else for all clients.
    pub(super) fn new(is_required: bool) -> Self {
        Self {
            is_required,
            client: None,
            cache: Mutex::default(),
            reviews: Semaphore::new(MAX_REVIEWS),
        }
    }

    /// Checks that a client has a token of a user who may read the views.
    pub(crate) async fn authorize(&self, headers: &HeaderMap) -> Result<(), Denied> {
        // Unknown tokens are cached too: a client that repeats one costs the API server nothing.
        self.review_in_time(&Right::Views, headers).await
    }

    /// Returns true if the user of a client's token may list the pods of a namespace, or of all.
    pub(crate) async fn may_list_pods(&self, headers: &HeaderMap, namespace: Option<Arc<str>>) -> bool {
        let reviewed = self.review_in_time(&Right::ListPods(namespace), headers).await;
        reviewed.is_ok()
    }

    /// Those of the namespaces whose pods the user of a client's token may list.
    pub(crate) async fn listable(
        &self,
        headers: &HeaderMap,
        namespaces: Vec<Arc<str>>,
    ) -> Arc<BTreeSet<Arc<str>>> {
        let mut reviews = Vec::with_capacity(namespaces.len());
        for namespace in &namespaces {
            reviews.push(self.may_list_pods(headers, Some(Arc::clone(namespace))));
        }
        let reviewed = namespaces.into_iter().zip(join_all(reviews).await);
        let listable = reviewed.filter_map(|(namespace, is_listable)| is_listable.then_some(namespace));
        Arc::new(listable.collect())
    }

    /// Checks the right of a client's bearer token, by the cache or by the API server, within `REVIEW_TIMEOUT`.
    async fn review_in_time(&self, right: &Right, headers: &HeaderMap) -> Result<(), Denied> {
        // Certificates were checked in the TLS handshake; here only tokens remain.
        let (Some(token), Some(client)) = (bearer_token(headers), self.client.as_ref()) else {
            return Err(Denied::NoCredentials);
        };
        if let Some(verdict) = self.cached(right, token) {
            return verdict;
        }
        let review = async {
            // Reviews for clients with many tokens must not slow down the API server for binds.
            let _permit = self.reviews.acquire().await;
            // Another request with the same token may have been reviewed meanwhile.
            if let Some(verdict) = self.cached(right, token) {
                return Ok(verdict);
            }
            self.review(client, right, token).await
        };
        let reason = match tokio::time::timeout(REVIEW_TIMEOUT, review).await {
            Ok(Ok(verdict)) => return verdict,
            Ok(Err(error)) => kube::Error::to_string(&error),
            Err(_) => format!("it took longer than {REVIEW_TIMEOUT:?}"),
        };
        Err(Denied::Unreviewed(reason))
    }

    /// Has the API server authenticate the token (`TokenReview`), unless its user is cached, and authorize its user
    /// (`SubjectAccessReview`); caches both answers. The outer error is that of a request to the API server.
    async fn review(
        &self,
        client: &Client,
        right: &Right,
        token: &str,
    ) -> Result<Result<(), Denied>, kube::Error> {
        // The cache has the user if the token was reviewed for another right.
        let user = match self.fresh(token) {
            Some(reviewed) => reviewed.user,
            None => self.authenticate(client, token).await?,
        };
        let Some(user) = user else {
            return Ok(Err(Denied::UnknownToken));
        };
        let review = SubjectAccessReview {
            spec: access_spec(right, UserInfo::clone(&user)),
            ..SubjectAccessReview::default()
        };
        let api = Api::<SubjectAccessReview>::all(client.clone());
        let reviewed = api.create(&PostParams::default(), &review).await?;
        // A review without a status was not evaluated, and grants nothing.
        let is_allowed = reviewed.status.unwrap_or_default().allowed;
        if let Some(cached) = self.cache.lock().get_mut(token) {
            cached.rights.insert(right.clone(), is_allowed);
        }
        Ok(verdict(is_allowed, &user))
    }

    /// The user of a token; `None` if it belongs to none.
    async fn authenticate(&self, client: &Client, token: &str) -> Result<Option<Arc<UserInfo>>, kube::Error> {
        let mut review = TokenReview::default();
        token.clone_into(&mut review.spec.token);
        let api = Api::<TokenReview>::all(client.clone());
        let reviewed = api.create(&PostParams::default(), &review).await?;
        // An authenticator may accept a token without naming a user, to whom RBAC could give no right.
        let status = reviewed.status.unwrap_or_default();
        let user = match status.user {
            Some(user) if status.authenticated == Some(true) => Some(Arc::new(user)),
            _ => None,
        };
        // Cached also if the token belongs to no user: repeating it must not cost the API server a review each time.
        self.insert(token, user.clone());
        Ok(user)
    }

    /// The verdict on a token by the cached reviews; `None` if the cache lacks the token or the right.
    fn cached(&self, right: &Right, token: &str) -> Option<Result<(), Denied>> {
        let reviewed = self.fresh(token)?;
        match &reviewed.user {
            None => Some(Err(Denied::UnknownToken)),
            Some(user) => Some(verdict(*reviewed.rights.get(right)?, user)),
        }
    }

    /// The answers about a token that are not too old.
    fn fresh(&self, token: &str) -> Option<ReviewedToken> {
        let cache = self.cache.lock();
        match cache.get(token) {
            Some(reviewed) if reviewed.since.elapsed() < CACHED_FOR => Some(reviewed.clone()),
            _ => None,
        }
    }

    /// Caches the user of a token, `None` for a token that the API server does not accept. A full cache loses its oldest token.
    fn insert(&self, token: &str, user: Option<Arc<UserInfo>>) {
        let mut cache = self.cache.lock();
        // Tokens come from anyone, so the cache must not grow with their number.
        if cache.len() >= MAX_CACHED {
            let oldest = cache.iter().min_by_key(|(_, reviewed)| reviewed.since);
            if let Some((token, _)) = oldest {
                let token = token.clone();
                cache.remove(&token);
            }
        }
        let reviewed = ReviewedToken {
            since: Instant::now(),
            user,
            rights: HashMap::new(),
        };
        cache.insert(token.into(), reviewed);
    }
}

/// The spec of the `SubjectAccessReview` that asks if this user has the right.
fn access_spec(right: &Right, user: UserInfo) -> SubjectAccessReviewSpec {
    let mut spec = SubjectAccessReviewSpec {
        user: user.username,
        uid: user.uid,
        // RBAC may give the right to a group, or by attributes that an authenticator adds.
        groups: user.groups,
        extra: user.extra,
        ..SubjectAccessReviewSpec::default()
    };
    match right {
        Right::Views => {
            spec.non_resource_attributes = Some(NonResourceAttributes {
                path: Some(format!("{PREFIX}/inspect")),
                verb: Some("get".to_owned()),
            });
        }
        Right::ListPods(namespace) => {
            spec.resource_attributes = Some(ResourceAttributes {
                namespace: namespace.as_deref().map(str::to_owned),
                resource: Some("pods".to_owned()),
                verb: Some("list".to_owned()),
                ..ResourceAttributes::default()
            });
        }
    }
    spec
}

/// The verdict on a user that was authenticated.
fn verdict(is_allowed: bool, user: &UserInfo) -> Result<(), Denied> {
    if is_allowed {
        return Ok(());
    }
    Err(Denied::Forbidden(user.username.clone().unwrap_or_default()))
}

/// The token of the header `Authorization`, if the API server may accept it.
fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let credentials = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = credentials.split_once(' ')?;
    let token = token.trim();
    // The token goes into a review as it is: it must not be empty, huge, or more than a word.
    let is_plain =
        !token.is_empty() && token.len() <= MAX_TOKEN && token.as_bytes().iter().all(u8::is_ascii_graphic);
    (scheme.eq_ignore_ascii_case("bearer") && is_plain).then_some(token)
}

/// Middleware that passes a request if views need no right, if the client has a valid certificate, or if its bearer token has the
/// right to the views.
pub(super) async fn require_access(
    State(extender): State<Arc<Extender>>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let has_certificate = request.extensions().get::<ClientCertificate>().is_some();
    if extender.access.is_required
        && !has_certificate
        && let Err(denied) = extender.access.authorize(request.headers()).await
    {
        // A view counts its requests in metrics itself, and this request reaches none.
        extender.metrics.time(Verb::Inspect).ending = Ending::Refused;
        return denied.into_response();
    }
    next.run(request).await
}

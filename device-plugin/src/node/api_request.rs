//! Requests to the API server with a time limit of their own: kubelet, or a task with other work, waits for some of them.

use std::time::Duration;

use tokio::time::timeout;

/// The reason that a request to the API server failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiRequestError {
    /// The API server answered with an error, or could not be reached.
    #[error("cannot {what}")]
    Failed {
        /// The request, as verb and object.
        what: String,
        /// The client's error.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time. It may still carry the request out.
    #[error("cannot {what}: no answer within {limit:?}")]
    Slow {
        /// The request, as verb and object.
        what: String,
        /// The time for which the plugin has waited.
        limit: Duration,
    },
}

impl ApiRequestError {
    /// The HTTP status of the API server's answer, if it answered.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Failed { source, .. } => match &**source {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            Self::Slow { .. } => None,
        }
    }
}

/// Waits for the answer to a request, at most for `limit`. `what` is the request as verb and object, for the error.
pub(crate) async fn within<T>(
    limit: Duration,
    what: impl Into<String>,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, ApiRequestError> {
    match timeout(limit, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => Err(ApiRequestError::Failed {
            what: what.into(),
            source: Box::new(source),
        }),
        Err(_) => Err(ApiRequestError::Slow {
            what: what.into(),
            limit,
        }),
    }
}

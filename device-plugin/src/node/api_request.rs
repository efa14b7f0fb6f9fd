//! Requests to the API server with a time limit of their own: kubelet, or a task with other work, waits for some of them.

use std::time::Duration;

use tokio::time::timeout;

/// The reason that a request to the API server failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say it")]
pub enum ApiRequestError {
    /// The API server answered with an error, or could not be reached.
    #[error("cannot {what}")]
    Failed {
        what: String,
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time. It may still carry the request out.
    #[error("cannot {what}: no answer within {limit:?}")]
    Slow { what: String, limit: Duration },
}

impl ApiRequestError {
    /// The HTTP status of the API server's answer, if it answered.
    pub(crate) fn status(&self) -> Option<u16> {
        if let Self::Failed { source, .. } = self
            && let kube::Error::Api(status) = &**source
        {
            return Some(status.code);
        }
        None
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

//! Waits for conditions that no watch shows.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{sleep, timeout};

/// The pause between two evaluations of a condition.
const PAUSE: Duration = Duration::from_millis(20);

/// Evaluates `condition` until it is true.
///
/// # Errors
/// It is not true within `deadline`; `failure` says so.
pub async fn until<F: Future<Output = bool>>(
    deadline: Duration,
    failure: impl Into<String>,
    mut condition: impl FnMut() -> F,
) -> Result<()> {
    let waiting = async {
        while !condition().await {
            sleep(PAUSE).await;
        }
    };
    timeout(deadline, waiting).await.context(failure.into())
}

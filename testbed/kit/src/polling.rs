//! Waits for conditions that no watch shows.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::time::{sleep, timeout};

/// The pause between two evaluations of a condition, which costs little.
const PAUSE: Duration = Duration::from_millis(20);
/// The pause between two looks that may each send requests to a real cluster.
const LOOK: Duration = Duration::from_millis(100);

/// Evaluates `condition` until it is true; `failure` is the error after `deadline`.
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

/// Evaluates `poll` until it finds something; the text in place of that says what is missing.
///
/// # Errors
/// The error of `poll`, or nothing is found within `deadline`: the last text.
pub async fn until_found<T, F: Future<Output = Result<Result<T, String>>>>(
    deadline: Duration,
    mut poll: impl FnMut() -> F,
) -> Result<T> {
    let mut missing = "the first look has no answer".to_owned();
    // The deadline ends a look that hangs too.
    let found = timeout(deadline, async {
        loop {
            match poll().await? {
                Ok(found) => return Ok(found),
                Err(text) => missing = text,
            }
            sleep(LOOK).await;
        }
    })
    .await;
    match found {
        Ok(found) => found,
        Err(_) => bail!("after {deadline:?}: {missing}"),
    }
}

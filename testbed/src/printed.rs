//! The output of a container that has printed its whole environment.
//!
//! A container runs before it prints, and the runtime hands its lines on one by one: on a real cluster a log that is read
//! too early is empty or ends in the middle. Waits; does not judge what is printed.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::Api;
use kube::api::LogParams;
use tokio::time::{Instant, sleep};

/// A variable that sorts behind all others: a log that has it has everything.
pub const LAST_VARIABLE: &str = "zz_last";

/// The longest time that a container may take to print.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

/// The log of a started container. A container that has [`LAST_VARIABLE`] is waited for, any other one is not.
///
/// # Errors
///
/// The API server's error, 404 if the pod has gone. A container that prints too little in half a minute is no error.
pub async fn whole(api: &Api<Pod>, pod: &str, container: &Container) -> kube::Result<String> {
    let params = LogParams {
        container: Some(container.name.clone()),
        ..LogParams::default()
    };
    let is_marked = container
        .env
        .iter()
        .flatten()
        .any(|variable| variable.name == LAST_VARIABLE);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let log = api.logs(pod, &params).await?;
        if !is_marked || has_last(&log) || Instant::now() >= deadline {
            return Ok(log);
        }
        sleep(PAUSE).await;
    }
}

fn has_last(log: &str) -> bool {
    log.lines().any(|line| {
        line.split_once('=')
            .is_some_and(|(name, _)| name == LAST_VARIABLE)
    })
}

//! Pods that must not be evicted because of their Jobs: an evicted pod counts as failed, with which a Job may fail for good.

use std::collections::BTreeMap;

use proto::read_api::PlannedMove;
use serde_json::Value;

use crate::connection::ClusterConnection;
use crate::failure::CommandFailure;
use crate::fields::{controller, text as field};
use crate::pod_path::pod_path;

// Kubernetes' own default of `spec.backoffLimit`.
const DEFAULT_BACK_OFF_LIMIT: u64 = 6;

/// The reasons for which pods of these moves must not be evicted, by UID. Pods whose names are hidden cannot be read.
pub(crate) async fn obstacles(
    connection: &ClusterConnection,
    moves: &[PlannedMove],
) -> Result<BTreeMap<String, String>, CommandFailure> {
    let mut found = BTreeMap::new();
    for one in moves.iter().filter(|one| !one.name.is_empty()) {
        let pod = connection.get("read the pod", &pod_path(one)?).await?;
        if let Some(owner) = pod.as_ref().and_then(controller)
            && field(owner, "/kind") == "Job"
            && let Some(reason) = obstacle(connection, one, owner).await?
        {
            found.insert(one.uid.clone(), reason);
        }
    }
    Ok(found)
}

/// The reason for which a pod must not be evicted, if the Job that controls it (`owner`) gives one.
pub(crate) async fn obstacle(
    connection: &ClusterConnection,
    one: &PlannedMove,
    owner: &Value,
) -> Result<Option<String>, CommandFailure> {
    let name = field(owner, "/name");
    let path = format!("/apis/batch/v1/namespaces/{}/jobs/{name}", one.namespace);
    match connection.get("read the Job", &path).await {
        Ok(Some(job)) if at_back_off_limit(&job) => Ok(Some(format!("Job {name} is at its back-off limit"))),
        Ok(Some(_)) => Ok(None),
        Ok(None) => Ok(Some(format!("there is no Job {name}"))),
        Err(failure) if failure.is_temporary() => Err(failure),
        Err(failure) => Ok(Some(format!("its Job cannot be read: {failure}"))),
    }
}

/// Returns true if one more failed pod may fail a Job, or an index of it.
fn at_back_off_limit(job: &Value) -> bool {
    let number = |path| job.pointer(path).and_then(Value::as_u64);
    let failed = number("/status/failed").unwrap_or(0);
    // The status of a Job does not have the number of failed pods of each index.
    let has_limit_per_index = number("/spec/backoffLimitPerIndex").is_some();
    has_limit_per_index || failed >= number("/spec/backoffLimit").unwrap_or(DEFAULT_BACK_OFF_LIMIT)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::below(json!({"spec": {"backoffLimit": 2}, "status": {"failed": 1}}), false)]
    #[case::at(json!({"spec": {"backoffLimit": 2}, "status": {"failed": 2}}), true)]
    #[case::none_allowed(json!({"spec": {"backoffLimit": 0}}), true)]
    #[case::default(json!({"spec": {}, "status": {"failed": 5}}), false)]
    #[case::default_reached(json!({"status": {"failed": 6}}), true)]
    #[case::per_index(json!({"spec": {"backoffLimit": 99, "backoffLimitPerIndex": 1}}), true)]
    fn jobs_at_their_back_off_limit(#[case] job: Value, #[case] expected: bool) {
        assert_eq!(at_back_off_limit(&job), expected);
    }
}

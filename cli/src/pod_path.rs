//! The path of a planned pod in the API, by the names in the scheduler's answer.

use proto::read_api::PlannedMove;

use crate::failure::CommandFailure;

/// The path of the pod of a move; refuses names that would change the path.
pub(crate) fn pod_path(one: &PlannedMove) -> Result<String, CommandFailure> {
    let is_plain = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
    };
    let PlannedMove { namespace, name, .. } = one;
    if is_plain(namespace) && is_plain(name) {
        Ok(format!("/api/v1/namespaces/{namespace}/pods/{name}"))
    } else {
        Err(CommandFailure::Refused(format!(
            "pod {namespace:?}/{name:?} has no valid name"
        )))
    }
}

//! Names in paths of the API, such as those of a planned pod in the scheduler's answer.

use proto::read_api::PlannedMove;

use crate::failure::CommandFailure;

/// Returns true if a name can be a part of a path: other characters, such as a slash, would make it another path.
pub(crate) fn is_plain(name: &str) -> bool {
    let is_legal = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
    !name.is_empty() && name.bytes().all(is_legal)
}

/// The path of the pod of a move; refuses names that would change the path.
pub(crate) fn pod_path(one: &PlannedMove) -> Result<String, CommandFailure> {
    let PlannedMove { namespace, name, .. } = one;
    if is_plain(namespace) && is_plain(name) {
        Ok(format!("/api/v1/namespaces/{namespace}/pods/{name}"))
    } else {
        Err(CommandFailure::Refused(format!(
            "pod {namespace:?}/{name:?} has no valid name"
        )))
    }
}

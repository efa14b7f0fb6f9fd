//! The number of files that the process may have open, connections among them.

#[cfg(unix)]
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

/// Files that a daemon opens beside the connections of its listeners: watches, requests to the API server, sockets, pipes.
pub const OWN_FILES: usize = 128;

/// The limit of open files for which the connections of all listeners are planned; most systems give it to every process.
const USUAL_LIMIT: usize = 1024;

/// The fewest connections of a listener, however low the limit is.
const FEWEST_CONNECTIONS: usize = 4;

/// Raises the limit of open files to the highest that the process may set for itself; Windows has no such limit.
pub fn raise_limit() {
    #[cfg(unix)]
    {
        let before = getrlimit(Resource::Nofile);
        let raised = Rlimit {
            current: before.maximum,
            ..before
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            warn!(%error, limit = before.current, "cannot raise the limit of open files");
        }
    }
}

/// The number of connections that a listener may have: `most`, or fewer where the process may open fewer files than usual.
pub fn connections_within_limit(most: usize) -> usize {
    connections_within(limit(), most)
}

fn connections_within(limit: usize, most: usize) -> usize {
    let (left, usually_left) = (limit.saturating_sub(OWN_FILES), USUAL_LIMIT - OWN_FILES);
    (most * left.min(usually_left) / usually_left).max(FEWEST_CONNECTIONS)
}

/// The number of files that the process may have open; the largest number without a limit, as on Windows.
fn limit() -> usize {
    #[cfg(unix)]
    if let Some(Ok(limit)) = getrlimit(Resource::Nofile).current.map(usize::try_from) {
        return limit;
    }
    usize::MAX
}

/// Logs the limit of open files, and the number that `n_connections` of the listeners leave for everything else.
pub fn log_room(n_connections: usize) {
    let limit = limit();
    let left = limit.saturating_sub(n_connections);
    if left < OWN_FILES {
        warn!(
            limit,
            left,
            needed = n_connections + OWN_FILES,
            "few open files are left beside connections: raise the limit (nofile) of the container"
        );
    } else {
        info!(limit, left, "open files");
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::without_a_limit(usize::MAX, 512, 512)]
    #[case::usual(1024, 512, 512)]
    #[case::half(576, 512, 256)]
    #[case::few(64, 64, 4)]
    fn connections_leave_room_for_own_files(
        #[case] limit: usize,
        #[case] most: usize,
        #[case] expected: usize,
    ) {
        assert_eq!(connections_within(limit, most), expected);
    }
}

//! The number of files that the process may have open, connections among them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

/// Files that a daemon opens beside the connections of its listeners: watches, requests to the API server, sockets, its own pipes.
pub const OWN_FILES: usize = 128;

/// Raises the limit to the highest that the process may set for itself.
pub fn raise_limit() {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: before.maximum,
        ..before
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, limit = before.current, "cannot raise the limit of open files");
    }
}

/// Logs the limit and the number of files that the listeners leave for everything else.
pub fn log_room(n_connections: usize) {
    // Without a limit there is room for all.
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
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

//! The scheduler's farewell after SIGTERM: it goes on serving until the next leader may decide and clients ask another replica.

use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

/// Time for which a replica of several still serves after the signal: the endpoints of its Services change first.
const LINGER: Duration = Duration::from_secs(3);

/// The conditions under which this replica may end.
pub(super) struct Farewell {
    /// The time for which it serves in any case.
    linger: Duration,
    /// Cancelled when the replica has released its Lease and removed its leader label.
    pub(super) resigned: CancellationToken,
}

impl Farewell {
    /// The farewell of a replica without others: no other could serve its clients.
    pub(super) fn of_only_replica() -> Self {
        let resigned = CancellationToken::new();
        resigned.cancel();
        Self {
            linger: Duration::ZERO,
            resigned,
        }
    }

    /// The farewell of one replica of several, which waits for the end of its part in the election.
    pub(super) fn of_replica() -> Self {
        Self {
            linger: LINGER,
            resigned: CancellationToken::new(),
        }
    }

    /// Returns once this replica may end.
    pub(super) async fn run(self) {
        tokio::join!(sleep(self.linger), self.resigned.cancelled());
    }
}

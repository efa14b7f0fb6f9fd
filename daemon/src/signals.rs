//! SIGTERM and SIGINT.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::panics::named;

/// Returns a token that the first SIGTERM or SIGINT cancels.
///
/// # Errors
/// The process cannot receive signals.
pub fn cancel_on_signal() -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(named("signals", async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM, stopping"),
            _ = interrupt.recv() => info!("SIGINT, stopping"),
        }
        cancelled.cancel();
    }));
    Ok(token)
}

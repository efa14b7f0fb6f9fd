//! Clients that read the extender's view of all nodes (`inspect`), one answer after the other, during a measurement.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Clients in the background; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Viewers {
    counts: Arc<ViewerCounts>,
    began: Instant,
    _running: JoinSet<()>,
}

#[derive(Debug, Default)]
struct ViewerCounts {
    views: AtomicU64,
    bytes: AtomicU64,
}

impl Viewers {
    /// Starts `n_clients` clients, each of which opens a connection for every view.
    pub(super) fn start(scheduler: SocketAddr, n_clients: u32) -> Self {
        let counts = Arc::new(ViewerCounts::default());
        let mut running = JoinSet::new();
        for _ in 0..n_clients {
            let counts = Arc::clone(&counts);
            running.spawn(async move {
                loop {
                    match view(scheduler).await {
                        Ok(n_bytes) => {
                            counts.views.fetch_add(1, Ordering::Relaxed);
                            counts.bytes.fetch_add(n_bytes, Ordering::Relaxed);
                        }
                        Err(error) => {
                            tracing::error!(%error, "views have ended");
                            return;
                        }
                    }
                }
            });
        }
        Self {
            counts,
            began: Instant::now(),
            _running: running,
        }
    }

    /// Whole views per second so far, and MiB of each.
    pub(super) fn rate(&self) -> (f64, f64) {
        let count = |counter: &AtomicU64, unit: u64| {
            f64::from(u32::try_from(counter.load(Ordering::Relaxed) / unit).unwrap_or(u32::MAX))
        };
        let n_views = count(&self.counts.views, 1);
        (
            n_views / self.began.elapsed().as_secs_f64(),
            count(&self.counts.bytes, 1 << 10) / 1024.0 / n_views.max(1.0),
        )
    }
}

/// Reads one view and keeps nothing of it; returns its length.
async fn view(scheduler: SocketAddr) -> std::io::Result<u64> {
    let mut stream = TcpStream::connect(scheduler).await?;
    stream
        .write_all(b"GET /gpushare-scheduler/inspect HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await?;
    // Only the cost to the scheduler is of interest, and a parsed view would cost this machine as much again.
    let (mut buffer, mut n_bytes) = (vec![0; 1 << 16], 0);
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(n_bytes),
            n_read => n_bytes += u64::try_from(n_read).unwrap_or_default(),
        }
    }
}

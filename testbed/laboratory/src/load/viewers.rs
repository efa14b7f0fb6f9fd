//! Clients that read the extender's view of all nodes (`inspect`), one answer after the other, during a measurement.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::background::Background;

/// Starts `n_clients` clients, each of which opens a connection for every view.
pub(super) fn start(scheduler: SocketAddr, n_clients: u32) -> Background {
    Background::start("views", n_clients, |counts| async move {
        loop {
            counts.bytes.fetch_add(view(scheduler).await?, Ordering::Relaxed);
            counts.done.fetch_add(1, Ordering::Relaxed);
        }
    })
}

/// Reads one view and keeps nothing of it; returns its length.
async fn view(scheduler: SocketAddr) -> Result<u64> {
    let mut stream = TcpStream::connect(scheduler).await?;
    stream
        .write_all(b"GET /gpushare-scheduler/inspect HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await?;
    // Only the cost to the scheduler is of interest, and a parsed view would cost this machine as much again.
    let (mut buffer, mut n_bytes) = (vec![0; 1 << 16], 0);
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(n_bytes),
            n_read => n_bytes += u64::try_from(n_read)?,
        }
    }
}

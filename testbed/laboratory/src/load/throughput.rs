//! Requests per second by several callers at once, such as kube-schedulers and autoscalers.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;

use super::kept_connection::KeptConnection;

#[derive(Clone, Debug, Serialize)]
pub(super) struct Throughput {
    pub(super) callers: u32,
    pub(super) per_second: f64,
    /// The same of a server that reads the request and answers at once.
    pub(super) floor_per_second: f64,
}

impl Throughput {
    /// Has callers send this number of requests in all, first to the floor, then to the scheduler. They send the given requests
    /// in turn, each time for a pod of its own.
    pub(super) fn measure(
        scheduler: (SocketAddr, &[Vec<u8>]),
        floor: (SocketAddr, &[Vec<u8>]),
        callers: u32,
        n_requests: u32,
    ) -> Result<Self> {
        let floor_per_second = per_second(floor, callers, n_requests)?;
        Ok(Self {
            callers,
            per_second: per_second(scheduler, callers, n_requests)?,
            floor_per_second,
        })
    }

    /// The callers, and the part of the floor's requests per second.
    pub(super) fn cell(&self) -> String {
        let percent = 100.0 * self.per_second / self.floor_per_second;
        format!("{}: {:.0} ({percent:.0} %)", self.callers, self.per_second)
    }
}

/// Runs all callers at the same time; returns the sum of their requests per second.
fn per_second(server: (SocketAddr, &[Vec<u8>]), callers: u32, n_requests: u32) -> Result<f64> {
    let n_each = n_requests.div_ceil(callers.max(1));
    let start = Barrier::new(callers as usize);
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for caller in 0..callers {
            let start = &start;
            threads.push(scope.spawn(move || call(server, caller, n_each, start)));
        }
        let mut per_second = 0.0;
        for thread in threads {
            per_second += thread.join().ok().context("a caller has panicked")??;
        }
        Ok(per_second)
    })
}

/// Sends the requests of one caller; returns how many a second are answered.
fn call(
    (address, wires): (SocketAddr, &[Vec<u8>]),
    caller: u32,
    n_requests: u32,
    start: &Barrier,
) -> Result<f64> {
    let connection = KeptConnection::to(address);
    let mut wires = wires.to_vec();
    // All callers have to come here, or the others would wait for ever.
    start.wait();
    let mut connection = connection?;
    let began = Instant::now();
    for nth in 0..n_requests {
        let n_wires = wires.len().max(1);
        let wire = wires.get_mut(nth as usize % n_wires).context("no request")?;
        set_pod(wire, caller, nth).context("the request has no pod")?;
        connection.ask(wire)?;
    }
    Ok(f64::from(n_requests) / began.elapsed().as_secs_f64())
}

/// Makes a request that of another pod.
fn set_pod(wire: &mut [u8], caller: u32, nth: u32) -> Option<()> {
    let uid = format!("asked-{caller:01}{nth:07}");
    let at = wire.windows(6).position(|bytes| bytes == b"asked-")?;
    wire.get_mut(at..at + uid.len())?.copy_from_slice(uid.as_bytes());
    Some(())
}

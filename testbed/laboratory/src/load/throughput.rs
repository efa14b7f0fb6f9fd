//! Requests per second by several callers at once, such as kube-schedulers and autoscalers.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;

use super::kept_connection::KeptConnection;
use crate::replay::portion::float;

/// The requests per second of a number of callers.
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
        let [floor, scheduler] = [floor, scheduler].map(|(address, wires)| {
            let shared = Shared {
                address,
                wires,
                n_each: n_requests.div_ceil(callers.max(1)),
                start: Barrier::new(callers as usize),
            };
            shared.per_second(callers)
        });
        Ok(Self {
            callers,
            per_second: scheduler?,
            floor_per_second: floor?,
        })
    }

    /// The callers, and the part of the floor's requests per second.
    pub(super) fn cell(&self) -> String {
        let percent = 100.0 * self.per_second / self.floor_per_second;
        format!("{}: {:.0} ({percent:.0} %)", self.callers, self.per_second)
    }
}

/// The part that all callers share.
struct Shared<'a> {
    address: SocketAddr,
    wires: &'a [Vec<u8>],
    n_each: u32,
    start: Barrier,
}

impl Shared<'_> {
    /// Runs all callers at the same time; returns the sum of their requests per second.
    fn per_second(&self, callers: u32) -> Result<f64> {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..callers)
                .map(|caller| scope.spawn(move || self.call(caller)))
                .collect();
            let mut per_second = 0.0;
            for thread in threads {
                per_second += thread.join().ok().context("a caller has panicked")??;
            }
            Ok(per_second)
        })
    }

    /// Sends the requests of one caller; returns how many a second are answered.
    fn call(&self, caller: u32) -> Result<f64> {
        let connection = KeptConnection::to(self.address);
        let mut wires = self.wires.to_vec();
        // All callers have to come here, or the others would wait for ever.
        self.start.wait();
        let mut connection = connection?;
        let began = Instant::now();
        for nth in 0..self.n_each {
            let n_wires = wires.len().max(1);
            let wire = wires.get_mut(nth as usize % n_wires).context("no request")?;
            set_pod(wire, caller, nth).context("the request has no pod")?;
            connection.ask(wire)?;
        }
        Ok(float(self.n_each as usize) / began.elapsed().as_secs_f64())
    }
}

/// Makes a request that of another pod.
fn set_pod(wire: &mut [u8], caller: u32, nth: u32) -> Option<()> {
    let uid = format!("asked-{caller:01}{nth:07}");
    let at = wire.windows(6).position(|bytes| bytes == b"asked-")?;
    wire.get_mut(at..at + uid.len())?.copy_from_slice(uid.as_bytes());
    Some(())
}

//! A process with the daemons' supervision and one fault, for the tests in `daemon/tests`.
//!
//! `supervised FAULT`: `returns`, `panics`, `panics-in-thread`, `hangs`, `holds-lock`, or `none`, which succeeds after two
//! seconds. The watchdog's limit is half a second.

use std::process::ExitCode;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use daemon::panics::log_panics;
use daemon::supervise::Tasks;
use daemon::watchdog::{Probe, watch};
use tokio::runtime::{Builder, Handle};
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_millis(500);
const LIFE: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    log_panics();
    let fault = std::env::args().nth(1).unwrap_or_default();
    let started = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map(|runtime| runtime.block_on(run(&fault)));
    match started {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
        Err(_) => ExitCode::from(2),
    }
}

async fn run(fault: &str) -> Result<(), String> {
    let state = Arc::new(RwLock::new(()));
    let watched = Arc::clone(&state);
    let lock = Probe::of_lock("state", move || drop(watched.write())).map_err(|error| error.to_string())?;
    watch(LIMIT, vec![Probe::of_runtime(Handle::current()), lock]).map_err(|error| error.to_string())?;
    let mut tasks = Tasks::default();
    tasks.spawn("watch of nodes", std::future::pending());
    let fault = fault.to_owned();
    tasks.spawn("watch of pods", async move { inject(&fault, state).await });
    tokio::select! {
        ended = tasks.ended() => Err(ended.to_string()),
        () = sleep(LIFE) => Ok(()),
    }
}

#[expect(clippy::panic, reason = "a fault to be tested")]
async fn inject(fault: &str, state: Arc<RwLock<()>>) {
    sleep(Duration::from_millis(50)).await;
    match fault {
        "returns" => {}
        "panics" => panic!("an impossible state"),
        "panics-in-thread" => {
            let thread = std::thread::Builder::new().name("device-watch".to_owned());
            let _ = thread.spawn(|| panic!("an impossible state"));
            std::future::pending::<()>().await;
        }
        "hangs" => {
            // Blocks every thread of the runtime.
            for _ in 0..8 {
                tokio::spawn(async { std::thread::sleep(LIFE * 10) });
            }
            std::thread::sleep(LIFE * 10);
        }
        "holds-lock" => {
            // A thread of the runtime that blocks can keep timers from firing, which the other probe would report as well.
            let hold = move || {
                let _reading = state.read();
                std::thread::sleep(LIFE * 10);
            };
            let _ = std::thread::Builder::new().name("reader".to_owned()).spawn(hold);
            std::future::pending::<()>().await;
        }
        _ => std::future::pending().await,
    }
}

//! A daemon with the supervision of gpushare's own, in which one thing goes wrong: for the tests in `daemon/tests`.
//!
//! `supervised WAY`: `returns`, `panics`, `panics-in-thread`, `hangs`, `holds-lock`, or `goes-on`, which ends with success after
//! two seconds. The watchdog's limit is half a second.

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
    let way = std::env::args().nth(1).unwrap_or_default();
    let started = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map(|runtime| runtime.block_on(run(&way)));
    match started {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
        Err(_) => ExitCode::from(2),
    }
}

async fn run(way: &str) -> Result<(), String> {
    let state = Arc::new(RwLock::new(()));
    let watched = Arc::clone(&state);
    let lock = Probe::of_lock("state", move || drop(watched.write())).map_err(|error| error.to_string())?;
    watch(LIMIT, vec![Probe::of_runtime(Handle::current()), lock]).map_err(|error| error.to_string())?;
    let mut tasks = Tasks::default();
    tasks.spawn("watch of nodes", std::future::pending());
    let way = way.to_owned();
    tasks.spawn("watch of pods", async move { go_wrong(&way, state).await });
    tokio::select! {
        ended = tasks.ended() => Err(ended.to_string()),
        () = sleep(LIFE) => Ok(()),
    }
}

#[expect(clippy::panic, reason = "it is what this program is for")]
async fn go_wrong(way: &str, state: Arc<RwLock<()>>) {
    sleep(Duration::from_millis(50)).await;
    match way {
        "returns" => {}
        "panics" => panic!("something that cannot be"),
        "panics-in-thread" => {
            let thread = std::thread::Builder::new().name("device-watch".to_owned());
            let _ = thread.spawn(|| panic!("something that cannot be"));
            std::future::pending::<()>().await;
        }
        "hangs" => {
            // Every thread of the runtime.
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

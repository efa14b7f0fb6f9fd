//! A process with the daemons' supervision and one fault, for the tests in `daemon/tests`.
//!
//! `supervised FAULT`: `returns`, `panics`, `panics-in-thread`, `hangs`, `holds-lock`, or `none`, which succeeds after two
//! seconds.

use std::process::ExitCode;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use clap::Parser;
use daemon::process::{self, Process, ProcessArgs};
use tokio::runtime::Builder;
use tokio::time::sleep;

const LIFE: Duration = Duration::from_secs(2);
const HANG_LIMIT: Duration = Duration::from_millis(500);

#[derive(Parser)]
struct Args {
    fault: String,
    #[command(flatten)]
    process: ProcessArgs,
}

fn main() -> ExitCode {
    let Args { fault, process } = Args::parse();
    let mut runtime = Builder::new_multi_thread();
    runtime.worker_threads(2);
    process::run(process, HANG_LIMIT, runtime, |process| run(fault, process))
}

async fn run(fault: String, mut process: Process) -> anyhow::Result<()> {
    let state = Arc::new(RwLock::new(()));
    let watched = Arc::clone(&state);
    process.watch_lock("state", move || drop(watched.write()))?;
    process.tasks.spawn("watch of nodes", std::future::pending());
    process
        .tasks
        .spawn("watch of pods", async move { inject(&fault, state).await });
    let life = async {
        sleep(LIFE).await;
        Ok(())
    };
    process.complete(life).await.map(drop)
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

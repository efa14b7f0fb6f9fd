//! The process of a daemon, from its flags to its exit code.
//!
//! `main` calls [`run`], which starts the log, the runtime, the watchdog and the handling of signals, and gives a [`Process`] to
//! the daemon. The daemon starts its tasks and servers in it, and ends with [`Process::serve_until_signal`].

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use tokio::runtime::Builder;
#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::http_server::{HttpServer, listen};
use crate::logging::{self, LogFilter, LogFormat};
use crate::open_files;
use crate::panics::{end_at_panics, named};
use crate::supervise::Tasks;
use crate::watchdog::{self, Probe};

/// Longest time for which the process waits at its end until the servers have answered the requests in work.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Time after which a daemon that hangs ends itself, so that kubelet starts it again: its runtime runs no task, or a lock of
/// [`Process::watch_lock`] is not released.
pub const HANG_LIMIT: Duration = Duration::from_secs(10);

/// The most connections of the listener for probes and metrics: kubelet, Prometheus and a few people.
pub const HEALTH_CONNECTIONS: usize = 64;

/// The flags that every daemon has.
#[derive(Clone, Debug, clap::Args)]
pub struct ProcessArgs {
    /// Address to serve /healthz, /readyz, /metrics and /version on without TLS, such as 0.0.0.0:8081; nowhere if left out
    #[arg(long, env = "GPUSHARE_HEALTH_LISTEN", value_name = "ADDRESS")]
    pub health_listen: Option<SocketAddr>,
    /// Form of the log on standard error
    #[arg(long, env = "GPUSHARE_LOG_FORMAT", default_value = "text", value_enum)]
    pub log_format: LogFormat,
    /// Log filter: error, warn, info, debug, trace, or directives such as `info,kube=debug`
    #[arg(
        long,
        env = "GPUSHARE_LOG_LEVEL",
        default_value = "info",
        value_name = "LEVEL"
    )]
    pub log_level: LogFilter,
}

/// A running daemon: its tasks and servers, and the tokens whose cancellation ends them.
#[derive(Debug)]
pub struct Process {
    /// Cancelled by the first SIGTERM or SIGINT.
    pub signal: CancellationToken,
    /// Cancelled after the farewell, when the servers should take no more requests.
    pub stop: CancellationToken,
    /// Tasks that run as long as the process, and are dropped at its end.
    pub tasks: Tasks,
    /// Tasks that end some time after `stop` is cancelled, once they have answered the requests in work.
    pub servers: Tasks,
    n_connections: usize,
    hang_limit: Duration,
    args: ProcessArgs,
}

/// Starts the log, runs `daemon` on the runtime that `runtime` builds, logs its error, and ends the process when it hangs.
pub fn run<F>(
    args: ProcessArgs,
    hang_limit: Duration,
    runtime: Builder,
    daemon: impl FnOnce(Process) -> F,
) -> ExitCode
where
    F: Future<Output = anyhow::Result<()>>,
{
    // Before anything that can fail, so that every failure is in the log.
    logging::start(args.log_format, &args.log_level);
    end_at_panics();
    open_files::raise_limit();
    match run_to_end(args, hang_limit, runtime, daemon) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_to_end<F>(
    args: ProcessArgs,
    hang_limit: Duration,
    mut runtime: Builder,
    daemon: impl FnOnce(Process) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let runtime = runtime.enable_all().build().context("cannot start the runtime")?;
    let probe = Probe::of_runtime(runtime.handle().clone(), hang_limit);
    watchdog::watch(hang_limit, probe).context("cannot start the thread that watches for hangs")?;
    let ended = runtime.block_on(async { daemon(Process::start(args, hang_limit)?).await });
    // Otherwise a call that hangs on a thread of its own, such as one of a GPU's driver, would keep the process from ending.
    runtime.shutdown_background();
    ended
}

impl Process {
    /// Begins to wait for signals. Must be called on the runtime.
    fn start(args: ProcessArgs, hang_limit: Duration) -> anyhow::Result<Self> {
        Ok(Self {
            signal: cancelled_by_signal().context("cannot wait for signals")?,
            stop: CancellationToken::new(),
            tasks: Tasks::default(),
            servers: Tasks::default(),
            n_connections: 0,
            hang_limit,
            args,
        })
    }

    /// Has the watchdog end the process when a lock stays taken for the hang limit; `take` takes the lock and releases it.
    pub fn watch_lock(&self, name: &'static str, take: impl Fn() + Send + 'static) -> anyhow::Result<()> {
        let watching = Probe::of_lock(name, take).and_then(|probe| watchdog::watch(self.hang_limit, probe));
        watching.context("cannot start the thread that watches for hangs")
    }

    /// Serves the routes of [`crate::health`] on the address of `--health-listen`, if there is one.
    pub async fn serve_health(&mut self, routes: Router) -> anyhow::Result<()> {
        let Some(address) = self.args.health_listen else {
            return Ok(());
        };
        let listener = listen(address).await.context("--health-listen")?;
        let server = HttpServer::new(listener, routes, HEALTH_CONNECTIONS);
        self.serve("probes and metrics", server);
        Ok(())
    }

    /// Starts an HTTP server, which ends with the process. It has fewer connections where the process may open few files.
    pub fn serve(&mut self, name: &'static str, mut server: HttpServer) {
        server.most_connections = open_files::connections_within_limit(server.most_connections);
        self.n_connections += server.most_connections;
        self.servers.spawn(name, server.serve(self.stop.clone()));
    }

    /// Completes `work` before the daemon serves. Returns `None` if SIGTERM or SIGINT comes first, and an error if a task ends.
    pub async fn complete<T>(
        &mut self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<Option<T>> {
        tokio::select! {
            // The daemon serves no requests yet, so no farewell is needed.
            () = self.signal.cancelled() => Ok(None),
            ended = self.tasks.ended() => Err(ended.into()),
            done = work => done.map(Some),
        }
    }

    /// Runs until SIGTERM or SIGINT, completes `farewell`, and then closes the servers. The end of a task before is an error.
    pub async fn serve_until_signal(mut self, farewell: impl Future<Output = ()>) -> anyhow::Result<()> {
        open_files::log_room(self.n_connections);
        let signal = self.signal.clone();
        let service = async {
            signal.cancelled().await;
            farewell.await;
        };
        let ended = tokio::select! {
            // In this order (`biased`): a task that ends because of the signal is no error.
            biased;
            () = service => Ok(()),
            ended = self.tasks.ended() => Err(ended.into()),
            ended = self.servers.ended() => Err(ended.into()),
        };
        self.stop.cancel();
        if ended.is_err() {
            // The task that has ended may have kept the answers up to date, so no request may be answered any more.
            self.servers.abort_all();
        }
        // Waits for all servers: the end of one without requests must not cut off the requests of another.
        if timeout(DRAIN_LIMIT, self.servers.all_ended()).await.is_err() {
            warn!("some requests were not answered in time");
        }
        info!("stopped");
        ended
    }
}

#[cfg(unix)]
fn cancelled_by_signal() -> std::io::Result<CancellationToken> {
    // Registered before the task runs, so that no signal is missed.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    let wait = async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM, stopping"),
            _ = interrupt.recv() => info!("SIGINT, stopping"),
        }
        cancelled.cancel();
    };
    tokio::spawn(named("signals", wait));
    Ok(token)
}

/// Returns a token that Ctrl-C cancels. The daemons run on Linux alone; elsewhere the CLI is built with this crate.
#[cfg(not(unix))]
fn cancelled_by_signal() -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let cancelled = token.clone();
    tokio::spawn(named("signals", async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            cancelled.cancel();
        }
    }));
    Ok(token)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::time::{Instant, sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn process() -> Process {
        Process {
            signal: CancellationToken::new(),
            stop: CancellationToken::new(),
            tasks: Tasks::default(),
            servers: Tasks::default(),
            n_connections: 0,
            hang_limit: HANG_LIMIT,
            args: ProcessArgs {
                health_listen: None,
                log_format: LogFormat::Text,
                log_level: "info".parse().unwrap(),
            },
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_ends_the_process_at_once() {
        let mut process = process();
        process.servers.spawn("server", std::future::pending());
        process.tasks.spawn("watch", async {});
        let began = Instant::now();
        let error = process.serve_until_signal(sleep(SECOND)).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "task \"watch\" has ended, and the process with it"
        );
        assert!(began.elapsed() < SECOND, "no request is answered any more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_ends_before_the_signal_is_an_error() {
        let mut process = process();
        process.servers.spawn("server", async {});
        let error = process.serve_until_signal(sleep(SECOND)).await.unwrap_err();
        assert!(error.to_string().contains("\"server\" has ended"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_farewell_is_completed_before_the_servers_stop() {
        let mut process = process();
        let steps = Arc::new(Mutex::new(Vec::new()));
        let [farewell, drained] = [Arc::clone(&steps), Arc::clone(&steps)];
        let (signal, stop) = (process.signal.clone(), process.stop.clone());
        process.servers.spawn("server", async move {
            stop.cancelled().await;
            sleep(SECOND).await;
            drained.lock().unwrap().push("drained");
        });
        let served = tokio::spawn(process.serve_until_signal(async move {
            sleep(SECOND).await;
            farewell.lock().unwrap().push("farewell");
        }));
        sleep(SECOND * 60).await;
        assert!(steps.lock().unwrap().is_empty(), "it serves until the signal");
        signal.cancel();
        served.await.unwrap().unwrap();
        assert_eq!(*steps.lock().unwrap(), ["farewell", "drained"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_never_ends_does_not_keep_the_process() {
        let mut process = process();
        process.servers.spawn("server", std::future::pending());
        process.signal.cancel();
        let began = Instant::now();
        process.serve_until_signal(std::future::ready(())).await.unwrap();
        assert!(began.elapsed() >= DRAIN_LIMIT && began.elapsed() < DRAIN_LIMIT + SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn work_before_serving_ends_with_the_signal_or_a_task() {
        let mut waiting = process();
        let done = waiting.complete(async { Ok(1) }).await;
        assert_eq!(done.unwrap(), Some(1));
        waiting.signal.cancel();
        let cut_off = waiting
            .complete(std::future::pending::<anyhow::Result<()>>())
            .await;
        assert_eq!(cut_off.unwrap(), None);
        let mut failing = process();
        failing.tasks.spawn("watch", async {});
        let failed = failing
            .complete(std::future::pending::<anyhow::Result<()>>())
            .await;
        assert!(failed.is_err());
    }
}

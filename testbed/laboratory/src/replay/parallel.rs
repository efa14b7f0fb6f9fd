//! Runs jobs in parallel, on threads of their own: they compute for minutes, which would block tokio's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

/// Tells the threads of runs to stop, and lets them wait for futures.
#[derive(Debug)]
pub struct RunThreads {
    pub stop: AtomicBool,
    handle: Handle,
}

struct StopOnDrop(Arc<RunThreads>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// Does work that runs jobs, on a thread that may block.
pub async fn on_threads<R: Send + 'static>(
    work: impl FnOnce(&RunThreads) -> Result<R> + Send + 'static,
) -> Result<R> {
    let threads = Arc::new(RunThreads {
        stop: AtomicBool::new(false),
        handle: Handle::current(),
    });
    // Ctrl-C drops this future, and blocking threads go on: they look at `stop` after every pod.
    let _guard = StopOnDrop(Arc::clone(&threads));
    spawn_blocking(move || work(&threads))
        .await
        .context("the runs broke off")?
}

impl RunThreads {
    /// Runs jobs, `n_threads` at a time, by default one per processor. Returns their results in the order of the jobs.
    /// The first error stops all; a job that was stopped returns `None`, and has no result.
    pub fn run_all<J: Sync, R: Send>(
        &self,
        jobs: &[J],
        n_threads: Option<u16>,
        run: impl AsyncFn(&J) -> Result<Option<R>> + Sync,
    ) -> Result<Vec<R>> {
        let next = AtomicUsize::new(0);
        let done: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(at) else { return Ok(()) };
                let result = self.handle.block_on(run(job));
                let result = result.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
                let Some(result) = result else { return Ok(()) };
                done.lock().push((at, result));
            }
        };
        let n_threads = match n_threads {
            Some(n) => n.into(),
            None => thread::available_parallelism().map_or(1, usize::from),
        };
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for _ in 0..n_threads.min(jobs.len()) {
                threads.push(scope.spawn(work));
            }
            // All are joined, also after an error: the scope would panic with a thread that does.
            let results: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            for result in results {
                result.ok().context("a run broke off")??;
            }
            anyhow::Ok(())
        })?;
        let mut done = done.into_inner();
        done.sort_by_key(|(at, _)| *at);
        Ok(done.into_iter().map(|(_, result)| result).collect())
    }
}

//! Runs jobs in parallel, on threads of their own: they compute for minutes, which would block tokio's.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Result;
use parking_lot::Mutex;

/// Runs jobs, `threads` at a time, by default one per processor. Returns their results in the order of the jobs.
/// The first error stops all; a job that was stopped returns `None`, and has no result.
///
/// # Errors
/// The error of the first job that has one.
pub fn in_parallel<J: Sync, R: Send>(
    jobs: &[J],
    threads: Option<u16>,
    stop: &AtomicBool,
    run: impl Fn(&J) -> Result<Option<R>> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(at) else { return Ok(()) };
            let result = run(job).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            let Some(result) = result else { return Ok(()) };
            done.lock().push((at, result));
        }
    };
    let n_threads = threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        usize::from,
    );
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads.min(jobs.len()))
            .map(|_| scope.spawn(work))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a run broke off")))
            })
            .collect()
    });
    results.into_iter().collect::<Result<()>>()?;
    let mut done = done.into_inner();
    done.sort_by_key(|(at, _)| *at);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

//! Logs each panic with the name of the task that panicked, and ends the process: no daemon goes on without one of its tasks.

use std::panic::PanicHookInfo;

use tracing::error;

tokio::task_local! {
    static NAME: &'static str;
}

/// Runs a task; if it panics, the log has this name.
pub async fn named<T>(name: &'static str, task: impl Future<Output = T>) -> T {
    NAME.scope(name, task).await
}

/// From now on each panic is logged, and ends the process. Must be called once, after the start of the log.
pub fn end_at_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        log(panic);
        // Rust's own hook prints the message and the backtrace.
        print(panic);
        std::process::abort();
    }));
}

fn log(panic: &PanicHookInfo<'_>) {
    // Empty for a thread that runs no named task.
    let task = NAME.try_with(|name| *name).unwrap_or_default();
    let thread = std::thread::current();
    let payload = panic.payload();
    // `panic!` with a literal carries a `&str`, one with arguments a `String`.
    let literal = payload.downcast_ref::<&str>().copied();
    let message = literal.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    error!(task, thread = thread.name(), at, message, "panic");
}

//! Logs each panic with the name of the task that panicked.
//!
//! Release builds abort after that (`panic = "abort"` in the workspace's Cargo.toml), so no daemon goes on without one of its
//! tasks.

use std::panic::PanicHookInfo;

use tracing::error;

tokio::task_local! {
    static NAME: &'static str;
}

/// Runs a task that has this name in the log if it panics.
pub async fn named<T>(name: &'static str, task: impl Future<Output = T>) -> T {
    NAME.scope(name, task).await
}

/// Logs every panic from now on, in addition to Rust's report on standard error. Must be called once, after the start of the log.
pub fn log_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        log(panic);
        // Rust's own hook prints the message and the backtrace.
        print(panic);
    }));
}

/// Logs a panic with the task and the thread in which it happened.
fn log(panic: &PanicHookInfo<'_>) {
    let task = NAME.try_with(|name| *name).unwrap_or_default();
    let thread = std::thread::current();
    let payload = panic.payload();
    // `panic!` with a literal carries a `&str`, one with arguments a `String`.
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    error!(task, thread = thread.name(), at, message, "panic");
}

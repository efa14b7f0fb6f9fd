//! Logs each panic with the name of its task.
//!
//! Release builds abort after that (`panic = "abort"` in the workspace's Cargo.toml), so no daemon goes on without one of its
//! tasks.

use std::panic::PanicHookInfo;

use tracing::error;

tokio::task_local! {
    static NAME: &'static str;
}

/// Runs a task under a name for the log of panics.
pub async fn named<T>(name: &'static str, task: impl Future<Output = T>) -> T {
    NAME.scope(name, task).await
}

/// Logs every panic, in addition to the default report on standard error. To be called once, after the start of the log.
pub fn log_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        log(panic);
        // The hook that was there prints the message and the backtrace.
        print(panic);
    }));
}

fn log(panic: &PanicHookInfo<'_>) {
    let task = NAME.try_with(|name| *name).unwrap_or_default();
    let thread = std::thread::current();
    let payload = panic.payload();
    let message = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let at = panic.location().map(ToString::to_string).unwrap_or_default();
    error!(task, thread = thread.name(), at, message, "panic");
}

//! A panic is logged with the name of its task.
//!
//! Release builds abort after that (`panic = "abort"` in the workspace's Cargo.toml), so no daemon goes on with a part of it
//! missing.

use std::panic::PanicHookInfo;

use tracing::error;

tokio::task_local! {
    static NAME: &'static str;
}

/// Gives a task the name that the log calls it by if it panics.
pub async fn named<T>(name: &'static str, task: impl Future<Output = T>) -> T {
    NAME.scope(name, task).await
}

/// Has every panic logged, and printed as before. Meant to be called once, after the log has begun.
pub fn log_panics() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        log(panic);
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

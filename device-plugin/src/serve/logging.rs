//! Where log lines go and in which form.

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogLevel};

/// Sends log lines to standard error from now on. Meant to be called once.
pub fn init(format: LogFormat, level: &LogLevel) {
    let filter = EnvFilter::new(level.as_str());
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.with_target(false).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

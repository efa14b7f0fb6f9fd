//! The log: lines on standard error, as text or as JSON.

use std::io::IsTerminal;
use std::str::FromStr;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Directives that select log lines, such as `info` or `info,kube=debug`.
#[derive(Clone, Debug)]
pub struct LogFilter(String);

impl FromStr for LogFilter {
    type Err = String;

    /// Accepts the directives of `EnvFilter`, except for texts that it would panic at or misread.
    fn from_str(text: &str) -> Result<Self, String> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        // EnvFilter panics at some texts that are not ASCII, such as a space before an emoji.
        if !text.is_ascii() {
            return Err("not ASCII".to_owned());
        }
        let parsed = EnvFilter::builder().parse(text);
        parsed.map_err(|error| error.to_string())?;
        for directive in text.split(',') {
            // EnvFilter takes a single word for the name of a module if it is not a level, and would silence all other modules.
            let is_single = !directive.contains(['=', '[', ':']);
            if is_single && !LEVELS.contains(&directive.trim().to_lowercase().as_str()) {
                return Err(format!(
                    "{directive:?} is none of {}, and no directive such as kube=debug",
                    LEVELS.join(", ")
                ));
            }
        }
        Ok(Self(text.to_owned()))
    }
}

/// Starts to write the log to standard error. A second call has no effect.
pub fn start(format: LogFormat, LogFilter(directives): &LogFilter) {
    // kube's client logs each request that fails, and so does the component that made the request.
    let filter = EnvFilter::new(format!("kube_client=off,{directives}"));
    // A line that cannot be written, as on a full disk, is lost: an internal error would end the task that logs.
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    // An error means that a subscriber is set already, as in tests.
    let _ = match format {
        LogFormat::Text => lines
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::level("debug", true)]
    #[case::upper_case("WARN", true)]
    #[case::directives("info,kube=debug,scheduler::index[span]=trace", true)]
    #[case::misspelt("inof", false)]
    #[case::misspelt_among_others("info,kube", false)]
    #[case::no_such_level("kube=loud", false)]
    #[case::nothing("", false)]
    #[case::not_ascii(" a\u{1f300}=", false)]
    fn filters(#[case] text: &str, #[case] is_valid: bool) {
        assert_eq!(text.parse::<LogFilter>().is_ok(), is_valid);
    }
}

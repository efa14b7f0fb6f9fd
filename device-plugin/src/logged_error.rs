//! Logs an error once, although many tries fail with it.

use std::error::Error;

use daemon::api_server::one_line;
use tracing::warn;

/// The text of the error that was logged last.
#[derive(Debug, Default)]
pub(crate) struct LoggedError(Option<String>);

impl LoggedError {
    /// Keeps the text of the error, and returns it if it differs from the one that was logged last.
    pub(crate) fn changed(&mut self, error: &(dyn Error + 'static)) -> Option<String> {
        let text = one_line(error);
        if self.0.as_ref() == Some(&text) {
            return None;
        }
        self.0 = Some(text.clone());
        Some(text)
    }

    /// Logs the error, with `what` as the line's message, if it differs from the one that was logged last.
    pub(crate) fn warn(&mut self, error: &(dyn Error + 'static), what: &str) {
        if let Some(error) = self.changed(error) {
            warn!(error, "{what}");
        }
    }

    /// Notes that a try has succeeded: the next error is logged, even the same one.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}

//! The ends of a command: yes, no, or a failure with a sentence that says what to do.

use std::fmt;

/// The answer of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandVerdict {
    /// The exit code 0.
    Yes,
    /// The exit code 2.
    No,
}

impl CommandVerdict {
    /// Yes, if this holds.
    pub(crate) fn of(holds: bool) -> Self {
        if holds { Self::Yes } else { Self::No }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Yes => 0,
            Self::No => 2,
        }
    }
}

/// The reason that a command failed. The exit code is 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandFailure {
    /// The kubeconfig cannot be used.
    #[error(
        "cannot use the kubeconfig: {0}. Name one with --kubeconfig or KUBECONFIG, and a context of it with --context"
    )]
    Kubeconfig(String),
    /// The API server does not answer.
    #[error(
        "the API server does not answer: {0}. Check `kubectl cluster-info` with the same --kubeconfig and --context"
    )]
    Unreachable(String),
    /// The API server refuses a request.
    #[error(
        "the API server refuses to {action}: {reason}. Ask an administrator for the right; docs/cli.md lists what each command needs"
    )]
    Forbidden {
        /// The request, for people.
        action: String,
        /// Its answer.
        reason: String,
    },
    /// The API server answers with another error.
    #[error("cannot {action}: {reason}")]
    Api {
        /// The HTTP status.
        code: u16,
        /// The request, for people.
        action: String,
        /// Its answer.
        reason: String,
    },
    /// The scheduler has no read API, or one of another version.
    #[error(
        "the scheduler at {at} does not serve version {} of the read API: {reason}. Upgrade it, or use --offline",
        proto::read_api::VERSION
    )]
    OldScheduler {
        /// The pod or address.
        at: String,
        /// Its answer.
        reason: String,
    },
    /// The read API cannot be reached.
    #[error("cannot reach the read API at {at}: {reason}")]
    NoReadApi {
        /// The pod or address.
        at: String,
        /// The fault.
        reason: String,
    },
    /// The scheduler serves no page.
    #[error(
        "the scheduler at {at} serves no page. Upgrade it, or start it with --page-listen=127.0.0.1:{}",
        proto::read_api::PAGE_PORT
    )]
    NoPage {
        /// The pod.
        at: String,
    },
    /// The read API refuses a request.
    #[error("{0}")]
    Refused(String),
    /// The command line or a file of it cannot be used.
    #[error("{0}")]
    Input(String),
    /// The reader of standard output has gone.
    #[error("standard output is closed")]
    ClosedPipe,
    /// Standard output cannot be written.
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
}

impl CommandFailure {
    /// The failure of the command line, or of a file of it.
    pub(crate) fn input(error: impl fmt::Display) -> Self {
        Self::Input(error.to_string())
    }

    /// Returns true if the same request may succeed a little later, such as while the API server or the scheduler restarts.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::NoReadApi { .. } => true,
            Self::Api { code, .. } => *code >= 500,
            _ => false,
        }
    }

    /// The failure of a request to the API server; `action` completes "cannot …".
    pub(crate) fn of_kube(action: impl fmt::Display, error: kube::Error) -> Self {
        let action = action.to_string();
        match error {
            kube::Error::Api(status) if matches!(status.code, 401 | 403) => Self::Forbidden {
                action,
                reason: status.message.clone(),
            },
            kube::Error::Api(status) => Self::Api {
                code: status.code,
                action,
                reason: status.message.clone(),
            },
            error => Self::Unreachable(with_sources(&error)),
        }
    }
}

/// An error with the errors that caused it.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let reason = error.to_string();
        // Some errors repeat the text of their source.
        if !text.contains(&reason) {
            text += &format!(": {reason}");
        }
        source = error.source();
    }
    text
}

//! The ends of a command: an exit code for yes or no, or a failure with a sentence that says what to do.

use std::fmt;
use std::process::ExitCode;

pub(crate) type CommandResult = Result<ExitCode, CommandFailure>;

/// The exit code of a command that answers a question: 0 for yes, 2 for no.
pub(crate) fn code_of_answer(is_yes: bool) -> ExitCode {
    // Scripts distinguish a no from a failure by this code; kubectl itself uses only 1.
    ExitCode::from(if is_yes { 0 } else { 2 })
}

/// The reason that a command failed, in a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandFailure {
    #[error(
        "cannot use the kubeconfig: {0}. Name one with --kubeconfig or KUBECONFIG, and a context of it with --context"
    )]
    Kubeconfig(String),
    #[error(
        "the API server does not answer: {0}. Check `kubectl cluster-info` with the same --kubeconfig and --context"
    )]
    Unreachable(String),
    #[error(
        "the API server refuses to {action}: {reason}. Ask an administrator for the right; docs/cli.md lists what each command needs"
    )]
    Forbidden {
        /// The request, in words that complete "refuses to …".
        action: String,
        reason: String,
    },
    #[error("cannot {action}: {reason}")]
    Api {
        code: u16,
        action: String,
        reason: String,
    },
    #[error(
        "the scheduler at {at} does not serve version {} of the read API: {reason}. Upgrade it, or use --offline",
        proto::read_api::VERSION
    )]
    OldScheduler { at: String, reason: String },
    #[error("cannot reach the read API at {at}: {reason}")]
    NoReadApi { at: String, reason: String },
    /// The read API does not answer now: it makes the plans of others, or has not read the cluster yet.
    #[error("the scheduler at {at} cannot answer now: {reason}. Run the command again in a few seconds")]
    Busy { at: String, reason: String },
    #[error("{0}")]
    Refused(String),
    /// The command line, or a file that it names, cannot be used.
    #[error("{0}")]
    Input(String),
    /// The program that reads standard output, such as a pager, has ended.
    #[error("standard output is closed")]
    ClosedPipe,
    #[error("cannot write to standard output: {0}")]
    Output(std::io::Error),
}

impl CommandFailure {
    pub(crate) fn input(error: impl fmt::Display) -> Self {
        Self::Input(error.to_string())
    }

    /// Returns true if the same request may succeed a little later, such as while the API server or the scheduler restarts.
    pub(crate) fn is_temporary(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::NoReadApi { .. } | Self::Busy { .. } => true,
            // The API server answers so while it starts, or has lost etcd.
            Self::Api { code, .. } => *code >= 500,
            _ => false,
        }
    }

    /// As [`Self::is_temporary`], for a request of a user who had the right a moment ago: an API server that has just started
    /// refuses requests until it has read the roles.
    pub(crate) fn may_pass(&self) -> bool {
        self.is_temporary() || matches!(self, Self::Forbidden { .. })
    }

    /// The failure of a request to the API server; `action` completes "cannot …" and "refuses to …".
    pub(crate) fn of_kube(action: &str, error: kube::Error) -> Self {
        let action = action.to_owned();
        match error {
            // 401 too: to the user, credentials that have expired are a lack of rights.
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

/// The text of an error with those of the errors that caused it.
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

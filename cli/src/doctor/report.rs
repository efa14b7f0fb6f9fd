//! The findings of one check of an installation.

use proto::read_api::{Finding, Severity};

/// The result of a check that found no fault: the sentence that says so, or the reason that the check could not be made.
pub(super) type Outcome = Result<String, String>;

pub(super) struct CheckReport {
    pub(super) check: &'static str,
    pub(super) findings: Vec<Finding>,
}

impl CheckReport {
    /// Adds a finding. `object` is empty for the installation as a whole, and `remedy` if the user has nothing to do.
    pub(super) fn add(
        &mut self,
        severity: Severity,
        object: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.findings.push(Finding {
            check: self.check.to_owned(),
            severity,
            object: object.into(),
            message: message.into(),
            remedy: remedy.into(),
        });
    }

    pub(super) fn error(
        &mut self,
        object: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Severity::Error, object, message, remedy);
    }

    pub(super) fn warn(
        &mut self,
        object: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Severity::Warning, object, message, remedy);
    }
}

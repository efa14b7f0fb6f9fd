//! Annotations whose value is JSON: a limit of their length, keys in any case, and errors that name the annotation.

use serde::de::DeserializeOwned;

pub(crate) mod keys;

/// An annotation that cannot be read, or cannot be written because its readers would refuse it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}: {problem}")]
pub struct AnnotationError {
    key: &'static str,
    /// The rule that the value breaks, or the error of its parser.
    problem: String,
}

impl AnnotationError {
    /// The error for the annotation with this key.
    pub(crate) fn new(key: &'static str, problem: impl Into<String>) -> Self {
        Self {
            key,
            problem: problem.into(),
        }
    }
}

/// Parses the value of an annotation.
///
/// # Errors
/// The value is longer than `max_bytes`, or is not the JSON of a `T`.
pub(crate) fn parse<T: DeserializeOwned>(
    key: &'static str,
    text: &str,
    max_bytes: usize,
) -> Result<T, AnnotationError> {
    // Before parsing, so that a long annotation costs no time: any user who may write the object may write one.
    if text.len() > max_bytes {
        return Err(AnnotationError::new(
            key,
            format!("longer than {max_bytes} bytes"),
        ));
    }
    serde_json::from_str(text)
        .and_then(keys::read_value)
        .map_err(|cause| AnnotationError::new(key, format!("does not parse: {cause}")))
}

#[cfg(test)]
mod tests;

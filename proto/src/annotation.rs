//! Annotations whose value is JSON: a limit of their length, keys in any case, and errors that name the annotation.

use serde::de::DeserializeOwned;

use crate::request::excerpt;

pub(crate) mod keys;

/// An annotation that cannot be read, or whose value would be refused by its readers.
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
/// It is longer than `max_bytes`, or is not the JSON of a `T`.
pub(crate) fn parse<T: DeserializeOwned>(
    key: &'static str,
    text: &str,
    max_bytes: usize,
) -> Result<T, AnnotationError> {
    // Before parsing, so that a long annotation costs nothing: any user who may write the object may write one.
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

/// The first characters of an annotation's value in quotes, for errors.
///
/// JSON is in single quotes, so that its own ones need no backslashes; characters that do not print are escaped.
pub(crate) fn quoted(value: &str) -> String {
    let mut shown = excerpt(value);
    if shown.len() < value.len() {
        shown.push('…');
    }
    let escaped = format!("{shown:?}");
    if shown.contains('"') && !shown.contains('\'') && escaped.replace("\\\"", "\"") == format!("\"{shown}\"")
    {
        format!("'{shown}'")
    } else {
        escaped
    }
}

#[cfg(test)]
mod tests;

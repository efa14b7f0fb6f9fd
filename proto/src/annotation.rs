//! Annotations whose value is JSON: a limit of their length, keys in any case, and errors that name the annotation.

use serde::de::DeserializeOwned;

use crate::excerpt::quoted;

pub(crate) mod keys;

/// An annotation that cannot be read, or cannot be written because its readers would refuse it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {key}{is_value}: {rule}")]
pub struct AnnotationError {
    key: &'static str,
    /// ` is ` and the beginning of the value in quotes, or empty.
    is_value: String,
    /// The rule that the value breaks, or the error of its parser.
    rule: String,
}

impl AnnotationError {
    pub(crate) fn new(key: &'static str, rule: impl Into<String>) -> Self {
        Self {
            key,
            is_value: String::new(),
            rule: rule.into(),
        }
    }

    /// An error that shows the beginning of the value.
    pub(crate) fn of_value(key: &'static str, value: &str, rule: impl Into<String>) -> Self {
        Self {
            is_value: format!(" is {}", quoted(value)),
            ..Self::new(key, rule)
        }
    }
}

pub(crate) fn parse<T: DeserializeOwned>(
    key: &'static str,
    text: &str,
    max_bytes: usize,
) -> Result<T, AnnotationError> {
    // Before parsing, so that a long annotation costs no time: any user who may write the object may write one.
    if text.len() > max_bytes {
        let rule = format!("longer than {max_bytes} bytes");
        return Err(AnnotationError::new(key, rule));
    }
    let value = serde_json::from_str(text).and_then(keys::read_value);
    value.map_err(|cause| AnnotationError::new(key, format!("does not parse: {cause}")))
}

#[cfg(test)]
mod tests;

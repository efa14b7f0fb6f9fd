//! Label and field selectors: parsed from a client's text, and matched with untyped objects.
//!
//! A field selector may name any field by its dotted path; kube-apiserver accepts a few per kind.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Expression, Selector, SelectorExt};
use serde::Deserialize;
use serde_json::Value;

use super::status::ApiError;

/// The requirement that the field or label of a name has a value, or not.
#[derive(Debug, Clone)]
struct Equality {
    name: String,
    value: String,
    /// True for `=`, false for `!=`.
    is_equal: bool,
}

/// Both selectors of a list or watch; the default selects everything.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selectors {
    labels: Selector,
    fields: Vec<Equality>,
}

impl Selectors {
    /// Parses both selectors from their text form, such as `app=web,tier in (a, b),!old` and
    /// `spec.nodeName=n1,status.phase!=Failed`; empty text selects everything.
    pub(crate) fn parse(labels: &str, fields: &str) -> Result<Self, ApiError> {
        let mut parsed = Self::default();
        for part in split_outside_parentheses(labels) {
            let expression = parse_label(part)
                .map_err(|why| ApiError::bad_request(format!("unable to parse requirement: {why}")))?;
            parsed.labels.extend([expression]);
        }
        for part in fields.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some(equality) = parse_equality(part) else {
                let why = format!("invalid selector: '{fields}'; can't understand '{part}'");
                return Err(ApiError::bad_request(why));
            };
            parsed.fields.push(equality);
        }
        Ok(parsed)
    }

    /// The same selectors for the one object of this name.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.fields.push(Equality {
            name: "metadata.name".to_owned(),
            value: name.to_owned(),
            is_equal: true,
        });
        self
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.fields.iter().all(|test| test.matches(object)) && has_labels(&self.labels, object)
    }
}

impl Equality {
    /// Returns true if the field at the dotted path meets the requirement.
    fn matches(&self, object: &Value) -> bool {
        let mut path = self.name.split('.');
        let found = path.try_fold(object, |value, field| value.get(field));
        let is_same = match found {
            Some(Value::String(text)) => *text == self.value,
            // A field selector treats an absent field as an empty string: `spec.nodeName=` selects pods without a node.
            Some(Value::Null) | None => self.value.is_empty(),
            // `Value` itself compares with text only if it is a string.
            Some(other) => format!("{other}") == self.value,
        };
        is_same == self.is_equal
    }
}

/// Returns true if the labels of an object meet all requirements.
pub(crate) fn has_labels(selector: &Selector, object: &Value) -> bool {
    if selector.selects_all() {
        return true;
    }
    let labels = object.pointer("/metadata/labels");
    let labels = labels.and_then(|labels| BTreeMap::deserialize(labels).ok());
    selector.matches(&labels.unwrap_or_default())
}

/// Splits at commas, except those inside the parentheses of `in (a, b)`.
fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|part| !part.is_empty())
    .collect()
}

/// Parses one requirement of a label selector.
fn parse_label(part: &str) -> Result<Expression, String> {
    if let Some(Equality {
        name,
        value,
        is_equal,
    }) = parse_equality(part)
    {
        let key = legal_key(&name)?;
        if value.contains('=') {
            return Err("found '=', expected: ',' or 'end of string'".to_owned());
        }
        let requirement = if is_equal {
            Expression::Equal
        } else {
            Expression::NotEqual
        };
        return Ok(requirement(key, value));
    }
    if let Some((head, list)) = part.split_once('(') {
        let Some(values) = list.strip_suffix(')') else {
            return Err(format!("'{part}' lacks ')'"));
        };
        let values: BTreeSet<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        let mut words = head.split_whitespace();
        let key = legal_key(words.next().unwrap_or_default())?;
        return match words.next() {
            Some("in") => Ok(Expression::In(key, values)),
            Some("notin") => Ok(Expression::NotIn(key, values)),
            _ => Err(format!("'{part}' has neither 'in' nor 'notin'")),
        };
    }
    match part.strip_prefix('!') {
        Some(key) => Ok(Expression::DoesNotExist(legal_key(key.trim())?)),
        None => Ok(Expression::Exists(legal_key(part)?)),
    }
}

/// Returns the key of a requirement, or an error if it cannot be a label.
fn legal_key(key: &str) -> Result<String, String> {
    if key.is_empty() || key.contains(|c: char| !c.is_ascii_alphanumeric() && !"-_./".contains(c)) {
        return Err(format!("'{key}' is not a label key"));
    }
    Ok(key.to_owned())
}

/// Parses `name=value`, `name==value` and `name!=value`; `None` if the text has another form.
fn parse_equality(part: &str) -> Option<Equality> {
    if part.contains('(') {
        return None;
    }
    let (name, value) = part.split_once('=')?;
    let is_equal = !name.ends_with('!');
    let value = value.strip_prefix('=').filter(|_| is_equal).unwrap_or(value);
    Some(Equality {
        name: name.trim_end_matches('!').trim().to_owned(),
        value: value.trim().to_owned(),
        is_equal,
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case("a=1,b!=2,!c", "", true)]
    #[case("a in (1, 2),d notin (3),b", "", true)]
    #[case("a notin (1)", "", false)]
    #[case("d", "", false)]
    #[case("", "spec.nodeName=n,status.phase!=Failed,spec.other=", true)]
    #[case("", "spec.nodeName!=n", false)]
    fn selectors_match_labels_and_fields(#[case] labels: &str, #[case] fields: &str, #[case] expected: bool) {
        let object = json!({"metadata": {"labels": {"a": "1", "b": "1"}}, "spec": {"nodeName": "n"}});
        assert_eq!(
            Selectors::parse(labels, fields).unwrap().matches(&object),
            expected
        );
    }

    #[rstest]
    #[case("a b", "")]
    #[case("a in (1", "")]
    #[case("a like (1)", "")]
    #[case("", "spec.nodeName")]
    fn bad_selectors_are_refused(#[case] labels: &str, #[case] fields: &str) {
        assert_eq!(Selectors::parse(labels, fields).unwrap_err().code, 400);
    }
}

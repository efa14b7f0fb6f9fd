//! Label and field selectors: parsed from a client's text, and matched with untyped objects.
//!
//! A field selector may name any field by its dotted path; kube-apiserver accepts a few per kind.

use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use serde_json::Value;

use super::status::ApiError;

#[derive(Debug, Clone, PartialEq, Eq)]
enum SelectorTest {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SelectorRequirement {
    key: String,
    test: SelectorTest,
}

/// A parsed label selector; empty matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ParsedSelector(Vec<SelectorRequirement>);

/// A parsed field selector; empty matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldSelector(Vec<SelectorRequirement>);

/// Both selectors of a list or watch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selectors {
    pub(crate) labels: ParsedSelector,
    pub(crate) fields: FieldSelector,
}

impl Selectors {
    /// Parses both selectors from their text form; empty text matches everything.
    pub(crate) fn parse(labels: &str, fields: &str) -> Result<Self, ApiError> {
        Ok(Self {
            labels: ParsedSelector::parse(labels)?,
            fields: FieldSelector::parse(fields)?,
        })
    }

    /// True if every object matches.
    pub(crate) fn is_everything(&self) -> bool {
        self.labels.0.is_empty() && self.fields.0.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.fields.matches(object) && self.labels.matches(object)
    }
}

impl ParsedSelector {
    /// Parses a label selector, such as `app=web,tier in (a, b),!old`.
    pub(crate) fn parse(text: &str) -> Result<Self, ApiError> {
        let mut requirements = Vec::new();
        for part in split_outside_parentheses(text) {
            match parse_label(part) {
                Ok(requirement) => requirements.push(requirement),
                Err(why) => {
                    return Err(ApiError::bad_request(format!(
                        "unable to parse requirement: {why}"
                    )));
                }
            }
        }
        Ok(Self(requirements))
    }

    /// Reads a selector from an object's field; a requirement with an unknown operator matches nothing.
    pub(crate) fn from_field(selector: &meta::LabelSelector) -> Self {
        let mut requirements = Vec::new();
        for (key, value) in selector.match_labels.iter().flatten() {
            let test = SelectorTest::In(vec![value.clone()]);
            requirements.push(SelectorRequirement::new(key, test));
        }
        for one in selector.match_expressions.iter().flatten() {
            let values = one.values.clone().unwrap_or_default();
            let test = match one.operator.as_str() {
                "NotIn" => SelectorTest::NotIn(values),
                "Exists" => SelectorTest::Exists,
                "DoesNotExist" => SelectorTest::Absent,
                "In" => SelectorTest::In(values),
                _ => SelectorTest::In(Vec::new()),
            };
            requirements.push(SelectorRequirement::new(&one.key, test));
        }
        Self(requirements)
    }

    /// Returns true if the labels of an object meet all requirements.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        for requirement in &self.0 {
            let label = labels.and_then(|labels| labels.get(&requirement.key));
            if !requirement.accepts(label.and_then(Value::as_str)) {
                return false;
            }
        }
        true
    }
}

impl FieldSelector {
    /// Parses a field selector, such as `spec.nodeName=n1,status.phase!=Failed`.
    pub(crate) fn parse(text: &str) -> Result<Self, ApiError> {
        let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
        let parsed: Option<Vec<_>> = parts.map(parse_equality).collect();
        let why = || format!("invalid selector: '{text}'; can't understand a part of it");
        parsed.map(Self).ok_or_else(|| ApiError::bad_request(why()))
    }

    /// The selector for one object's name.
    pub(crate) fn name(name: &str) -> Self {
        let test = SelectorTest::In(vec![name.to_owned()]);
        Self(vec![SelectorRequirement::new("metadata.name", test)])
    }

    /// Adds another selector's requirements.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// Returns true if the fields of an object meet all requirements.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|r| {
            let found = r.key.split('.').try_fold(object, |value, field| value.get(field));
            match found {
                Some(Value::String(text)) => r.accepts(Some(text)),
                // A field selector treats an absent field as an empty string: `spec.nodeName=` selects pods
                // without a node.
                Some(Value::Null) | None => r.accepts(Some("")),
                Some(other) => r.accepts(Some(&other.to_string())),
            }
        })
    }
}

impl SelectorRequirement {
    fn new(key: &str, test: SelectorTest) -> Self {
        let key = key.to_owned();
        Self { key, test }
    }
    /// Returns true if a value, or the absence of one, meets the requirement.
    fn accepts(&self, found: Option<&str>) -> bool {
        match (&self.test, found) {
            (SelectorTest::In(values), Some(found)) => values.iter().any(|value| value == found),
            (SelectorTest::In(_) | SelectorTest::Exists, None) | (SelectorTest::Absent, Some(_)) => false,
            (SelectorTest::NotIn(values), Some(found)) => values.iter().all(|v| v != found),
            // `notin` also matches an object without the label, as in Kubernetes.
            (SelectorTest::NotIn(_) | SelectorTest::Absent, None) | (SelectorTest::Exists, Some(_)) => true,
        }
    }
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
fn parse_label(part: &str) -> Result<SelectorRequirement, String> {
    if let Some(requirement) = parse_equality(part) {
        return with_legal_key(requirement);
    }
    if let Some((head, list)) = part.split_once('(') {
        let Some(values) = list.strip_suffix(')') else {
            return Err(format!("'{part}' lacks ')'"));
        };
        let values = values.split(',').map(|value| value.trim().to_owned()).collect();
        let mut words = head.split_whitespace();
        let key = words.next().unwrap_or_default();
        let test = match words.next() {
            Some("in") => SelectorTest::In(values),
            Some("notin") => SelectorTest::NotIn(values),
            _ => return Err(format!("'{part}' has neither 'in' nor 'notin'")),
        };
        return with_legal_key(SelectorRequirement::new(key, test));
    }
    with_legal_key(match part.strip_prefix('!') {
        Some(key) => SelectorRequirement::new(key.trim(), SelectorTest::Absent),
        None => SelectorRequirement::new(part, SelectorTest::Exists),
    })
}

/// Returns the requirement, or an error if its key cannot be a label.
fn with_legal_key(requirement: SelectorRequirement) -> Result<SelectorRequirement, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let key = &requirement.key;
    if key.is_empty() || !key.chars().all(legal) {
        return Err(format!("'{key}' is not a label key"));
    }
    Ok(requirement)
}

/// Parses `key=value`, `key==value` or `key!=value`; `None` if the text has another form.
fn parse_equality(part: &str) -> Option<SelectorRequirement> {
    if part.contains('(') {
        return None;
    }
    let (key, value) = part.split_once('=')?;
    let (key, is_equal) = match key.strip_suffix('!') {
        Some(key) => (key, false),
        None => (key, true),
    };
    let value = if is_equal {
        value.strip_prefix('=').unwrap_or(value)
    } else {
        value
    };
    let values = vec![value.trim().to_owned()];
    let test = if is_equal {
        SelectorTest::In(values)
    } else {
        SelectorTest::NotIn(values)
    };
    Some(SelectorRequirement::new(key.trim(), test))
}

#[cfg(test)]
mod tests;

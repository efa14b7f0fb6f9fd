//! Label and field selectors: parsing a client's text, and matching untyped objects.
//!
//! Any dotted path is accepted as a field; a real API server accepts a few per kind.

use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use serde_json::Value;

use super::status::ApiError;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

/// A parsed label selector; empty matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LabelSelector(Vec<Requirement>);

/// A parsed field selector; empty matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldSelector(Vec<Requirement>);

/// Both selectors of a list or watch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selectors {
    pub(crate) labels: LabelSelector,
    pub(crate) fields: FieldSelector,
}

impl Selectors {
    /// Parses both selectors from their text form; empty text matches everything.
    pub(crate) fn parse(labels: &str, fields: &str) -> Result<Self, ApiError> {
        Ok(Self {
            labels: LabelSelector::parse(labels)?,
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

impl LabelSelector {
    pub(crate) fn parse(text: &str) -> Result<Self, ApiError> {
        let parts = split_outside_parentheses(text);
        let parsed: Result<Vec<_>, _> = parts.into_iter().map(parse_label).collect();
        parsed
            .map(Self)
            .map_err(|why| ApiError::bad_request(format!("unable to parse requirement: {why}")))
    }

    /// The selector that an object's field holds; an unknown operator matches nothing.
    pub(crate) fn of(selector: &meta::LabelSelector) -> Self {
        let equal = selector.match_labels.iter().flatten();
        let equal = equal.map(|(key, value)| Requirement {
            key: key.clone(),
            test: Test::In(vec![value.clone()]),
        });
        let expressions = selector.match_expressions.iter().flatten().map(|one| {
            let values = one.values.clone().unwrap_or_default();
            let test = match one.operator.as_str() {
                "NotIn" => Test::NotIn(values),
                "Exists" => Test::Exists,
                "DoesNotExist" => Test::Absent,
                "In" => Test::In(values),
                _ => Test::In(Vec::new()),
            };
            Requirement {
                key: one.key.clone(),
                test,
            }
        });
        Self(equal.chain(expressions).collect())
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        self.0
            .iter()
            .all(|r| r.accepts(labels.and_then(|l| l.get(&r.key)).and_then(Value::as_str)))
    }
}

impl FieldSelector {
    pub(crate) fn parse(text: &str) -> Result<Self, ApiError> {
        let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
        let parsed: Option<Vec<_>> = parts.map(parse_equality).collect();
        parsed.map(Self).ok_or_else(|| {
            ApiError::bad_request(format!(
                "invalid selector: '{text}'; can't understand a part of it"
            ))
        })
    }

    /// The selector for one object's name.
    pub(crate) fn name(name: &str) -> Self {
        Self(vec![Requirement {
            key: "metadata.name".to_owned(),
            test: Test::In(vec![name.to_owned()]),
        }])
    }

    /// Adds another selector's requirements.
    pub(crate) fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|r| {
            let found = r.key.split('.').try_fold(object, |value, field| value.get(field));
            match found {
                Some(Value::String(text)) => r.accepts(Some(text)),
                Some(Value::Null) | None => r.accepts(Some("")),
                Some(other) => r.accepts(Some(&other.to_string())),
            }
        })
    }
}

impl Requirement {
    fn accepts(&self, found: Option<&str>) -> bool {
        match (&self.test, found) {
            (Test::In(values), Some(found)) => values.iter().any(|v| v == found),
            (Test::In(_) | Test::Exists, None) | (Test::Absent, Some(_)) => false,
            (Test::NotIn(values), Some(found)) => values.iter().all(|v| v != found),
            (Test::NotIn(_) | Test::Absent, None) | (Test::Exists, Some(_)) => true,
        }
    }
}

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

fn parse_label(part: &str) -> Result<Requirement, String> {
    if let Some(requirement) = parse_equality(part) {
        return checked(requirement);
    }
    if let Some((head, list)) = part.split_once('(') {
        let values = list
            .strip_suffix(')')
            .ok_or_else(|| format!("'{part}' lacks ')'"))?;
        let values = values.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = head.split_whitespace();
        let key = words.next().unwrap_or_default().to_owned();
        let test = match words.next() {
            Some("in") => Test::In(values),
            Some("notin") => Test::NotIn(values),
            _ => return Err(format!("'{part}' has neither 'in' nor 'notin'")),
        };
        return checked(Requirement { key, test });
    }
    match part.strip_prefix('!') {
        Some(key) => checked(Requirement {
            key: key.trim().to_owned(),
            test: Test::Absent,
        }),
        None => checked(Requirement {
            key: part.to_owned(),
            test: Test::Exists,
        }),
    }
}

fn checked(requirement: Requirement) -> Result<Requirement, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let key = &requirement.key;
    if key.is_empty() || !key.chars().all(legal) {
        return Err(format!("'{key}' is not a label key"));
    }
    Ok(requirement)
}

fn parse_equality(part: &str) -> Option<Requirement> {
    if part.contains('(') {
        return None;
    }
    let (key, value, equal) = if let Some((key, value)) = part.split_once("!=") {
        (key, value, false)
    } else if let Some((key, value)) = part.split_once("==") {
        (key, value, true)
    } else {
        let (key, value) = part.split_once('=')?;
        (key, value, true)
    };
    let values = vec![value.trim().to_owned()];
    let test = if equal {
        Test::In(values)
    } else {
        Test::NotIn(values)
    };
    Some(Requirement {
        key: key.trim().to_owned(),
        test,
    })
}

#[cfg(test)]
mod tests;

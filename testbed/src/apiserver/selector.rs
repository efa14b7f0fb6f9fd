//! Label and field selectors: parsing a client's text, and matching untyped objects.
//!
//! Any dotted path is accepted as a field; a real API server accepts a few per kind.

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
        let equal = equal.map(|(key, value)| SelectorRequirement {
            key: key.clone(),
            test: SelectorTest::In(vec![value.clone()]),
        });
        let expressions = selector.match_expressions.iter().flatten().map(|one| {
            let values = one.values.clone().unwrap_or_default();
            let test = match one.operator.as_str() {
                "NotIn" => SelectorTest::NotIn(values),
                "Exists" => SelectorTest::Exists,
                "DoesNotExist" => SelectorTest::Absent,
                "In" => SelectorTest::In(values),
                _ => SelectorTest::In(Vec::new()),
            };
            SelectorRequirement {
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
        Self(vec![SelectorRequirement {
            key: "metadata.name".to_owned(),
            test: SelectorTest::In(vec![name.to_owned()]),
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

impl SelectorRequirement {
    fn accepts(&self, found: Option<&str>) -> bool {
        match (&self.test, found) {
            (SelectorTest::In(values), Some(found)) => values.iter().any(|v| v == found),
            (SelectorTest::In(_) | SelectorTest::Exists, None) | (SelectorTest::Absent, Some(_)) => false,
            (SelectorTest::NotIn(values), Some(found)) => values.iter().all(|v| v != found),
            (SelectorTest::NotIn(_) | SelectorTest::Absent, None) | (SelectorTest::Exists, Some(_)) => true,
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

fn parse_label(part: &str) -> Result<SelectorRequirement, String> {
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
            Some("in") => SelectorTest::In(values),
            Some("notin") => SelectorTest::NotIn(values),
            _ => return Err(format!("'{part}' has neither 'in' nor 'notin'")),
        };
        return checked(SelectorRequirement { key, test });
    }
    match part.strip_prefix('!') {
        Some(key) => checked(SelectorRequirement {
            key: key.trim().to_owned(),
            test: SelectorTest::Absent,
        }),
        None => checked(SelectorRequirement {
            key: part.to_owned(),
            test: SelectorTest::Exists,
        }),
    }
}

fn checked(requirement: SelectorRequirement) -> Result<SelectorRequirement, String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let key = &requirement.key;
    if key.is_empty() || !key.chars().all(legal) {
        return Err(format!("'{key}' is not a label key"));
    }
    Ok(requirement)
}

fn parse_equality(part: &str) -> Option<SelectorRequirement> {
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
        SelectorTest::In(values)
    } else {
        SelectorTest::NotIn(values)
    };
    Some(SelectorRequirement {
        key: key.trim().to_owned(),
        test,
    })
}

#[cfg(test)]
mod tests;

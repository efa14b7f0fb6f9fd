//! Selection by labels, as Kubernetes defines it for label selectors.

use std::fmt;

use crate::traits::Labels;

/// What a label must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// One of these.
    In(Vec<Box<str>>),
    /// None of these; it may be missing.
    NotIn(Vec<Box<str>>),
    /// There.
    Exists,
    /// Missing.
    DoesNotExist,
}

/// What one label must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The label's key.
    pub key: Box<str>,
    /// What it must be.
    pub test: Test,
}

/// Requirements all of which must hold; without any, everything is selected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// The requirements.
    pub requirements: Vec<Requirement>,
}

impl Selector {
    /// Whether all requirements hold.
    pub fn selects(&self, labels: &Labels) -> bool {
        self.requirements
            .iter()
            .all(|Requirement { key, test }| test.passes(labels.get(key).map(|value| &**value)))
    }
}

impl Test {
    fn passes(&self, value: Option<&str>) -> bool {
        let is_one_of =
            |values: &[Box<str>]| value.is_some_and(|value| values.iter().any(|one| **one == *value));
        match self {
            Self::In(values) => is_one_of(values),
            Self::NotIn(values) => !is_one_of(values),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.requirements
            .iter()
            .enumerate()
            .try_for_each(|(at, one)| write!(f, "{}{one}", if at == 0 { "" } else { "," }))
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, test } = self;
        match test {
            Test::In(values) if values.len() == 1 => write!(f, "{key}={}", values.join("")),
            Test::In(values) => write!(f, "{key} in ({})", values.join(", ")),
            Test::NotIn(values) => write!(f, "{key} notin ({})", values.join(", ")),
            Test::Exists => f.write_str(key),
            Test::DoesNotExist => write!(f, "!{key}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{Requirement, Selector, Test};

    fn one(test: Test) -> Selector {
        Selector {
            requirements: vec![Requirement {
                key: "type".into(),
                test,
            }],
        }
    }

    #[rstest]
    #[case::empty(&Selector::default(), [true, true, true])]
    #[case::is_in(&one(Test::In(vec!["a".into(), "c".into()])), [true, false, false])]
    #[case::in_nothing(&one(Test::In(vec![])), [false, false, false])]
    #[case::not_in(&one(Test::NotIn(vec!["a".into()])), [false, true, true])]
    #[case::exists(&one(Test::Exists), [true, true, false])]
    #[case::does_not_exist(&one(Test::DoesNotExist), [false, false, true])]
    fn selects_by_labels(#[case] selector: &Selector, #[case] expected: [bool; 3]) {
        let labels = [&[("type", "a")][..], &[("type", "b")], &[("other", "a")]];
        let labels = labels.map(|pairs| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect()
        });
        assert_eq!(labels.map(|labels| selector.selects(&labels)), expected);
    }

    #[test]
    fn all_requirements_must_hold() {
        let both = Selector {
            requirements: [one(Test::Exists), one(Test::NotIn(vec!["a".into()]))]
                .into_iter()
                .flat_map(|one| one.requirements)
                .collect(),
        };
        let labels = |value: &str| [("type".into(), value.into())].into();
        assert!(both.selects(&labels("b")));
        assert!(!both.selects(&labels("a")));
    }
}

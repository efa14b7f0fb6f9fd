//! Conditions over the chart's values, found from the combinations of components under which something exists.

use std::collections::BTreeSet;

/// Components that change the webhooks of another one.
const NEED_WEBHOOKS: [&str; 2] = ["guard-bindings", "fail-closed"];

/// The components that are chosen.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Choice(BTreeSet<String>);

impl Choice {
    pub(super) fn new(components: impl IntoIterator<Item = String>) -> Self {
        Self(components.into_iter().collect())
    }

    pub(super) fn has(&self, component: &str) -> bool {
        self.0.contains(component)
    }

    /// The combinations that `templates/_helpers.tpl` admits.
    pub(super) fn is_valid(&self) -> bool {
        let sources = ["webhooks", "webhooks-cert-manager"];
        let n_sources = sources.iter().filter(|name| self.has(name)).count();
        let n_files = ["certificate-files", "webhooks-cert-manager"]
            .iter()
            .filter(|name| self.has(name))
            .count();
        n_sources <= 1
            && n_files <= 1
            && (n_files == 0 || !self.has("second-scheduler"))
            && (n_sources == 1 || !NEED_WEBHOOKS.iter().any(|name| self.has(name)))
    }
}

/// A simple question about a choice.
#[derive(Clone, Debug)]
struct Literal {
    any_of: Vec<String>,
    is_negated: bool,
}

impl Literal {
    fn holds(&self, choice: &Choice) -> bool {
        self.any_of.iter().any(|component| choice.has(component)) != self.is_negated
    }

    /// In the language of Helm's templates.
    fn expression(&self) -> String {
        let terms: Vec<String> = self.any_of.iter().map(|component| value(component)).collect();
        let term = match terms.as_slice() {
            [term] => term.clone(),
            terms => format!("or {}", terms.join(" ")),
        };
        if self.is_negated {
            format!("not {}", argument(&term))
        } else {
            term
        }
    }
}

/// An expression as an argument of another one.
fn argument(expression: &str) -> String {
    if expression.contains(' ') {
        format!("({expression})")
    } else {
        expression.to_owned()
    }
}

/// The key of a component among the chart's values.
pub(super) fn value_of(component: &str) -> String {
    let mut key = String::new();
    for word in component.split('-') {
        let (first, rest) = word.split_at(1);
        key.push_str(&if key.is_empty() {
            first.to_owned()
        } else {
            first.to_uppercase()
        });
        key.push_str(rest);
    }
    key
}

fn value(component: &str) -> String {
    if component == "second-scheduler" {
        r#"eq .Values.attach "second-scheduler""#.to_owned()
    } else {
        format!(".Values.components.{}", value_of(component))
    }
}

/// A condition of a template.
#[derive(Clone, Debug)]
pub(super) enum Condition {
    Always,
    One(LiteralRef),
    Both(LiteralRef, LiteralRef),
    Either(LiteralRef, LiteralRef),
}

/// A literal that a condition holds.
#[derive(Clone, Debug)]
pub(super) struct LiteralRef(Literal);

impl Condition {
    pub(super) fn holds(&self, choice: &Choice) -> bool {
        match self {
            Self::Always => true,
            Self::One(one) => one.0.holds(choice),
            Self::Both(one, other) => one.0.holds(choice) && other.0.holds(choice),
            Self::Either(one, other) => one.0.holds(choice) || other.0.holds(choice),
        }
    }

    /// In the language of Helm's templates; `None` if it always holds.
    pub(super) fn expression(&self) -> Option<String> {
        let both = |operator: &str, one: &LiteralRef, other: &LiteralRef| {
            let [one, other] = [one, other].map(|literal| argument(&literal.0.expression()));
            format!("{operator} {one} {other}")
        };
        Some(match self {
            Self::Always => return None,
            Self::One(one) => one.0.expression(),
            Self::Both(one, other) => both("and", one, other),
            Self::Either(one, other) => both("or", one, other),
        })
    }
}

/// The combinations that conditions are found from.
#[derive(Debug)]
pub(super) struct Universe {
    pub(super) choices: Vec<Choice>,
    literals: Vec<Literal>,
}

impl Universe {
    /// None, every one and every two of the components; and as many as go together, less one.
    pub(super) fn new(components: &[String]) -> Self {
        let mut choices = BTreeSet::new();
        for one in components {
            for other in components {
                for third in ["webhooks", "webhooks-cert-manager"] {
                    let needs_third = NEED_WEBHOOKS
                        .iter()
                        .any(|name| [one, other].contains(&&(*name).to_owned()));
                    let third = needs_third.then(|| third.to_owned());
                    choices.insert(Choice::new([one.clone(), other.clone()].into_iter().chain(third)));
                }
            }
        }
        for left_out in [
            ["certificate-files", "webhooks-cert-manager"].as_slice(),
            &["second-scheduler", "certificate-files", "webhooks"],
            &["second-scheduler", "webhooks-cert-manager"],
        ] {
            let most = components
                .iter()
                .filter(|name| !left_out.contains(&name.as_str()));
            choices.insert(Choice::new(most.clone().cloned()));
            for one in most.clone() {
                choices.insert(Choice::new(most.clone().filter(|name| *name != one).cloned()));
            }
        }
        choices.insert(Choice::new([]));
        let groups = [
            ["certificate-files", "webhooks-cert-manager"],
            ["webhooks", "webhooks-cert-manager"],
        ];
        let groups = groups.map(|group| group.map(str::to_owned).to_vec());
        let singles = components.iter().map(|name| vec![name.clone()]);
        let mut literals = Vec::new();
        for any_of in singles.chain(groups) {
            for is_negated in [false, true] {
                literals.push(Literal {
                    any_of: any_of.clone(),
                    is_negated,
                });
            }
        }
        Self {
            choices: choices.into_iter().filter(Choice::is_valid).collect(),
            literals,
        }
    }

    /// The simplest condition that holds for exactly `wanted` of the combinations `among`.
    pub(super) fn condition(&self, among: &[usize], wanted: &[usize]) -> Condition {
        let is_found = |condition: &Condition| {
            among
                .iter()
                .all(|idx| condition.holds(&self.choices[*idx]) == wanted.contains(idx))
        };
        if among.len() == wanted.len() {
            return Condition::Always;
        }
        let held = |literal: &Literal| LiteralRef(literal.clone());
        let ones = self.literals.iter().map(|one| Condition::One(held(one)));
        if let Some(found) = ones.into_iter().find(|condition| is_found(condition)) {
            return found;
        }
        for one in &self.literals {
            for other in &self.literals {
                for condition in [
                    Condition::Both(held(one), held(other)),
                    Condition::Either(held(one), held(other)),
                ] {
                    if is_found(&condition) {
                        return condition;
                    }
                }
            }
        }
        let choices: Vec<&Choice> = wanted.iter().map(|idx| &self.choices[*idx]).collect();
        panic!("no simple condition holds for exactly {choices:#?}");
    }
}

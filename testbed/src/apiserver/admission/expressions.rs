//! CEL expressions of policies and webhooks about one request.

use cel::Context;
use cel::parser::Parser;
use k8s_openapi::api::admissionregistration::v1::MatchCondition;
use serde_json::Value;

use super::{Objects, Request, review};

/// The names that expressions can use.
pub(super) struct Expressions {
    names: Vec<(&'static str, Value)>,
    variables: serde_json::Map<String, Value>,
}

impl Expressions {
    /// The names of a request; `params` is the parameter of a policy, and a webhook has none.
    pub(super) fn new(
        request: &Request<'_>,
        objects: &Objects,
        params: Option<&Value>,
    ) -> Result<Self, String> {
        let mut asked = review::request("", request, objects)
            .get_mut("request")
            .map(Value::take)
            .unwrap_or_default();
        let fields = asked
            .as_object_mut()
            .ok_or("the request cannot be shown to policies")?;
        for field in ["object", "oldObject"] {
            fields.remove(field);
        }
        if let Some(user) = fields.get_mut("userInfo").and_then(Value::as_object_mut) {
            user.insert("extra".to_owned(), serde_json::json!(request.user.extra));
        }
        let mut names = vec![
            ("object", objects.new.clone()),
            ("oldObject", Value::clone(&objects.old)),
            ("request", asked),
        ];
        names.extend(params.map(|params| ("params", params.clone())));
        Ok(Self {
            names,
            variables: serde_json::Map::new(),
        })
    }

    /// Adds variables; those that cannot be evaluated are missing, which is an error where they are used.
    pub(super) fn with_variables<'a>(mut self, variables: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        for (name, expression) in variables {
            match self
                .evaluate(expression)
                .and_then(|value| value.json().map_err(|error| error.to_string()))
            {
                Ok(value) => drop(self.variables.insert(name.to_owned(), value)),
                Err(error) => tracing::debug!(name, error, "a variable of a policy cannot be evaluated"),
            }
        }
        self
    }

    /// The value of an expression, or the reason for which it has none.
    pub(super) fn evaluate(&self, expression: &str) -> Result<cel::Value, String> {
        let failed = |error: String| format!("expression '{}' resulted in error: {error}", expression.trim());
        let parsed = Parser::new()
            .enable_optional_syntax(true)
            .parse(expression)
            .map_err(|error| failed(error.to_string()))?;
        let mut context = Context::default();
        for (name, value) in &self.names {
            context
                .add_variable(*name, value)
                .map_err(|error| failed(error.to_string()))?;
        }
        context
            .add_variable("variables", &self.variables)
            .map_err(|error| failed(error.to_string()))?;
        cel::Value::resolve(&parsed, &context).map_err(|error| failed(error.to_string()))
    }

    /// Returns true if every condition is.
    pub(super) fn are_met(&self, conditions: &[MatchCondition]) -> Result<bool, String> {
        conditions.iter().try_fold(true, |all, condition| {
            Ok(self.is_true(&condition.expression)? && all)
        })
    }

    pub(super) fn is_true(&self, expression: &str) -> Result<bool, String> {
        match self.evaluate(expression)? {
            cel::Value::Bool(is_true) => Ok(is_true),
            other => Err(format!(
                "expression '{expression}' is no truth value but {other:?}"
            )),
        }
    }
}

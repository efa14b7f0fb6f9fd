//! One file of cases, one case, and what becomes of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;

/// A file of cases.
pub(crate) struct File(Value);

/// One case.
pub(crate) struct Case<'a> {
    /// Its identifier.
    pub(crate) id: &'a str,
    /// A description for people.
    pub(crate) name: &'a str,
    /// The operation, where a file has several kinds.
    pub(crate) kind: &'a str,
    /// The input.
    pub(crate) input: &'a Value,
    /// The expected output.
    pub(crate) expected: &'a Value,
    fixtures: &'a Value,
    tags: Vec<&'a str>,
}

/// The outcome of a case.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As expected.
    Passed,
    /// Not as expected; how.
    Failed(String),
    /// Not run; why.
    Skipped(String),
}

impl Outcome {
    /// Not run, for this reason.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self::Skipped(reason.into())
    }

    /// Passed if what came out is what was expected.
    pub(crate) fn equal<T: PartialEq + std::fmt::Debug>(got: &T, expected: &T) -> Self {
        if got == expected {
            Self::Passed
        } else {
            Self::Failed(format!("expected {expected:?}, got {got:?}"))
        }
    }

    /// This outcome, or the other if this one is a pass.
    pub(crate) fn and(self, other: impl FnOnce() -> Self) -> Self {
        if self == Self::Passed { other() } else { self }
    }
}

impl File {
    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or holds no case.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read(path).map_err(|error| error.to_string())?;
        let file = Self(serde_json::from_slice(&text).map_err(|error| error.to_string())?);
        if file.cases().next().is_none() {
            Err("it holds no case".to_owned())
        } else {
            Ok(file)
        }
    }

    /// Its cases, in order.
    pub(crate) fn cases(&self) -> impl Iterator<Item = Case<'_>> {
        let cases = self
            .0
            .get("cases")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        cases.map(|case| Case {
            id: str_of(case, "id"),
            name: str_of(case, "name"),
            kind: str_of(case, "kind"),
            input: &case["input"],
            expected: &case["expected"],
            fixtures: &self.0["fixtures"],
            tags: case["tags"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect(),
        })
    }
}

fn str_of<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

impl Case<'_> {
    /// Runs it; a panic on the way is a failure of this case only.
    pub(crate) fn run(&self, runner: fn(&Case<'_>) -> Outcome) -> Outcome {
        catch_unwind(AssertUnwindSafe(|| runner(self))).unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Outcome::Failed(format!("panic: {}", text.unwrap_or_default()))
        })
    }

    /// True if success is expected.
    pub(crate) fn is_ok(&self) -> bool {
        self.expected["ok"].as_bool().expect("expected.ok is missing")
    }

    /// True if the case has a tag.
    pub(crate) fn has_tag(&self, tag: &str) -> bool {
        self.tags.contains(&tag)
    }

    /// Why the case is another vendor's, if it is.
    pub(crate) fn of_other_vendor(&self) -> Option<Outcome> {
        let vendors = [
            ("huawei", "Huawei"),
            ("cambricon", "Cambricon"),
            ("metax", "MetaX"),
        ];
        let mut input = self.input.clone();
        // Templates are the scheduler's configuration, whatever the pod asks for.
        input.as_object_mut()?.remove("gpu_shared_resource_templates");
        let text = input.to_string().to_lowercase();
        let vendor = vendors
            .iter()
            .find(|(word, _)| text.contains(word) || self.has_tag(&format!("vendor:{word}")))?;
        Some(Outcome::skipped(format!(
            "{}'s own resources, templates and adapters",
            vendor.1
        )))
    }

    /// The Device object of the input, or of the fixtures.
    pub(crate) fn device(&self) -> Option<&Value> {
        let named = self.input["device_ref"].as_str().map(|name| &self.fixtures[name]);
        named
            .or(self.input.get("device"))
            .filter(|device| !device.is_null())
    }
}

//! The chart's values: `values.yaml` has the comment and the default of each, from which the descriptions of the schema, and the
//! table of the chart's README, are written.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use regex::Regex;
use serde_json::{Map, Value, json};

/// A value of the chart.
#[derive(Debug)]
pub(super) struct ChartValue {
    /// The keys that lead to it.
    path: Vec<String>,
    /// The comment in front of its key.
    description: String,
}

/// The values that have a comment or no keys of their own, in their order. The keys of values that are free objects count as
/// content.
pub(super) fn read(text: &str, schema: &Value) -> Vec<ChartValue> {
    let (mut values, mut comment, mut path) = (Vec::new(), Vec::new(), Vec::<String>::new());
    for line in text.lines() {
        let trimmed = line.trim_start();
        let depth = (line.len() - trimmed.len()) / 2;
        if let Some(words) = trimmed.strip_prefix('#') {
            comment.push(words.trim());
            continue;
        }
        let key = trimmed.split_once(':').map(|(key, _)| key);
        let Some(key) = key.filter(|_| !trimmed.starts_with('-') && depth <= path.len()) else {
            comment.clear();
            continue;
        };
        path.truncate(depth);
        path.push(key.to_owned());
        let description = std::mem::take(&mut comment).join(" ");
        if property(schema, &path).is_some() {
            values.push(ChartValue {
                path: path.clone(),
                description: description.split_whitespace().collect::<Vec<_>>().join(" "),
            });
        }
    }
    values
}

/// The schema of the value at a path; `None` within free objects.
fn property<'a>(schema: &'a Value, path: &[String]) -> Option<&'a Value> {
    let mut found = schema;
    for key in path {
        found = properties(schema, found)?.get(key)?;
    }
    Some(found)
}

/// The properties that are values of their own. Those of other definitions than images, such as a strategy, are Kubernetes' own.
fn properties<'a>(schema: &'a Value, part: &'a Value) -> Option<&'a Map<String, Value>> {
    const IMAGE: &str = "#/definitions/image";
    let part = match part["$ref"].as_str() {
        Some(IMAGE) => &schema["definitions"]["image"],
        Some(_) => return None,
        None => part,
    };
    part["properties"].as_object()
}

/// Writes the descriptions into the schema.
pub(super) fn describe(schema: &mut Value, values: &[ChartValue]) {
    for value in values.iter().filter(|value| !value.description.is_empty()) {
        let pointer = format!("/properties/{}", value.path.join("/properties/"));
        // The definition of images belongs to three values.
        if let Some(property) = schema.pointer_mut(&pointer) {
            property["description"] = json!(value.description);
        }
    }
}

/// The paths of all properties of the schema.
pub(super) fn paths(schema: &Value) -> BTreeSet<String> {
    let (mut paths, mut open) = (BTreeSet::new(), vec![(String::new(), schema)]);
    while let Some((path, part)) = open.pop() {
        for (key, property) in properties(schema, part).into_iter().flatten() {
            let path = if path.is_empty() {
                key.clone()
            } else {
                format!("{path}.{key}")
            };
            open.push((path.clone(), property));
            paths.insert(path);
        }
    }
    paths
}

impl ChartValue {
    /// The keys with dots between them, as `helm --set` takes them.
    pub(super) fn name(&self) -> String {
        self.path.join(".")
    }
}

/// The chart's README with the table of all values.
pub(super) fn readme(text: &str, schema: &Value) -> String {
    let defaults: Value = serde_yaml_ng::from_str(text).unwrap();
    let values = read(text, schema);
    let document = Regex::new(r"docs/[a-z-]+\.md").unwrap();
    let mut readme = HEAD.to_owned();
    for value in &values {
        let pointer = format!("/{}", value.path.join("/"));
        let default = defaults.pointer(&pointer).unwrap();
        let is_group = properties(schema, property(schema, &value.path).unwrap()).is_some();
        if is_group && value.description.is_empty() {
            continue;
        }
        let default = if is_group {
            String::new()
        } else {
            format!("`{}`", shown(default))
        };
        let description = document
            .replace_all(&value.description.replace('|', "\\|"), LINK)
            .into_owned();
        writeln!(readme, "| `{}` | {default} | {description} |", value.name()).unwrap();
    }
    readme
}

/// The link to a document. Its address is whole, since the README is also part of the packed chart.
const LINK: &str = "[$0](https://github.com/gpushare/gpushare/blob/main/$0)";

/// A default in one line; a long one by its number of items.
fn shown(default: &Value) -> String {
    const LONGEST: usize = 90;
    let text = default.to_string();
    match default {
        Value::Array(items) if text.len() > LONGEST => format!("[{} items]", items.len()),
        Value::Object(_) if text.len() > LONGEST => "{…}".to_owned(),
        _ => text,
    }
}

const HEAD: &str = "\
# Chart of gpushare

Installs both daemons of [gpushare](https://github.com/gpushare/gpushare), and by default a kube-scheduler of their own, on Kubernetes \
1.33 or later: the objects of the folders of kustomize \
([docs/install.md](https://github.com/gpushare/gpushare/blob/main/docs/install.md#with-helm)).

```sh
helm install gpushare deploy/helm/gpushare
kubectl label node NODE gpushare=true
```

For another namespace set `namespace=NAME`: the chart creates it. With `--namespace NAME --create-namespace` beside it Helm does, and \
without `--create-namespace` the namespace is there before. `kubectl gpushare` and `deploy/uninstall.sh` then take the variable \
`GPUSHARE_NAMESPACE`.

A list replaces the default; keys of an object are added to it, and `null` removes one.

## Values

A test writes this table from `values.yaml` and `values.schema.json`: `UPDATE_CHART=1 cargo test --package testbed --test main deploy::chart`.

| Value | Default | Description |
|---|---|---|
";

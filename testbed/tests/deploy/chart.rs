//! The Helm chart `deploy/helm/gpushare` is generated from the kustomize tree, so the two cannot differ.
//!
//! The generator renders the tree under many combinations of components, compares the results, and writes each difference as a
//! condition of a template. `UPDATE_CHART=1 cargo test -p testbed --test main deploy::chart` writes the files; without the variable the
//! test fails if a committed file is not the generated one. `.ci/helm` renders the chart with Helm's own engine.

mod conditions;
mod emit;
mod tree;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use super::deploy;
use super::render::render_with;
use conditions::{Choice, Condition, Universe};
use tree::Tree;

/// Components that change what others have added come after them; the rest follows in the order of names.
const FIRST: [&str; 7] = [
    "second-scheduler",
    "whole-gpus",
    "certificate-files",
    "webhooks",
    "webhooks-cert-manager",
    "guard-bindings",
    "fail-closed",
];
/// A part of other components, and none by itself.
const PART: &str = "webhook-configurations";

/// The names of the components, in the order in which they are applied.
fn components() -> Vec<String> {
    let mut rest: Vec<String> = fs::read_dir(deploy().join("components"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != PART && !FIRST.contains(&name.as_str()))
        .collect();
    rest.sort();
    FIRST.iter().map(|name| (*name).to_owned()).chain(rest).collect()
}

fn rendered(choice: &Choice) -> BTreeMap<String, Value> {
    let folders: Vec<String> = components()
        .iter()
        .filter(|name| choice.has(name))
        .map(|name| format!("components/{name}"))
        .collect();
    let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
    render_with("base", &folders)
        .into_iter()
        .map(|object| (file_name(&object), object))
        .collect()
}

/// The name of an object's template.
fn file_name(object: &Value) -> String {
    let kind = object["kind"].as_str().unwrap().to_lowercase();
    let name = object["metadata"]["name"].as_str().unwrap();
    format!("{}-{kind}.yaml", name.replace('.', "-"))
}

/// A template per object: the condition under which it exists, and its content.
fn templates(universe: &Universe) -> BTreeMap<String, (Condition, Tree)> {
    let all: Vec<BTreeMap<String, Value>> = universe.choices.iter().map(rendered).collect();
    let names: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let everywhere: Vec<usize> = (0..all.len()).collect();
    let mut templates = BTreeMap::new();
    for name in names {
        let present: Vec<(usize, &Value)> = all
            .iter()
            .enumerate()
            .filter_map(|(idx, objects)| Some((idx, objects.get(name)?)))
            .collect();
        let indices: Vec<usize> = present.iter().map(|(idx, _)| *idx).collect();
        let condition = universe.condition(&everywhere, &indices);
        templates.insert(name.clone(), (condition, Tree::build(universe, &present, name)));
    }
    templates
}

/// All files that are generated, by their path in the chart.
fn files(universe: &Universe) -> BTreeMap<PathBuf, String> {
    let mut files = BTreeMap::new();
    for (name, (condition, tree)) in templates(universe) {
        let path = Path::new("templates").join(&name);
        files.insert(path, emit::template(&condition, &tree));
        for (file, text) in tree.config_map_files() {
            files.insert(Path::new("files").join(file), text);
        }
    }
    let values = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let (written, _) = values.split_once("\ncomponents:\n").unwrap();
    let mut values = format!("{written}\ncomponents:\n");
    let mut schema: Value =
        serde_json::from_str(&fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap();
    let mut properties = serde_json::Map::new();
    for component in components().iter().filter(|name| *name != "second-scheduler") {
        let comment = comment(component);
        let key = conditions::value_of(component);
        let description = comment.join(" ");
        let lines = comment
            .iter()
            .map(|line| format!("  # {line}").trim_end().to_owned());
        let lines: Vec<String> = lines.chain([format!("  {key}: false")]).collect();
        values = values + &lines.join("\n") + "\n";
        properties.insert(key, json!({"type": "boolean", "description": description}));
    }
    schema["properties"]["components"]["properties"] = Value::Object(properties);
    let described = values::read(&values, &schema);
    values::describe(&mut schema, &described);
    files.insert("README.md".into(), values::readme(&values, &schema));
    files.insert("values.yaml".into(), values);
    let schema = serde_json::to_string_pretty(&schema).unwrap();
    files.insert("values.schema.json".into(), format!("{schema}\n"));
    files
}

/// The comment at the top of a component's kustomization.
fn comment(component: &str) -> Vec<String> {
    let text = super::read(&format!("components/{component}/kustomization.yaml"));
    text.lines()
        .map_while(|line| line.strip_prefix('#'))
        .map(|line| line.trim().replace("../../", "deploy/"))
        .filter(|line| !line.starts_with("In a list of components"))
        .collect()
}

fn chart() -> PathBuf {
    deploy().join("helm/gpushare")
}

#[test]
fn the_committed_chart_is_the_generated_one() {
    let universe = Universe::new(&components());
    let files = files(&universe);
    if std::env::var_os("UPDATE_CHART").is_some() {
        for folder in ["templates", "files"] {
            for path in generated(folder) {
                fs::remove_file(chart().join(path)).unwrap();
            }
            fs::create_dir_all(chart().join(folder)).unwrap();
        }
        for (path, text) in &files {
            fs::write(chart().join(path), text).unwrap();
        }
    }
    let found: Vec<PathBuf> = ["templates", "files"].into_iter().flat_map(generated).collect();
    for path in &found {
        assert!(files.contains_key(path), "{} is not generated", path.display());
    }
    for (path, text) in &files {
        let committed = fs::read_to_string(chart().join(path)).unwrap_or_default();
        assert!(
            committed == *text,
            "deploy/helm/gpushare/{} differs from the kustomize tree: run UPDATE_CHART=1 cargo test -p testbed --test main deploy::chart",
            path.display()
        );
    }
}

/// Every property of the schema is a value with a default, so that the README has it; and no value is missing in the schema.
#[test]
fn the_schema_and_the_values_have_the_same_keys() {
    let schema: Value =
        serde_json::from_str(&fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap();
    let text = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let named = values::read(&text, &schema);
    let named: BTreeSet<String> = named.iter().map(values::ChartValue::name).collect();
    let defaults: Value = serde_yaml_ng::from_str(&text).unwrap();
    for key in defaults.as_object().unwrap().keys() {
        assert!(named.contains(key), "the schema lacks {key}");
    }
    // Helm gives every chart the value "global"; the comment of "files" names its keys.
    let is_exempt = |path: &&String| *path == "global" || path.starts_with("files.");
    let paths = values::paths(&schema);
    let missing: Vec<&String> = paths.difference(&named).filter(|path| !is_exempt(path)).collect();
    assert!(missing.is_empty(), "values.yaml lacks {missing:?}");
    assert!(named.len() > 70, "{} values", named.len());
}

/// A value that takes the place of a field has the field's content in the kustomize tree as its default.
#[test]
fn defaults_are_those_of_the_kustomize_tree() {
    let defaults = fs::read_to_string(chart().join("values.yaml")).unwrap();
    let defaults: Value = serde_yaml_ng::from_str(&defaults).unwrap();
    let objects = rendered(&Choice::new([
        "second-scheduler".to_owned(),
        "whole-gpus".to_owned(),
    ]));
    let workloads = [
        ("gpushare-scheduler-deployment.yaml", "scheduler", "strategy"),
        (
            "gpushare-device-plugin-daemonset.yaml",
            "devicePlugin",
            "updateStrategy",
        ),
        (
            "gpushare-device-plugin-whole-gpus-daemonset.yaml",
            "devicePlugin",
            "updateStrategy",
        ),
    ];
    let mut n_compared = 0;
    for (file, key, strategy) in workloads {
        let (spec, values) = (&objects[file]["spec"], &defaults[key]);
        let pod = &spec["template"]["spec"];
        let mut compared = vec![(strategy, &spec[strategy], &values["updateStrategy"])];
        compared.extend(emit::POD_FIELDS.map(|field| (field, &pod[field], &values[field])));
        compared.extend(
            emit::NODE_LABELS
                .map(|label| (label, &pod["nodeSelector"][label], &values["nodeSelector"][label])),
        );
        compared.push(("replicas", &spec["replicas"], &values["replicas"]));
        for container in pod["containers"].as_array().unwrap() {
            let values = if container["name"] == "kube-scheduler" {
                &defaults["kubeScheduler"]
            } else {
                values
            };
            compared.push(("resources", &container["resources"], &values["resources"]));
            compared.push((
                "imagePullPolicy",
                &container["imagePullPolicy"],
                &values["image"]["pullPolicy"],
            ));
        }
        for (field, expected, found) in compared {
            assert_eq!(expected, found, "{key}: {field}");
            n_compared += usize::from(!found.is_null());
        }
    }
    let policy = &objects["gpushare-scheduler-networkpolicy.yaml"]["spec"]["ingress"];
    let peers = policy
        .as_array()
        .unwrap()
        .iter()
        .find_map(|rule| rule.get("from"))
        .unwrap();
    assert_eq!(*peers, defaults["networkPolicy"]["metricsFrom"]);
    assert!(n_compared > 20, "{n_compared} fields");
}

/// The files of a folder of the chart, without those that are written by hand.
fn generated(folder: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(chart().join(folder)) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .map(|entry| Path::new(folder).join(entry.unwrap().file_name()))
        .filter(|path| {
            ![
                "_helpers.tpl",
                "NOTES.txt",
                "uninstall.yaml",
                "gpushare-podmonitor.yaml",
                "gpushare-prometheusrule.yaml",
                "alerts.yaml",
            ]
            .iter()
            .any(|name| path.ends_with(name))
        })
        .collect();
    found.sort();
    found
}

/// Conditions are found from some combinations, and must hold in all.
#[test]
fn the_templates_agree_with_kustomize_in_random_combinations() {
    let universe = Universe::new(&components());
    let templates = templates(&universe);
    let mut random = StdRng::seed_from_u64(1);
    let mut n_tried = 0;
    while n_tried < 100 {
        let choice = Choice::new(components().into_iter().filter(|_| random.random()));
        if !choice.is_valid() {
            continue;
        }
        n_tried += 1;
        let expected = rendered(&choice);
        for (name, (condition, tree)) in &templates {
            let evaluated = condition.holds(&choice).then(|| tree.evaluate(&choice));
            assert_eq!(evaluated.as_ref(), expected.get(name), "{name} with {choice:?}");
        }
    }
}

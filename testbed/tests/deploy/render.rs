//! Renders the part of kustomize's language that `deploy/` uses, and refuses every other part of it.
//!
//! Leaves out what does not matter to the tests: the order of objects, and the hash behind a generated name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rstest::rstest;
use serde::Deserialize;
use serde_json::{Value, json};

use super::deploy;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    kind: String,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    components: Vec<String>,
    #[serde(default)]
    config_map_generator: Vec<ConfigMapGenerator>,
    #[serde(default)]
    generator_options: GeneratorOptions,
    #[serde(default)]
    patches: Vec<Patch>,
    #[serde(default)]
    images: Vec<Image>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GeneratorOptions {
    #[serde(default, rename = "disableNameSuffixHash")]
    _disable_name_suffix_hash: bool,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigMapGenerator {
    name: String,
    namespace: String,
    files: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Patch {
    target: Option<Target>,
    path: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    kind: String,
    name: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Image {
    name: String,
    new_name: Option<String>,
    new_tag: Option<String>,
}

/// The objects that `kubectl kustomize deploy/<folder>` prints.
pub(crate) fn render(folder: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    apply(&deploy().join(folder), "Kustomization", &mut objects);
    objects
}

/// The result of a folder under `deploy/` as a component on top of the base.
pub(crate) fn render_base_with(component: &str) -> Vec<Value> {
    render_with("base", &[component])
}

/// The result of folders under `deploy/` as components on top of another one, in order.
pub(crate) fn render_with(folder: &str, components: &[&str]) -> Vec<Value> {
    let mut objects = render(folder);
    for component in components {
        apply(&deploy().join(component), "Component", &mut objects);
    }
    objects
}

/// All documents of a YAML text.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

fn apply(folder: &Path, kind: &str, objects: &mut Vec<Value>) {
    let kustomization = load(folder);
    assert_eq!(kustomization.kind, kind, "{}", folder.display());
    for resource in &kustomization.resources {
        let path = folder.join(resource);
        if path.is_dir() {
            apply(&path, "Kustomization", objects);
        } else {
            objects.extend(documents(&read(&path)));
        }
    }
    for component in &kustomization.components {
        apply(&folder.join(component), "Component", objects);
    }
    let labels = &kustomization.generator_options.labels;
    objects.extend(
        kustomization
            .config_map_generator
            .iter()
            .map(|generator| config_map(folder, generator, labels)),
    );
    for patch in &kustomization.patches {
        apply_patch(folder, patch, objects);
    }
    for image in &kustomization.images {
        for object in objects.iter_mut() {
            rename_image(object, image);
        }
    }
}

fn load(folder: &Path) -> Kustomization {
    let name = ["kustomization.yaml", "Kustomization"]
        .into_iter()
        .find(|name| folder.join(name).exists());
    let path = folder.join(name.unwrap_or_else(|| panic!("{} is no kustomization", folder.display())));
    serde_yaml_ng::from_str(&read(&path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn config_map(folder: &Path, generator: &ConfigMapGenerator, labels: &BTreeMap<String, String>) -> Value {
    let data: BTreeMap<&str, String> = generator
        .files
        .iter()
        .map(|file| (file.as_str(), read(&folder.join(file))))
        .collect();
    let metadata = json!({"name": generator.name, "namespace": generator.namespace, "labels": labels});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
}

fn apply_patch(folder: &Path, patch: &Patch, objects: &mut Vec<Value>) {
    let document = documents(&read(&folder.join(&patch.path))).remove(0);
    let Some(target) = &patch.target else {
        return remove(&document, objects);
    };
    let operations: json_patch::Patch = serde_json::from_value(document).unwrap();
    let is_named = |object: &Value, pattern: &str| match (
        pattern.strip_suffix(".*"),
        object["metadata"]["name"].as_str(),
    ) {
        (Some(prefix), Some(name)) => name.starts_with(prefix),
        (_, name) => name == Some(pattern),
    };
    let is_meant = |object: &&mut Value| {
        object["kind"] == *target.kind
            && target
                .name
                .as_ref()
                .is_none_or(|pattern| is_named(object, pattern))
    };
    let mut n_meant = 0;
    for object in objects.iter_mut().filter(is_meant) {
        n_meant += 1;
        json_patch::patch(object, &operations).unwrap_or_else(|error| panic!("{}: {error}", patch.path));
    }
    assert!(n_meant > 0, "{} changes nothing", patch.path);
}

fn remove(document: &Value, objects: &mut Vec<Value>) {
    assert_eq!(
        document["$patch"], "delete",
        "only removals come without a target: {document}"
    );
    let n_before = objects.len();
    objects.retain(|object| object["kind"] != document["kind"] || !same(object, document));
    assert_eq!(objects.len() + 1, n_before, "removes one object: {document}");
}

fn same(one: &Value, other: &Value) -> bool {
    ["name", "namespace"]
        .iter()
        .all(|key| one["metadata"][key] == other["metadata"][key])
}

fn rename_image(object: &mut Value, image: &Image) {
    match object {
        Value::Object(fields) => {
            for (key, value) in fields {
                if key == "image"
                    && value
                        .as_str()
                        .is_some_and(|text| text.split(':').next() == Some(&image.name))
                {
                    let name = image.new_name.as_ref().unwrap_or(&image.name);
                    let tag = image
                        .new_tag
                        .as_ref()
                        .map(|tag| format!(":{tag}"))
                        .unwrap_or_default();
                    *value = Value::from(format!("{name}{tag}"));
                } else {
                    rename_image(value, image);
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| rename_image(value, image)),
        _ => {}
    }
}

#[rstest]
#[case::base("base")]
#[case::simulated("overlays/simulated")]
#[case::second_scheduler("attach/second-scheduler")]
#[case::samples("samples")]
#[case::samples_for_the_second_scheduler("attach/second-scheduler/samples")]
fn each_kustomization_renders_each_object_once(#[case] folder: &str) {
    let objects = render(folder);
    let mut names: Vec<String> = objects.iter().map(identity).collect();
    names.sort();
    let n_all = names.len();
    names.dedup();
    assert_eq!(names.len(), n_all, "{names:#?}");
    assert!(n_all > 3);
}

fn identity(object: &Value) -> String {
    let text = |pointer: &str| {
        object
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    assert!(
        !text("/kind").is_empty() && !text("/apiVersion").is_empty() && !text("/metadata/name").is_empty(),
        "{object:#}"
    );
    format!(
        "{} {}/{}",
        text("/kind"),
        text("/metadata/namespace"),
        text("/metadata/name")
    )
}

/// Every folder with a kustomization is rendered by some test, so that none of them rots.
#[test]
fn every_kustomization_is_tested() {
    let mut found = Vec::new();
    visit(&deploy(), &mut found);
    found.sort();
    insta::assert_snapshot!(found.join("\n"), @r"
    attach/second-scheduler/kustomization.yaml
    attach/second-scheduler/samples/kustomization.yaml
    base/kustomization.yaml
    components/all-devices/kustomization.yaml
    components/certificate-files/kustomization.yaml
    components/device-labels/kustomization.yaml
    components/driver-limits/kustomization.yaml
    components/driver-root/kustomization.yaml
    components/evict-pods/kustomization.yaml
    components/fail-closed/kustomization.yaml
    components/gpu-operator/kustomization.yaml
    components/guard-bindings/kustomization.yaml
    components/hami-core/kustomization.yaml
    components/make-room/kustomization.yaml
    components/measure-memory/kustomization.yaml
    components/nri/kustomization.yaml
    components/nvidia-runtime-class/kustomization.yaml
    components/read-only-etc/kustomization.yaml
    components/record-writers/kustomization.yaml
    components/second-scheduler/kustomization.yaml
    components/selinux/kustomization.yaml
    components/simulated/kustomization.yaml
    components/webhook-configurations/kustomization.yaml
    components/webhooks-cert-manager/kustomization.yaml
    components/webhooks/kustomization.yaml
    components/whole-gpus/kustomization.yaml
    overlays/simulated/kustomization.yaml
    samples/Kustomization
    ");
}

fn visit(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, found);
        } else if path
            .file_name()
            .is_some_and(|name| name.eq_ignore_ascii_case("kustomization.yaml") || name == "Kustomization")
        {
            found.push(path.strip_prefix(deploy()).unwrap().display().to_string());
        }
    }
}
